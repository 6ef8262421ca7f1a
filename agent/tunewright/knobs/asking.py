"""Asked of an image itself: which flags its vLLM takes, and what the model's `config.json` says.

The source of this module is the program: a pod of the target's image runs it by `python3 -c`. So it imports nothing of
ours, and nothing that is newer than Python 3.10, the oldest that vLLM runs on. It touches no GPU.
"""

import base64
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

BEGIN, END = "tunewright-facts begin", "tunewright-facts end"
_LINE = 4000  # characters: container runtimes split lines of 16 KiB
_MOST = 4 * 2**20  # bytes of a config.json
_BLOCK = re.compile(rf"^{BEGIN} ([0-9a-f]{{64}})\n(.*?)^{END}$", re.MULTILINE | re.DOTALL)


def config_of(model: str, environment: Mapping[str, str], download_dir: str = "") -> dict[str, Any] | None:
    """The model's `config.json`: of a folder, or of a hub id where its cache holds it; None where it is not there."""
    home = Path(environment.get("HF_HOME") or Path(environment.get("HOME") or "/root") / ".cache" / "huggingface")
    hub = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
    places = [Path(model)]
    for root in (download_dir, hub):
        if root:
            with suppress(OSError):
                places += sorted((Path(root) / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/"))
    for place in places:
        with suppress(OSError, ValueError):
            path = place / "config.json"
            if path.stat().st_size <= _MOST:
                config = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(config, dict):
                    return config
    return None


def help_of(commands: Sequence[Sequence[str]], timeout: float) -> dict[str, str]:
    """The `text` that the first of `commands` prints which knows its flags; else the first one's `error`."""
    errors: list[str] = []
    # Without a GPU, so that it takes no memory beside a server.
    environment = {**os.environ, "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": ""}
    for command in commands:
        shown = f"`{' '.join(command)}`"
        try:
            done = subprocess.run(
                list(command), capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
                timeout=timeout, check=False, env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            errors.append(f"{shown} did not answer within {timeout:.0f} s")
            continue
        except OSError as error:
            errors.append(f"{shown}: {error}")
            continue
        if done.returncode == 0 and "--max-num-seqs" in done.stdout:
            return {"text": done.stdout}
        told = (done.stderr or done.stdout).strip().splitlines()
        errors.append(f"{shown} ended with status {done.returncode}: {told[-1] if told else 'without a word'}")
    return {"error": errors[0] if errors else "nothing was to be asked"}


def pack(answer: Mapping[str, Any]) -> str:
    """The answer as a marked block of a log, with its digest."""
    raw = gzip.compress(json.dumps(answer).encode(), mtime=0)
    text = base64.b64encode(raw).decode()
    lines = [text[at : at + _LINE] for at in range(0, len(text), _LINE)]
    return "\n".join([f"{BEGIN} {hashlib.sha256(raw).hexdigest()}", *lines, END])


def unpack(log: str) -> dict[str, Any]:
    """The answer in a log. Raises `ValueError` where there is none that is whole."""
    found = _BLOCK.search(log)
    if found is None:
        raise ValueError("its log holds no answer")
    raw = base64.b64decode("".join(found[2].split()))
    if hashlib.sha256(raw).hexdigest() != found[1]:
        raise ValueError("the answer in its log is damaged")
    answer = json.loads(gzip.decompress(raw))
    if not isinstance(answer, dict):
        raise ValueError("the answer in its log is none")
    return answer


def main(question: str) -> int:
    """`question` is JSON: `commands`, `timeout` in seconds, `model` and `download_dir` (both may be empty)."""
    asked = json.loads(question)
    answer: dict[str, Any] = {"help": help_of(asked["commands"], asked["timeout"])}
    if asked["model"]:
        answer["config"] = config_of(asked["model"], os.environ, asked["download_dir"])
    print(pack(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
