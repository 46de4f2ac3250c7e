"""Write the tables and pages of this folder anew, from its records: ``python results/make_tables.py``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from vardass.files import atomic_write
from vardass.lab.averages import ALGORITHMS, Label, collect, current_records
from vardass.lab.page import make_page
from vardass.lab.tables import make_tables
from vardass.table import markdown, render

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from claims import HELD, NOT, OPEN, SWEEPS, UNIFORM, Results, Verdict, estimate, figure_claims, gains  # noqa: E402

README = HERE / "README.md"
FULL = "full"  # records of samplers.yaml by the paper's protocol, of the data sets that are complete so far


def table_files() -> list[Path]:
    """Tables of the sweeps, each named after what ``vardass tables --table`` calls it."""
    return sorted(HERE.glob("*/table-*.md"))


def pages() -> list[Path]:
    """Pages of the sweeps."""
    return sorted(HERE.glob("*/report.html"))


def gains_files() -> list[Path]:
    """Gains of samplers, with all tasks and repeats as pairs."""
    return sorted(HERE.glob("*/gains.md"))


@cache
def results_of(folder: str) -> Results:
    """Chosen runs by data set; none if there are no records yet."""
    place = HERE / folder
    return collect(current_records(place)[0]) if any(place.glob("*records.jsonl.gz")) else {}


def table_text(file: Path) -> str:
    """What a file of tables should say, by the records beside it."""
    return render(make_tables(results_of(file.parent.name), file.stem.removeprefix("table-")), "markdown")


def gains_text(folder: Path) -> str:
    """Gain of each sampler over uniform batches in paired runs, with its standard error over tasks and repeats."""
    data = list(results_of(folder.name).values())
    runs = sum(len(each.finished) for each in data)
    lines = [
        "Gain over uniform batches with replacement, points of target accuracy. ± is the standard error over tasks",
        f"and repeats, paired; {runs:,} runs.",
    ]
    for algorithm in ("erm", "coral", "mmd"):
        labels = list(dict.fromkeys(label for each in data for label in each.labels if label.algorithm == algorithm))
        reference = Label(algorithm, UNIFORM)
        levels = [100 * np.nanmean(each.values(reference)) for each in data]
        rows = [["uniform, in %", *(f"{level:.1f}" for level in levels), f"{np.mean(levels):.1f}"]]
        for label in sorted(labels):
            if label != reference:
                found = [100 * (each.values(label) - each.values(reference)).ravel() for each in data]
                errors = [gain.std(ddof=1) / np.sqrt(len(gain)) for gain in found]
                shown = [f"{gain.mean():+.1f} ± {error:.1f}" for gain, error in zip(found, errors, strict=True)]
                mean = np.mean([gain.mean() for gain in found])
                error = np.sqrt(np.sum(np.square(errors))) / len(data)
                rows.append([label.sampler_name, *shown, f"{mean:+.1f} ± {error:.1f}"])
        header = [ALGORITHMS[algorithm], *(each.name for each in data), "mean"]
        lines += ["", markdown(header, rows, quoted=True)]
    return "\n".join(lines) + "\n"


# --- what stands between marks in README.md ---


def section3() -> list[tuple[Verdict, int]]:
    """Claims of section 3 from the records that have all data sets, each with the number of repeats."""
    rows = []
    for folder, judge in SWEEPS.items():
        results = results_of(folder)
        repeats = min(len(data.repeats) for data in results.values())
        rows += [(verdict, repeats) for verdict in judge(results)]
    return rows


def summary_block() -> str:
    """How many claims came to what."""
    figures, training = figure_claims(HERE / "figures"), [verdict for verdict, _ in section3()]
    lines = []
    for section, verdicts in (("2, and of figure 5", figures), ("3", training)):
        counts = Counter(verdict.verdict for verdict in verdicts)
        shown = ", ".join(f"{counts[name]} {name}" for name in (HELD, NOT, OPEN))
        lines.append(f"- Of {len(verdicts)} claims of section {section}: {shown}.")
    lines[-1] += " Held: " + "; ".join(verdict.claim for verdict in training if verdict.verdict == HELD) + "."
    return "\n".join(lines)


def records_block() -> str:
    """What the records of each folder are."""
    rows = []
    for folder in [*SWEEPS, "finetuning", FULL]:
        records = [record for data in results_of(folder).values() for record in data.runs["record"]]
        if records:
            configs = [record.spec.config for record in records]
            commits = Counter(str(record.environment.get("commit"))[:7] for record in records)
            rows.append(
                [
                    folder,
                    f"{len(records):,}",
                    ", ".join(f"{name} {len(data.tasks)}" for name, data in results_of(folder).items()),
                    str(max(record.spec.repeat for record in records) + 1),
                    str(max(record.spec.search for record in records) + 1),
                    "/".join(sorted({str(config["feature_source"]) for config in configs})),
                    "/".join(map(str, sorted({config["batch_size"] for config in configs}))),
                    "/".join(map(str, sorted({config["steps"] for config in configs}))),
                    ", ".join(f"{commit} ({count:,})" for commit, count in commits.most_common()),
                ]
            )
    header = ["folder", "runs", "tasks", "repeats", "draws", "features", "batch", "steps", "commits (runs)"]
    return markdown(header, rows, quoted=True)


def _over_uniform(folder: str) -> str:
    """VaRDASS over uniform batches on each data set, tasks being the unit."""
    results = results_of(folder)
    rows = []
    for algorithm in ("erm", "coral", "mmd"):
        one, other = Label(algorithm, "vardass"), Label(algorithm, UNIFORM)
        cells = [str(estimate(gains({name: data}, one, other))) for name, data in results.items()]
        rows.append([ALGORITHMS[algorithm], *cells, str(estimate(gains(results, one, other)))])
    return markdown(["VaRDASS over uniform", *results, "mean"], rows, quoted=True)


def full_block() -> str:
    """The same from the stage that is under way, as far as data sets are complete."""
    results = results_of(FULL)
    if not results:
        return "No data set is complete yet."
    one = next(iter(results.values()))
    done = f"Complete with {len(one.repeats)} repeats of {len(one.searches)} draw, all samplers: {', '.join(results)}"
    return f"{done} ([gains]({FULL}/gains.md), [Table 1]({FULL}/table-1.md)).\n\n{_over_uniform(FULL)}"


def _claims3() -> str:
    found = [[one.claim, one.number, str(repeats), f"**{one.verdict}**"] for one, repeats in section3()]
    return markdown(["claim", "here", "repeats", ""], found, right=False, quoted=True)


def _claims2() -> str:
    figures: dict[str, list[Verdict]] = {}
    for one in figure_claims(HERE / "figures"):
        figures.setdefault(one.claim.partition(": ")[0], []).append(one)
    rows = []
    for figure, verdicts in figures.items():
        counts = Counter(one.verdict for one in verdicts)
        missed = (one.claim.partition(": ")[2].partition(", taken as")[0] for one in verdicts if one.verdict == NOT)
        rows.append([figure, *(str(counts[name]) for name in (HELD, NOT, OPEN)), "; ".join(missed)])
    return markdown(["", HELD, NOT, OPEN, "what did not"], rows, right=False, quoted=True)


BLOCKS: dict[str, Callable[[], str]] = {
    "summary": summary_block,
    "records": records_block,
    "gains": lambda: _over_uniform("samplers"),
    "section 2": _claims2,
    "section 3": _claims3,
    "full": full_block,
}


def page_text(text: str) -> str:
    """README.md with all that stands between marks written anew."""
    for name, make in BLOCKS.items():
        begin, end = f"<!-- {name}, by make_tables.py -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = "\n".join([before + begin, make().strip(), end + rest.partition(end)[2]])
    return text


def main() -> None:
    """Write all files."""
    for file in table_files():
        with atomic_write(file) as opened:
            opened.write(table_text(file).encode())
    for file in gains_files():
        with atomic_write(file) as opened:
            opened.write(gains_text(file.parent).encode())
    for page in pages():
        with atomic_write(page) as opened:
            opened.write(make_page(page.parent).encode())
    with atomic_write(README) as opened:
        opened.write(page_text(README.read_text(encoding="utf-8")).encode())


if __name__ == "__main__":
    main()
