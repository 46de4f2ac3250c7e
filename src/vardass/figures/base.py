"""What all figures share: their result, how it is written, and how it looks."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vardass.errors import InputError
from vardass.files import atomic_write
from vardass.plots import require_matplotlib, save_figure
from vardass.validate import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "COLOURS",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "PURPLE",
    "VERMILION",
    "Claim",
    "FigureResult",
    "Progress",
    "dress",
    "log_axes",
    "render",
    "write_figure",
]

Cell: TypeAlias = str | int | float

GREY, INK = "#555555", "#222222"
# Okabe and Ito: they stay apart for the colour-blind
BLUE, ORANGE, GREEN, PURPLE, VERMILION = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION)


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, and what came of it.

    Attributes
    ----------
    paper : str
        What the paper says, as one clause without a full stop.
    held : bool
        Whether the numbers of the figure bear it out: computed from them.
    evidence : str
        These numbers, as one clause without a full stop.
    """

    paper: str
    held: bool
    evidence: str

    def __str__(self) -> str:
        return f"{'Held' if self.held else 'Did not hold'}: {self.paper}. Measured: {self.evidence}."


@dataclass(frozen=True)
class FigureResult:
    """A figure: its numbers, what they show in words, and how to draw them.

    Attributes
    ----------
    number : int
        Of the figure in the paper.
    title : str
        What it shows.
    columns : tuple of str
        Names of the columns of ``rows``.
    rows : list of tuples
        All numbers that are drawn, in a form that a spreadsheet or a test can take up.
    sentences : tuple of str
        What the figure shows, with the numbers, and what was chosen where the paper is silent.
    draw : callable
        Draws on an empty matplotlib figure.
    claims : tuple of Claim
        The paper's statements and whether they held; written below the sentences.
    size : (float, float)
        Width and height in inches.
    settings : dict
        What the numbers depend on: seed, quick, sizes of the problems.
    """

    number: int
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    sentences: tuple[str, ...]
    draw: Callable[[Figure], None]
    claims: tuple[Claim, ...] = ()
    size: tuple[float, float] = (10.0, 5.6)
    settings: dict[str, Any] = field(default_factory=dict)

    def select(self, **values: Cell) -> list[dict[str, Cell]]:
        """Rows whose columns have the given ``values``, each by name."""
        if unknown := sorted(set(values) - set(self.columns)):
            raise InputError(f"figure {self.number} has no column {unknown[0]!r}; it has {', '.join(self.columns)}")
        named = (dict(zip(self.columns, row, strict=True)) for row in self.rows)
        return [row for row in named if all(row[name] == value for name, value in values.items())]

    def text(self) -> str:
        """Sentences, then claims, one to a line."""
        return "\n".join([*self.sentences, *map(str, self.claims)])

    def to_csv(self) -> str:
        """The numbers, with nine digits; the same seed gives the same bytes."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([f"{cell:.9g}" if isinstance(cell, float) else cell for cell in row] for row in self.rows)
        return text.getvalue()

    def to_markdown(self) -> str:
        """The title, the sentences and the claims as a page of text."""
        lines = [f"# Figure {self.number}: {self.title}", "", *_items(self.sentences)]
        if self.claims:
            lines += ["", "What the paper says of it:", "", *_items([str(claim) for claim in self.claims])]
        return "\n".join([*lines, "", f"![Figure {self.number}](figure{self.number}.png)", ""])


def _items(sentences: Sequence[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


def render(result: FigureResult) -> Figure:
    """Draw ``result`` on a new figure, without a window system and without global state."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=result.size)
    FigureCanvasAgg(figure)
    result.draw(figure)
    return figure


def write_figure(result: FigureResult, out: str | Path, *, provenance: Mapping[str, Any] | None = None) -> list[Path]:
    """Write ``figureN.png``, ``.svg``, ``.csv``, ``.md`` and ``.json`` into ``out``, each whole or not at all.

    Parameters
    ----------
    result : FigureResult
        What to write.
    out : path
        Folder, made if it is missing.
    provenance : mapping, optional
        Further entries of the JSON file, such as the command; it holds settings, versions and claims too.

    Returns
    -------
    list of Path
        The five files, in the order above.
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
        paths = save_figure(render(result), stem)
    texts = {
        "csv": result.to_csv(),
        "md": result.to_markdown(),
        "json": json.dumps(_record(result, provenance or {}), indent=2, ensure_ascii=False) + "\n",
    }
    for ending, text in texts.items():
        path = stem.with_suffix(f".{ending}")
        with atomic_write(path) as file:
            file.write(text.encode())
        paths.append(path)
    return paths


def _record(result: FigureResult, provenance: Mapping[str, Any]) -> dict[str, Any]:
    packages = ("vardass", "torch", "numpy", "matplotlib")
    return {
        "figure": result.number,
        "title": result.title,
        "settings": result.settings,
        "claims": [{"paper": c.paper, "held": c.held, "evidence": c.evidence} for c in result.claims],
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        **provenance,
    }


def dress(axes: Axes, *, grid: str = "both") -> None:
    """Light grid behind the data and no box around it."""
    axes.grid(True, axis=grid, color="#E6E6E6", linewidth=0.7)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def log_axes(axes: Axes, *, x: bool = True, y: bool = True) -> None:
    """Logarithmic scales with few plain labels that do not run into each other; call it after the data are drawn."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for wanted, axis, set_scale, limits in (
        (x, axes.xaxis, axes.set_xscale, axes.get_xlim),
        (y, axes.yaxis, axes.set_yscale, axes.get_ylim),
    ):
        if not wanted:
            continue
        set_scale("log")
        low, high = limits()
        decades = math.log10(high / low)
        axis.set_minor_formatter(NullFormatter())
        if decades < 1.7:  # two labels at least
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades > 0.7 else (1.0, 2.0, 3.0, 5.0, 7.0)))
        elif decades > 4.0:
            axis.set_major_locator(LogLocator(numticks=5))
        if low > 1e-4 and high < 1e5:
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
