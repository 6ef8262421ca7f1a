"""The script of `sh -c`, where it is one simple command: its words, and the same script with other words.

What is not changed keeps its bytes: quotes, spaces and line continuations stay as they were.
"""

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.ports import Refused

_OPERATORS = {
    "|": "a pipe", "&": "`&`", ";": "`;`", "<": "a redirection", ">": "a redirection", "(": "a subshell",
    ")": "a subshell", "`": "a command substitution", "#": "a comment", "\n": "several lines",
}  # fmt: skip
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_KEYWORDS = frozenset(
    {"if", "then", "for", "while", "until", "case", "function", "{", "}", "!", "[[", "eval", "source", ".", "set", "cd"}
)


@dataclass(frozen=True)
class Word:
    """One word: what it means, and its bytes with the space before it."""

    value: str
    raw: str


@dataclass(frozen=True)
class Script:
    """One simple command as the shell reads it. `tail` are the bytes behind the last word."""

    words: tuple[Word, ...]
    tail: str

    @property
    def values(self) -> list[str]:
        """The words."""
        return [word.value for word in self.words]

    def with_words(self, wanted: Sequence[str]) -> str:
        """The script with these words; those that were there before keep their bytes."""
        text = []
        matcher = difflib.SequenceMatcher(None, self.values, list(wanted), autojunk=False)
        for kind, low, high, new_low, new_high in matcher.get_opcodes():
            if kind == "equal":
                text += [word.raw for word in self.words[low:high]]
            else:
                text += [f" {shlex.quote(word)}" for word in wanted[new_low:new_high]]
        return "".join(text) + self.tail


def read_script(text: str) -> Script:
    """Read a script. Raises `Refused` where it is more than one simple command, or needs the shell's variables."""
    words: list[Word] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        start = at
        at = _skip_space(text, at, end)
        if at >= end:
            break
        value, at = _word(text, at, end)
        words.append(Word(value, text[start:at]))
    if not words:
        raise Refused("the script of `sh -c` is empty")
    first = words[0].value
    if first in _KEYWORDS:
        raise Refused(f"the script of `sh -c` begins with `{first}`; {_ADVICE}")
    if _ASSIGNMENT.match(words[0].raw.lstrip()):
        raise Refused(f"the script of `sh -c` sets {first.partition('=')[0]} before its command; put it into `env`")
    return Script(tuple(words), text[at:])


_ADVICE = "only one simple command can be tuned: write it as `command: [vllm, serve, …]`, and variables as plain values"


def _skip_space(text: str, at: int, end: int) -> int:
    while at < end and (text[at] in " \t" or text.startswith("\\\n", at)):
        at += 2 if text[at] == "\\" else 1
    return at


def _word(text: str, at: int, end: int) -> tuple[str, int]:
    value = ""
    start = at
    while at < end and text[at] not in " \t":
        char = text[at]
        if char == "'":
            close = text.find("'", at + 1)
            value, at = value + text[at + 1 : _closed(close)], close + 1
        elif char == '"':
            inside, at = _double_quoted(text, at + 1)
            value += inside
        elif text.startswith("\\\n", at):
            at += 2
        elif char == "\\":
            value, at = value + text[at + 1 : at + 2], at + 2
        else:
            _refuse(char, first=at == start)
            value, at = value + char, at + 1
    return value, at


def _double_quoted(text: str, at: int) -> tuple[str, int]:
    value = ""
    while at < len(text) and text[at] != '"':
        if text[at] in "$`":
            _refuse(text[at], first=False)
        if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
            value += "" if text[at + 1] == "\n" else text[at + 1]
            at += 2
        else:
            value, at = value + text[at], at + 1
    return value, _closed(-1 if at >= len(text) else at) + 1


def _closed(at: int) -> int:
    if at < 0:
        raise Refused("the script of `sh -c` has a quote that is not closed")
    return at


def _refuse(char: str, *, first: bool) -> None:
    if char == "#" and not first:
        return
    if char in _OPERATORS:
        raise Refused(f"the script of `sh -c` has {_OPERATORS[char]}; {_ADVICE}")
    if char == "$":
        raise Refused(f"the script of `sh -c` has a variable or a substitution; {_ADVICE}")
    if char in "*?[" or (char in "~{" and first):
        raise Refused(f"the script of `sh -c` has `{char}`, which the shell expands; {_ADVICE}")
