"""How ``vardass stratify`` shows its result: as text for people and as a record for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vardass.cli.job import Outcome

__all__ = ["as_record", "print_report"]

_BAR = 28  # characters


def as_record(outcome: Outcome) -> dict[str, Any]:
    """One flat record of plain numbers and text; what is not a finite number is None."""
    strata, bound = outcome.strata, outcome.strata.bound
    record = {
        "file": str(outcome.source),
        "n": strata.n,
        "d": outcome.d,
        "k": strata.k,
        "kernel": strata.kernel,
        "solver": strata.solver,
        "variance": strata.variance,
        "variance_stderr": strata.variance_stderr,
        "uniform_variance": strata.uniform_variance,
        "relative_variance": _relative(outcome, strata.variance),
        "without_replacement": _without_replacement(outcome),
        "reduction": strata.reduction,
        "bound": None if bound is None else bound.variance,
        "bound_stderr": None if bound is None else bound.stderr,
        "bound_method": None if bound is None else bound.method,
        "gap": strata.gap,
        "min_size": int(strata.sizes.min()),
        "median_size": float(strata.sizes.double().quantile(0.5)),
        "max_size": int(strata.sizes.max()),
        "singletons": strata.singletons,
        "size_histogram": strata.size_histogram(),
        "seconds": outcome.seconds,
        "info": {name: value for name, value in strata.info.items() if not name.startswith("seconds_")},
        "out": str(outcome.out),
        "labels_csv": None if outcome.labels_csv is None else str(outcome.labels_csv),
    }
    plain = _finite(record)
    assert isinstance(plain, dict)
    return plain


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _relative(outcome: Outcome, variance: float) -> float:
    uniform = outcome.strata.uniform_variance
    return variance / uniform if uniform > 0 else 0.0


def _without_replacement(outcome: Outcome) -> float:
    n, k = outcome.strata.n, outcome.strata.k
    return (n - k) / (n - 1) if n > 1 else 0.0


def print_report(outcome: Outcome, *, console: Console | None = None) -> None:
    """Print variances, bound, sizes, seconds and where the strata are; 80 columns unless a path is long."""
    console = console or Console(highlight=False)
    strata = outcome.strata

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    line(f"{outcome.source.name}: {strata.n:,} samples, {outcome.d:,} features, {strata.k:,} strata", "bold")
    line(f"solver {strata.solver}, kernel {strata.kernel}")
    console.print()
    line("variance of the minibatch mean embedding", "bold")
    console.print(_variances(outcome, console))
    for sentence in _verdict(outcome):
        line(sentence)
    console.print()
    sizes = strata.sizes
    middle = f"{float(sizes.double().quantile(0.5)):g}"
    line(f"samples in a stratum: {int(sizes.min())} to {int(sizes.max())}, median {middle}", "bold")
    console.print(_histogram(outcome, console))
    if strata.singletons:
        line(f"{strata.singletons} strata of one sample, which is in every batch; --min-size 2 avoids them")
    console.print()
    line("seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in outcome.seconds.items()))
    written = [outcome.out] if outcome.labels_csv is None else [outcome.out, outcome.labels_csv]
    line(f"written: {', '.join(map(str, written))}")


def _variances(outcome: Outcome, console: Console) -> Table:
    strata, bound = outcome.strata, outcome.strata.bound
    rows = [
        ("uniform draws", strata.uniform_variance, 0.0, "dim"),
        ("uniform, no repeats", strata.uniform_variance * _without_replacement(outcome), 0.0, "dim"),
        ("one from each stratum", strata.variance, strata.variance_stderr, "bold green"),
    ]
    if bound is not None:
        rows.append(("lower bound", bound.variance, bound.stderr, ""))
    table = _plain_table("left", "right", "right", "left")
    plus_minus = "+-" if console.options.ascii_only else "±"
    for name, variance, error, style in rows:
        share = _relative(outcome, variance)
        spread = f" {plus_minus} {error:.1g}" if error > 0 else ""
        percent = f"{100 * share:.1f} %"
        table.add_row(name, f"{variance:.4g}{spread}", percent, _bar(share, console), style=style)
    return table


def _verdict(outcome: Outcome) -> list[str]:
    strata = outcome.strata
    lines = [f"{strata.reduction:.3g} times less variance than uniform draws"]
    if strata.gap is not None and strata.bound is not None:
        lines[0] += f"; at most {100 * max(strata.gap, 0.0):.2g} % above the best possible partition"
        sampled = ", estimated from sampled rows" if strata.bound.stderr > 0 else ""
        lines.append(f"lower bound: {strata.bound.method}{sampled}")
    if "captured" in strata.info:
        captured, rank = 100 * float(strata.info["captured"]), strata.info.get("rank", "?")
        lines.append(f"rank {rank} captures {captured:.3g} % of the variance, {100 - captured:.3g} % is irreducible")
    if strata.variance > 0.8 * strata.uniform_variance and "scale=1.0" in strata.kernel:
        lines.append("the kernel is close to the identity on these features, where no strata help; try --scale median")
    return lines


def _histogram(outcome: Outcome, console: Console) -> Table:
    table = _plain_table("right", "right", "left")
    histogram = outcome.strata.size_histogram()
    for label, count in histogram.items():
        table.add_row(label, f"{count} strata", _bar(count / max(histogram.values()), console))
    return table


def _plain_table(*justify: Literal["left", "right"]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for side in justify:
        table.add_column(justify=side, no_wrap=True)
    return table


def _bar(share: float, console: Console) -> Text:
    mark = "#" if console.options.ascii_only else "█"
    return Text(mark * min(_BAR, max(int(share > 0), round(_BAR * share))))
