"""`stratify_shards`: strata for features in files that together need not fit in memory.

A uniform sample of the rows is read and stratified. Its strata become a rule (`rule.py`) that gives any row its
stratum, and one pass applies it to the files, part by part. Parts are independent, so any number of workers finds the
same labels, and a restart keeps the parts that are done.

The folder of the result holds

    manifest.json   settings and files, written first; another run with others is refused
    work/           the rule and what is known of each part; removed at the end
    labels/         for each file one of the same name and kind with the stratum of each of its rows
    strata.json     sizes and variance, written last
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vardass.data.embedding_files import Columns
from vardass.errors import InputError
from vardass.files import PathLike, as_path, atomic_write, inside, locked, read_json, remove_temporary, write_text
from vardass.kernels import Kernel, KernelLike, as_kernel, fitted_kernel
from vardass.samplers.base import kernel_name
from vardass.shards.files import Part, Shard, ShardRows, expand, located, open_shards
from vardass.solvers.rule import JUDGED_ROWS, SampledRule, Totals, default_sample, draw_rows, fit_rule
from vardass.strata import Strata, StrataSummary
from vardass.validate import Progress, check_count, check_number, check_seed, reading, silent

__all__ = ["ShardStrata", "stratify_shards"]

_RULE = Path("work", "rule.pt")
_FORMAT = "vardass-shards"
_VERSION = 1
_AGAIN = "make the strata again in another folder"
_READ, _SOLVED = 0.1, 0.2  # of the progress: the sample is read; the rule is found


@dataclass(frozen=True, eq=False)
class ShardStrata(StrataSummary):
    """Strata of the rows of many files, with the labels in files.

    Attributes
    ----------
    folder : Path
        Where the labels are.
    files, labels_files : tuple of Path
        The features, and the stratum of each of their ``rows``.
    sizes : Tensor of shape (k,)
        Rows in each stratum.
    variance, uniform_variance, variance_stderr, uniform_stderr : float
        As for `Strata`; a part of them is estimated from 2,000 random pairs of rows.
    info : mapping
        Size of the sample, rank, and the seconds of each step.
    """

    folder: Path
    files: tuple[Path, ...]
    labels_files: tuple[Path, ...]
    rows: tuple[int, ...]
    d: int
    sizes: Tensor
    variance: float
    uniform_variance: float
    variance_stderr: float
    uniform_stderr: float
    solver: str
    kernel: str
    info: Mapping[str, Any]

    bound = None

    @property
    def n(self) -> int:
        """Number of rows."""
        return sum(self.rows)

    @property
    def k(self) -> int:
        """Number of strata."""
        return len(self.sizes)

    @cached_property
    def labels(self) -> NDArray[np.int32]:
        """Stratum of each row, through all files in their order: (n,). It takes four bytes for each row."""
        return np.concatenate(list(self.labels_by_file()))

    def labels_by_file(self) -> Iterator[NDArray[np.int32]]:
        """Stratum of each row of one file after the other."""
        for path, rows in zip(self.labels_files, self.rows, strict=True):
            labels = _read_labels(path)
            whole = labels.dtype == np.int32 and labels.shape == (rows,)
            if not whole or (rows and not 0 <= labels.min() <= labels.max() < self.k):
                raise InputError(
                    f"{path} has {labels.dtype} of shape {labels.shape}, not labels 0 to {self.k - 1} of {rows:,} "
                    "rows; make the strata again"
                )
            yield labels

    def strata(self) -> Strata:
        """The same as `Strata`, for samplers: `StratifiedBatchSampler.use`. It takes eight bytes for each row."""
        return Strata(
            torch.from_numpy(self.labels.astype(np.int64)),
            self.k,
            self.variance,
            self.uniform_variance,
            self.variance_stderr,
            self.solver,
            self.kernel,
            info=self.info,
        )

    @classmethod
    def load(cls, folder: PathLike) -> ShardStrata:
        """Read the result of `stratify_shards` from its folder ``out``."""
        folder = as_path(folder)
        found = _read_json(folder / "strata.json")
        if found is None:
            raise InputError(f"there are no finished strata in {folder}; let vardass stratify run to its end")
        with reading(folder / "strata.json", _AGAIN):
            files = tuple(map(Path, found.pop("files")))
            rows = tuple(check_count(count, "rows", low=0) for count in found.pop("rows"))
            sizes = [check_count(count, "sizes") for count in found.pop("sizes")]
            for name in ("variance", "uniform_variance", "variance_stderr", "uniform_stderr"):
                check_number(found[name], name, low=0.0)
            check_count(found["d"], "d")
            kinds = (str, str, dict)
            if not all(isinstance(found[name], kind) for name, kind in zip(("solver", "kernel", "info"), kinds)):
                raise TypeError("solver, kernel and info are text, text and a mapping")
            if len(files) != len(rows) or sum(rows) != sum(sizes):
                raise ValueError(f"{sum(sizes)} labels for {sum(rows)} rows in {len(files)} files")
            labels_files = tuple(_labels_files(folder, files))
            return cls(folder, files, labels_files, rows, sizes=torch.tensor(sizes), **found)


def stratify_shards(
    paths: PathLike | Sequence[PathLike],
    k: int,
    *,
    out: PathLike,
    kernel: KernelLike = "mmd",
    columns: Columns | None = None,
    leave_out: Sequence[str] = (),
    sample: int | None = None,
    rank: int | None = None,
    seed: int = 0,
    workers: int | None = 1,
    engine: str = "local",
    progress: Progress | None = None,
) -> ShardStrata:
    """Partition the rows of many files into k strata, with only a sample and a block of rows in memory.

    Rows are computed in float32. If interrupted, call it again to resume; the labels are the same.

    Parameters
    ----------
    paths : path, pattern or sequence of them
        ``.npy`` and ``.parquet`` files, as `read_embeddings` takes them.
    k : int
        Number of strata: the minibatch size.
    out : path
        Folder for the result, which is created. With the engine ``"ray"`` all nodes must see it, and the files, under
        the same paths.
    kernel : Kernel, name or callable
        See `stratify`; fitted to the sample unless it is fitted.
    columns, leave_out
        Which columns are features, see `read_embeddings`.
    sample : int, optional
        Rows, drawn uniformly from all files, that kernel, landmarks and strata are found on. By default 131,072, or 512
        for each stratum if that is more. These rows keep their strata.
    rank : int, optional
        Columns of the low-rank kernel features, see `stratify`.
    seed : int
        The same seed gives the same labels, whatever the number of workers.
    workers : int, optional
        Processes; None is one for each CPU. More than one need ``if __name__ == "__main__":`` in a script.
    engine : {"local", "ray"}
        Processes of this machine, or tasks of the Ray cluster at ``RAY_ADDRESS``.
    progress : callable, optional
        Called as ``progress(fraction, message)``.
    """
    k = check_count(k, "k")
    sample = check_count(
        default_sample(k) if sample is None else sample, "sample", low=k, remedy="each stratum needs a row"
    )
    workers = None if workers is None else check_count(workers, "workers")
    folder, unfitted = as_path(out).absolute(), as_kernel(kernel)
    settings = {
        "k": k,
        "kernel": kernel_name(unfitted),
        "columns": columns if columns is None or isinstance(columns, str) else list(columns),
        "leave_out": list(leave_out),
        "sample": sample,
        "rank": rank,
        "seed": check_seed(seed),
    }
    shards = _begin(folder, [located(path) for path in expand(paths)], settings)
    if (folder / "strata.json").exists():
        return ShardStrata.load(folder)
    check_count(k, "k", high=sum(shard.rows for shard in shards), remedy="lower --k, each stratum needs a row")
    run = _Run(
        folder, ShardRows(shards, columns, tuple(leave_out), engine, workers), unfitted, settings, progress or silent
    )
    with locked(inside(folder, "work"), work="stratify"):
        remove_temporary(folder / "work")  # of workers that were killed
        try:
            run.do()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise InputError(
                f"cannot write to {folder}: {error.strerror}; done parts are kept: make room, and start again to resume"
            ) from None
    return ShardStrata.load(folder)


# --- starting and resuming ---


def _begin(folder: Path, paths: list[Path], settings: dict[str, Any]) -> list[Shard]:
    """The files: noted in a new manifest, or those of an earlier start, if they and the settings are the same.

    A start that was stopped before it had a rule does not count: there is nothing to resume.
    """
    manifest = None if folder.is_file() else _read_json(folder / "manifest.json")
    if manifest is None or not any((folder / name).exists() for name in (_RULE, "strata.json")):
        others = folder.iterdir() if manifest is None and folder.is_dir() else iter(())
        if folder.is_file() or any(not path.name.startswith(".") for path in others):
            raise InputError(f"{folder} exists and holds no strata; choose another --out")
        shards = open_shards(paths, settings["columns"], settings["leave_out"])
        folder.mkdir(parents=True, exist_ok=True)
        files = [{**asdict(shard), "path": str(shard.path)} for shard in shards]
        write_text(folder / "manifest.json", _json({**settings, "files": files}))
        (folder / "work").mkdir(exist_ok=True)
        return shards
    for name, value in settings.items():
        if manifest.get(name) != value:
            raise InputError(
                f"{folder} was begun with {name}={manifest.get(name)!r}, now it is {value!r}; give the same to resume, "
                "or another --out"
            )
    with reading(folder / "manifest.json", _AGAIN):
        shards = [
            Shard(
                located(Path(file["path"])),
                check_count(file["size"], "size", low=0),
                check_count(file["mtime_ns"], "mtime_ns"),
                tuple(check_count(rows, "groups", low=0) for rows in file["groups"]),
            )
            for file in manifest["files"]
        ]
    for shard in shards:
        shard.check()
    known = [shard.path for shard in shards]
    if paths != known:
        how = "in another order"
        for odd, what in ((set(known) - set(paths), "among them"), (set(paths) - set(known), "not among them")):
            how = f"with {min(odd)} {what}" if odd else how
        raise InputError(
            f"{folder} was begun with {len(known)} files, {how}; give the same files to resume, or another --out"
        )
    return shards


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps({"format": _FORMAT, "version": _VERSION, **value}) + "\n"


def _read_json(path: Path) -> dict[str, Any] | None:
    found = read_json(path)
    if not found:
        return None
    if (found.pop("format", None), found.pop("version", None)) != (_FORMAT, _VERSION):
        raise InputError(f"{path} is not of this version of vardass; choose another --out")
    return found


def _labels_files(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Where the labels of each file go: the same path below the folder that all files share."""
    common = Path(os.path.commonpath([path.parent for path in files]))
    return [inside(folder, "labels", path.relative_to(common)) for path in files]


# --- sample, rule, pass, result ---


class _Job(NamedTuple):
    """What each worker has to know."""

    sampled: SampledRule
    rows: ShardRows
    width: int
    folder: Path


class _Plan(NamedTuple):
    sampled: SampledRule
    judged_rows: NDArray[np.int64]  # on which the variance is estimated
    judged: Tensor  # their features (m, d)


class _Run(NamedTuple):
    folder: Path
    rows: ShardRows
    kernel: Kernel
    settings: dict[str, Any]
    progress: Progress

    def do(self) -> None:
        clock = time.perf_counter()
        plan = self._plan()
        planned = time.perf_counter()
        self._label(plan)
        passed = time.perf_counter()
        rule, shards = plan.sampled.rule, self.rows.shards
        totals = Totals.zero(*rule.sums.shape)
        for i in range(len(self.rows.parts)):
            with self._part(i) as found:
                totals.add_totals(Totals(*(torch.from_numpy(found[name]) for name in vars(totals))))
        variances = plan.sampled.judge(totals, plan.judged, plan.judged_rows, self.settings["seed"])
        for shard, target in zip(shards, _labels_files(self.folder, [shard.path for shard in shards])):
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                _write_labels(target, shard.rows, self._labels(shard))
        info = {
            "sample": len(plan.sampled.rows),
            "rank": rule.sums.shape[1],
            "captured": 1.0 - float(totals.residual.sum() / totals.spread.sum().clamp_min(1e-300)),
            "parts": len(self.rows.parts),
            "seconds_sample": planned - clock,
            "seconds_pass": passed - planned,
            "seconds_write": time.perf_counter() - passed,
        }
        result = {
            "files": [str(shard.path) for shard in shards],
            "rows": [shard.rows for shard in shards],
            "d": plan.judged.shape[1],
            "sizes": totals.sizes.long().tolist(),
            **asdict(variances),
            "solver": "min-sum",
            "kernel": repr(rule.kernel),
            "info": info,
        }
        write_text(self.folder / "strata.json", _json(result))
        shutil.rmtree(self.folder / "work", ignore_errors=True)

    def _plan(self) -> _Plan:
        """The rule: of an earlier start, or found on a sample now."""
        target, settings = self.folder / _RULE, self.settings
        if not target.exists():
            rows = draw_rows(self.rows.n, settings["sample"], settings["seed"], 0)
            judged_rows = draw_rows(self.rows.n, JUDGED_ROWS, settings["seed"], 1)
            wanted = np.union1d(rows, judged_rows)
            features = self.rows.read(wanted, lambda share, message: self.progress(_READ * share, message))
            x = features[np.searchsorted(wanted, rows)]
            kernel = fitted_kernel(self.kernel, x)
            self.progress(_READ, f"strata of {len(rows):,} rows")
            sampled = fit_rule(x, rows, settings["k"], kernel, rank=settings["rank"], seed=settings["seed"])
            judged = features[np.searchsorted(wanted, judged_rows)]
            state = {**sampled.state(), "rows": torch.from_numpy(rows)}
            state |= {"judged": judged, "judged_rows": torch.from_numpy(judged_rows)}
            packed = io.BytesIO()  # torch.save to a file would hide that a disk is full
            torch.save(state, packed)
            with atomic_write(target) as file:
                file.write(packed.getbuffer())
        with reading(target, _AGAIN):
            state = torch.load(target, weights_only=True)
            sampled = SampledRule.from_state({**state, "rows": state["rows"].numpy()}, self.kernel)
            return _Plan(sampled, state["judged_rows"].numpy(), state["judged"])

    def _label(self, plan: _Plan) -> None:
        todo = [(i, part) for i, part in enumerate(self.rows.parts) if not _part_file(self.folder, i).exists()]
        job = _Job(plan.sampled, self.rows, plan.judged.shape[1], self.folder)
        remaining = sum(part.rows for _, part in todo)
        report = with_time_left(self.progress, self.rows.n, self.rows.n - remaining)
        for i, _ in self.rows.each(_label_task, job, todo):
            report(todo[i][1].rows)

    def _labels(self, shard: Shard) -> Iterator[NDArray[np.int32]]:
        for i, part in enumerate(self.rows.parts):
            if part.shard is shard:
                with self._part(i) as found:
                    yield np.asarray(found["labels"])

    @contextmanager
    def _part(self, i: int) -> Iterator[Any]:
        file = _part_file(self.folder, i)
        with reading(file, "remove it, and start again to resume"), np.load(file, allow_pickle=False) as found:
            yield found


def _part_file(folder: Path, i: int) -> Path:
    return folder / "work" / f"part-{i:06d}.npz"


def with_time_left(progress: Progress, n: int, done: int = 0) -> Callable[[int], None]:
    """A function that counts rows and reports how many are done, and how long the rest will take."""
    start, before = time.monotonic(), done

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        seconds = (time.monotonic() - start) * (n - done) / (done - before)
        text = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        progress(_SOLVED + (1.0 - _SOLVED) * done / n, f"{done:,} of {n:,} rows, {text} left")

    progress(_SOLVED + (1.0 - _SOLVED) * done / n, f"{done:,} of {n:,} rows")
    return report


def _label_task(job: _Job, task: tuple[int, Part]) -> None:
    """Label the rows of a part, and write the labels with what the variance needs to know of them."""
    i, part = task
    rule = job.sampled.rule
    totals = Totals.zero(*rule.sums.shape)
    found, start = [], part.start
    for x in job.rows.blocks(part, job.width):
        rule.kernel.check_range(x)
        problem = rule.embed(x)
        labels = job.sampled.assign(problem, np.arange(start, start + len(x)))
        totals.add(problem, labels)
        found.append(labels.int())
        start += len(x)
    labels = torch.cat(found)
    arrays = {name: value.numpy() for name, value in vars(totals).items()}
    with atomic_write(_part_file(job.folder, i)) as file:
        np.savez(file, labels=labels.numpy(), **arrays)


# --- files ---


def _write_labels(target: Path, rows: int, parts: Iterator[NDArray[np.int32]]) -> None:
    """Write labels as they come, so that those of a large file need no memory."""
    with atomic_write(target) as file:
        if target.suffix.lower() == ".npy":
            descr = np.lib.format.dtype_to_descr(np.dtype(np.int32))
            np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (rows,)})
            for labels in parts:
                file.write(labels.tobytes())
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema([("stratum", pa.int32())])
        with pq.ParquetWriter(file, schema) as writer:
            for labels in parts:
                writer.write_table(pa.table({"stratum": labels}, schema))


def _read_labels(path: Path) -> NDArray[np.int32]:
    try:
        if path.suffix.lower() == ".npy":
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        import pyarrow.parquet as pq

        return np.asarray(pq.read_table(path, columns=["stratum"])["stratum"].to_numpy())
    except (OSError, ValueError) as error:
        raise InputError(f"the labels in {path} cannot be read ({error}); make the strata again") from None
