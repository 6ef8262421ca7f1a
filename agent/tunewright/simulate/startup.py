"""What a starting vLLM writes, to which stream, and how it ends when it cannot start."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from . import flags as flag_table
from .config import CONFIG, EngineConfig, StartFailure
from .memory import Memory
from .profile import Profile

_BANNER = (
    "",
    "       █     █     █▄   ▄█",
    " ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}",
    "  █▄█▀ █     █     █     █  model   {model}",
    "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
    "",
)


class Log:
    """vLLM's log lines: process, level, time, source, text. To stdout, as vLLM's are.

    As with Python's logging, a line that can't be written (a full disk) is lost, and nothing else.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def line(self, process: str, level: str, source: str, text: str) -> None:
        head = f"({process} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [{source}]"
        self.plain("\n".join(f"{head} {part}" for part in text.split("\n")))

    def api(self, source: str, text: str, level: str = "INFO") -> None:
        self.line("APIServer", level, source, text)

    def engine(self, source: str, text: str, level: str = "INFO") -> None:
        self.line("EngineCore", level, source, text)

    def plain(self, text: str) -> None:
        """A line of the HTTP server's own log."""
        with suppress(OSError):
            self._out.write(f"{text}\n")
            self._out.flush()


def traceback(last: str, frames: tuple[str, ...] = ("entrypoints/cli/serve.py", "engine/arg_utils.py")) -> str:
    """A traceback's shape around the exception line that matters."""
    lines = "".join(f'  File "site-packages/vllm/{frame}"\n' for frame in frames)
    return f"Traceback (most recent call last):\n{lines}{last}\n"


def announce(log: Log, arguments: flag_table.Arguments) -> None:
    """The banner and the arguments: the first lines of every start."""
    for text in _BANNER:
        line = text.format(version=flag_table.VLLM_VERSION, model=arguments.model)
        log.api("api_utils.py:347", line)
    log.api("api_utils.py:286", f"non-default args: {flag_table.non_default(arguments)}")


def check_model(model: str) -> None:
    """A path that does not exist is taken for a repository's name, and refused as one. Raises StartFailure."""
    if model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
        raise StartFailure(
            f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{model}'. Use `repo_type` argument "
            "if needed.",
            kind="huggingface_hub.errors.HFValidationError",
        )


def report_config(log: Log, profile: Profile, config: EngineConfig) -> None:
    """What the API server says about the resolved configuration."""
    log.api("model.py:733", f"Resolved architecture: {profile.model.architecture}")
    log.api("model.py:2152", f"Using max model len {config.max_model_len}")
    if config.chunked_prefill:
        text = f"Chunked prefill is enabled with max_num_batched_tokens={config.max_num_batched_tokens}."
        log.api("scheduler.py:307", text)
    if profile.model.mamba_layers:
        text = f"Updating mamba_ssm_cache_dtype to '{config.ssm_dtype}' for {profile.model.architecture} model"
        log.api("config.py:621", text)
    if profile.hardware.device != "cpu":
        state = "enabled" if config.async_scheduling else "disabled"
        log.api("vllm.py:1109", f"Asynchronous scheduling is {state}.")
    if config.enforce_eager:
        text = "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup."
        log.api("vllm.py:1703", text, "WARNING")


def report_engine(log: Log, arguments: flag_table.Arguments, profile: Profile, config: EngineConfig) -> None:
    """The engine's own first line: the configuration it was given."""
    spec: Any = None
    if config.spec_tokens:
        spec = f"SpeculativeConfig(method='{config.spec_method}', num_spec_tokens={config.spec_tokens})"
    log.engine(
        "core.py:133",
        f"Initializing a V1 LLM engine (v{flag_table.VLLM_VERSION}) with config: model='{arguments.model}', "
        f"speculative_config={spec}, tokenizer='{arguments.model}', max_seq_len={config.max_model_len}, "
        f"tensor_parallel_size={config.tensor_parallel}, enforce_eager={config.enforce_eager}, "
        f"kv_cache_dtype={config.kv_cache_dtype}, device_config={profile.hardware.device}, "
        f"served_model_name={arguments.served_names[0]}, enable_prefix_caching={config.prefix_caching}, "
        f"enable_chunked_prefill={config.chunked_prefill}, cudagraph_mode={config.cudagraph_mode}, "
        f"max_cudagraph_capture_size={config.capture_size}",
    )
    log.engine("gpu_model_runner.py:5250", f"Starting to load model {arguments.model}...")


def report_memory(log: Log, profile: Profile, config: EngineConfig, memory: Memory) -> None:
    """The lines a tuner reads: memory for the KV cache, its size, and how many longest requests fit."""
    cpu = profile.hardware.device == "cpu"
    if cpu:
        text = f"Explicitly set ({memory.available_gib}/{profile.hardware.memory_gib}) GiB for KV cache on node 0."
        log.line("Worker", "INFO", "cpu_worker.py:260", text)
    else:
        weights = profile.model.weights_gib / config.tensor_parallel
        seconds = f"{profile.start.load_s:.6f}"
        log.engine("gpu_model_runner.py:5347", f"Model loading took {weights:.2f} GiB memory and {seconds} seconds")
        log.engine("gpu_worker.py:560", f"Available KV cache memory: {memory.available_gib:.2f} GiB")
    log.engine(
        "kv_cache_utils.py:2327",
        f"{'CPU' if cpu else 'GPU'} KV cache size: {memory.size_tokens(config.max_model_len):,} tokens, "
        f"Maximum concurrency for {config.max_model_len:,} tokens per request: "
        f"{memory.concurrency(config.max_model_len):.2f}x",
    )


def report_ready(log: Log, engine_seconds: float, compile_seconds: float, host: str, port: int) -> None:
    """The last lines before the first request."""
    suffix = f" (compilation: {compile_seconds:.2f} s)" if compile_seconds else ""
    text = f"init engine (profile, create kv cache, warmup model) took {engine_seconds:.2f} s{suffix}"
    log.engine("core.py:402", text)
    log.api("entry.py:136", "Supported tasks: ['generate']")
    log.api("entry.py:140", f"Starting vLLM server on http://{host}:{port}")
    log.api("launcher.py:186", "Available routes are:")
    for route in ("/load", "/version", "/health", "/metrics", "/tokenize", "/v1/models", "/ping"):
        log.api("launcher.py:195", f"Route: {route}, Methods: {'POST' if route == '/tokenize' else 'GET'}")
    for route in ("/v1/chat/completions", "/v1/completions"):
        log.api("launcher.py:195", f"Route: {route}, Methods: POST")
    log.plain(f"INFO:     Started server process [{os.getpid()}]")
    log.plain("INFO:     Waiting for application startup.")
    log.plain("INFO:     Application startup complete.")


def fail(log: Log, failure: StartFailure) -> int:
    """Writes a failed start as vLLM does, by the stage that noticed it. Returns the exit code."""
    err = sys.stderr
    if failure.stage == CONFIG and failure.kind in ("ValueError", "field"):
        kind = failure.message.partition("type=")[2].partition(",")[0] or "value_error"
        body = failure.message
        if failure.kind == "ValueError":
            kind = "value_error"
            body = (
                f"  Value error, {failure.message} [type=value_error, input_value=ArgsKwargs((), {{...}}), "
                "input_type=ArgsKwargs]"
            )
        err.write(
            traceback(
                f"pydantic_core._pydantic_core.ValidationError: 1 validation error for {failure.config_model}\n{body}\n"
                f"    For further information visit https://errors.pydantic.dev/2.14/v/{kind}"
            )
        )
    elif failure.stage == CONFIG:
        err.write(traceback(f"{failure.kind}: {failure.message}"))
    else:
        last = f"{failure.kind}: {failure.message}"
        inside = traceback(last, ("v1/engine/core.py",))
        log.engine("core.py:1510", f"EngineCore failed to start.\n{inside.rstrip()}", "ERROR")
        err.write(f"Process EngineCore:\n{inside}")
        summary = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
        err.write(traceback(summary, ("entrypoints/cli/serve.py", "v1/engine/utils.py")))
    err.flush()
    return 1


def engine_died(log: Log, cause: str) -> None:
    """The lines of an engine that dies while it serves."""
    if "OutOfMemory" in cause:
        inside = traceback(cause, ("v1/engine/core.py", "v1/worker/gpu_model_runner.py"))
    else:
        text = "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor."
        log.engine("multiproc_executor.py:315", text, "ERROR")
        inside = traceback(cause, ("v1/engine/core.py",))
    log.engine("core.py:1512", f"EngineCore encountered a fatal error.\n{inside.rstrip()}", "ERROR")
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for "
    inside = traceback(dead + "the root cause.", ("v1/engine/async_llm.py",))
    log.api("async_llm.py:906", f"AsyncLLM output_handler failed.\n{inside.rstrip()}", "ERROR")
    with suppress(OSError):
        sys.stderr.write(f"Process EngineCore:\n{traceback(cause, ('v1/engine/core.py',))}")
        sys.stderr.flush()
