"""The paper's figures, recomputed: numbers, pictures, and whether what the paper says of them held."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vardass.backend import one_thread
from vardass.errors import InputError
from vardass.files import write_output
from vardass.lab.record import versions
from vardass.plots import new_figure, require_matplotlib, save_figure
from vardass.registry import Registry
from vardass.validate import Progress, check_count

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["NUMBERS", "Claim", "FigureResult", "draw_figure", "make_figure", "write_figure"]


@dataclass(frozen=True)
class Claim:
    """One statement, and what came of it."""

    statement: str
    held: bool | None  # None: it cannot be told
    evidence: str
    source: Literal["paper", "ours"] = "paper"

    def __str__(self) -> str:
        besides = ", not of the paper" if self.source == "ours" else ""
        return f"{self.verdict}{besides}: {self.statement}. Measured: {self.evidence}."

    @property
    def verdict(self) -> str:
        """Whether it held, in words."""
        return "Cannot be told" if self.held is None else "Held" if self.held else "Did not hold"


@dataclass(frozen=True, eq=False)
class FigureResult:
    """A figure: its numbers, what came of the claims about it, and how to draw it."""

    number: int  # of the figure in the paper
    title: str
    caption: str  # of what data, and what was chosen where the paper is silent
    numbers: pd.DataFrame  # all that are drawn
    claims: tuple[Claim, ...]  # statements of the paper and of ours, and whether they held
    draw: Callable[[Figure], None]  # on an empty matplotlib figure
    size: tuple[float, float] = (10.0, 5.6)  # width and height in inches
    settings: dict[str, Any] = field(default_factory=dict)  # what the numbers depend on

    def text(self) -> str:
        """The caption, then the claims, one to a line."""
        return "\n".join([self.caption, *map(str, self.claims)])

    def to_csv(self) -> str:
        """The numbers, with nine digits; the same seed gives the same bytes, apart from seconds."""
        text: str = self.numbers.to_csv(index=False, float_format="%.9g", lineterminator="\n")
        return text

    def to_markdown(self) -> str:
        """The title, the caption and the claims as a page of text."""
        lines = [f"# Figure {self.number}: {self.title}", "", self.caption]
        for source, heading in (("paper", "What the paper says of it:"), ("ours", "What we found besides:")):
            if found := [f"- {claim}" for claim in self.claims if claim.source == source]:
                lines += ["", heading, "", *found]
        return "\n".join([*lines, "", f"![Figure {self.number}](figure{self.number}.png)", ""])


def draw_figure(result: FigureResult) -> Figure:
    """Draw ``result`` on a new figure."""
    figure = new_figure(*result.size)
    result.draw(figure)
    return figure


def write_figure(result: FigureResult, out: str | Path, *, provenance: Mapping[str, Any] | None = None) -> list[Path]:
    """Write ``figureN.png``, ``.svg``, ``.csv``, ``.md`` and ``.json`` into the folder ``out``; return their paths.

    ``provenance`` are further entries of the JSON file, such as the command.
    """
    require_matplotlib()
    import matplotlib

    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from None
    stem = folder / f"figure{result.number}"
    with matplotlib.rc_context({"svg.hashsalt": "vardass"}):  # else element names differ from run to run
        paths = save_figure(draw_figure(result), stem, "figure")
    record = {
        "figure": result.number,
        "title": result.title,
        "settings": result.settings,
        "claims": [asdict(claim) for claim in result.claims],
        "versions": {**versions(), "matplotlib": version("matplotlib")},
        **(provenance or {}),
    }
    texts = {
        "csv": result.to_csv(),
        "md": result.to_markdown(),
        "json": json.dumps(record, indent=2, ensure_ascii=False) + "\n",
    }
    for ending, text in texts.items():
        paths.append(stem.with_suffix(f".{ending}"))
        write_output(paths[-1], text, "figure")
    return paths


_FIGURES: Registry[Callable[..., FigureResult]] = Registry(
    "figure", {str(n): f"vardass.paper.figures.figure{n}:figure{n}" for n in range(1, 6)}
)
NUMBERS = tuple(map(int, _FIGURES))
"""Figures of the paper, in order."""
ENDINGS = ("png", "svg", "csv", "md", "json")
"""Of the files of a figure."""


def make_figure(number: int, *, seed: int = 0, quick: bool = False, progress: Progress | None = None) -> FigureResult:
    """Compute one figure of the paper, 1 to 5.

    The same seed gives the same numbers, apart from seconds. ``quick`` takes seconds and gives rougher numbers.
    """
    if isinstance(number, bool) or number not in NUMBERS:
        raise InputError(f"there is no figure {number!r}; choose one of {', '.join(map(str, NUMBERS))}")
    check_count(seed, "seed", low=0)

    def report(share: float, message: str) -> None:
        if progress is not None:
            progress(share, f"figure {number}, {message}")

    with one_thread():
        return _FIGURES[str(number)](seed=seed, quick=quick, progress=report)
