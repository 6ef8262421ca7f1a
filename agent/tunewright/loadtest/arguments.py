"""The arguments of `tunewright load`, and the load test that they describe."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from tunewright.domain.traffic import Normal, Pair, Ramp, Sessions, Trace, TraceFile, TraceFormat
from tunewright.domain.tuning import Slo
from tunewright.domain.units import parse_duration, parse_share
from tunewright.domain.workload import Lengths, Workload
from tunewright.loadtest.job import LoadJob

_PROMPT, _OUTPUT = 512, 128


def _workload(given: argparse.Namespace) -> Workload:
    if given.sessions is not None:
        _refuse(given, "sessions", "prompts", "pair", "lengths_of", "prompt_normal", "output_normal", "prefix_reuse")
        sessions = Sessions(
            concurrency=given.sessions,
            turns=given.turns,
            first_prompt=given.prompt_tokens or _PROMPT,
            shared_prompt=given.shared_prompt,
            per_turn=given.per_turn,
            output=given.output_tokens or _OUTPUT,
            pause=parse_duration(given.pause),
        )
        return Workload.of_sessions(sessions, given.temperature)
    if given.prompts:
        _refuse(given, "prompts", "prompt_tokens", "prompt_normal", "prefix_reuse", "trace", "pair", "lengths_of")
    for way in ("pair", "lengths_of"):
        if getattr(given, way):
            _refuse(given, way, "prompt_tokens", "output_tokens", "prompt_normal", "output_normal")
    trace = Trace(file=given.trace, format=given.trace_format, speed=given.speed) if given.trace else None
    return Workload(
        concurrency=given.concurrency if given.rate is None and trace is None else None,
        rate=given.rate,
        ramp=_ramp(given.ramp) if given.ramp else None,
        trace=trace,
        highest=given.highest_rate,
        burstiness=given.burstiness,
        prompt_tokens=_lengths(given, "prompt", _PROMPT),
        output_tokens=_lengths(given, "output", _OUTPUT),
        pairs=tuple(map(_pair, given.pair)),
        pairs_of=TraceFile(file=given.lengths_of, format=given.trace_format) if given.lengths_of else None,
        prompts_file=given.prompts,
        prefix_reuse=parse_share(given.prefix_reuse or "0%"),
        temperature=given.temperature,
    )


def _refuse(given: argparse.Namespace, way: str, *others: str) -> None:
    """Refuse arguments that say again, or otherwise, what `way` says."""
    if wrong := [_flag(name) for name in others if getattr(given, name) not in (None, [])]:
        raise ValueError(f"{' and '.join(wrong)} can't be with {_flag(way)}, which says that itself")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _lengths(given: argparse.Namespace, what: str, usual: int) -> Lengths:
    fixed, normal = getattr(given, f"{what}_tokens"), getattr(given, f"{what}_normal")
    if normal is None:
        return Lengths(fixed=usual if fixed is None else fixed)
    _refuse(given, f"{what}_normal", f"{what}_tokens")
    mean, deviation, least, most = _numbers(f"--{what}-normal", normal, "MEAN:SD:LEAST:MOST", (float, float, int, int))
    return Lengths(normal=Normal(mean=mean, standard_deviation=deviation, least=int(least), most=int(most)))


def _pair(text: str) -> Pair:
    form = "PROMPT:OUTPUT:WEIGHT" if text.count(":") > 1 else "PROMPT:OUTPUT"
    prompt, output, weight = [*_numbers("--pair", text, form, (int, int, float)), 1.0][:3]
    return Pair(prompt_tokens=int(prompt), output_tokens=int(output), weight=weight)


def _ramp(text: str) -> Ramp:
    rate, _, duration = text.partition(":")
    (start,) = _numbers("--ramp", rate, "RATE", (float,))
    return Ramp(start_rate=start, duration=parse_duration(duration))


def _numbers(flag: str, text: str, form: str, kinds: Sequence[type[int | float]]) -> list[float]:
    parts = text.split(":")
    try:
        if len(parts) != len(form.split(":")):
            raise ValueError
        return [kind(part) for kind, part in zip(kinds, parts, strict=False)]
    except ValueError:
        raise ValueError(f"{flag} wants {form} in numbers, not {text!r}") from None


def job(given: argparse.Namespace) -> LoadJob:
    """The load test that the arguments describe. Raises `ValueError`, also pydantic's, for what can't be."""
    return LoadJob(
        url=given.url.rstrip("/"),
        workload=_workload(given),
        model=given.model,
        duration=parse_duration(given.duration),
        max_warmup=parse_duration(given.max_warmup),
        seed=given.seed,
        api_key_file=given.api_key_file,
        ca_file=given.ca_file,
        slo=Slo.model_validate(dict(_bound(text) for text in given.slo)),
        endpoint="chat" if given.sessions is not None else given.endpoint,
    )


def _bound(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--slo wants NAME=BOUND, as ttftP95=2s, not {text!r}")
    return name, value


def parser() -> argparse.ArgumentParser:
    """Reads the command line, for people and for the service."""
    made = argparse.ArgumentParser(
        prog="tunewright load", description="Load-test one OpenAI-compatible server and say how far the numbers hold."
    )
    made.add_argument("url", nargs="?", help="base URL of the server, as http://127.0.0.1:8000")
    loop = made.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, default=32, help="closed loop: requests running at all times (32)")
    loop.add_argument("--rate", type=float, help="open loop: requests per second")
    loop.add_argument("--sessions", type=int, metavar="N", help="agent sessions: N conversations at all times")
    made.add_argument(
        "--highest-rate", action="store_true", help="seek the highest rate that keeps the SLO, beginning with --rate"
    )
    made.add_argument("--slo", action="append", default=[], metavar="NAME=BOUND", help="as ttftP95=2s; may be repeated")
    made.add_argument("--burstiness", type=float, default=1.0, help="variance over mean of arrivals, 1 is Poisson")
    loop.add_argument(
        "--trace", metavar="FILE", help="replay a recording: Mooncake's or vLLM's JSON lines, Azure's CSV"
    )
    made.add_argument("--speed", type=float, default=1.0, help="trace: times as fast as it was recorded (1)")
    made.add_argument("--trace-format", choices=get_args(TraceFormat), default="auto")
    made.add_argument("--ramp", metavar="RATE:TIME", help="open loop: rise from RATE at first, as 0.5:30s")
    made.add_argument("--prompt-tokens", type=int, help=f"of a request, or of a session's first turn ({_PROMPT})")
    made.add_argument("--output-tokens", type=int, help=f"of a request, or of each turn ({_OUTPUT})")
    for what in ("prompt", "output"):
        form = "MEAN:SD:LEAST:MOST"
        made.add_argument(f"--{what}-normal", metavar=form, help=f"{what} tokens by a truncated normal distribution")
    made.add_argument(
        "--pair", action="append", default=[], metavar="PROMPT:OUTPUT[:WEIGHT]",
        help="prompt and output tokens that go together; may be repeated",
    )  # fmt: skip
    made.add_argument("--lengths-of", metavar="FILE", help="lengths of a recording's requests, without their times")
    made.add_argument("--prompts", metavar="FILE", help='texts to send: one {"prompt": "..."} a line')
    made.add_argument("--prefix-reuse", metavar="SHARE", help="share of prompt tokens shared, as 50%% (0%%)")
    made.add_argument("--temperature", type=float, default=0.0, help="at which answers are sampled; 0 is greedy (0)")
    made.add_argument("--turns", type=int, default=12, help="sessions: turns of one conversation (12)")
    made.add_argument("--per-turn", type=int, default=256, help="sessions: tokens that each further turn adds (256)")
    made.add_argument("--shared-prompt", type=int, default=0, help="sessions: tokens that all begin with (0)")
    made.add_argument("--pause", default="2s", help="sessions: from an answer to the next turn, on average (2s)")
    made.add_argument("--duration", default="35s", help="length of the steady window (35s)")
    made.add_argument("--max-warmup", default="120s", help="the warm-up is ended by then (120s)")
    made.add_argument("--model", help="served model name; asked of the server when left out")
    made.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    made.add_argument("--seed", type=int, default=1, help="seed of lengths and arrivals (1)")
    made.add_argument("--api-key-file", metavar="FILE", help="file with the bearer token")
    made.add_argument("--ca-file", metavar="FILE", help="authorities to trust for https, PEM")
    made.add_argument("--json", action="store_true", help="print the whole result as JSON")
    made.add_argument("--request", type=Path, metavar="FILE", help="a load test as JSON, instead of URL")
    made.add_argument("--result", type=Path, metavar="FILE", help="where its result goes")
    return made
