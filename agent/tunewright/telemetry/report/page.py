"""The page: sections in order, with nothing that has to be fetched from elsewhere."""

import base64
import json
from collections.abc import Sequence

from tunewright import __version__
from tunewright.domain.state import Decision, TrialRecord, TuningRecord
from tunewright.telemetry.facts import seconds
from tunewright.telemetry.report import answer, cost, inputs, measured, story, worth
from tunewright.telemetry.report.data import report_data
from tunewright.telemetry.report.markup import Raw, el, join
from tunewright.telemetry.report.style import STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def render_report(
    record: TuningRecord, trials: Sequence[TrialRecord], *, decisions: Sequence[Decision] = (), how_to_apply: str = ""
) -> str:
    """The report of a tuning in any phase as one HTML page.

    `decisions` are the store's; `how_to_apply` is what the target recommends doing by hand. The raw data are in the
    page, behind its download link.
    """
    by_hand = el("pre", how_to_apply) if how_to_apply else Raw("")
    sections = [
        ("answer", "The answer", answer.answer(record, trials)),
        ("change", "What changes", answer.configuration(record, trials)),
        ("ladder", "What each change is worth", worth.ladder_section(record, trials)),
        ("cost", "What it costs", cost.cost_section(record, trials)),
        ("apply", "How to apply it, how to go back", join((answer.apply_and_back(record, trials), by_hand))),
        ("trials", "Trials", measured.trials_section(record, trials)),
        ("inputs", "What the search knew", inputs.inputs_section(record)),
        ("rounds", "Confirming rounds", measured.rounds(record, trials)),
        ("tradeoff", "Speed against latency", worth.tradeoff_section(record, trials)),
        ("latency", "Latency against the SLO", measured.latencies(record, trials)),
        ("traffic", "The traffic", story.traffic(record, trials)),
        ("noise", "Noise", measured.noise(record, trials)),
        ("failures", "Failures", measured.failures(trials)),
        ("spare", "Where the spare's time went", measured.spare_use(trials)),
        ("promotion", "Promotion", story.promotion(record)),
        ("decisions", "Decisions", story.decisions_section(record, decisions)),
        ("phases", "Phases", story.phases(record)),
    ]
    links = el("ul", join(el("li", el("a", title, href=f"#{name}")) for name, title, _ in sections))
    body = join(
        (
            el(
                "header",
                el("h1", f"Tuning {record.name}"),
                _subtitle(record, trials),
                el("nav", links, aria_label="Sections"),
            ),
            el("main", join(_section(*section) for section in sections)),
            el("footer", _download(record, trials, decisions), el("p", f"Made by Tunewright {__version__}.")),
        )
    )
    head = join(
        (
            Raw('<meta charset="utf-8">'),
            Raw('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Raw(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            Raw('<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'),
            el("title", f"Tuning {record.name}: {record.phase}"),
            Raw(f"<style>{STYLE}</style>"),
        )
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _section(name: str, title: str, content: Raw) -> Raw:
    return el("section", el("h2", title, id=f"{name}-head"), content, id=name, cls=name, aria_labelledby=f"{name}-head")


def _subtitle(record: TuningRecord, trials: Sequence[TrialRecord]) -> Raw:
    spec = record.tuning.spec
    goal = f"maximize {spec.objective.maximize}" if spec.objective.maximize else f"minimize {spec.objective.minimize}"
    slo = ", ".join(f"{latency.upper()} {p} ≤ {seconds(bound)}" for latency, p, bound in spec.slo.bounds())
    seen = sorted({str(trial.measurement.source) for trial in trials if trial.measurement is not None})
    source = f"numbers: {', '.join(seen)}" if seen else "nothing measured yet"
    promotion = f"promotion: {spec.promotion.mode}"
    return el(
        "p", " · ".join(part for part in (goal, slo or "no latency bound", source, promotion) if part), cls="soft"
    )


def _download(record: TuningRecord, trials: Sequence[TrialRecord], decisions: Sequence[Decision]) -> Raw:
    data = report_data(record, trials, decisions=decisions)
    text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=True).encode()
    link = Raw(f"data:application/json;base64,{base64.b64encode(text).decode()}")
    return el(
        "p",
        el("a", "Download the data behind this page (JSON)", href=link, download=f"{record.name}.json"),
        cls="download",
    )
