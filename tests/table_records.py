"""Records of runs that never happened, for tests of tables, and a plain second way to their numbers."""

import itertools
import random

from vardass.lab.record import Record, RunSpec


def run(
    accuracy,
    *,
    score=0.5,
    data="watch",
    task="a->b",
    algorithm="mmd",
    sampler="uniform",
    repeat=0,
    search=0,
    status="finished",
    wall=1.0,
    seconds=None,
    dataset=None,
    config=(),
    grid=(),
    **result,
):
    result = {"target_accuracy": accuracy, "score": score, "mmd2": 0.1, "coral": 0.2, "oracle": 1 - score, **result}
    spec = RunSpec(
        dataset=dataset or data,
        task=task,
        data_name=data,
        config={"algorithm": algorithm, "sampler": sampler, **dict(config)},
        cell={"algorithm": algorithm, "sampler": sampler, **dict(grid)},
        repeat=repeat,
        search=search,
    )
    done = status == "finished"
    return Record(
        spec, status, result if done else {}, wall=wall, seconds=dict(seconds or {}), error=None if done else "x"
    )


def random_records(
    seed,
    *,
    gaps=0.2,
    failures=0.1,
    data=("watch",),
    algorithms=("erm", "coral", "mmd"),
    samplers=("uniform", "vardass"),
):
    rng = random.Random(seed)
    records = []
    for name, algorithm, sampler, task, repeat, search in itertools.product(
        data, algorithms, samplers, ("t0", "t1", "t2"), range(3), range(2)
    ):
        fate = rng.random()
        if fate > gaps:
            score = rng.choice([0.1, 0.5, 0.5, 0.9])  # with ties
            where = {"data": name, "task": task, "algorithm": algorithm, "sampler": sampler}
            number = {"repeat": repeat, "search": search, "wall": rng.random()}
            status = "failed" if fate < gaps + failures else "finished"
            found = {"mmd2": rng.random(), "coral": rng.random()}
            records.append(run(rng.random(), score=score, status=status, **where, **number, **found))
    rng.shuffle(records)
    return records


def brute_values(records, data, algorithm, sampler, key="target_accuracy"):
    """(task, repeat) to the value of the first run with the highest score, by exhaustive search."""
    found = {}
    mine = [
        r
        for r in records
        if r.status == "finished"
        and r.spec.data_name == data
        and r.spec.cell["algorithm"] == algorithm
        and r.spec.cell["sampler"] == sampler
    ]
    for task, repeat in {(r.spec.task, r.spec.repeat) for r in mine}:
        rivals = [r for r in mine if (r.spec.task, r.spec.repeat) == (task, repeat)]
        top = max(r.result["score"] for r in rivals)
        first = min(r.spec.search for r in rivals if r.result["score"] == top)
        found[task, repeat] = next(r.result[key] for r in rivals if r.spec.search == first)
    return found


def entries(table):
    return {(row.own_name, column): row.entries[j] for row in table.rows for j, column in enumerate(table.columns)}


def best_names(table):
    return {(table.rows[i].own_name, table.columns[j]) for i, j in table.best}


def write_records(folder, records):
    folder.mkdir(exist_ok=True)
    (folder / "records.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    return folder
