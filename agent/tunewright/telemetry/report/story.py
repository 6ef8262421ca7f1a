"""The report's last part: the traffic, the promotion, who decided what, and the phases."""

from collections.abc import Callable, Sequence

from tunewright.domain.load import Load
from tunewright.domain.measurement import Measurement
from tunewright.domain.state import Decision, TrialRecord, TuningRecord
from tunewright.domain.verdict import Outcome, Reading
from tunewright.domain.workload import Lengths, Workload, workload_for
from tunewright.telemetry.facts import is_judged, number, seconds
from tunewright.telemetry.report.charts import histogram_chart
from tunewright.telemetry.report.data import all_decisions
from tunewright.telemetry.report.markup import Raw, badge, el, join, table, when

_KINDS = {Outcome.PASS: "good", Outcome.FAIL: "bad", Outcome.INCONCLUSIVE: "warn"}


def traffic(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    """What production's traffic looked like, and beside it what the load tests asked for and really sent."""
    profile = record.profile
    if profile is None:
        return el("p", "The traffic has not been learned yet.", cls="soft")
    workload = workload_for(_load(record), profile)
    if profile.given:
        return _given(workload, trials)
    demand = f"{number(profile.demand)} requests/s"
    reuse = "prefix cache off" if profile.prefix_reuse is None else f"{profile.prefix_reuse:.0%}"
    seen = _seen_in_tests(trials)
    rows = [
        ("Arrivals", f"at least {demand}" if profile.saturated else demand, _arrivals(workload),
         _each(seen, lambda m: m.requests_per_second, " requests/s")),
        ("At a time", f"{number(profile.concurrency)} (95th percentile {number(profile.concurrency_p95)})",
         number(workload.concurrency) if workload.concurrency else "as it comes",
         _each(seen, lambda m: m.generator.achieved if workload.concurrency else None)),
        ("Burstiness (1 is Poisson)", "not known" if profile.burstiness is None else number(profile.burstiness),
         number(workload.burstiness) if workload.rate else "as recorded" if workload.trace else "closed loop", "–"),
        ("Prompt tokens", f"{number(profile.prompt_tokens_mean)} on average", _prompts(workload),
         _each(seen, lambda m: _per_request(m.input_tokens_per_second, m), " on average")),
        ("Output tokens", f"{number(profile.output_tokens_mean)} on average", _outputs(workload),
         _each(seen, lambda m: _per_request(m.output_tokens_per_second.value, m), " on average")),
        ("Shared prefix", reuse, f"{workload.prefix_reuse:.0%}",
         _found_in_cache(seen)),
        ("Output tokens/s", number(profile.output_tokens_per_second), "what a candidate can do",
         _each(seen, lambda m: m.output_tokens_per_second.value)),
        ("TTFT p95", _or_none(profile.ttft_p95), "what comes of it", _span(seen, lambda m: m.ttft.p95)),
        ("E2E p95", _or_none(profile.e2e_p95), "what comes of it", _span(seen, lambda m: m.e2e.p95)),
    ]  # fmt: skip
    parts: list[object] = [
        el("p", f"{number(profile.finished_requests)} requests of {profile.replicas} replicas, from ",
           when(profile.start), " to ", when(profile.end), f"; {profile.via}; {profile.source}. Per replica:"),
        table("Traffic seen and replayed, per replica",
              ("", "Seen in production", "Asked of the load tests", "Measured in them"), rows),
        el("div", histogram_chart("prompts", "Prompt length in tokens", profile.prompt_tokens),
           histogram_chart("outputs", "Output length in tokens", profile.output_tokens), cls="two"),
    ]  # fmt: skip
    if record.load_file is not None:
        parts.append(el("p", f"The load tests read a copy of {record.load_file.told}."))
    if profile.acceptance:
        shares = ", ".join(f"{share:.0%}" for share in profile.acceptance)
        parts.append(el("p", f"Drafts accepted at each position of speculation: {shares}."))
    if profile.notes:
        parts.append(el("ul", join(el("li", note) for note in profile.notes)))
    return join(parts)


def _load(record: TuningRecord) -> Load:
    """As the load tests are given it; of a spec that was edited just now no ConfigMap is copied yet."""
    source = record.load.source
    if source is None or source.config_map is None:
        return record.load
    return record.load.reading(f"ConfigMap {source.config_map}")


def _given(workload: Workload, trials: Sequence[TrialRecord]) -> Raw:
    """Traffic that nobody watched: what was asked of the load tests, and what they really sent."""
    seen = _seen_in_tests(trials)
    rows = [
        ("Arrivals", _arrivals(workload), _each(seen, lambda m: m.requests_per_second, " requests/s")),
        ("At a time", number(workload.concurrency or 0), _each(seen, lambda m: m.generator.achieved)),
        ("Prompt tokens", _prompts(workload),
         _each(seen, lambda m: _per_request(m.input_tokens_per_second, m), " on average")),
        ("Output tokens", _outputs(workload),
         _each(seen, lambda m: _per_request(m.output_tokens_per_second.value, m), " on average")),
        ("Shared prefix", f"{workload.prefix_reuse:.0%}", _found_in_cache(seen)),
        ("TTFT p95", "what comes of it", _span(seen, lambda m: m.ttft.p95)),
        ("E2E p95", "what comes of it", _span(seen, lambda m: m.e2e.p95)),
    ]  # fmt: skip
    return join([
        el("p", "There is no production: the traffic is what the tuning file says, and was not watched."),
        table("Traffic given and sent", ("", "Asked of the load tests", "Measured in them"), rows),
    ])  # fmt: skip


def _found_in_cache(seen: Sequence[Measurement]) -> str:
    return _each(
        seen,
        lambda m: None if m.server is None or m.server.prefix_hit_rate is None else 100 * m.server.prefix_hit_rate,
        "% found in the cache",
    )


def _seen_in_tests(trials: Sequence[TrialRecord]) -> list[Measurement]:
    return [trial.measurement for trial in trials if trial.measurement is not None and is_judged(trial)]


def _per_request(rate: float, measured: Measurement) -> float | None:
    return rate / measured.requests_per_second if measured.requests_per_second > 0 else None


def _ends(seen: Sequence[Measurement], of: Callable[[Measurement], float | None]) -> tuple[float, float] | None:
    values = [value for measured in seen if (value := of(measured)) is not None]
    return (min(values), max(values)) if values else None


def _each(seen: Sequence[Measurement], of: Callable[[Measurement], float | None], unit: str = "") -> str:
    """The lowest and the highest over all sound trials."""
    ends = _ends(seen, of)
    if ends is None:
        return "–"
    low, high = number(ends[0]), number(ends[1])
    return f"{low if low == high else f'{low} to {high}'}{unit}"


def _span(seen: Sequence[Measurement], of: Callable[[Measurement], float]) -> str:
    ends = _ends(seen, of)
    return "–" if ends is None else f"{seconds(ends[0])} to {seconds(ends[1])}"


def _arrivals(workload: Workload) -> str:
    if workload.rate is not None:
        ramp = f" after a ramp from {number(workload.ramp.start_rate)}" if workload.ramp is not None else ""
        return f"open loop, {number(workload.rate)} requests/s{ramp}"
    if workload.trace is not None:
        return f"the trace {workload.trace.path}, {number(workload.trace.speed)} times as fast"
    if workload.sessions is not None:
        return f"{workload.sessions.concurrency} agent sessions of {workload.sessions.turns} turns"
    return f"closed loop of {workload.concurrency} streams"


def _prompts(workload: Workload) -> str:
    if workload.prompts_file is not None:
        return f"the texts of {workload.prompts_file}"
    return _together(workload) or _lengths(workload.prompt_tokens)


def _outputs(workload: Workload) -> str:
    return _together(workload) or _lengths(workload.output_tokens)


def _together(workload: Workload) -> str:
    if workload.pairs_of is not None:
        return f"drawn in pairs from {workload.pairs_of.path}"
    return f"{len(workload.pairs)} kinds of requests, as given" if workload.pairs else ""


def _lengths(lengths: Lengths) -> str:
    if lengths.fixed is not None:
        return f"always {lengths.fixed:,}"
    if (normal := lengths.normal) is not None:
        return (
            f"normal, {number(normal.mean)} ± {number(normal.standard_deviation)}, "
            f"from {normal.least:,} to {normal.most:,}"
        )
    if lengths.mean is not None:
        return f"as seen ({number(lengths.mean)} on average)"
    mean = lengths.histogram.mean if lengths.histogram is not None else None
    return "as seen" if mean is None else f"as seen ({number(mean)} on average, from the buckets)"


def _or_none(value: float | None) -> str:
    return "no data" if value is None else seconds(value)


def promotion(record: TuningRecord) -> Raw:
    """How far the guarded rollout is, and the verdict on the canary metric by metric, with its raw numbers."""
    state = record.promotion
    if state is None:
        return el("p", "Production was not touched.", cls="soft")
    parts: list[object] = [
        el("p", f"{state.updated} of {state.replicas} replicas are to run {state.candidate.hash}; the others run "
           f"{state.baseline.hash}.")
    ]  # fmt: skip
    if state.back_reason:
        parts.append(el("p", badge("going back", "warn"), f" {state.back_reason}"))
    moments = [
        ("Canary answered first", state.canary_since),
        ("Judged from", state.judged_from),
        ("Rolled", state.rolled_at),
    ]
    known = [(name, when(at)) for name, at in moments if at is not None]
    if known:
        parts.append(table("Moments of the rollout", ("", "When"), known))
    verdict = state.verdict
    if verdict is None:
        parts.append(el("p", "There is no verdict on the canary yet.", cls="soft"))
        return join(parts)
    parts.append(
        el("p", badge(str(verdict.outcome), _KINDS[verdict.outcome]), f" {verdict.reason} (", when(verdict.at), ")")
    )
    rows = [
        (m.metric, badge(str(m.outcome), _KINDS[m.outcome]), _reading(m.canary), _reading(m.stable), m.reason)
        for m in verdict.metrics
    ]
    if rows:
        heads = ("Metric", "Verdict", "Canary", "Stable", "Why")
        parts.append(table("Verdict by metric, over the same window", heads, rows, (2, 3)))
    readings = [reading for m in verdict.metrics for reading in (m.canary, m.stable)] + list(state.readings)
    if readings:
        raw = [
            (el("code", r.query), _value(r), number(r.samples), when(r.start), when(r.end))
            for r in dict.fromkeys(readings)
        ]
        heads = ("Query", "Value", "Samples", "From", "To")
        parts.append(el("details", el("summary", "Raw readings"), table("Raw readings", heads, raw, (1, 2))))
    return join(parts)


def _value(reading: Reading) -> str:
    return "no data" if reading.value is None else number(reading.value)


def _reading(reading: Reading) -> str:
    return f"{_value(reading)} ({number(reading.samples)} samples)"


def decisions_section(record: TuningRecord, decisions: Sequence[Decision]) -> Raw:
    """Who decided what, when and why, and on which candidate, spec and baseline."""
    found = all_decisions(record, decisions)
    if not found:
        return el("p", "Nobody has decided anything.", cls="soft")
    rows = [
        (
            when(d.at),
            d.action,
            d.by,
            "; ".join([*(f"{knob} {text}" for knob, text in d.values.items()), *([d.reason] if d.reason else [])])
            or "–",
            el("code", d.candidate or "–"),
            el("code", d.spec or "–"),
            el("code", d.baseline or "–"),
        )
        for d in found
    ]
    return table("Decisions", ("When", "What", "Who", "Why", "Candidate", "Spec", "Baseline"), rows)


def phases(record: TuningRecord) -> Raw:
    """The tuning's story, phase by phase."""
    if not record.history:
        return el("p", f"It is {record.phase} since ", when(record.phase_since), ".", cls="soft")
    ends = [change.at for change in record.history[1:]]
    lasted = [seconds(max(0.0, end - change.at)) for change, end in zip(record.history, ends, strict=False)]
    rows = [
        (str(change.phase), when(change.at), length, change.sentence)
        for change, length in zip(record.history, [*lasted, "–"], strict=True)
    ]
    return table("Phases", ("Phase", "From", "Lasted", "What happened"), rows, (2,))
