"""The table of knobs for people: `python -m tunewright.knobs.docs > docs/knobs.md`. A test holds the file to it."""

from tunewright.knobs.catalogue import CATALOGUE
from tunewright.knobs.knob import Family, Knob, Searched

_HEAD = """# Knobs

What Tunewright knows of vLLM's engine arguments. This page is generated from the catalogue; do not edit it by hand.

- *searched*: `always` where the knob applies to model and machine; `named` only when `spec.search.include` names it;
  `never` is production's own business (it can still be pinned with `spec.search.pin`).
- **Lossy** values can change answers. They are tried only with `spec.search.allowLossy: true`, and promoted only past
  the quality gate.
- Values outside the grid are kept where production or a pin sets them.
"""


def knobs_page() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD]
    for group in dict.fromkeys(knob.group for knob in CATALOGUE.values()):
        parts.append(f"## {group[0].upper()}{group[1:]}\n")
        parts.append(
            "| Knob | Set by | Searched | Values tried | Default | Lossy | Needs | vLLM | What it does | Source |"
        )
        parts.append("|---|---|---|---|---|---|---|---|---|---|")
        parts.extend(_row(knob) for knob in CATALOGUE.values() if knob.group == group)
        parts.append("")
    return "\n".join(parts)


def _row(knob: Knob) -> str:
    spellings = ", ".join(f"`{text}`" for text in (knob.where, *knob.aliases))
    tried = ", ".join(knob.format(value) for value in knob.grid) if knob.search is not Searched.NEVER else ""
    lossy = [value for value in knob.grid if value in knob.lossy]
    lossy_text = ", ".join(knob.format(value) for value in lossy) if lossy else "no"
    needs = [knob.needs] if knob.needs else []
    if knob.families != frozenset(Family):
        needs.append("model: " + " or ".join(sorted(knob.families)))
    if knob.min_gpus > 1:
        needs.append(f"{knob.min_gpus} GPUs")
    elif knob.gpu:
        needs.append("a GPU")
    versions = f"from {_version(knob.since)}" + (f", before {_version(knob.until)}" if knob.until else "")
    cells = [
        f"`{knob.name}`", spellings, knob.search.value, tried, knob.default, lossy_text, "; ".join(needs), versions,
        knob.does, knob.source,
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") or "–" for cell in cells) + " |"


def _version(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"


if __name__ == "__main__":
    print(knobs_page(), end="")
