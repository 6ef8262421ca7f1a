"""HTML that is safe by construction: every string is escaped and stripped of secrets unless it was made here."""

import html
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from tunewright.domain.redact import redact


class Raw(str):
    """Markup that is not escaped again."""

    __slots__ = ()


def esc(value: object) -> Raw:
    """Text for a page: escaped, redacted, without control characters. `Raw` stays as it is."""
    if isinstance(value, Raw):
        return value
    text = "".join(
        sign if sign == "\n" or unicodedata.category(sign) not in ("Cc", "Cf", "Cs") else "\N{REPLACEMENT CHARACTER}"
        for sign in redact(str(value))
    )
    return Raw(html.escape(text, quote=True))


def el(tag: str, *children: object, **attributes: object) -> Raw:
    """An element; `cls` is the class, underscores in names of attributes become dashes, None leaves one out."""
    names = {"cls": "class", "view_box": "viewBox"}
    text = "".join(
        f' {names.get(name, name.replace("_", "-"))}="{esc(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Raw(f"<{tag}{text}>{''.join(esc(child) for child in children)}</{tag}>")


def join(parts: Iterable[object]) -> Raw:
    """Parts one after another."""
    return Raw("".join(esc(part) for part in parts))


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], numeric: Iterable[int] = ()) -> Raw:
    """A table with its caption; the first cell of a row is its header, columns in `numeric` are aligned right.

    It scrolls inside its own box on a narrow screen, which can be reached by keyboard.
    """
    right = set(numeric)
    align = ["num" if index in right else None for index in range(len(heads))]
    head = join(el("th", name, scope="col", cls=cls) for name, cls in zip(heads, align, strict=True))
    body = join(
        el(
            "tr",
            *(
                el("td", cell, cls=cls) if index else el("th", cell, scope="row", cls=cls)
                for index, (cell, cls) in enumerate(zip(row, align, strict=True))
            ),
        )
        for row in rows
    )
    content = el("table", el("caption", caption), el("thead", el("tr", head)), el("tbody", body))
    return el("div", content, cls="scroll", tabindex="0", role="region", aria_label=caption)


def when(at: float | None) -> Raw:
    """A moment, in UTC and machine-readable too."""
    if at is None:
        return Raw("–")
    try:
        moment = datetime.fromtimestamp(at, UTC)
    except (OverflowError, ValueError, OSError):
        return Raw("unknown")
    return el("time", f"{moment:%Y-%m-%d %H:%M:%S} UTC", datetime=f"{moment:%Y-%m-%dT%H:%M:%SZ}")


def badge(text: str, kind: str = "plain") -> Raw:
    """A short state: its word says it, the colour (`good`, `bad`, `warn`, `plain`) only helps."""
    sign = {"good": "✓ ", "bad": "✕ ", "warn": "! "}.get(kind, "")
    return el("span", Raw(sign), text, cls=f"badge {kind}")
