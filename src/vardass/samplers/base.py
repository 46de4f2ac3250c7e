"""What all batch samplers share: a seeded stream of batches that can be saved, restored and refreshed."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from vardass.backend import has_numba, one_thread
from vardass.errors import InputError, VardassWarning
from vardass.kernels import FunctionKernel, KernelLike, as_kernel
from vardass.processes import process_group
from vardass.registry import declared_options
from vardass.samplers.weighted_batches import IndexBatch
from vardass.validate import (
    ArrayLike,
    as_features,
    as_weights,
    check_count,
    check_seed,
    check_state,
    check_tensor,
    reading,
)

__all__ = ["Chunk", "MinibatchSampler", "RowBatch", "StreamOptions", "derive_seed", "one_iterator"]

_STATE_VERSION = 2
# restored, or compared apart
_NOT_COMPARED = ("seed", "batches", "endless", "num_replicas", "rank", "groups", "shares")
_SAME = ("sampler", "version", "n", "batch_size", "num_replicas")
_COUNTS = ("epoch", "position", "refreshes", "base")  # whole numbers in a state


class StreamOptions(TypedDict, total=False):
    """Options of every sampler; `MinibatchSampler` explains them."""

    seed: int
    batches: int | None
    endless: bool
    num_replicas: int | None
    rank: int | None


class Chunk(NamedTuple):
    """Some batches in a row."""

    rows: Tensor  # (m, batch_size), indices of m batches
    weights: Tensor | None = None  # (batch_size,), summing to 1; None for uniform
    tail: Tensor | None = None  # a last, smaller batch


class RowBatch(NamedTuple):
    """One batch as tensors: its ``rows`` (b,) and their ``weights`` (b,), None for uniform."""

    rows: Tensor
    weights: Tensor | None

    def as_list(self) -> IndexBatch:
        """The same for a loader, or a state."""
        return IndexBatch(self.rows.tolist(), None if self.weights is None else self.weights.tolist())

    @classmethod
    def from_list(cls, saved: Mapping[str, Any], n: int) -> RowBatch:
        """The batch of ``n`` samples whose `as_list` has the state ``saved``."""
        batch = IndexBatch.from_state(saved, n)
        weights = None if batch.weights is None else torch.tensor(batch.weights, dtype=torch.float64)
        return cls(torch.tensor(batch, dtype=torch.int64), weights)


class MinibatchSampler(Sampler[IndexBatch], ABC):
    """A ``torch.utils.data.Sampler`` of batches, for ``DataLoader(batch_sampler=...)``.

    The stream is a pure function of the seed, the epoch and the features of the refreshes, computed a chunk
    at a time. Its state, the same on every process, is the current chunk and the result of the last refresh. Subclasses
    implement ``_make_chunk``, and ``_fit``, ``_extra_state`` and ``_load_extra_state`` if they depend on features.
    `Refresher` logs the attribute ``strata``, a `Strata` or None.

    Parameters
    ----------
    n : int
        Number of samples in the data set.
    batch_size : int
        Samples in a batch.
    seed : int
        The same seed gives the same stream.
    batches : int, optional
        Batches in an epoch, over all processes; by default one pass over the n samples, without a remainder.
    endless : bool
        Never stop; ``len`` is then undefined.
    num_replicas, rank : int, optional
        Process ``rank`` gets every ``num_replicas``-th batch; leftover batches at the end of an epoch are dropped. The
        defaults are read from the ``torch.distributed`` process group at the first batch. ``num_replicas=1`` gives
        every process all batches, for libraries that shard them, such as ``accelerator.prepare``.

    Examples
    --------
    >>> class InTurn(MinibatchSampler):
    ...     needs_features = False
    ...
    ...     def _make_chunk(self, rounds, generator):
    ...         return Chunk(torch.arange(self.n).reshape(-1, self.batch_size))
    >>> list(InTurn(6, 2))
    [[0, 1], [2, 3], [4, 5]]
    """

    needs_features: ClassVar[bool] = True  # whether `refresh` makes a difference
    plans_both_domains: ClassVar[bool] = False  # one of two with the same seed, which draw in step on purpose

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int = 0,
        batches: int | None = None,
        endless: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.n = check_count(n, "n")
        self.batch_size = check_count(batch_size, "batch_size")
        if self.batch_size > self.n:
            raise InputError(
                f"batch_size={batch_size} needs at least {batch_size} samples, got n={n}; lower batch_size"
            )
        self.seed = check_seed(seed)
        self.endless = bool(endless)
        self._total = self._default_batches() if batches is None else check_count(batches, "batches")
        self._set_processes(1 if num_replicas is None else num_replicas, 0 if rank is None else rank)
        self._is_shared = num_replicas is not None or rank is not None  # whether the processes are settled
        self.epoch = 0
        self.position = 0  # batches already handed to this process in this epoch
        self._started = False  # whether the current epoch has handed out a batch
        self._refreshes = 0
        self._base = 0  # round at which the present strata or plan took over
        self._chunk: Chunk | None = None
        self._held = 0  # batches of the chunk that are for this process
        self._weights: list[float] | None = None
        self._first = 0  # round of the first row of the chunk

    def _default_batches(self) -> int:
        return self.n // self.batch_size

    # --- several processes ----------------------------------------------------------------------------

    def shard(self, num_replicas: int, rank: int) -> None:
        """Give this process every ``num_replicas``-th batch from number ``rank`` on; before the first batch."""
        if (num_replicas, rank) == (self.num_replicas, self.rank):
            self._is_shared = True
            return
        if self._is_shared:
            raise InputError(
                f"this sampler is already sharded, with rank={self.rank} of num_replicas={self.num_replicas}, got "
                f"rank={rank} of {num_replicas}; leave out num_replicas and rank when creating the sampler"
            )
        if self._has_begun:
            raise InputError(
                f"{self.position} batches of epoch {self.epoch} went to one process before shard({num_replicas}, "
                f"{rank}); call it before the first batch"
            )
        self._set_processes(num_replicas, rank)
        self._is_shared = True

    def _set_processes(self, num_replicas: int, rank: int) -> None:
        num_replicas = check_count(num_replicas, "num_replicas")
        rank = check_count(rank, "rank", low=0, high=num_replicas - 1)
        if self._total < num_replicas:
            raise InputError(
                f"an epoch of {self._total} batches is too short for num_replicas={num_replicas} processes; "
                "lower batch_size or set batches"
            )
        self.num_replicas, self.rank = num_replicas, rank
        self._rounds = self._total // num_replicas

    @property
    def _has_begun(self) -> bool:
        return self._started or self.position > 0

    @property
    def _process_count(self) -> int:
        """Processes that share the stream, or will from the first batch on."""
        return self.num_replicas if self._is_shared or self._has_begun else (process_group() or (1, 0))[0]

    def _join_process_group(self) -> None:
        group = None if self._is_shared else process_group()
        if group is None:
            return
        if not self._has_begun:
            self.shard(*group)
            return
        self._is_shared = True  # one warning is enough
        warnings.warn(
            f"there is a process group of {group[0]}, but this {type(self).__name__} began without it, so every "
            "process gets the same batches; create it after init_process_group, or call shard before the first batch",
            VardassWarning,
            stacklevel=4,
        )

    # --- for subclasses -------------------------------------------------------------------------------

    @abstractmethod
    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        """Make the next batches, a multiple of ``num_replicas``.

        This process has had ``rounds`` batches since the last refresh or the start of the epoch.
        """

    def _fit(self, features: Tensor) -> None:
        """Take strata or a plan from (n, d) features."""

    def _extra_state(self) -> dict[str, Any]:
        """What `_fit` found, for `state_dict`."""
        return {}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `_extra_state` gave."""

    def _new_epoch(self) -> None:
        """Forget what belongs to one epoch."""

    def _settings(self) -> dict[str, Any]:
        """Keyword-only arguments of all constructors with an attribute of the same name, in plain values.

        A state with other ones is refused.
        """
        names = [name for name in declared_options(type(self)) if name not in _NOT_COMPARED and hasattr(self, name)]
        values = {name: getattr(self, name) for name in names}
        if values.get("kernel") is not None:
            values["kernel"] = kernel_name(values["kernel"])
        return {**{name: plain(value) for name, value in values.items()}, "batches": self._total}

    # --- the stream -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.endless:
            raise TypeError(f"an endless {type(self).__name__} has no length; set endless=False")
        return self._total // self._process_count

    def set_epoch(self, epoch: int) -> None:
        """Start the given epoch at the next iteration; an epoch that was just restored continues."""
        epoch = check_count(epoch, "epoch", low=0)
        if self._started or epoch != self.epoch:
            self._begin_epoch(epoch)

    def leave_epoch(self) -> None:
        """Begin the next epoch at the next iteration, even if a state was restored in mid-epoch."""
        if self.position:
            self.set_epoch(self.epoch + 1)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self.position, self._base, self._started = epoch, 0, 0, False
        self._chunk = None
        self._new_epoch()

    def __iter__(self) -> Iterator[IndexBatch]:
        self._join_process_group()
        return one_iterator(self, self._batches())

    def _batches(self) -> Iterator[IndexBatch]:
        # a stream that was left in the middle of an epoch resumes only if its state was restored
        if self._started:
            self._begin_epoch(self.epoch + 1)
        while self.endless or self.position < self._rounds:
            yield IndexBatch(self._next_rows().tolist(), self._weights)
        self._begin_epoch(self.epoch + 1)

    def draw(self) -> RowBatch:
        """The next batch of an endless stream, as tensors; `__iter__` gives the same as lists."""
        rows = self._next_rows()
        assert self._chunk is not None
        return RowBatch(rows, self._chunk.weights)

    def _next_rows(self) -> Tensor:
        offset = self.position - self._first
        if self._chunk is None or not 0 <= offset < self._held:
            rounds, offset = self.position - self._base, 0
            seed = derive_seed(self.seed, self.epoch, self._refreshes, self._base, rounds)
            with one_thread():
                self._set_chunk(self._make_chunk(rounds, torch.Generator().manual_seed(seed)), self.position)
        chunk, row = self._chunk, self.rank + offset * self.num_replicas
        assert chunk is not None
        self._started = True
        self.position += 1
        return chunk.tail if chunk.tail is not None and row == len(chunk.rows) else chunk.rows[row]

    def _set_chunk(self, chunk: Chunk, first: int) -> None:
        self._chunk, self._first = chunk, first
        self._held = (len(chunk.rows) + (chunk.tail is not None)) // self.num_replicas
        self._weights = None if chunk.weights is None else chunk.weights.tolist()

    # --- refresh --------------------------------------------------------------------------------------

    def refresh(self, features: ArrayLike) -> None:
        """Recompute strata or plan from the current ``features`` (n, d); they apply from the next batch on.

        Batches that a DataLoader has already prefetched keep their weights. A state of torchdata's StatefulDataLoader
        belongs to the last batch it returned: if it still held batches from before a refresh, refresh again after a
        restore. Under several processes let `Refresher` call this: features may differ between them.
        """
        x = features_of_all(features, self.n)
        if not self.needs_features:
            return
        if self._has_begun:
            self._join_process_group()
        self._refreshes += 1
        try:
            with one_thread():
                self._fit(x)
        except BaseException:  # features that cannot be used leave the stream as it was
            self._refreshes -= 1
            raise
        self._drop_chunk()

    def fitted_state(self) -> dict[str, Any]:
        """The result of the last refresh, to send to the other processes."""
        return {"refreshes": self._refreshes, "extra": self._extra_state()}

    def use_fitted_state(self, state: dict[str, Any]) -> None:
        """Use another process's `fitted_state` from the next batch on, as after a `refresh`."""
        self._drop_chunk()
        self._load_extra_state(state["extra"])
        self._refreshes = state["refreshes"]

    def _drop_chunk(self) -> None:
        """Draw the next batch from what was just fitted."""
        self._before_drop()
        self._base = self.position
        self._chunk = None

    def _before_drop(self) -> None:
        """Take note of the present chunk before it is dropped."""

    def sample_batches(self, count: int, *, seed: int = 0) -> Chunk:
        """Draw ``count`` full batches, in whole epochs, from the current strata or plan; the stream does not move."""
        count = check_count(count, "count")
        rows: list[Tensor] = []
        while sum(map(len, rows)) < count:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, seed, len(rows), -1))
            chunk = self._sample_chunk(generator)
            rows.append(chunk.rows)
        return chunk._replace(rows=torch.cat(rows)[:count], tail=None)

    def _sample_chunk(self, generator: torch.Generator) -> Chunk:
        return self._make_chunk(0, generator)

    # --- state ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # a copy continues the stream, like a sampler with a restored state
        return {**self.__dict__, "_started": False}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the stream depends on after the last batch handed out; the same on every process.

        DataLoader workers prefetch batches: with them, save the state of torchdata's StatefulDataLoader or of a
        ``CheckpointedSampler`` instead.
        """
        return {
            "sampler": type(self).__name__,
            "version": _STATE_VERSION,
            "n": self.n,
            "batch_size": self.batch_size,
            "num_replicas": self.num_replicas,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "refreshes": self._refreshes,
            "base": self._base,
            "chunk": None if self._chunk is None else {"first": self._first, **self._chunk._asdict()},
            "extra": self._extra_state(),
            "settings": {**self._settings(), **({"numba": has_numba()} if self.needs_features else {})},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the stream that ``state`` was taken from, in this or in a new process.

        The next iteration yields the rest of the epoch, which is empty after its last batch.
        """
        check_state(state, self)
        group = None if self._is_shared else process_group()
        if group is not None and state.get("num_replicas") == group[0] and not self._has_begun:
            self.shard(*group)
        mine = self.state_dict()
        check_state(state, self, mine)
        for part in (state["settings"], state["extra"], state["chunk"] or {}):
            check_state(part, self)
        theirs = {**state, **state["settings"]}
        for key, value in {**{key: mine[key] for key in _SAME}, **mine["settings"]}.items():
            if theirs.get(key) != value:
                remedy = "make the sampler with the same arguments"
                if key == "numba":  # the two backends take steps in another order, so later batches would differ
                    remedy = "resume with numba" if value is False else "resume without numba"
                raise InputError(
                    f"the state has {key}={theirs.get(key)!r}, this sampler {key}={value!r}; {remedy} or start over"
                )
        counts = [check_count(state[key], f"{key} of the state", low=0) for key in _COUNTS]
        seed, before = check_seed(state["seed"]), dict(self.__dict__)
        try:
            with reading(f"the state of this {type(self).__name__}", "pass what its state_dict() gave"):
                self._load_extra_state(state["extra"])
                self.seed = seed
                self.epoch, self.position, self._refreshes, self._base = counts
                self._chunk = None
                if state["chunk"] is not None:
                    saved = dict(state["chunk"])
                    first = check_count(saved.pop("first"), "first of the chunk", low=0)
                    self._set_chunk(self._checked_chunk(Chunk(**saved)), first)
        except BaseException:  # a state that cannot be used leaves the stream as it was
            self.__dict__ = before
            raise
        # the next iteration continues instead of starting another epoch
        self._started = False

    def _checked_chunk(self, chunk: Chunk) -> Chunk:
        """``chunk`` from a state, if batches can be drawn from it."""
        size, last = self.batch_size, self.n - 1
        check_tensor(chunk.rows, "rows of the chunk", (None, size), low=0, high=last)
        if chunk.tail is not None:
            check_tensor(chunk.tail, "tail of the chunk", (None,), low=0, high=last)
        if chunk.weights is not None:
            as_weights(check_tensor(chunk.weights, "weights", (size,)), size, chunk.weights, "weights of the chunk")
        return chunk


def one_iterator(sampler: Any, batches: Iterator[IndexBatch]) -> Iterator[IndexBatch]:
    """Yield ``batches`` until ``sampler`` is iterated again: two iterators would each get a part of its stream."""
    mine = sampler._iteration = object()
    for batch in batches:
        yield batch
        if sampler._iteration is not mine:
            raise InputError(
                f"two iterators share one {type(sampler).__name__}, so each would get only part of its stream; "
                "give every loader a sampler of its own, with another seed"
            )


def features_of_all(features: ArrayLike, n: int) -> Tensor:
    """Return the features of all ``n`` samples that a refresh was given, checked: (n, d)."""
    x = as_features(features)
    if len(x) != n:
        raise InputError(
            f"features have {len(x)} rows, the sampler was made for n={n} samples; "
            "pass the features of the whole data set, in its order"
        )
    return x


def plain(value: Any) -> Any:
    """A value as a state holds it: numbers and text as they are, of other objects the name of their type."""
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def kernel_name(kernel: KernelLike) -> str:
    """A text for a kernel that is the same in another process."""
    known = as_kernel(kernel)
    if isinstance(known, FunctionKernel):
        return getattr(known.function, "__qualname__", type(known.function).__name__)
    return type(known).__name__ if " at 0x" in repr(known) else repr(known)


def derive_seed(*parts: int) -> int:
    """Mix integers into one 63-bit seed (splitmix64), so that streams with related parts are unrelated."""
    mask = 2**64 - 1
    state = 0
    for part in parts:
        state = (state ^ (part & mask)) + 0x9E3779B97F4A7C15 & mask
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        state ^= state >> 31
    return state >> 1
