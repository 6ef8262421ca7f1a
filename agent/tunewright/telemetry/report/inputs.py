"""What the search knew of model, machine and vLLM, and what it left alone."""

from tunewright.domain.state import TuningRecord
from tunewright.telemetry.report.markup import Raw, el, join, table


def inputs_section(record: TuningRecord) -> Raw:
    """The facts, the knobs that were searched, and the flags that are not tuned."""
    told = record.inputs
    if told is None:
        return el("p", "The search has not begun yet.", cls="soft")
    rows = [
        ("vLLM", told.version or "not known"),
        ("Model", told.model or "not known: its config.json was not found"),
        ("GPU of the spare", told.gpu or "not known"),
        ("Knobs searched", ", ".join(told.searched) or "none"),
        ("Earlier measurements of this target", f"{len(record.earlier)}, as a prior" if record.earlier else "none"),
    ]
    parts: list[object] = [table("What the search knew", ("Of", "Known"), rows)]
    if told.flags_unknown:
        parts.append(
            el("p", f"The flags of this vLLM are not known, and the catalogue's versions hold: {told.flags_unknown}.")
        )
    if told.missing:
        parts.append(el("p", f"Not in this vLLM, and never passed: {', '.join(told.missing)}."))
    if told.renamed:
        names = ", ".join(f"{knob} (now {flag})" for knob, flag in told.renamed.items())
        parts.append(el("p", f"Under another name in this vLLM, and left as production has them: {names}."))
    if told.not_tuned:
        listed = el("ul", join(el("li", el("code", flag)) for flag in told.not_tuned))
        parts.append(el("details", el("summary", f"{len(told.not_tuned)} flags of this vLLM are not tuned"), listed))
    return join(parts)
