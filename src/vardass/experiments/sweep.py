"""A sweep: all its runs, each once, whatever happens in between."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vardass.errors import InputError
from vardass.experiments.engines import Attempt, Outcome, count_cpus, get_engine
from vardass.experiments.record import Record, RunSpec
from vardass.experiments.status import status
from vardass.experiments.store import RUNS_FOLDER
from vardass.experiments.sweep_store import SweepStore
from vardass.validate import Progress, check_count

__all__ = ["Progress", "Summary", "run_sweep", "status"]


@dataclass(frozen=True)
class Summary:
    """How a sweep ended.

    Attributes
    ----------
    total : int
        Runs of the sweep.
    finished, failed : int
        How many of them have finished, and how many have failed for good.
    before : int
        How many had finished when the sweep was started.
    others : int
        Finished runs in the folder that are not part of the sweep, as its specification was changed.
    interrupted : bool
        Whether Ctrl-C stopped it.
    seconds : float
        Since it was started.
    """

    total: int
    finished: int
    failed: int
    before: int
    others: int
    interrupted: bool
    seconds: float


def run_sweep(
    runs: Sequence[RunSpec],
    folder: str | os.PathLike[str],
    *,
    engine: str = "local",
    jobs: int | None = None,
    retry: int = 1,
    progress: Progress | None = None,
    text: str | None = None,
) -> Summary:
    """Do all runs that have not finished yet, and write their records to ``folder``.

    It may be killed at any moment and started again with the same or more runs: finished ones are not done again,
    those under way go on from their checkpoints, and failed ones are tried anew.

    Parameters
    ----------
    runs : sequence of RunSpec
        Runs by their content; a run that occurs twice is done once.
    folder : path
        Of this sweep alone, made if need be. See ``vardass.experiments.store``.
    engine : {"local", "ray"}
        Where to run.
    jobs : int, optional
        Runs at a time; default: the number of CPUs.
    retry : int
        How often a run that failed is tried again before it is recorded as failed. A worker that dies does not count,
        see ``vardass.experiments.engines``.
    progress : callable, optional
        ``progress(share_done, message)`` about once a second.
    text : str, optional
        Specification, kept in ``sweep.yaml``.

    Raises
    ------
    InputError
        If another sweep is at work in the folder, it cannot be written to, or the disk is full. All records are safe
        then.
    """
    if jobs is not None:
        check_count(jobs, "jobs")
    check_count(retry, "retry", low=0)
    run_all = get_engine(engine)
    specs = {spec.run_id: spec for spec in runs}
    if not specs:
        raise InputError("the sweep has 0 runs; name at least one algorithm, sampler and task")
    clock = time.monotonic()
    interrupted = False
    with SweepStore.open(folder) as store:
        store.write_plan(list(specs), jobs=jobs or count_cpus(), text=text)
        todo = [_attempt(spec, store.done.get(name)) for name, spec in specs.items() if not store.is_finished(name)]
        before = len(specs) - len(todo)
        sweep = _Sweep(store, {attempt.spec.run_id: attempt.number + retry for attempt in todo})

        def tick() -> None:
            if progress is not None:
                done = before + sweep.ended
                failed = f", {sweep.failed} failed" if sweep.failed else ""
                progress(done / len(specs), f"{done} of {len(specs)} runs{failed}")

        tick()
        try:
            if todo:
                run_all(todo, store.path / RUNS_FOLDER, jobs=jobs, on_done=sweep.on_done, tick=tick)
        except KeyboardInterrupt:
            interrupted = True
        finished = sum(store.is_finished(name) for name in specs)
        others = sum(store.is_finished(name) for name in store.done if name not in specs)
    return Summary(
        total=len(specs),
        finished=finished,
        failed=sweep.failed,
        before=before,
        others=others,
        interrupted=interrupted,
        seconds=time.monotonic() - clock,
    )


def _attempt(spec: RunSpec, failed: Record | None) -> Attempt:
    return Attempt(spec) if failed is None else Attempt(spec, failed.attempts + 1, failed.wall)


class _Sweep:
    """What becomes of each outcome.

    Parameters
    ----------
    store : SweepStore
        Where records go.
    last : dict of str to int
        Number of the last attempt that each run has.
    """

    def __init__(self, store: SweepStore, last: dict[str, int]) -> None:
        self.store = store
        self.last = last
        self.ended = 0
        self.failed = 0

    def on_done(self, attempt: Attempt, outcome: Outcome) -> Attempt | None:
        """Write the record, or say that the run is to be tried again."""
        if outcome.kind == "disk-full":
            raise InputError(
                f"the disk is full: {outcome.text}; all {len(self.store.done)} records in {self.store.path} are safe; "
                "make room and start the sweep again to go on"
            )
        if outcome.kind == "finished":
            self.store.add(Record.from_json(outcome.text))
        elif attempt.number < self.last[attempt.spec.run_id]:
            return Attempt(attempt.spec, attempt.number + 1, outcome.wall)
        else:
            self.store.add(
                Record(
                    spec=attempt.spec,
                    status="failed",
                    wall=outcome.wall,
                    attempts=attempt.number,
                    error=outcome.text,
                    version=_version(),
                )
            )
            self.failed += 1
        self.ended += 1
        return None


def _version() -> str:
    import vardass

    return vardass.__version__
