"""A production command, taken apart into a candidate and the rest, and put together again.

What is not a knob is carried byte for byte and in place; so is a knob whose value does not change. A changed knob is
written anew where it stood; a knob that was not there is added at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tunewright.domain.candidate import Candidate, KnobValue
from tunewright.knobs import jsonflags
from tunewright.knobs.catalogue import CATALOGUE
from tunewright.knobs.knob import Knob
from tunewright.ports import Refused

_FLAGS = {spelling: knob for knob in CATALOGUE.values() if knob.flag for spelling in (knob.flag, *knob.aliases)}
_ENVIRONMENT = {knob.environment: knob for knob in CATALOGUE.values() if knob.environment}
_MANY_VALUES = frozenset(
    {
        "--api-key", "--lora-modules", "--allowed-media-domains", "--logits-processors", "--served-model-name",
        "--sleep-preserve-parameter-names", "--ignore-patterns", "--numa-bind-cpus", "--numa-bind-nodes",
        "--kv-cache-dtype-skip-layers", "--cpu-offload-params", "--offload-params", "--lora-target-modules",
        "--collect-detailed-traces", "--cudagraph-capture-sizes",
    }
)  # fmt: skip
"""Flags that take every word up to the next flag: one of them would swallow a positional that comes to follow it."""


@dataclass(frozen=True)
class Piece:
    """Words of the command that set one knob or add to one JSON flag."""

    at: int  # how many words of the rest stand before it
    owner: str  # the knob, or the JSON flag
    words: tuple[str, ...]


@dataclass(frozen=True)
class SplitCommand:
    """A command without its knobs: `join` puts any candidate in their place."""

    rest: tuple[str, ...]
    rest_environment: Mapping[str, str]
    candidate: Candidate
    pieces: tuple[Piece, ...] = ()
    templates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment_text: Mapping[str, str] = field(default_factory=dict)  # knobs in the environment, as they were written


def split(argv: Sequence[str], environment: Mapping[str, str]) -> SplitCommand:
    """Take the known knobs out of a production command. Raises `Refused` for a knob whose value can't be read."""
    rest: list[str] = []
    pieces: list[Piece] = []
    values: dict[str, KnobValue] = {}
    templates: dict[str, dict[str, Any]] = {}
    for words, found in _scan(argv):
        if found is None:
            rest.extend(words)
            continue
        owner, path, text = found
        pieces.append(Piece(len(rest), owner, words))
        try:
            if owner in CATALOGUE:
                values[owner] = CATALOGUE[owner].parse(text)
            else:
                added = jsonflags.contribution(path, text)
                # A whole JSON replaces what came before it; single keys are laid over.
                templates[owner] = jsonflags.merge(templates.get(owner, {}), added) if path else added
        except ValueError as error:
            raise Refused(
                f"{words[0]}: {error}; write a plain value into the command, so that it can be tuned"
            ) from None
    for flag, template in templates.items():
        try:
            values.update(jsonflags.take_knobs(flag, template))
        except ValueError as error:
            raise Refused(f"{flag}: {error}") from None
    _refuse_swallowing(rest, pieces)
    texts: dict[str, str] = {}
    for variable, text in environment.items():
        if variable in _ENVIRONMENT:
            knob = _ENVIRONMENT[variable]
            try:
                values[knob.name] = knob.parse(text)
            except ValueError as error:
                raise Refused(f"environment variable {variable}: {error}") from None
            texts[knob.name] = text
    return SplitCommand(
        rest=tuple(rest),
        rest_environment={name: text for name, text in environment.items() if name not in _ENVIRONMENT},
        candidate=Candidate(values=values),
        pieces=tuple(pieces),
        templates=templates,
        environment_text=texts,
    )


def model_of(command: Sequence[str]) -> str | None:
    """The model's folder or hub id, as the word after `serve` or `--model` names it; None where none does."""
    return next((following for word, following in pairwise(command) if word in ("serve", "--model")), None)


def join(command: SplitCommand, candidate: Candidate) -> tuple[list[str], dict[str, str]]:
    """The command line and environment that run `candidate`. Raises `Refused` for a knob that is not known."""
    unknown = sorted(set(candidate.values) - set(CATALOGUE))
    if unknown:
        raise Refused(f"{', '.join(unknown)}: no knob of this catalogue")
    written = {owner: _words(owner, command, candidate) for owner in _owners(command, candidate)}
    last = {piece.owner: index for index, piece in enumerate(command.pieces)}
    argv: list[str] = []
    done = 0
    for index, piece in enumerate(command.pieces):
        argv.extend(command.rest[done : piece.at])
        done = piece.at
        words = written[piece.owner]
        if words is None:
            argv.extend(piece.words)  # unchanged: every one of its words as it was
        elif last[piece.owner] == index:
            argv.extend(words)
    end = command.rest.index("--") if "--" in command.rest[done:] else len(command.rest)
    argv.extend(command.rest[done:end])
    for owner, words in written.items():
        if owner not in last and words:
            argv.extend(words)
    argv.extend(command.rest[end:])
    return argv, _environment(command, candidate)


def _owners(command: SplitCommand, candidate: Candidate) -> list[str]:
    """Every knob and JSON flag that stands in the command or is to be added, in the catalogue's order."""
    present = {piece.owner for piece in command.pieces}
    owners: dict[str, None] = {}
    for knob in CATALOGUE.values():
        owner = knob.json_flag or knob.name
        if not knob.environment and (owner in present or knob.name in candidate.values):
            owners[owner] = None
    return list(owners)


def _words(owner: str, command: SplitCommand, candidate: Candidate) -> list[str] | None:
    """The words for one knob or JSON flag; None: as they are. Empty: left out."""
    if owner in CATALOGUE:
        knob, value = CATALOGUE[owner], candidate.values.get(owner)
        if value is None:
            return []
        if _same(value, command.candidate.values.get(owner)):
            return None
        return flag_words(knob, value)
    names = list(jsonflags.knobs_of(owner).values())
    present = owner in command.templates
    if present and all(_same(candidate.values.get(n), command.candidate.values.get(n)) for n in names):
        return [] if jsonflags.off(owner, command.templates[owner]) else None
    values = {name: candidate.values[name] for name in names if name in candidate.values}
    text = jsonflags.render(owner, command.templates.get(owner, {}), values)
    return [] if text is None else [owner, text]


def flag_words(knob: Knob, value: KnobValue) -> list[str]:
    """A knob with a flag of its own, as words of a command line."""
    flag = knob.flag or ""
    if knob.kind == "bool":
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    return [flag, knob.format(value)]


def _same(left: KnobValue | None, right: KnobValue | None) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _environment(command: SplitCommand, candidate: Candidate) -> dict[str, str]:
    environment = dict(command.rest_environment)
    for variable, knob in _ENVIRONMENT.items():
        value = candidate.values.get(knob.name)
        if value is not None:
            same = _same(value, command.candidate.values.get(knob.name))
            environment[variable] = command.environment_text[knob.name] if same else knob.format(value)
    return environment


# --- reading the words -----------------------------------------------------------------------------------------------

_Found = tuple[str, str | None, str]  # owner, path inside its JSON, text


def _scan(argv: Sequence[str]) -> Iterator[tuple[tuple[str, ...], _Found | None]]:
    """The command in pieces: words, and what they set if they set a knob."""
    index = _first_argument(argv)
    yield tuple(argv[:index]), None
    while index < len(argv):
        word = argv[index]
        if word == "--":
            yield tuple(argv[index:]), None
            return
        following = argv[index + 1] if index + 1 < len(argv) else None
        found, taken = _recognize(word, following)
        yield tuple(argv[index : index + taken]), found
        index += taken


def _first_argument(argv: Sequence[str]) -> int:
    """Where vLLM's own arguments begin: behind `serve` or the module, so that a wrapper's flags are left alone."""
    for index, word in enumerate(argv):
        if word == "serve" or word.startswith("vllm.entrypoints."):
            return index + 1
    return 0


def _recognize(word: str, following: str | None) -> tuple[_Found | None, int]:
    """What a word sets, and how many words that took."""
    name, equals, attached = word.partition("=")
    if name.startswith("--"):
        head, dot, tail = name.partition(".")
        name = head.replace("_", "-") + dot + tail  # vLLM reads --max_num_seqs as --max-num-seqs
    base, dot, path = name.partition(".")
    owner = jsonflags.ALIASES.get(base)
    if owner is None and name in jsonflags.SHORTHANDS:
        owner, dot, path = jsonflags.SPECULATION, ".", jsonflags.SHORTHANDS[name]
    if owner is not None:
        inside = path if dot else None
        if equals:
            return (owner, inside, attached), 1
        return ((owner, inside, following), 2) if following is not None else (None, 1)
    if name.startswith("-O") and name[2:].isdigit():
        return (_FLAGS["-O"].name, None, name[2:]), 1
    knob, negated = _flag(name), False
    if knob is None and name.startswith("--no-"):
        knob, negated = _flag("--" + name[5:]), True
    if knob is None or (negated and knob.kind != "bool"):
        return None, 1
    if knob.kind == "bool" and not equals:
        return (knob.name, None, "false" if negated else "true"), 1
    if equals:
        return (knob.name, None, attached), 1
    return ((knob.name, None, following), 2) if following is not None else (None, 1)


def _flag(name: str) -> Knob | None:
    """The knob of a flag, also when it is cut short: argparse takes `--gpu-memory-util` while it is unambiguous."""
    if name in _FLAGS or not name.startswith("--") or len(name) < 7:
        return _FLAGS.get(name)
    meant = {knob.name: knob for spelling, knob in _FLAGS.items() if spelling.startswith(name)}
    return meant.popitem()[1] if len(meant) == 1 else None


def _refuse_swallowing(rest: Sequence[str], pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        if not 0 < piece.at < len(rest) or rest[piece.at].startswith("-"):
            continue
        flags = [word for word in rest[: piece.at] if word.startswith("-")]
        if flags and flags[-1].replace("_", "-") in _MANY_VALUES:
            raise Refused(
                f"{rest[piece.at]!r} stands behind {flags[-1]} with only {piece.words[0]} between them: without that "
                f"knob {flags[-1]} would swallow it. Move it to the front, right behind `serve`"
            )
