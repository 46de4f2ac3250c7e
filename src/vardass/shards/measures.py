"""`compare` and `coreset` for rows of many files.

Kernel and landmarks are fitted to a random sample of each set; then one pass adds up low-rank kernel features, and
products of columns for CORAL, over all rows (`row_sums`). Parts are added in their order, so any number of workers
finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vardass.analysis.comparison import Comparison, compare
from vardass.analysis.coresets import LARGEST, Coreset, coreset
from vardass.analysis.sums import Sums, add_sums, row_sums
from vardass.data.embedding_files import Columns
from vardass.errors import InputError
from vardass.files import PathLike
from vardass.lowrank import FeatureMap
from vardass.shards.files import Part, ShardRows, expand
from vardass.shards.stratification import with_time_left
from vardass.solvers.rule import draw_rows
from vardass.validate import Progress, check_count, check_seed, silent

__all__ = ["compare_shards", "coreset_shards"]

DEFAULT_SAMPLE = 2**16


def compare_shards(
    first: PathLike | Sequence[PathLike],
    second: PathLike | Sequence[PathLike],
    *,
    columns: Columns | None = None,
    leave_out: Sequence[str] = (),
    sample: int | None = None,
    seed: int = 0,
    workers: int | None = 1,
    engine: str = "local",
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """MMD² and CORAL between two sets of files, with memory for a sample and a block of rows.

    Values are those of all rows: CORAL by their moments, MMD² by low-rank features, with what these miss from random
    blocks of the sample. Intervals are for all rows, with variances from the sample; the test permutes the sample.

    Parameters
    ----------
    first, second : path, pattern or sequence of them
        ``.npy`` and ``.parquet`` files.
    columns, leave_out
        Which columns are features, see `read_embeddings`.
    sample : int, optional
        Random rows of each set, 65,536 by default. Where that is all rows, the result is that of `compare`.
    seed : int
        The same seed gives the same result, whatever the number of workers.
    workers, engine, progress
        See `stratify_shards`.
    **options
        Of `compare`.
    """
    tell = progress or silent
    paths = [expand(first), expand(second)]
    rows = ShardRows.of([*paths[0], *paths[1]], columns, leave_out, engine, workers)
    n = sum(shard.rows for shard in rows.shards[: len(paths[0])])
    for files, count in zip(paths, (n, rows.n - n)):
        if count < 4:
            raise InputError(f"{files[0]} and the files with it have {count} rows; at least 4 have a spread")
    count = check_count(DEFAULT_SAMPLE if sample is None else sample, "sample", low=4)
    numbers = [draw_rows(n, count, check_seed(seed), 0), n + draw_rows(rows.n - n, count, seed, 1)]
    z = rows.read(np.concatenate(numbers), tell)
    x, y = z[: len(numbers[0])], z[len(numbers[0]) :]
    if len(z) == rows.n:
        return compare(x, y, seed=seed, progress=progress, **options)

    def whole(feature_map: FeatureMap | None, centre: Tensor | None) -> tuple[Sums, Sums]:
        return _add_up(_Job(rows, feature_map, centre, z.shape[1]), tell, n)

    return compare(x, y, seed=seed, whole=whole, **options)


def coreset_shards(
    paths: PathLike | Sequence[PathLike],
    size: int,
    *,
    columns: Columns | None = None,
    leave_out: Sequence[str] = (),
    sample: int | None = None,
    seed: int = 0,
    workers: int | None = 1,
    engine: str = "local",
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Coreset, list[tuple[Path, int]]]:
    """Choose weighted representatives of the rows of many files, with memory for a sample and a block of rows.

    They are rows of a random sample, chosen for the mean embedding of all rows.

    Parameters
    ----------
    paths : path, pattern or sequence of them
        ``.npy`` and ``.parquet`` files.
    size : int
        Number m of representatives.
    sample : int, optional
        Random rows to choose from, 65,536 by default. Where that is all rows, the result is that of `coreset`.
    columns, leave_out, seed, workers, engine, progress
        See `compare_shards`.
    **options
        Of `coreset`.

    Returns
    -------
    Coreset, list of (Path, int)
        With ``indices`` counted through all files; file of each representative, and its row there.
    """
    tell = progress or silent
    rows = ShardRows.of(expand(paths), columns, leave_out, engine, workers)
    most = min(rows.n, LARGEST)
    size = check_count(size, "size", high=most, remedy=f"there are {rows.n:,} rows, and at most {LARGEST} are chosen")
    count = check_count(DEFAULT_SAMPLE if sample is None else sample, "sample", low=size)
    numbers = draw_rows(rows.n, count, check_seed(seed), 0)
    x = rows.read(numbers, tell)

    def whole(feature_map: FeatureMap) -> Sums:
        return _add_up(_Job(rows, feature_map, None, x.shape[1]), tell, rows.n)[0]

    found = coreset(x, size, seed=seed, whole=None if len(x) == rows.n else whole, **options)
    chosen = numbers[found.indices.numpy()]
    return replace(found, indices=torch.from_numpy(chosen)), rows.locate(chosen)


class _Job(NamedTuple):
    """What each worker has to know."""

    rows: ShardRows
    feature_map: FeatureMap | None
    centre: Tensor | None
    width: int


def _add_up(job: _Job, tell: Progress, split: int) -> tuple[Sums, Sums]:
    """Sums over the rows before the one with number ``split``, where a file begins, and over the others."""
    totals: list[Sums] = [{}, {}]
    rows = job.rows
    report = with_time_left(tell, rows.n)
    arrived: dict[int, Sums] = {}  # that cannot be added yet, because parts are added in their order
    following = 0
    for i, sums in rows.each(_sum_task, job, rows.parts):
        arrived[i] = sums
        while following in arrived:
            part = rows.parts[following]
            place = int(part.start >= split)
            totals[place] = add_sums([totals[place], arrived.pop(following)])
            report(part.rows)
            following += 1
    return totals[0], totals[1]


def _sum_task(job: _Job, part: Part) -> Sums:
    total: Sums = {}
    for x in job.rows.blocks(part, job.width):
        if job.feature_map is not None:
            job.feature_map.kernel.check_range(x)
        total = add_sums([total, row_sums(x, job.feature_map, job.centre)])
    return total
