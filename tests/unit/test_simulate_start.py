"""Failed and good starts: message, stream and exit code as recorded from a real vLLM."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
from pathlib import Path

import pytest
import yaml
from simulate_process import fails, free_port, serving

from tunewright.simulate.profile import PROFILES, ProfileError, load

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A profile of the model that the failures were recorded with: 4 heads, 2 KB of KV cache a token."""
    data = yaml.safe_load((PROFILES / "small-cpu.yaml").read_text(encoding="utf-8"))
    data["name"] = "tiny"
    data["model"].update(attention_heads=4, attention_layers=4, kv_bytes_per_token_layer=512, weights_gib=0.02)
    data["hardware"].update(overhead_gib=2.19)
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def _replay(case: str, tiny: Path, tmp_path: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """A recorded command with this machine's model folder and port."""
    folder = FIXTURES / "failures" / case
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    words = shlex.split((folder / "cmd").read_text(encoding="utf-8"))[2:]
    words = [str(model) if w == "/srv/models/tiny" else str(port) if w == "8002" else w for w in words]
    env = dict(line.split("=", 1) for line in (folder / "env").read_text(encoding="utf-8").split())
    return [*words, "--profile", str(tiny)], env


def _last_error(text: str) -> list[str]:
    """The lines that carry the meaning: exception lines, without process, time and source."""
    lines = [re.sub(r"^\(\w+[^)]*\) (ERROR|INFO) \S+ \S+ \[[^]]*\] ", "", line) for line in text.splitlines()]
    wanted = re.compile(r"(\w+\.)*\w*(Error|Exception)\b.*: |\s+Value error|\s+Input should|\s+For further")
    keep = [line for line in lines if wanted.match(line) and "resource_tracker" not in line and "Warning" not in line]
    # Whether the dead engine is still listed depends on timing, in the records too.
    keep = [re.sub(r"(Failed core proc\(s\): ).*", r"\1…", line) for line in keep]
    return [re.sub(r"input_value=ArgsKwargs\(.*\), input_type", "input_value=…, input_type", line) for line in keep]


@pytest.mark.parametrize(
    "case",
    [
        "model_missing_path",
        "gpu_util_2",
        "tp3_heads",
        "mbt_below_maxlen",
        "kv_too_small_for_maxlen",
        "kv_space_over_ram",
        "tp2_two_cores",
    ],
)
def test_failed_starts_end_as_recorded(case: str, tiny: Path, tmp_path: Path) -> None:
    folder = FIXTURES / "failures" / case
    arguments, env = _replay(case, tiny, tmp_path, free_port())
    ended = fails(*arguments, env=env)
    expected_err = (folder / "stderr").read_text(encoding="utf-8")
    assert ended.returncode == 1
    assert _last_error(ended.stderr)[-1] == _last_error(expected_err)[-1]
    for line in set(_last_error(expected_err)):
        assert line in _last_error(ended.stderr)
    recorded_out = (folder / "stdout").read_text(encoding="utf-8")
    failed_in_engine = "EngineCore failed to start." in recorded_out
    assert ("EngineCore failed to start." in ended.stdout) is failed_in_engine
    if failed_in_engine:
        assert _last_error(recorded_out)[-1] in _last_error(ended.stdout)


def test_a_port_in_use_is_found_first(tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments, env = _replay("port_in_use", tiny, tmp_path, taken.getsockname()[1])
        ended = fails(*arguments, env=env)
    assert ended.returncode == 1
    assert ended.stderr.endswith("OSError: [Errno 98] Address already in use\n")
    assert "non-default args" in ended.stdout
    assert "Resolved architecture" not in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "512", "--max-num-batched-tokens", "256"], "must be greater than or equal to max_num_seqs"),
        (
            ["--max-num-seqs", "1024", "--gpu-memory-utilization", "0.5", "--max-model-len", "4096"],
            "exceeds available Mamba cache blocks (",
        ),
        (["--gpu-memory-utilization", "0.43"], "No available memory for the cache blocks"),
        (["--gpu-memory-utilization", "0.45", "--max-num-seqs", "8"], "the estimated maximum model length is "),
        (["--mamba-backend", "nonsense"], "Unknown Mamba SSU backend"),
        (["--enable-mamba-cache-stochastic-rounding", "--mamba-backend", "flashinfer"], "requires the SSM cache to be"),
        (["--speculative-config", '{"method":"mtp","num_speculative_tokens":8}'], "does not have enough slots"),
        (["-tp", "2"], "is larger than the number of available GPUs"),
    ],
)
def test_what_a_gpu_refuses(arguments: list[str], message: str) -> None:
    ended = fails("m", "--port", str(free_port()), "--profile", "hybrid-30b-h200", *arguments)
    assert ended.returncode == 1
    assert message in ended.stderr


def test_demo_has_a_region_that_does_not_start() -> None:
    deep = '{"method":"mtp","num_speculative_tokens":3}'
    ended = fails("m", "--port", str(free_port()), "--max-num-seqs", "256", "--speculative-config", deep)
    assert ended.returncode == 1
    assert "No available memory for the cache blocks" in ended.stderr


def test_a_good_start_logs_what_a_tuner_reads(tmp_path: Path) -> None:
    with serving(
        tmp_path, "--profile", "hybrid-30b-h200", "--max-model-len", "4096", "--load-format", "dummy"
    ) as server:
        log = server.output()
        assert server.get("/version") == {"version": "0.32.0+simulated.hybrid-30b-h200"}
        assert server.get("/v1/models")["data"][0]["max_model_len"] == 4096
    for line in (  # figures of the recorded start of this model on an H200
        "Resolved architecture: NemotronHForCausalLM",
        "Chunked prefill is enabled with max_num_batched_tokens=8192.",
        "Updating mamba_ssm_cache_dtype to 'float32' for NemotronH",
        "Asynchronous scheduling is enabled.",
        "Available KV cache memory: 66.43 GiB",
        "GPU KV cache size: 3,780,608 tokens",
        "Maximum concurrency for 4,096 tokens per request: 923.00x",
        "init engine (profile, create kv cache, warmup model) took ",
        "Starting vLLM server on http://127.0.0.1:",
        "Application startup complete.",
    ):
        assert line in log


def test_terminated_it_ends_well(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert "Application shutdown complete." in server.output()
        assert "this run is valid" in server.output()


def test_an_orphan_survives_and_spoils_the_next_start(tmp_path: Path) -> None:
    gpu = tmp_path / "gpu"
    with serving(tmp_path, "--sim-fault", "leaves-engine", "--sim-gpu", str(gpu)) as server:
        server.process.kill()
        server.wait_end()
        ended = fails("m", "--port", str(free_port()), "--sim-gpu", str(gpu))
        assert ended.returncode == 1
        assert "is less than desired GPU memory utilization" in ended.stderr
        os.killpg(server.process.pid, signal.SIGKILL)
        with serving(tmp_path, "--sim-gpu", str(gpu)) as clean:
            assert clean.request("/health")[0] == 200


def test_profiles_are_refused_with_the_key(tmp_path: Path) -> None:
    data = yaml.safe_load((PROFILES / "demo.yaml").read_text(encoding="utf-8"))
    data["cost"]["tokens_s"] = 1.0
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(ProfileError, match=r"p\.yaml\.cost: unknown key 'tokens_s'"):
        load(str(file))
    del data["cost"]["tokens_s"], data["cost"]["token_s"]
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(ProfileError, match="key 'token_s' is missing"):
        load(str(file))


@pytest.mark.parametrize("name", sorted(p.stem for p in PROFILES.glob("*.yaml")))
def test_every_shipped_profile_loads(name: str) -> None:
    assert load(name).name == name
