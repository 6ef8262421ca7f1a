"""The program that a pod of the target's image runs, run as it runs there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tunewright.knobs import asking

HELP = Path(__file__).parents[1] / "fixtures/vllm/vllm-0.32-serve-help.txt"


def run(question: dict, **environment: str) -> dict:
    source = Path(asking.__file__).read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", "-c", source, json.dumps(question)],
        capture_output=True, text=True, timeout=60, check=True, env={"PATH": "/usr/bin:/bin", **environment},
    )  # fmt: skip
    return asking.unpack(f"a warning of the image\n{done.stdout}")


def test_it_asks_what_answers_and_reads_the_model(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["A"]}')
    silent, answers = [sys.executable, "-c", "raise SystemExit(3)"], ["cat", str(HELP)]
    commands = [["/no/such/vllm"], silent, answers]
    answer = run({"commands": commands, "timeout": 20, "model": str(tmp_path), "download_dir": ""})
    assert answer["help"] == {"text": HELP.read_text(encoding="utf-8")}
    assert answer["config"] == {"architectures": ["A"]}


def test_an_image_that_can_t_answer_says_why():
    answer = run({"commands": [["sh", "-c", "echo no such device >&2; exit 4"]], "timeout": 20, "model": "",
                  "download_dir": ""})  # fmt: skip
    assert "ended with status 4: no such device" in answer["help"]["error"]
    assert "config" not in answer
    hangs = run({"commands": [["sleep", "60"]], "timeout": 0.2, "model": "", "download_dir": ""})
    assert "did not answer within" in hangs["help"]["error"]


def test_the_gpu_is_hidden_from_what_is_asked():
    show = ["sh", "-c", 'echo --max-num-seqs "[$CUDA_VISIBLE_DEVICES]"']
    answer = run({"commands": [show], "timeout": 20, "model": "", "download_dir": ""}, CUDA_VISIBLE_DEVICES="3")
    assert answer["help"]["text"] == "--max-num-seqs []\n"


@pytest.mark.parametrize("damage", ["", "x", "cut"])
def test_what_is_not_whole_is_no_answer(damage):
    block = asking.pack({"help": {"text": "t" * 9000}})
    log = {"": "nothing", "x": block.replace("A", "B", 1), "cut": block[: len(block) // 2]}[damage]
    with pytest.raises(ValueError, match="log"):
        asking.unpack(log)
