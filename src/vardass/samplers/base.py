"""What all batch samplers share: a seeded stream of batches that can be saved, restored and refreshed."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Protocol, TypedDict, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from vardass.backend import has_numba
from vardass.errors import InputError, VardassWarning
from vardass.kernels import FunctionKernel, KernelLike, as_kernel
from vardass.processes import process_group
from vardass.registry import declared_options
from vardass.samplers.weighted_batches import IndexBatch
from vardass.validate import ArrayLike, as_features, check_count, check_seed, check_state

__all__ = ["BatchStream", "Chunk", "MinibatchSampler", "RefreshableSampler", "StreamOptions", "derive_seed"]

_STATE_VERSION = 1
_LISTED = 8192  # indices that are held as a list
# restored, or compared apart
_NOT_COMPARED = ("seed", "batches", "endless", "num_replicas", "rank", "groups", "shares")
_SAME = ("sampler", "version", "n", "batch_size", "num_replicas")
_COUNTS = ("epoch", "position", "refreshes", "base")  # whole numbers in a state


@runtime_checkable
class RefreshableSampler(Protocol):
    """What a sampler of your own needs to be used where those of this package are.

    `Refresher` calls `refresh` with the features of all samples when its policy says so. A loop takes the batches
    as from any ``DataLoader(batch_sampler=...)``; with `with_weights` it gets the weights of each `IndexBatch`, and
    1 / batch size where these are None. `variance_report` measures it, and a checkpoint holds its `state_dict`. An
    attribute ``strata``, a `Strata` or None, is logged by `Refresher` if there is one, and ``kernel`` is what drift is
    measured in. `MinibatchSampler` has all of this but the drawing of batches: a subclass writes ``_make_chunk``,
    and ``_fit``, ``_extra_state`` and ``_load_extra_state`` if it takes something from features.

    Attributes
    ----------
    n : int
        Number of samples in the data set.
    batch_size : int
        Samples in a batch.
    needs_features : bool
        Whether `refresh` makes a difference; where it is False no features are computed.

    Examples
    --------
    >>> from vardass import BalancedBatchSampler
    >>> isinstance(BalancedBatchSampler(100, 10), RefreshableSampler), isinstance([[0, 1]], RefreshableSampler)
    (True, False)
    """

    n: int
    batch_size: int
    needs_features: bool

    def __iter__(self) -> Iterator[IndexBatch]:
        """Yield batches of indices with their weights; endlessly for the trainer."""

    def refresh(self, features: ArrayLike) -> None:
        """Take what is needed from the current ``features`` (n, d); it applies from the next batch on."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the stream depends on: numbers, text, tensors, lists and dictionaries."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the stream that ``state`` was taken from."""


class StreamOptions(TypedDict, total=False):
    """Options of every sampler; `MinibatchSampler` explains them."""

    seed: int
    batches: int | None
    endless: bool
    num_replicas: int | None
    rank: int | None


class Chunk(NamedTuple):
    """Some batches in a row.

    Attributes
    ----------
    rows : Tensor of shape (m, batch_size)
        Indices of m batches.
    weights : Tensor of shape (batch_size,) or None
        Weights of each batch's samples, summing to 1; None for uniform.
    tail : Tensor of shape (fewer than batch_size,) or None
        A last, smaller batch.
    strata : Tensor of shape (batch_size,) or None
        Stratum of each sample, see `IndexBatch`; None where the samples of a batch depend on one another.
    pool : int or None
        n, where draws from one stratum are without replacement.

    Examples
    --------
    >>> chunk = Chunk(torch.tensor([[0, 3], [2, 1]]), weights=torch.tensor([0.25, 0.75]))
    >>> len(chunk.rows), chunk.tail
    (2, None)
    """

    rows: Tensor
    weights: Tensor | None = None
    tail: Tensor | None = None
    strata: Tensor | None = None
    pool: int | None = None


class BatchStream(Sampler[IndexBatch], ABC):
    """A stream of batches for one iterator at a time."""

    _iteration: object | None = None  # the iterator that was begun last

    @abstractmethod
    def _batches(self) -> Iterator[IndexBatch]:
        """Yield the batches."""

    @abstractmethod
    def _join_process_group(self) -> None:
        """Share the stream with the processes of a group, before the first batch, unless that is settled."""

    def __iter__(self) -> Iterator[IndexBatch]:
        self._join_process_group()
        return self._one_iterator()

    def _one_iterator(self) -> Iterator[IndexBatch]:
        mine = self._iteration = object()
        for batch in self._batches():
            yield batch
            if self._iteration is not mine:
                raise InputError(
                    f"two iterators take turns on one {type(self).__name__}, and each would get a part of its stream; "
                    "give every loader a sampler of its own, with another seed"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iteration": None}


class MinibatchSampler(BatchStream, ABC):
    """A ``torch.utils.data.Sampler`` of batches, for ``DataLoader(batch_sampler=...)``.

    The stream is a pure function of the seed, the epoch and the features of the refreshes, computed a chunk
    at a time. Its state is the present chunk and what the last refresh found; it is the same on every process,
    and restoring it continues the stream bit for bit.

    Parameters
    ----------
    n : int
        Number of samples in the data set.
    batch_size : int
        Samples in a batch.
    seed : int
        The same seed gives the same stream.
    batches : int, optional
        Batches in an epoch, over all processes; by default as many as cover n samples once, remainder left
        out.
    endless : bool
        Never stop; ``len`` is then undefined.
    num_replicas, rank : int, optional
        Under several processes with one seed, process ``rank`` gets every ``num_replicas``-th batch of the
        stream. Batches left over at the end of an epoch are dropped. Without them the sampler asks the process
        group of ``torch.distributed``, if there is one, when the first batch is taken. ``num_replicas=1`` gives every
        process all batches: set it where a library shares them out, as ``accelerator.prepare`` does. See also `shard`.

    Attributes
    ----------
    needs_features : bool
        Whether `refresh` makes a difference.
    epoch, position : int
        Where the stream is: batches already handed to this process in this epoch.

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

    needs_features: ClassVar[bool] = True
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
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise InputError(f"seed must be a whole number, got {seed!r}; seed=0 is the default")
        self.seed = check_seed(seed)
        self.endless = bool(endless)
        self._total = self._default_batches() if batches is None else check_count(batches, "batches")
        self._set_processes(1 if num_replicas is None else num_replicas, 0 if rank is None else rank)
        self._is_shared = num_replicas is not None or rank is not None  # whether the processes are settled
        self.epoch = 0
        self.position = 0
        self._started = False  # whether the current epoch has handed out a batch
        self._refreshes = 0
        self._base = 0  # round at which the present strata or plan took over
        self._chunk: Chunk | None = None
        self._held = 0  # batches of the chunk that are for this process
        self._lists: list[list[int]] = []  # some of them, from number `_listed` on
        self._listed = 0
        self._weights: list[float] | None = None
        self._strata: list[int] | None = None
        self._first = 0  # round of the first row of the chunk

    def _default_batches(self) -> int:
        return self.n // self.batch_size

    # --- several processes ----------------------------------------------------------------------------

    def shard(self, num_replicas: int, rank: int) -> None:
        """Give this process every ``num_replicas``-th batch from number ``rank`` on; before the first batch.

        Raises
        ------
        InputError
            If the stream is shared out already in another way, or has begun.
        """
        if (num_replicas, rank) == (self.num_replicas, self.rank):
            self._is_shared = True
            return
        if self._is_shared:
            raise InputError(
                f"this sampler is shared out already, with rank={self.rank} of num_replicas={self.num_replicas}, got "
                f"rank={rank} of {num_replicas}; leave out num_replicas and rank where the sampler is made"
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
            f"there is a process group of {group[0]}, but this {type(self).__name__} began without it, so that every "
            "process gets the same batches; make it after init_process_group, or call shard before the first batch",
            VardassWarning,
            stacklevel=4,
        )

    # --- for subclasses -------------------------------------------------------------------------------

    @abstractmethod
    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        """Make the next batches, a multiple of ``num_replicas``.

        ``rounds`` is how many batches this process has had since the last refresh or epoch start.
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
        """Options that the stream depends on, in plain values: a state of others is refused.

        They are the keyword-only arguments of all constructors that an attribute of the same name holds.
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
        """Start the given epoch at the next iteration; one whose state was just restored is continued."""
        epoch = check_count(epoch, "epoch", low=0)
        if self._started or epoch != self.epoch:
            self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self.position, self._base, self._started = epoch, 0, 0, False
        self._chunk = None
        self._new_epoch()

    def _batches(self) -> Iterator[IndexBatch]:
        # a stream that was left in the middle of an epoch goes on only if its state was restored
        if self._started:
            self._begin_epoch(self.epoch + 1)
        while self.endless or self.position < self._rounds:
            row = self._row(self.position)
            self._started = True
            self.position += 1
            yield row
        self._begin_epoch(self.epoch + 1)

    def _row(self, position: int) -> IndexBatch:
        offset = position - self._first
        if self._chunk is None or not 0 <= offset < self._held:
            self._load_chunk(position)
            offset = position - self._first
        assert self._chunk is not None
        if not 0 <= offset - self._listed < len(self._lists):
            self._list_batches(self._chunk, offset)
        batch = IndexBatch(self._lists[offset - self._listed])
        batch.weights = self._weights
        batch.strata = self._strata if self._strata is None else self._strata[: len(batch)]
        batch.pool = self._chunk.pool
        return batch

    def _load_chunk(self, position: int) -> None:
        rounds = position - self._base
        generator = torch.Generator().manual_seed(
            derive_seed(self.seed, self.epoch, self._refreshes, self._base, rounds)
        )
        self._set_chunk(self._make_chunk(rounds, generator), position)

    def _set_chunk(self, chunk: Chunk, first: int) -> None:
        self._chunk, self._first = chunk, first
        self._held = (len(chunk.rows) + (chunk.tail is not None)) // self.num_replicas
        self._lists = []
        self._weights = None if chunk.weights is None else chunk.weights.tolist()
        self._strata = None if chunk.strata is None else chunk.strata.tolist()

    def _list_batches(self, chunk: Chunk, start: int) -> None:
        # some at a time: a list takes several times the memory of a tensor, and a chunk may hold a whole epoch
        stop = min(start + max(1, _LISTED // self.batch_size), self._held)
        first, last = (self.rank + number * self.num_replicas for number in (start, stop - 1))
        self._lists, self._listed = chunk.rows[first : last + 1 : self.num_replicas].tolist(), start
        if chunk.tail is not None and last == len(chunk.rows):
            self._lists.append(chunk.tail.tolist())

    # --- refresh --------------------------------------------------------------------------------------

    def refresh(self, features: ArrayLike) -> None:
        """Recompute strata or plan from the current ``features`` (n, d); they apply from the next batch on.

        Batches that a DataLoader has already asked for keep the weights that they were drawn with. A state that
        torchdata's StatefulDataLoader saves belongs to the last batch that arrived: a refresh while batches
        drawn before it are still on their way is not part of it, so refresh again after such a restore.

        Under several processes let `Refresher` call this: it sends what the first process found to all. Features that
        differ between processes, as with BatchNorm they do, would give each process strata of its own.
        """
        if not self.needs_features:
            return
        if self._has_begun:
            self._join_process_group()
        x = features_of_all(features, self.n)
        self._refreshes += 1
        try:
            self._fit(x)
        except BaseException:  # features that cannot be used leave the stream as it was
            self._refreshes -= 1
            raise
        self._drop_chunk()

    def fitted_state(self) -> dict[str, Any]:
        """What the last refresh found, to be sent to the other processes."""
        return {"refreshes": self._refreshes, "extra": self._extra_state()}

    def use_fitted_state(self, state: dict[str, Any]) -> None:
        """Draw from what another process found, from the next batch on, as after a `refresh`."""
        self._drop_chunk()
        self._load_extra_state(state["extra"])
        self._refreshes = state["refreshes"]

    def _drop_chunk(self) -> None:
        """Let the next batch be the first of what was just fitted."""
        self._before_drop()
        self._base = self.position
        self._chunk = None

    def _before_drop(self) -> None:
        """Take note of the present chunk before it is dropped."""

    def sample_batches(self, count: int, *, seed: int = 0) -> Chunk:
        """Draw ``count`` full batches from the present strata or plan, without moving the stream: (count, batch_size).

        Samplers that visit each sample once draw from whole epochs, wherever in its epoch the stream is.
        """
        count = check_count(count, "count")
        rows: list[Tensor] = []
        have = turn = 0
        while have < count:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, seed, turn, -1))
            chunk = self._sample_chunk(generator)
            rows.append(chunk.rows)
            have += len(chunk.rows)
            turn += 1
        return chunk._replace(rows=torch.cat(rows)[:count], tail=None)

    def _sample_chunk(self, generator: torch.Generator) -> Chunk:
        return self._make_chunk(0, generator)

    # --- state ----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # a copy goes on where the stream is, as one whose state was restored
        return {**super().__getstate__(), "_started": False}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the stream depends on; the same on every process.

        It is that of the last batch handed out. A DataLoader with workers asks ahead, by ``prefetch_factor`` batches
        for each: a run that resumes from this state leaves them out. Save the state of torchdata's StatefulDataLoader
        there, or that of a ``CheckpointedSampler``.
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

        The next iteration yields what was left of the epoch, which after its last batch is nothing.
        """
        check_state(state, self)
        group = None if self._is_shared else process_group()
        if group is not None and state.get("num_replicas") == group[0] and not self._has_begun:
            self.shard(*group)
        mine = self.state_dict()
        if missing := [key for key in mine if key not in state]:
            raise InputError(
                f"the state has the keys {sorted(state)}, but not {missing}; "
                f"pass what {type(self).__name__}.state_dict() gave"
            )
        for part in (state["settings"], state["extra"], state["chunk"] or {}):
            check_state(part, self)
        theirs = {**state, **state["settings"]}
        for key, value in {**{key: mine[key] for key in _SAME}, **mine["settings"]}.items():
            if theirs.get(key) != value:
                remedy = "make the sampler with the same arguments"
                if key == "numba":  # the two backends take steps in another order, so later batches would differ
                    remedy = "resume where numba is" if value is False else "resume where numba is not"
                raise InputError(
                    f"the state has {key}={theirs.get(key)!r}, this sampler {key}={value!r}; {remedy} or start anew"
                )
        counts = [check_count(state[key], f"{key} of the state", low=0) for key in _COUNTS]
        seed = check_seed(state["seed"])
        self._load_extra_state(state["extra"])
        self.seed = seed
        self.epoch, self.position, self._refreshes, self._base = counts
        self._chunk = None
        if state["chunk"] is not None:
            saved = dict(state["chunk"])
            first = saved.pop("first")
            self._set_chunk(Chunk(**saved), first)
        # the next iteration continues instead of starting another epoch
        self._started = False


def features_of_all(features: ArrayLike, n: int) -> Tensor:
    """Return the features of all ``n`` samples that a refresh was given, checked: (n, d)."""
    if features is None:
        raise InputError(
            f"refresh got None where the features of n={n} samples belong; extract them first, for example "
            "with extract_features, and draw uniform batches until then"
        )
    x = as_features(features)
    if len(x) != n:
        raise InputError(
            f"features have {len(x)} rows, the sampler was made for n={n} samples; "
            "pass the features of the whole data set, in its order"
        )
    return x


def plain(value: Any) -> Any:
    """A value as a state holds it, to be compared: numbers and text as they are, of other objects their type."""
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def kernel_name(kernel: KernelLike) -> str:
    """A kernel in words that are the same in another process."""
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
