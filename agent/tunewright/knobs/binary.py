"""The flags of the very vLLM in use, asked of its own argument parser: `vllm serve --help=all`, which needs no GPU.

Flags come and go between minor versions, and a flag that is gone ends the server. What the parser says is kept in a
file named by what was asked and of which program: it is asked once, and again when the program has changed.
"""

import difflib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tunewright.domain.candidate import content_hash
from tunewright.knobs.catalogue import CATALOGUE
from tunewright.knobs.knob import Knob

TIMEOUT = 120.0
"""Seconds that vLLM may take: it imports PyTorch before it reads its arguments."""

_SHORTHANDS = ("--spec-method", "--spec-tokens", "--spec-model")  # each is one key of --speculative-config
_FEWEST = 20  # flags; a text with fewer is no help text of vLLM's
_HEADING = re.compile(r"^  (-\S.*)$")
_NAME = re.compile(r"(?:^|(?<=[\s,]))(--?[A-Za-z][\w-]*)")
_CHOICES = re.compile(r"\{([^{}]*)\}|\[((?:'[^']*',?\s*)+)\]")
_DEFAULT = re.compile(r"\(default: (.*?)\)\s*$", re.S)


@dataclass(frozen=True)
class Flag:
    """One flag: its valid values where the parser lists them, and its default as text."""

    choices: tuple[str, ...] = ()
    default: str | None = None


@dataclass(frozen=True)
class BinaryFlags:
    """Every spelling of every flag that this binary takes."""

    flags: Mapping[str, Flag]

    def has(self, flag: str) -> bool:
        """Whether the parser takes it (a switch's `--no-` form is not asked about)."""
        return flag in self.flags

    def allows(self, flag: str, value: object) -> bool:
        """Whether the parser takes this value; True where it lists none."""
        known = self.flags.get(flag)
        return known is None or not known.choices or str(value) in known.choices

    def takes(self, knob: Knob, value: object = None) -> bool:
        """Whether this binary has the knob, and takes that value of it; True for environment variables."""
        flag = knob.flag or knob.json_flag
        if flag is None:
            return True
        return self.has(flag) and (value is None or knob.kind != "choice" or not knob.flag or self.allows(flag, value))

    def unknown(self, command: Sequence[str]) -> list[str]:
        """The long flags behind `serve` that the parser refuses, each with the nearest that it takes, if one is near.

        Told as argparse and vLLM read them: underscores are dashes, `--flag.key` is a key of `--flag`, and a flag may
        be cut short.
        """
        words = list(command)
        words = words[words.index("serve") + 1 :] if "serve" in words else []
        found = []
        for word in words[: words.index("--")] if "--" in words else words:
            name = re.split(r"[=.]", word, maxsplit=1)[0].replace("_", "-")
            if name.startswith("--") and not any(flag.startswith(name) for flag in self.flags):
                near = difflib.get_close_matches(name, self.flags, n=1, cutoff=0.75)
                found.append(f"{name} (did you mean {near[0]}?)" if near else name)
        return found

    def missing(self) -> list[str]:
        """Knobs of the catalogue whose flag this binary does not have: they are never passed."""
        return [knob.name for knob in CATALOGUE.values() if not self.takes(knob)]

    def renamed(self) -> dict[str, str]:
        """Of the missing ones, those that it has under another name: never passed by ours, and told."""
        found = {}
        for name in self.missing():
            others = [alias for alias in CATALOGUE[name].aliases if alias.startswith("--") and self.has(alias)]
            if others:
                found[name] = others[0]
        return found

    def not_tuned(self) -> list[str]:
        """Long flags that no knob stands for, sorted: what a tuning leaves as production has it."""
        known = {spelling for knob in CATALOGUE.values() for spelling in (knob.flag, *knob.aliases, knob.json_flag)}
        known |= set(_SHORTHANDS)
        positive = {flag for flag in self.flags if flag.startswith("--") and not flag.startswith("--no-")}
        return sorted(positive - {name for name in known if name})


def read_help(text: str) -> BinaryFlags:
    """The flags in the text of `--help=all`. Raises ValueError when it is no such text."""
    entries: list[list[str]] = []
    for line in text.splitlines():
        if (heading := _HEADING.match(line)) is not None:
            entries.append([heading[1]])
        elif entries and line.startswith(" " * 20):
            entries[-1].append(line.strip())
    flags: dict[str, Flag] = {}
    for entry in entries:
        head, words = re.split(r"\s{2,}", entry[0], maxsplit=1)[0], " ".join([*entry[0].split("  ")[1:], *entry[1:]])
        # "... or name registered in --tool-parser-plugin" names another flag, not a second name of this one.
        plain, _, or_others = head.partition(" or name ")
        choices = None if or_others else _CHOICES.search(plain)
        default = _DEFAULT.search(words)
        flag = Flag(
            choices=tuple(c.strip(" '") for c in (choices[1] or choices[2]).split(",")) if choices else (),
            default=default[1].strip() if default else None,
        )
        flags.update(dict.fromkeys(_NAME.findall(_CHOICES.sub("", plain)), flag))
    if len(flags) < _FEWEST:
        raise ValueError(f"this is no help text of vLLM: {len(flags)} flags were found in it")
    return BinaryFlags(flags)


def help_command(command: Sequence[str]) -> list[str] | None:
    """The command that prints the help of what `command` runs; None where it is not of the form `… serve …`."""
    if "serve" not in command:
        return None
    return [*command[: list(command).index("serve") + 1], "--help=all"]


def ask(
    command: Sequence[str], environment: Mapping[str, str], cache: Path, *, timeout: float = TIMEOUT
) -> tuple[BinaryFlags | None, str]:
    """Flags of the program that `command` runs, from `cache` or asked anew; None with the reason where it won't tell.

    Never raises: without an answer the catalogue's own versions hold.
    """
    asked = help_command(command)
    if asked is None:
        return None, "the command is not of the form `vllm serve …`"
    path = {**os.environ, **environment}.get("PATH")
    program = shutil.which(asked[0], path=path)
    if program is None:
        return None, f"{asked[0]} is not found"
    # Behind a wrapper, as `taskset -c 0 vllm serve`, it is the word before `serve` that changes with an upgrade.
    real = Path(shutil.which(asked[-3], path=path) or program).resolve()
    stat = real.stat()
    file = cache / f"flags-{content_hash([asked, str(real), stat.st_size, stat.st_mtime_ns])}.json"
    if (kept := _load(file)) is not None:
        return kept, ""
    try:
        done = subprocess.run(
            [program, *asked[1:]], capture_output=True, text=True, errors="replace", timeout=timeout, check=False,
            env={**os.environ, **environment, "COLUMNS": "80"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        flags = read_help(done.stdout)
    except subprocess.TimeoutExpired:
        return None, f"`{' '.join(asked)}` did not answer within {timeout:.0f} s"
    except (OSError, ValueError) as error:
        return None, f"`{' '.join(asked)}`: {error}"
    _keep(file, flags)
    return flags, ""


def _load(file: Path) -> BinaryFlags | None:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        return BinaryFlags({name: Flag(tuple(one["choices"]), one["default"]) for name, one in document.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _keep(file: Path, flags: BinaryFlags) -> None:
    """Written beside and moved into place, so that a reader never sees half of it; a full disk costs only the cache."""
    document = {name: {"choices": list(flag.choices), "default": flag.default} for name, flag in flags.flags.items()}
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_text(json.dumps(document), encoding="utf-8")
        partial.replace(file)
    except OSError:
        with suppress(OSError):  # what stands in the way of writing may stand in the way of removing
            partial.unlink(missing_ok=True)
