"""Refreshes and draws in a thread of their own, so that training does not wait for them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from vardass.errors import InputError, VardassError
from vardass.samplers.base import BatchStream, MinibatchSampler, features_of_all
from vardass.samplers.weighted_batches import IndexBatch
from vardass.strata import Strata
from vardass.validate import ArrayLike, as_tensor, check_count

__all__ = ["BackgroundSampler"]


class _InThisThread:
    """Does what is submitted at once, in the place of a thread: the same stream."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self) -> None:
        """Nothing runs."""


class BackgroundSampler(BatchStream):
    """Let another thread refresh a sampler and draw from it; the stream stays a function of the seed.

    Batches are asked for ``ahead`` at a time, as soon as fewer than that many are in store. `refresh` hands the
    features over and returns at once: the batches that were asked for before still come, and the first one from
    the new strata is the one after them, ``ahead`` to 2 ``ahead`` batches later, however fast either thread
    is. So the stream does not depend on the machine, and strata are that much older than without a background
    thread. Before the first refresh has arrived batches are uniform.

    Parameters
    ----------
    sampler : MinibatchSampler
        Endless. It belongs to the background from then on.
    ahead : int
        Batches asked for at a time. Choose them so that the time to train on that many covers a refresh.
    in_process : bool
        Answer requests in this thread: the same stream, without the gain. For debugging.

    Attributes
    ----------
    strata : Strata or None
        Those that the last batch came from.

    Examples
    --------
    >>> import torch
    >>> from vardass import StratifiedBatchSampler
    >>> sampler = BackgroundSampler(StratifiedBatchSampler(100, 8, endless=True), ahead=4)
    >>> sampler.refresh(torch.randn(100, 3, generator=torch.Generator().manual_seed(0)))
    >>> batches = iter(sampler)
    >>> [next(batches).weights is None for _ in range(6)]
    [True, True, True, True, False, False]
    >>> sampler.close()
    """

    def __init__(self, sampler: MinibatchSampler, *, ahead: int = 32, in_process: bool = False) -> None:
        if not isinstance(sampler, MinibatchSampler):
            raise InputError(
                f"a background thread needs a MinibatchSampler, got {type(sampler).__name__}; pass one of vardass, or "
                "derive yours from it"
            )
        if not sampler.endless:
            raise InputError(
                f"a background thread draws ahead, over the end of an epoch, but this {type(sampler).__name__} has "
                "endless=False; make it with endless=True"
            )
        self.n, self.batch_size, self.seed = sampler.n, sampler.batch_size, sampler.seed
        self.needs_features = sampler.needs_features
        self.kernel = getattr(sampler, "kernel", None)
        self.plans_both_domains = sampler.plans_both_domains
        # of samplers with groups
        self.strata_count, self.min_size = (getattr(sampler, name, None) for name in ("strata_count", "min_size"))
        self.shares = getattr(sampler, "shares", None)  # of the last refresh that was asked for
        self.endless = True
        self.ahead = check_count(ahead, "ahead")
        self.strata: Strata | None = None
        self.position = 0
        self._sampler = sampler
        self._in_process = bool(in_process)
        self._thread: ThreadPoolExecutor | _InThisThread | None = None
        self._drawn: Iterator[IndexBatch] | None = None  # of the sampler, in the thread
        self._store: deque[dict[str, Any]] = deque()  # answers, the first of them partly used
        self._used = 0
        self._asked: deque[tuple[Future[Any], bool]] = deque()  # answers to come, and whether they begin with a refresh
        self._is_lost = False

    # --- the stream -----------------------------------------------------------------------------------

    def _batches(self) -> Iterator[IndexBatch]:
        while True:
            yield self._next()

    def shard(self, num_replicas: int, rank: int) -> None:
        """As for `MinibatchSampler`."""
        if (self._thread is not None or self.position) and (num_replicas, rank) != self._processes:
            raise InputError(
                f"the background thread has begun before shard({num_replicas}, {rank}); call it before the first batch"
            )
        self._sampler.shard(num_replicas, rank)

    @property
    def _processes(self) -> tuple[int, int]:
        return self._sampler.num_replicas, self._sampler.rank

    def _join_process_group(self) -> None:
        if self._thread is None and not self.position:  # afterwards the sampler belongs to the other thread
            self._sampler._join_process_group()

    def _next(self) -> IndexBatch:
        self._connect()
        if self._in_store < self.ahead:
            self._ask(None)
        if self._store and self._used == len(self._store[0]["rows"]):
            self._store.popleft()
            self._used = 0
        if not self._store:
            self._receive()
        answer = self._store[0]
        if self._used == 0 and answer["strata"] is not None:
            self.strata = Strata.from_dict(answer["strata"])
        batch = IndexBatch(answer["rows"][self._used])
        batch.weights = answer["weights"]
        strata, batch.pool = answer["draws"]
        batch.strata = strata if strata is None else strata[: len(batch)]
        self._used += 1
        self.position += 1
        return batch

    @property
    def _in_store(self) -> int:
        """Batches that are here or on their way: the same at each step of each run."""
        return sum(len(answer["rows"]) for answer in self._store) - self._used + self.ahead * len(self._asked)

    @property
    def is_refreshing(self) -> bool:
        """Whether features were handed over of which no batch has come yet."""
        to_begin = list(self._store)[1 if self._used else 0 :]
        return any(refreshed for _, refreshed in self._asked) or any(answer["refreshed"] for answer in to_begin)

    def refresh(self, features: ArrayLike, **groups: ArrayLike) -> None:
        """Hand the current ``features`` (n, d) over; see the class for when they apply.

        ``groups`` and ``shares``, or ``other``, are for samplers that have them, see `StratifiedBatchSampler` and
        `PairedBatchSampler`.
        """
        if not self.needs_features:
            return
        x = features_of_all(features, self.n)
        self._connect()
        if self._in_store < self.ahead:
            self._ask(None)
        # a copy: whoever made the features may write to them while the other thread has not read them
        copies = {name: as_tensor(value, name).to("cpu", copy=True) for name, value in groups.items()}
        if copies:
            self.shares = copies.get("shares")
        self._ask(x.detach().to("cpu", copy=True), copies)

    def _ask(self, features: Tensor | None, groups: Mapping[str, Tensor] | None = None) -> None:
        assert self._thread is not None
        answer = self._thread.submit(self._draw, features, groups or {})
        self._asked.append((answer, features is not None))

    def _draw(self, features: Tensor | None, groups: Mapping[str, Tensor]) -> dict[str, Any]:
        """Refresh and draw, in the thread."""
        assert self._drawn is not None
        strata: Strata | None = None
        if features is not None:
            self._sampler.refresh(features, **groups)
            strata = getattr(self._sampler, "strata", None)
        drawn = [next(self._drawn) for _ in range(self.ahead)]
        first = drawn[0]
        return {
            "rows": [list(batch) for batch in drawn],
            "weights": first.weights,  # between two refreshes those of all batches
            "draws": (first.strata, first.pool),
            "strata": None if strata is None else strata.to_dict(),
            "refreshed": features is not None,
        }

    def _receive(self) -> None:
        answer, _ = self._asked.popleft()  # also if it is an error
        self._store.append(answer.result())

    # --- the thread -----------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._is_lost:
            raise VardassError(
                "a refresh in the background failed and the stream ended with it; load a state with load_state_dict, "
                "or make a new sampler"
            )
        if self._thread is None:
            self._thread = (
                _InThisThread() if self._in_process else ThreadPoolExecutor(1, thread_name_prefix="vardass-background")
            )
            self._continue()

    def _continue(self) -> None:
        """Draw from where the sampler is, not from the beginning of its next epoch."""
        self._sampler.load_state_dict(self._sampler.state_dict())
        self._drawn = iter(self._sampler)

    def close(self) -> None:
        """End the thread. The stream goes on where it was if another batch is asked for."""
        if self._thread is None:
            return
        try:
            self._wait()
        except BaseException:
            self._is_lost = True
            raise
        finally:
            self._thread.shutdown()
            self._thread = self._drawn = None

    # --- copies and state -----------------------------------------------------------------------------

    def copy_of_sampler(self) -> MinibatchSampler:
        """A copy of the sampler behind, after all that it was asked for; this stream stays where it is."""
        self._wait()
        return copy.deepcopy(self._sampler)

    def __getstate__(self) -> dict[str, Any]:
        self._wait()
        return {**super().__getstate__(), "_thread": None, "_drawn": None}  # a copy starts a thread of its own

    def _wait(self) -> None:
        """Receive what is on its way; afterwards the thread has nothing to do."""
        while self._asked:
            self._receive()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the stream depends on; waits for the batches that are on their way."""
        self._wait()
        return {
            "sampler": self._sampler.state_dict(),
            "store": [dict(answer) for answer in self._store],
            "used": self._used,
            "position": self.position,
            "strata": None if self.strata is None else self.strata.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the stream that ``state`` was taken from, in this or in a new process."""
        names = {"sampler", "store", "used", "position", "strata"}
        if not isinstance(state, Mapping) or state.keys() != names:
            found = f"the keys {sorted(state)}" if isinstance(state, Mapping) else f"type {type(state).__name__}"
            raise InputError(
                f"the state has {found}, a background sampler's has {sorted(names)}; "
                "make the sampler with the same arguments or start anew"
            )
        if self._thread is None:
            self._asked.clear()
        self._wait()
        self._sampler.load_state_dict(state["sampler"])  # says so if it is another sampler's
        self._is_lost = False
        if self._thread is not None:
            self._continue()
        self._store = deque(dict(answer) for answer in state["store"])
        self._used = state["used"]
        self.position = state["position"]
        self.shares = state["sampler"]["extra"].get("shares")
        self.strata = None if state["strata"] is None else Strata.from_dict(state["strata"])
