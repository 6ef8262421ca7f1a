"""vLLM 0.32's command line: every real flag is accepted, anything else is refused as vLLM refuses it.

Refusals go to stderr with vLLM's wording and end the process with exit code 2. The `--sim-*` options and
`--profile` are the only additions; they carry what a GPU, a model and bad luck would supply.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

VLLM_VERSION = "0.32.0"

_USAGE_SERVE = "usage: vllm serve [model_tag] [options]\n"
_USAGE_TOP = (
    "usage: vllm [-h] [-v]\n"
    "            {chat,complete,serve,launch,bench,collect-env,download-kernels,preload,run-batch,snapshot}\n"
    "            ...\n"
)
_OWN: tuple[dict[str, Any], ...] = (
    {"names": ["--profile"], "kind": "str", "default": "demo"},
    {"names": ["--sim-speed"], "kind": "float", "default": 1.0},
    *({"names": [f"--sim-{name}"], "kind": "float"} for name in ("seed", "noise-between", "noise-within")),
    *({"names": [f"--sim-{name}"], "kind": "str"} for name in ("fault", "gpu")),
)
_HUMAN = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class UsageError(Exception):
    """The command line is refused: `text` is what goes to stderr, the exit code is 2."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def human_int(text: str) -> int:
    """`1k` is 1,000 and `1K` is 1,024; decimals only before the decimal units; `auto` is -1 (as vLLM)."""
    if text == "auto":
        return -1
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgGtT])?", text.strip())
    if match is None:
        raise ValueError(f"Invalid number {text!r}")
    number, unit = match.groups()
    if unit is None or unit.isupper():
        return int(number) * _HUMAN.get(unit or "", 1)
    return int(float(number) * _HUMAN[unit])


def _json_value(text: str) -> Any:
    return json.loads(text)


human_int.__name__ = "human_readable_int_or_auto"
_json_value.__name__ = "loads"
_TYPES: dict[str, Any] = {"int": int, "float": float, "human": human_int, "json": _json_value, "str": str}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{_USAGE_SERVE}vllm serve: error: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # Wording of Python 3.11's argparse, which is what the recorded failures show, on every Python.
        if action.choices is not None and value not in action.choices:
            listed = ", ".join(map(repr, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} (choose from {listed})")


def load_flags() -> list[dict[str, Any]]:
    """The shipped table of vLLM 0.32's flags (see `flags_from_help`)."""
    text = Path(__file__).with_name("vllm-0.32-flags.json").read_text(encoding="utf-8")
    flags: list[dict[str, Any]] = json.loads(text)
    return flags


def help_text() -> str:
    """What `vllm serve --help=all` tells of the flags, in argparse's form, and the simulator's own; no descriptions."""
    entries = []
    for flag in [*load_flags(), *_OWN]:
        names = [*flag["names"], *([flag["negative"]] if "negative" in flag else [])]
        if flag["kind"] not in ("switch", "bool"):
            choices, dest = flag.get("choices"), dest_of(flag).upper()
            value = "{" + ",".join(map(str, choices)) + "}" if choices else dest
            value = {"+": f"{value} [{value} ...]", "?": f"[{value}]"}.get(flag.get("nargs", ""), value)
            names = [f"{name} {value}" for name in names]
        entries.append(f"  {', '.join(names)}\n{' ' * 24}(default: {flag.get('default')})\n")
    return "".join([_USAGE_SERVE, "\noptions:\n", *entries])


def dest_of(flag: dict[str, Any]) -> str:
    """The attribute vLLM stores a flag's value under."""
    name: str = next(n for n in flag["names"] if n.startswith("--"))
    return name[2:].replace("-", "_")


def _parser(flags: list[dict[str, Any]]) -> _Parser:
    parser = _Parser(prog="vllm serve", add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("model_tag", nargs="?")
    for flag in flags:
        names, kind = list(flag["names"]), flag["kind"]
        dest = dest_of(flag)
        if kind == "switch":
            parser.add_argument(*names, dest=dest, action="store_true")
        elif kind == "bool":
            parser.add_argument(*names, dest=dest, action="store_true")
            parser.add_argument(flag["negative"], dest=dest, action="store_false")
        else:
            choices = flag.get("choices")
            parser.add_argument(
                *names,
                dest=dest,
                type=_TYPES[kind],
                nargs=flag.get("nargs"),
                choices=[int(c) for c in choices] if choices and kind == "int" else choices,
            )
    parser.add_argument("--profile", default="demo")
    parser.add_argument("--sim-speed", type=float, default=1.0)
    parser.add_argument("--sim-seed", type=int, default=None)
    parser.add_argument("--sim-noise-between", type=float, default=None)
    parser.add_argument("--sim-noise-within", type=float, default=None)
    parser.add_argument("--sim-fault", action="append", default=[])
    parser.add_argument("--sim-gpu", default=None)
    return parser


def _normalise(argv: Sequence[str]) -> list[str]:
    """Underscores in flag names become dashes; `-O3` and dotted JSON keys (`-cc.mode=3`) are expanded."""
    out: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    items = iter(argv)
    for item in items:
        name, equals, value = item.partition("=")
        if re.fullmatch(r"-O\.?\d", item):
            out += ["--optimization-level", item[-1]]
        elif re.match(r"--?[a-z][\w-]*\.", name):
            head, _, path = name.partition(".")
            leaf = value if equals else next(items, "")
            _put(nested.setdefault(head.replace("_", "-"), {}), path.split("."), leaf)
        elif name.startswith("--"):
            out.append(name.replace("_", "-") + equals + value)
        else:
            out.append(item)
    for head, tree in nested.items():
        out += [head, json.dumps(tree)]
    return out


def _put(tree: dict[str, Any], path: list[str], value: str) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    try:
        tree[path[-1]] = json.loads(value)
    except ValueError:
        tree[path[-1]] = value


def _config_argv(path: str) -> list[str]:
    """A `--config` file as arguments: lists repeat, `key: true` is a bare flag, `key: false` is `--no-key`."""
    import yaml

    if not path.endswith((".yaml", ".yml")):
        raise UsageError(
            f"ValueError: Config file must be of a yaml/yml type. {path.rsplit('.', 1)[-1]} is not supported\n"
        )
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"Unable to read the config file at {path}: {error}\n") from error
    out: list[str] = []
    for key, value in loaded.items():
        flag = "--" + str(key).replace("_", "-")
        if value is True:
            out.append(flag)
        elif value is False:
            out.append("--no-" + flag[2:])
        elif isinstance(value, list):
            out += [flag, *(str(v) for v in value)]
        elif isinstance(value, dict):
            out += [flag, json.dumps(value)]
        elif value is not None:
            out += [flag, str(value)]
    return out


def _with_config(argv: list[str]) -> list[str]:
    """Puts the file's arguments before the command line's own, so that the command line overrides them."""
    for index, item in enumerate(argv):
        if item == "--config" and index + 1 < len(argv):
            rest, from_file = argv[:index] + argv[index + 2 :], _config_argv(argv[index + 1])
            break
        if item.startswith("--config="):
            rest, from_file = argv[:index] + argv[index + 1 :], _config_argv(item.partition("=")[2])
            break
    else:
        return argv
    model = rest[:1] if rest and not rest[0].startswith("-") else []
    return [*model, *from_file, *rest[len(model) :]]


class Arguments:
    """What the command line says: `given` holds vLLM's flags as passed, the rest is the simulator's own."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.profile: str = given.pop("profile")
        self.speed: float = given.pop("sim_speed")
        self.seed: int | None = given.pop("sim_seed")
        self.noise_between: float | None = given.pop("sim_noise_between")
        self.noise_within: float | None = given.pop("sim_noise_within")
        faults: list[str] = given.pop("sim_fault")
        from_environment = os.environ.get("TUNEWRIGHT_SIM_FAULT", "")
        self.faults: list[str] = faults or [f for f in from_environment.split(",") if f]
        self.gpu: str | None = given.pop("sim_gpu")
        self.given = given

    def get(self, name: str, default: Any = None) -> Any:
        """A vLLM flag's value as given, or `default`."""
        return self.given.get(name, default)

    @property
    def model(self) -> str:
        return str(self.get("model_tag") or self.get("model") or "Qwen/Qwen3-0.6B")

    @property
    def served_names(self) -> list[str]:
        names = self.get("served_model_name")
        return list(names) if names else [self.model]


def parse(argv: Sequence[str]) -> Arguments:
    """Parses the arguments after `serve`. Raises UsageError with vLLM's own text for exit code 2."""
    arguments = _with_config(_normalise(argv))
    namespace, unknown = _parser(load_flags()).parse_known_args(arguments)
    if unknown:
        raise UsageError(f"{_USAGE_TOP}vllm: error: unrecognized arguments: {' '.join(unknown)}\n")
    given = vars(namespace)
    for name in ("sim_speed", "sim_noise_between", "sim_noise_within"):
        value = given[name]
        if value is not None and (value < 0 or (name == "sim_speed" and value == 0)):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{_USAGE_SERVE}vllm serve: error: argument {flag}: must be positive\n")
    if not 0 <= given.get("port", 0) <= 65535:
        raise UsageError(f"{_USAGE_SERVE}vllm serve: error: argument --port: {given['port']} is not from 0 to 65535\n")
    return Arguments(given)


def non_default(arguments: Arguments) -> dict[str, Any]:
    """The arguments that differ from vLLM's defaults, in the order and form of its start-up log."""
    defaults = {dest_of(f): f.get("default") for f in load_flags()}
    shown: dict[str, Any] = {}
    if arguments.get("model_tag"):
        shown = {"model_tag": arguments.model, "model": arguments.model}
    for name, value in arguments.given.items():
        if name not in shown and name != "model_tag" and str(value) != str(defaults.get(name)):
            shown[name] = value
    return shown


def write_usage(error: UsageError) -> int:
    """Prints a refusal to stderr; returns the exit code."""
    sys.stderr.write(error.text)
    sys.stderr.flush()
    return 2
