"""Records of runs that never happened, for tests of the report page."""

import math

from vardass.adapt.config import RunConfig
from vardass.lab.record import Record, RunSpec

EVIL = '</script><img src=x onerror="window.hacked=1"><!--<script>\'&amp;'
GAINS = {"uniform": 0.0, "vardass": 0.02, "ordered": 0.04}


def record(data="watch", task="a->b", algorithm="mmd", sampler="uniform", *, repeat=0, search=0, points=5, **given):
    """A run whose numbers follow from its names."""
    config = RunConfig(steps=10 * points, lr=1e-3 / (1 + search)).to_dict() | {"sampler": sampler}
    cell = {"algorithm": algorithm, "sampler": sampler, **given.pop("grid", {})}
    spec = RunSpec(dataset="watch", task=task, data_name=data, config=config, cell=cell, repeat=repeat, search=search)
    if given.get("status") == "failed":
        return Record(spec, **given)
    accuracy = 0.6 + GAINS.get(sampler, 0.0) + 0.01 * repeat + (0.05 if algorithm == "coral" else 0.0)
    curve = []
    for number in range(1, points + 1):
        share = math.exp(-3 * number / points)
        line = {"step": 10 * number, "loss/total": 0.1 + share, "source_accuracy": 0.9 - share / 2}
        line |= {"score": 0.9 - share / 2, "mmd": 0.01 + share / 9}
        if sampler != "uniform":
            line |= {"source/variance": 0.05 * (1 + share), "source/uniform_variance": 0.1 * (1 + share)}
        curve.append(line)
    result = {
        "target_accuracy": accuracy - 0.1 * search,
        "source_accuracy": curve[-1]["source_accuracy"],
        "score": 0.9 - 0.1 * search,
        "mmd2": 0.02,
        "coral": 0.003,
    }
    seconds = {"training": 2.0, "solver": 0.0 if sampler == "uniform" else 1.0, "evaluation": 0.5}
    return Record(
        spec,
        status="finished",
        result=result,
        curve=curve,
        seconds=seconds,
        wall=3.0 + len(sampler),
        environment={"python": "3.11", "machine": "one"},
        version="0.1.0",
    )


def sweep(*, repeats=2, searches=2, points=5):
    """Two data sets, two algorithms, three samplers, and one run that failed."""
    records = [
        record(data, task, algorithm, sampler, repeat=repeat, search=search, points=points)
        for repeat in range(repeats)
        for data, tasks in (("watch", ("a->b",)), ("photos", ("c->d", "d->c")))
        for task in tasks
        for algorithm in ("mmd", "coral")
        for sampler in GAINS
        for search in range(searches)
    ]
    failed = record("watch", algorithm="coral", sampler="ordered", repeat=repeats - 1, search=searches - 1)
    records = [one for one in records if one.run_id != failed.run_id]
    return [*records, Record(failed.spec, "failed", error="loss is not finite at step 30", attempts=3)]


def write(folder, records):
    """A sweep's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(one.to_json() + "\n" for one in records)
    (folder / "records.jsonl").write_text(text, encoding="utf-8")
    return folder
