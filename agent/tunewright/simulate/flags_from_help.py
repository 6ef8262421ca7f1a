"""Reads the text of `vllm serve --help=all` into the compact table of flags that `flags.py` loads.

The table is generated, never edited: `python -m tunewright.simulate.flags_from_help HELP.txt > OUT.json`.
A test holds the shipped table against the help text in the fixtures.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

Flag = dict[str, Any]

# The help text names no types. Defaults give most of them; these integers default to None or to text.
INTEGERS_WITHOUT_DEFAULT = {
    "--api-server-count",
    "--block-size",
    "--data-parallel-rank",
    "--data-parallel-rpc-port",
    "--data-parallel-size-local",
    "--data-parallel-start-rank",
    "--distributed-timeout-seconds",
    "--cpu-distributed-timeout-seconds",
    "--grpc-port",
    "--mamba-block-size",
    "--max-cpu-loras",
    "--max-cudagraph-capture-size",
    "--max-log-len",
    "--max-num-active-seqs",
    "--max-num-queued-reqs",
    "--max-num-scheduled-tokens",
    "--max-num-seqs",
    "--max-parallel-loading-workers",
    "--num-gpu-blocks-override",
    "--optimization-level",
    "--prefix-match-unit",
    "--seed",
    "--spec-tokens",
    "--cudagraph-capture-sizes",
}
FLOATS = {
    "--kv-offloading-size",
    "--video-pruning-rate",
    "--cpu-offload-gb",
    "--mm-ipc-gpu-memory-gb",
    "--mm-processor-cache-gb",
}
JSON_BY_HAND = {"--hf-overrides", "--model-loader-extra-config", "--additional-config"}

_DEFAULT = re.compile(r"\(default:\s*(.*)\)\s*$", re.S)
_CHOICES = re.compile(r"\{([^{}]*)\}|\[((?:'[^']*',?\s*)+)\]")


def _heading(text: str) -> tuple[str, str]:
    """Splits an entry's first line into the option part and what follows it after two spaces."""
    body = text[2:]
    parts = re.split(r"\s{2,}", body, maxsplit=1)
    return parts[0], parts[1] if len(parts) > 1 else ""


def _entries(help_text: str) -> list[tuple[str, str]]:
    entries: list[tuple[str, str]] = []
    for line in help_text.splitlines():
        if re.match(r"  -\S", line):
            entries.append(_heading(line))
        elif entries and line.startswith(" " * 20):
            head, words = entries[-1]
            entries[-1] = (head, f"{words}\n{line.strip()}")
    return entries


def _kind(name: str, words: str, default: str | None, flag: Flag) -> str:
    if flag.get("negative"):
        return "bool"
    if "valid JSON string" in words or name in JSON_BY_HAND:
        return "json"
    if "human-readable integers" in words:
        return "human"
    if name in INTEGERS_WITHOUT_DEFAULT:
        return "int"
    if name in FLOATS:
        return "float"
    if default is not None and re.fullmatch(r"-?\d+", default):
        return "int"
    if default is not None and re.fullmatch(r"-?\d+\.\d+", default):
        return "float"
    return "str"


def _entry(head: str, words: str) -> Flag:
    # "... or name registered in --tool-parser-plugin" names another flag, not a second name of this one.
    names = re.findall(r"(?:^|(?<=\s))(--?[A-Za-z][\w-]*)", head.split(" or name ")[0])
    flag: Flag = {"names": names}
    flag["names"] = list(dict.fromkeys(flag["names"]))
    negative = [n for n in flag["names"] if n.startswith("--no-")]
    positive = "--" + negative[0][len("--no-") :] if negative else ""
    if negative and positive in flag["names"]:
        flag["negative"] = negative[0]
        flag["names"].remove(negative[0])
    default = _DEFAULT.search(words)
    raw = re.sub(r"\s+", " ", default.group(1)) if default else None
    name = next(n for n in flag["names"] if n.startswith("--"))
    rest = head.replace(",", " ")
    takes_value = bool(re.search(r"\s(\{|\[|[A-Z][A-Z0-9_]+)", head.split(",")[0] if "{" not in head else head))
    if not flag.get("negative") and not takes_value:
        flag["kind"] = "switch"
        return flag
    flag["kind"] = _kind(name, words, raw, flag)
    if flag["kind"] == "bool":
        return flag
    if rest.rstrip().endswith("...]"):
        flag["nargs"] = "+"
    elif re.search(r"\[[A-Z_]+\]$", rest):
        flag["nargs"] = "?"
    choices = _CHOICES.search(head)
    if choices and "or name registered" not in head:
        flag["choices"] = [c.strip(" '") for c in (choices.group(1) or choices.group(2)).split(",")]
        if all(c.isdigit() for c in flag["choices"]):
            flag["kind"] = "int"
    if raw not in (None, "None", ""):
        flag["default"] = raw
    return flag


def parse_help(help_text: str) -> list[Flag]:
    """The flags in a help text: names, negative form, kind, number of values, choices, default as text."""
    return [_entry(head, words) for head, words in _entries(help_text) if "--help" not in head]


def render(flags: list[Flag]) -> str:
    """One flag a line, so that two versions' tables can be compared with a plain diff."""
    lines = ",\n".join(json.dumps(f, separators=(",", ":")) for f in flags)
    return f"[\n{lines}\n]\n"


if __name__ == "__main__":
    sys.stdout.write(render(parse_help(Path(sys.argv[1]).read_text(encoding="utf-8"))))
