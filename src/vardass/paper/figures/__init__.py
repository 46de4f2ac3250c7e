"""The paper's figures, recomputed: numbers, pictures, and whether what the paper says of them held."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vardass.backend import one_thread
from vardass.errors import InputError
from vardass.files import atomic_write
from vardass.lab.versions import versions
from vardass.plots import new_figure, require_matplotlib, save_figure
from vardass.registry import Registry
from vardass.validate import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NUMBERS", "Claim", "FigureResult", "Value", "draw_figure", "make_figure", "write_figure"]

Value: TypeAlias = str | int | float


@dataclass(frozen=True)
class Claim:
    """One statement, and what came of it."""

    statement: str
    held: bool
    evidence: str
    source: Literal["paper", "ours"] = "paper"

    def __str__(self) -> str:
        verdict = ("Held" if self.held else "Did not hold") + (", not of the paper" if self.source == "ours" else "")
        return f"{verdict}: {self.statement}. Measured: {self.evidence}."


@dataclass(frozen=True)
class FigureResult:
    """A figure: its numbers, what came of the claims about it, and how to draw it.

    Attributes
    ----------
    number : int
        Of the figure in the paper.
    title : str
        What it shows.
    caption : str
        Of what data, and what was chosen where the paper is silent.
    columns : tuple of str
        Names of the columns of ``rows``.
    rows : list of tuples
        All numbers that are drawn, in a form that a spreadsheet or a test can take up.
    claims : tuple of Claim
        Statements of the paper and of ours, and whether they held.
    draw : callable
        Draws on an empty matplotlib figure.
    size : (float, float)
        Width and height in inches.
    settings : dict
        What the numbers depend on: seed, quick, sizes of the problems.

    Examples
    --------
    >>> from vardass.paper.figures import make_figure
    >>> result = make_figure(2, quick=True)
    >>> result.number, len(result.rows[0]) == len(result.columns)
    (2, True)
    """

    number: int
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: list[tuple[Value, ...]]
    claims: tuple[Claim, ...]
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (10.0, 5.6)
    settings: dict[str, Any] = field(default_factory=dict)

    def select(self, **values: Value) -> list[dict[str, Value]]:
        """Rows whose columns have the given ``values``, each by name."""
        if unknown := sorted(set(values) - set(self.columns)):
            raise InputError(f"figure {self.number} has no column {unknown[0]!r}; it has {', '.join(self.columns)}")
        named = (dict(zip(self.columns, row, strict=True)) for row in self.rows)
        return [row for row in named if all(row[name] == value for name, value in values.items())]

    def text(self) -> str:
        """The caption, then the claims, one to a line."""
        return "\n".join([self.caption, *map(str, self.claims)])

    def to_csv(self) -> str:
        """The numbers, with nine digits; the same seed gives the same bytes, apart from seconds."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([f"{cell:.9g}" if isinstance(cell, float) else cell for cell in row] for row in self.rows)
        return text.getvalue()

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

    Examples
    --------
    >>> import tempfile
    >>> claim = Claim("it falls", held=True, evidence="from 2 to 1")
    >>> line = [("0", 2.0), ("1", 1.0)]
    >>> result = FigureResult(2, "A line", "of two points", ("x", "y"), line, (claim,), draw=lambda figure: None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in write_figure(result, folder)]
    ['figure2.png', 'figure2.svg', 'figure2.csv', 'figure2.md', 'figure2.json']
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
        paths = save_figure(draw_figure(result), stem)
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
    return {
        "figure": result.number,
        "title": result.title,
        "settings": result.settings,
        "claims": [asdict(claim) for claim in result.claims],
        "versions": {**versions(), "matplotlib": version("matplotlib")},
        **provenance,
    }


_FIGURES: Registry[Callable[..., FigureResult]] = Registry(
    "figure", {str(n): f"vardass.paper.figures.figure{n}:figure{n}" for n in range(1, 6)}
)
NUMBERS = tuple(map(int, _FIGURES))
"""Figures of the paper, in order."""


def make_figure(number: int, *, seed: int = 0, quick: bool = False, progress: Progress | None = None) -> FigureResult:
    """Compute one figure of the paper.

    Parameters
    ----------
    number : int
        1 to 5.
    seed : int
        The same seed gives the same numbers, apart from seconds.
    quick : bool
        A version scaled down to seconds, to see that it works; its numbers are rougher.
    progress : callable, optional
        Called as ``progress(fraction, message)``.
    """
    if isinstance(number, bool) or number not in NUMBERS:
        raise InputError(f"there is no figure {number!r}; choose one of {', '.join(map(str, NUMBERS))}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed must be a whole number of at least 0, got {seed!r}")

    def report(share: float, message: str) -> None:
        if progress is not None:
            progress(share, f"figure {number}, {message}")

    with one_thread():
        return _FIGURES[str(number)](seed=seed, quick=quick, progress=report)
