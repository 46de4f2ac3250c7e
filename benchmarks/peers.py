"""What a user would pick instead of `vardass adapt`: accuracy on the target and CPU seconds, on the same splits.

    python results/make_data.py ../shared/data ../evidence          # and results/make_other_data.py, see there
    python benchmarks/peers.py --seeds 0 --dry-run                   # the hours that are missing
    nice -n 19 python benchmarks/peers.py --seeds 0 1 2 3 4          # resumes; seed by seed
    python benchmarks/peers.py --methods adapt-mmd adapt-coral
    python benchmarks/peers.py --page                                # only the page, from the records

One line of results/peers.jsonl.gz is one method of peer_methods.py on one pair of domains. Methods see source rows,
source labels and target rows; target labels are read when the predictions are there, for the score.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import yaml
from common import HERE, RESULTS, markdown
from peer_methods import METHODS, MOST, NUMBERS, OURS, PEERS, Array, Problem, rows_of
from sklearn.metrics import r2_score
from threadpoolctl import threadpool_limits

from vardass.backend import one_thread
from vardass.data import Domain, Task, TaskSplits, load_task, split_task
from vardass.data.embedding_tasks import standardise_task
from vardass.files import atomic_write
from vardass.lab.record import versions

RECORDS = RESULTS / "peers.jsonl.gz"
STAGES = {
    "first": "adaptation_first_pairs.yaml",
    "others": "adaptation_other_pairs.yaml",
    "data": "adaptation_other_data.yaml",
    "partial": "adaptation_first_pairs.yaml",  # the target has only the first classes
    "regression": "adaptation_other_data.yaml",  # one column is predicted from the others
}
PRESENT = {"fsdd": 3, "office-home": 15, "pacs": 3, "watch": 3}  # classes of partial targets
SPOKEN = ("lucas->theo", "yweweler->jackson")  # the pairs of fsdd with partial targets
WIDE = ("fsdd", "office-home", "pacs")  # 512 and 1,280 columns, too slow for gradient boosting, which is for tables
PREDICTED = {"covtype": (7, "shade at noon"), "elec": (2, "demand"), "weather": (1, "dew point")}  # columns


# --- pairs of domains -------------------------------------------------------------------------------


class Case(NamedTuple):
    """A pair of domains: stage, data set and name of the task."""

    stage: str
    data: str
    task: str


def cases(stages: list[str]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """All pairs of the stages, each with its entry in the YAML file."""
    for stage in stages:
        for entry in yaml.safe_load((HERE / STAGES[stage]).read_text())["data"]:
            name = entry.get("name", entry["dataset"])
            tasks = SPOKEN if (stage, name) == ("partial", "fsdd") else entry["tasks"]
            if name in {"partial": PRESENT, "regression": PREDICTED}.get(stage, [name]):
                yield from ((Case(stage, name, task), entry) for task in tasks)


def load(case: Case, entry: dict[str, Any], folder: Path) -> Task:
    """The task of a case; ``folder`` stands for the one that the paths of the YAML files begin in."""
    root, options = entry.get("root"), entry.get("options", {})
    if root is not None:
        root = folder / Path(root).relative_to("../..")
    if case.stage == "regression":
        task = load_task(entry["dataset"], case.task, root, standardise=False, **options)
        return standardise_task(_of_column(task, *PREDICTED[case.data]))
    task = load_task(entry["dataset"], case.task, root, **options)
    if case.stage != "partial":
        return task
    labels = task.target.known_labels()
    return Task(task.name, task.sources, task.target.subset((labels < PRESENT[case.data]).nonzero().flatten()))


def _of_column(task: Task, column: int, name: str) -> Task:
    """The same rows with one column as numbers to predict from all others."""
    domains = []
    for domain in (*task.sources, task.target):
        rows = torch.from_numpy(rows_of(domain))
        inputs = torch.cat([rows[:, :column], rows[:, column + 1 :]], 1)
        domains.append(Domain(domain.name, inputs, rows[:, column].double(), [name], regression=True))
    return Task(task.name, tuple(domains[:-1]), domains[-1])


# --- records ----------------------------------------------------------------------------------------

Record = dict[str, Any]
KEY = ("stage", "data", "task", "seed", "method")


def read(path: Path) -> list[Record]:
    """All records, the last of those with one key."""
    if not path.exists():
        return []
    with gzip.open(path, "rt") as file:
        records = [json.loads(line) for line in file]
    return list({tuple(record[name] for name in KEY): record for record in records}.values())


def write(path: Path, records: list[Record]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    with atomic_write(path) as file:
        file.write(gzip.compress(lines.encode(), mtime=0))


def score(predicted: Array, splits: TaskSplits) -> float:
    """Accuracy, or R², in %, on the target rows that were not trained on."""
    target = splits.target_test
    truth = target.subset(torch.arange(len(target))).reveal().known_labels().numpy()  # the splits' stay hidden
    value = r2_score(truth[:, 0], predicted) if target.regression else np.mean(predicted == truth)
    return 100.0 * float(value)


def run_case(case: Case, task: Task, seed: int, methods: list[str]) -> Iterator[Record]:
    """One record for each method, on one split of the task."""
    splits = split_task(task, seed=seed)
    problem = Problem.of(splits, seed)
    for name in methods:
        start, problem.clock[0] = time.process_time(), 0.0
        predicted = METHODS[name][1](problem)
        seconds = time.process_time() - start + problem.clock[0]
        sizes = {"rows": [len(problem.x), len(problem.t), len(problem.v)], "columns": problem.x.shape[1]}
        yield {
            **case._asdict(),
            "seed": seed,
            "method": name,
            "score": round(score(predicted, splits), 3),
            "seconds": round(seconds, 2),
            **sizes,
            "commit": str(versions()["commit"])[:10],
        }


class Work(NamedTuple):
    """Methods to run on one split of a pair; ``entry`` is that of the YAML file."""

    case: Case
    entry: dict[str, Any]
    seed: int
    methods: list[str]


def missing(records: list[Record], stages: list[str], seeds: list[int], methods: list[str]) -> Iterator[Work]:
    """What has no record, seed by seed."""
    done = {tuple(record[name] for name in KEY) for record in records}
    for seed in seeds:
        for case, entry in cases(stages):
            todo = [name for name in methods if (*case, seed, name) not in done and can(name, case)]
            if todo:
                yield Work(case, entry, seed, todo)


def can(method: str, case: Case) -> bool:
    if method == "boosting" and case.data in WIDE:
        return False
    return case.stage != "regression" or method in NUMBERS


def tell_hours(records: list[Record], work: list[Work]) -> None:
    """CPU hours of what is missing, by what each method took on the same data before."""
    frame = pd.DataFrame(records, columns=[*KEY, "seconds"])
    known = frame.groupby(["data", "method"]).seconds.mean().to_dict()
    wanted = [(case.data, name) for case, _, _, methods in work for name in methods]
    hours = sum(known.get(each, 0.0) for each in wanted) / 3600
    unknown = len([each for each in wanted if each not in known])
    print(f"{len(wanted):,} runs are missing, {hours:.2f} CPU hours, and {unknown:,} of them of unknown length")


# --- the page ---------------------------------------------------------------------------------------

ABOUT = """Made by `python benchmarks/peers.py` from {runs:,} records (commits {commits}; scikit-learn {sklearn}, skada
{skada}, POT {pot}). Accuracy in % on target samples that were not trained on. All methods have the same splits
(`vardass.data.split_task`): 80 % of the source rows to learn from, 40 % of the target's without labels, 40 % to test
on. No method sees a target label. ± is the standard error over pairs of domains times seeds. The best peer of each
column is bold; a mean is given where a method has every column.

- Columns are scaled by mean and deviation of the source, robustly, as `vardass` does. *Each domain standardised* scales
  source and target once more, each by its own; prototypes (the labelling step of SHOT) and selective pseudo-labels
  (Wang and Breckon 2020) begin there.
- The strength of logistic regression, 0.001 to 1, is chosen by three-fold cross-validation on the source. Methods that
  end in a logistic regression have the same strength. Self-training takes probabilities from 0.75 on.
- SubspaceAlignmentAdapter has at most 64 components. LinearOTMappingAdapter adds 0.01 to variances: with fewer rows
  than columns its default is not defined. SinkhornLpl1Transport (entropy 0.1, classes 0.1, costs over their median,
  at most 3 times 20 rounds, chosen in its favour by target accuracy on three of the first pairs) sees at most {most:,}
  rows of each domain.
- Gradient boosting has scikit-learn's defaults. It is for tables and not run on fsdd, Office-Home and PACS.
- The networks are those of `vardass adapt` by the product's trainer: 800 steps, uniform batches of 32, λ = 1.
- Seconds are CPU seconds of one thread, with tuning, on a machine that was busy with other work.
- In these records names of domains seeded the splits, now their roles do; `--again` measures anew."""

PARTIAL = """The target has only the first {present} classes; source and methods as above."""
NUMBERS_ARE = """R² in %: {what}. Ridge regression, its strength by generalised cross-validation, takes the place of
logistic regression."""


def _cell(values: pd.Series[float], best: bool, errors: bool) -> str:
    if not len(values):
        return ""
    text = f"{values.mean():.1f}"
    text = f"**{text}**" if best else text
    return f"{text} ± {values.sem():.1f}" if errors and len(values) > 1 else text


def table(frame: pd.DataFrame, *, errors: bool = True) -> str:
    """Mean score by method and data set; the best peer of each data set is bold."""
    sets = list(dict.fromkeys(frame.data))
    means = frame.groupby(["method", "data"]).score.mean().unstack().reindex(columns=sets)
    peers = means[means.index.isin(PEERS)]
    best = {name: peers[name].max() for name in sets}
    best["mean"] = peers.dropna().mean(axis=1).max()
    rows = []
    for method in (name for name in METHODS if name in means.index):
        row, rival = frame[frame.method == method], method in PEERS
        cells = []
        for name in sets:
            cells.append(_cell(row[row.data == name].score, rival and means[name][method] == best[name], errors))
        whole = means.loc[method].mean() if means.loc[method].notna().all() else np.nan
        mean = "" if np.isnan(whole) else f"**{whole:.1f}**" if rival and whole == best["mean"] else f"{whole:.1f}"
        rows.append([METHODS[method][0], *cells, mean])
    rows.append(
        ["best peer of each", *(f"{best[name]:.1f}" for name in sets), f"{np.mean([best[n] for n in sets]):.1f}"]
    )
    winners = [METHODS[str(peers[name].idxmax())][0] for name in sets]
    note = "Best peers: " + "; ".join(f"{name}: {winner}" for name, winner in zip(sets, winners, strict=True)) + "."
    return markdown(["", *sets, "mean"], rows) + f"\n\n{note}{lost(means, best)}"


def lost(means: pd.DataFrame, best: dict[str, float]) -> str:
    """Where `vardass adapt` is below the best peer."""
    ours = [name for name in OURS if name in means.index]
    worse = {
        name: [f"{data} {means[data][name] - best[data]:+.1f}" for data in means if means[data][name] < best[data]]
        for name in ours
    }
    return "".join(
        f" {METHODS[name][0]} is below the best peer: {', '.join(worse[name]) or 'nowhere'}." for name in ours
    )


def seconds_table(frame: pd.DataFrame) -> str:
    """Median CPU seconds by method and data set."""
    sets = list(dict.fromkeys(frame.data))
    medians = frame.groupby(["method", "data"]).seconds.median().unstack().reindex(columns=sets)
    rows = [
        [METHODS[name][0], *("" if np.isnan(value) else f"{value:.1f}" for value in medians.loc[name])]
        for name in METHODS
        if name in medians.index
    ]
    return markdown(["CPU seconds, median", *sets], rows)


def coverage(frame: pd.DataFrame) -> str:
    """Which seeds the rows of a table have."""
    seeds = frame.groupby("method").seed.unique()
    usual = sorted({int(seed) for each in seeds for seed in each})
    short = {METHODS[str(name)][0]: sorted(map(int, each)) for name, each in seeds.items() if len(each) < len(usual)}
    apart = "".join(f"; {name}: {', '.join(map(str, each))}" for name, each in short.items())
    pairs = frame.groupby("data").task.nunique()
    counts = f"{pairs.min()}" if pairs.min() == pairs.max() else f"{pairs.min()} to {pairs.max()}"
    return f"{counts} pairs of domains a data set, seeds {', '.join(map(str, usual))}{apart}."


def write_page(records: list[Record], path: Path) -> None:
    known = pd.DataFrame(records)
    about = ABOUT.format(
        runs=len(records),
        commits=", ".join(dict.fromkeys(known.commit)),
        most=MOST,
        **{
            name: version(package)
            for name, package in (("sklearn", "scikit-learn"), ("skada", "skada"), ("pot", "POT"))
        },
    )
    present = ", ".join(f"{count} ({name})" for name, count in PRESENT.items())
    what = ", ".join(f"{name} of {data}" for data, (_, name) in PREDICTED.items())
    titles = {
        "first": ("Pairs that settings of `vardass adapt` were chosen on", ""),
        "others": ("Pairs that nothing was chosen on", ""),
        "data": ("Other data sets", ""),
        "partial": ("Targets that lack classes", PARTIAL.format(present=present)),
        "regression": ("Numbers instead of classes", NUMBERS_ARE.format(what=what)),
    }
    parts = ["# What you would use instead", about]
    for stage, (title, text) in titles.items():
        frame = known[known.stage == stage]
        if len(frame):
            parts += [f"## {title}", *([text] if text else []), coverage(frame), table(frame)]
            if stage == "first" and frame.seed.nunique() > 1:
                parts += ["Seed 0 alone:", table(frame[frame.seed == 0], errors=False)]
    parts += ["## Time", seconds_table(known[known.stage.isin(["first", "others", "data"])])]
    with atomic_write(path) as file:
        file.write(("\n\n".join(parts) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--partial", action="store_true", help="the stages partial and regression only")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=PEERS)
    parser.add_argument("--folder", type=Path, default=HERE / "../..", help="has evidence/ and shared/")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--again", action="store_true", help="replace records, such as those of an older adapt")
    parser.add_argument("--dry-run", action="store_true", help="only tell the hours")
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    stages = ["partial", "regression"] if args.partial else args.stage
    records = read(args.records)
    work = [] if args.page else list(missing([] if args.again else records, stages, args.seeds, args.methods))
    if args.dry_run:
        tell_hours(records, work)
        return
    warnings.simplefilter("ignore")  # of solvers that stop at their limit
    with threadpool_limits(1), one_thread():
        for case, entry, seed, methods in work:
            for record in run_case(case, load(case, entry, args.folder), seed, methods):
                records.append(record)
                print(*(record[name] for name in (*KEY, "score", "seconds")), flush=True)
            write(args.records, records)
    records = read(args.records)
    write_page(records, args.records.with_name("peers.md"))


if __name__ == "__main__":
    main()
