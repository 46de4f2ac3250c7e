"""Small pieces of HTML; text is escaped here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

__all__ = [
    "as_json",
    "cell",
    "download",
    "estimate_cell",
    "head",
    "number_cell",
    "number_text",
    "scroller",
    "select",
    "table",
    "unique",
]


def as_json(value: Any) -> str:
    """JSON that cannot end the script element that it is in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def unique(values: Iterable[str]) -> list[str]:
    """Values without repetition, in order."""
    return list(dict.fromkeys(values))


def select(name: str, label: str, values: Sequence[str]) -> str:
    """A labelled list to filter by."""
    options = "".join(f'<option value="{escape(value)}">{escape(value)}</option>' for value in values)
    # the empty value stands for all, also where a name is empty
    return f'<label>{label}<select id="{name}"><option value="" data-all="yes">all</option>{options}</select></label>'


def download(what: str, file: str) -> str:
    """A button that the script gives its data."""
    return f'<button type="button" class="download" data-download="{what}" data-file="{file}">Download CSV</button>'


def scroller(table: str, label: str) -> str:
    """A box in which a wide table scrolls, so that the page does not."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'


def head(names: Sequence[str], *, numbers_from: int | None = None) -> str:
    """A header row; columns from ``numbers_from`` on hold numbers."""
    first = len(names) if numbers_from is None else numbers_from
    kinds = ("text", "number")
    cells = "".join(
        f'<th scope="col" class="{kinds[place >= first]}">{escape(name)}</th>' for place, name in enumerate(names)
    )
    return f"<thead><tr>{cells}</tr></thead>"


def table(caption: str, names: str, rows: str, *, name: str = "") -> str:
    """A table with its caption, from a header and rows that are HTML already."""
    place = f' id="{name}"' if name else ""
    return f"<table{place}><caption><span>{escape(caption)}</span></caption>{names}<tbody>{rows}</tbody></table>"


def cell(text: str, kind: str = "") -> str:
    """A cell with text."""
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def number_cell(value: float | None, shown: str) -> str:
    """A cell with a number, exact for sorting and as shown, which is HTML already."""
    exact = "" if value is None else repr(float(value))
    return f'<td class="number" data-value="{exact}">{shown}</td>'


def estimate_cell(value: tuple[float | None, float | None], *, signed: bool = False, kind: str = "") -> str:
    """A share as percentage with its error."""
    mean, error = value
    if mean is None:
        return number_cell(None, "–")
    shown = f"{100 * mean:+.1f}" if signed else f"{100 * mean:.1f}"
    shown = "0.0" if float(shown) == 0 else shown.replace("-", "−")
    if error is not None:
        shown += f' <span class="error">± {100 * error:.1f}</span>'
    exact = "" if error is None else repr(100 * error)
    return f'<td class="number {kind}" data-value="{100 * mean!r}" data-error="{exact}">{shown}</td>'


def number_text(value: float | None, form: str) -> str:
    """A number as text."""
    return "–" if value is None else form.format(value)
