"""The paper's claims, judged from records and from the figures' programs by the rules in README.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from vardass.lab.averages import FACTOR, LEVEL, POINTS, SAMPLERS, DataResults, Label, holm

Results = Mapping[str, DataResults]

HELD, NOT, OPEN = "held", "did not", "cannot be told"
UNIFORM, PAPERS = "uniform-replacement", ("kmeans++", "dpp", "kmeans-inputs", "kmeans-features", "vardass")


class Verdict(NamedTuple):
    """One claim of the paper, what is measured, and what follows."""

    claim: str
    number: str
    verdict: str


class Estimate(NamedTuple):
    """A mean over data sets, its standard error and degrees of freedom."""

    mean: float
    error: float
    freedom: float

    def interval(self) -> tuple[float, float]:
        reach = float(stats.t.ppf(1 - LEVEL / 2, self.freedom)) * self.error
        return self.mean - reach, self.mean + reach

    def p(self) -> float:
        """Two-sided, of no difference."""
        return 2 * float(stats.t.sf(abs(self.mean) / self.error, self.freedom))

    def equivalence_p(self, margin: float) -> float:
        """Of two one-sided tests that the mean is within the margin."""
        return float(stats.t.sf((margin - abs(self.mean)) / self.error, self.freedom))

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ± {self.error:.1f}"


def estimate(differences: Sequence[np.ndarray]) -> Estimate:
    """Mean of data sets from arrays (repeats, tasks), tasks being the unit."""
    tasks = [np.asarray(each).mean(0) for each in differences]
    means = np.array([each.mean() for each in tasks])
    parts = np.array([each.var(ddof=1) / len(each) for each in tasks]) / len(tasks) ** 2
    freedom = parts.sum() ** 2 / (parts**2 / [len(each) - 1 for each in tasks]).sum()
    return Estimate(float(means.mean()), float(np.sqrt(parts.sum())), float(freedom))


def gains(results: Results, one: Label, other: Label) -> list[np.ndarray]:
    """Points of accuracy that one label has above another, (repeats, tasks) of each data set that has both."""
    both = [data for data in results.values() if one in data.labels and other in data.labels]
    return [100 * (data.values(one) - data.values(other)) for data in both]


def log_ratios(results: Results, one: Label, other: Label, metric: str) -> list[np.ndarray]:
    """Logarithms of ratios of a discrepancy."""
    both = [data for data in results.values() if one in data.labels and other in data.labels]
    return [np.log(data.values(one, metric)) - np.log(data.values(other, metric)) for data in both]


# --- the rules ---


def judge_gain(found: Estimate) -> str:
    low, high = found.interval()
    return HELD if low > 0 else NOT if high < POINTS else OPEN


def judge_same(found: Iterable[Estimate], margin: float = POINTS) -> str:
    """Held if each is within the margin, where no correction is due; did not if one is shown that may be outside."""
    several = list(found)
    same = [each.equivalence_p(margin) < LEVEL for each in several]
    shown = [p is not None and p < LEVEL for p in holm([each.p() for each in several])]
    other = any(differs and not within for differs, within in zip(shown, same, strict=True))
    return HELD if all(same) else NOT if other else OPEN


def judge_best(cells: Sequence[Sequence[Estimate]], needed: int) -> tuple[int, int, str]:
    """In how many cells the lead on all others is shown, in how many another is shown ahead, and the verdict."""
    led = sum(all(each.interval()[0] > 0 for each in cell) for cell in cells)
    behind = 0
    for cell in cells:
        adjusted = holm([each.p() for each in cell])
        behind += any(p is not None and p < LEVEL and each.mean < 0 for p, each in zip(adjusted, cell, strict=True))
    return led, behind, HELD if led >= needed else NOT if behind > len(cells) - needed else OPEN


# --- claims of section 3 ---


def _over_uniform(results: Results, sampler: str, algorithm: str) -> Estimate:
    return estimate(gains(results, Label(algorithm, sampler), Label(algorithm, UNIFORM)))


def _leads(results: Results, algorithm: str) -> list[tuple[list[Estimate], bool]]:
    """VaRDASS against the paper's other samplers in each data set, and whether it has the highest mean."""
    cells = []
    for data in results.values():
        others = [name for name in (UNIFORM, *PAPERS) if name != "vardass" and Label(algorithm, name) in data.labels]
        one = Label(algorithm, "vardass")
        cell = [estimate(gains({data.name: data}, one, Label(algorithm, name))) for name in others]
        cells.append((cell, all(each.mean >= 0 for each in cell)))
    return cells


def sampler_claims(results: Results) -> list[Verdict]:
    """What section 3 says of samplers (Table 1, Table 3, appendix B)."""
    found = []
    for sampler, words in (
        ("vardass", "VaRDASS gains over uniform batches"),
        ("kmeans-features", "k-means on features gains"),
        ("kmeans++", "k-means++ gains"),
        ("dpp", "the DPP gains"),
    ):
        for algorithm in ("coral", "mmd"):
            one = _over_uniform(results, sampler, algorithm)
            found.append(Verdict(f"{words}, {algorithm.upper()}", f"{one} points", judge_gain(one)))
    for algorithm in ("coral", "mmd"):
        one = _over_uniform(results, "kmeans-inputs", algorithm)
        verdict = {HELD: NOT, NOT: HELD, OPEN: OPEN}[judge_gain(one)]
        found.append(Verdict(f"k-means on inputs is not effective, {algorithm.upper()}", f"{one} points", verdict))
    for algorithm in ("coral", "mmd"):
        one = estimate(gains(results, Label(algorithm, "kmeans++"), Label(algorithm, "dpp")))
        found.append(
            Verdict(f"k-means++ and DPP do not differ, {algorithm.upper()}", f"{one} points", judge_same([one]))
        )
    cells = [cell for algorithm in ("coral", "mmd") for cell in _leads(results, algorithm)]
    needed = math.ceil(0.75 * len(cells))
    led, behind, verdict = judge_best([cell for cell, _ in cells], needed)
    highest = sum(best for _, best in cells)
    number = (
        f"highest mean of the paper's six in {highest} of {len(cells)}; lead shown in {led}, another ahead in {behind}"
    )
    found.append(Verdict("VaRDASS is the best sampler in six of eight cases", number, verdict))
    return [*found, _erm(results), *_discrepancies(results), *_seconds(results)]


def _erm(results: Results) -> Verdict:
    """Each sampler on each data set, as a mean over data sets may hide one of them."""
    tried = [name for name in PAPERS if gains(results, Label("erm", name), Label("erm", UNIFORM))]
    cells = {(name, data): _over_uniform({data: own}, name, "erm") for name in tried for data, own in results.items()}
    worst = max(cells, key=lambda cell: abs(cells[cell].mean))
    means = ", ".join(f"{SAMPLERS[name]} {_over_uniform(results, name, 'erm')}" for name in tried)
    absent = [SAMPLERS[name] for name in PAPERS if name not in tried]
    number = f"in the mean {means}; most on one data set {cells[worst]} ({SAMPLERS[worst[0]]}, {worst[1]})"
    if absent:
        number += f"; {' and '.join(absent)} were not run"
    return Verdict("the sampler does not matter to ERM, on any data set", number, judge_same(cells.values()))


def _discrepancies(results: Results) -> list[Verdict]:
    found = []
    for algorithm, metric in (("coral", "coral"), ("mmd", "mmd2")):
        uniform = Label(algorithm, UNIFORM)
        ratios = {}
        for name in PAPERS:
            ratios[name] = estimate(log_ratios(results, Label(algorithm, name), uniform, metric))
        verdict = judge_same(ratios.values(), math.log(FACTOR))
        number = ", ".join(f"{SAMPLERS[name]} {math.exp(each.mean):.2f}" for name, each in ratios.items())
        claim = f"the discrepancy after training does not depend on the sampler, {algorithm.upper()}"
        found.append(Verdict(claim, f"times uniform's: {number}", verdict))
    for algorithm, metric in (("coral", "coral"), ("mmd", "mmd2")):
        logs = log_ratios(results, Label("erm", UNIFORM), Label(algorithm, UNIFORM), metric)
        cells = {data: estimate([each / math.log(10)]) for data, each in zip(results, logs, strict=True)}
        lows, highs = zip(*(each.interval() for each in cells.values()), strict=True)
        verdict = NOT if min(highs) < 2 else HELD if min(lows) >= 2 else OPEN
        number = ", ".join(f"{data} {_three_digits(10**each.mean)}" for data, each in cells.items())
        claim = f"it is two to three orders of magnitude below ERM's on all data sets, {algorithm.upper()}"
        found.append(Verdict(claim, f"fold: {number}", verdict))
    return found


def _three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g}"


def _seconds(results: Results) -> list[Verdict]:
    """Wall-clock times of runs that shared a machine with other work: no verdict."""
    found = []
    for other, claim in ((UNIFORM, "about ten times uniform's"), ("kmeans-features", "2 to 3 times k-means'")):
        ratios = []
        for data in results.values():
            walls = data.finished.assign(wall=[record.wall for record in data.finished["record"]])
            means = walls.groupby("label").wall.mean()
            ratios.append(np.mean([means[Label(a, "vardass")] / means[Label(a, other)] for a in ("coral", "mmd")]))
        number = f"{min(ratios):.1f} to {max(ratios):.1f} times, on a machine shared with other work"
        found.append(Verdict(f"a run with VaRDASS takes {claim} time (Table 3)", number, OPEN))
    return found


def method_claims(results: Results) -> list[Verdict]:
    """Table 2."""
    cells, ahead = [], 0
    for data in results.values():
        pair = [Label(algorithm, "vardass") for algorithm in ("coral", "mmd")]
        best = max(pair, key=lambda label: data.values(label).mean())
        others = [label for label in data.labels if label.sampler != "vardass"]
        cell = [estimate(gains({data.name: data}, best, label)) for label in others]
        ahead += all(each.mean > 0 for each in cell)
        cells.append(cell)
    led, behind, verdict = judge_best(cells, len(cells))
    number = f"highest mean on {ahead} of {len(cells)}; lead on all others shown on {led}, another ahead on {behind}"
    return [Verdict("CORAL or MMD with VaRDASS is the best method on all four data sets (Table 2)", number, verdict)]


def refresh_claims(results: Results) -> list[Verdict]:
    """Table 4."""
    found = []
    for algorithm in ("coral", "mmd"):
        grid = {T: Label(algorithm, "vardass", (("refresh_every", T),)) for T in (10, 50, 100, 500, 1000)}
        others = {T: estimate(gains(results, label, grid[100])) for T, label in grid.items() if T != 100}
        number = ", ".join(f"T = {T} {each}" for T, each in others.items())
        claim = f"accuracy is robust to T (Table 4), {algorithm.upper()} against T = 100"
        found.append(Verdict(claim, number, judge_same(others.values())))
    return found


# --- claims of section 2, from the figures' programs ---


def figure_claims(folder: Path) -> list[Verdict]:
    """What the paper says of its figures, as `vardass figure` judged it."""
    found = []
    for file in sorted(folder.glob("figure*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        link = f"[figure {record['figure']}](figures/{file.stem}.md)"
        for claim in record["claims"]:
            if claim["source"] == "paper":
                verdict = {True: HELD, False: NOT, None: OPEN}[claim["held"]]
                found.append(Verdict(f"{link}: {claim['statement']}", claim["evidence"], verdict))
    return found


Maker = Callable[[Results], list[Verdict]]
SWEEPS: dict[str, Maker] = {"samplers": sampler_claims, "algorithms": method_claims, "refresh": refresh_claims}
