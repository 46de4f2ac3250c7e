"""Who asks a sampler for batches: one loader at a time, one of several processes, with workers that ask ahead."""

from __future__ import annotations

import sys
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from vardass.errors import InputError, VardassWarning
from vardass.samplers.weighted_batches import IndexBatch

__all__ = ["WatchedSampler", "called_by_torchdata", "self_of_caller", "shares_out"]


class WatchedSampler(Sampler[IndexBatch]):
    """A stream of batches that notices how it is used where that would go wrong in silence.

    Whoever calls ``iter`` or ``len`` is looked at, by the ``self`` of the calling frame: libraries wrap samplers, and
    have no other way to tell them.
    """

    _iteration: object | None = None  # the iterator that was begun last
    _loader: weakref.ref[Any] | None = None  # a plain DataLoader with workers that takes the batches
    _has_twin = False  # whether a sampler of another data set that draws in step began after this one

    @abstractmethod
    def _batches(self) -> Iterator[IndexBatch]:
        """Yield the batches."""

    @abstractmethod
    def _find_processes(self, is_shared_out: bool) -> None:
        """Learn before the first batch which processes share the stream; ``is_shared_out`` if the caller sees to it."""

    def __iter__(self) -> Iterator[IndexBatch]:
        caller = self_of_caller()
        self._find_processes(shares_out(caller, self))
        self._loader = weakref.ref(caller) if _asks_ahead(caller) else None
        return self._one_iterator(_data_of(caller))

    def _one_iterator(self, data: Any) -> Iterator[IndexBatch]:
        mine = self._iteration = object()
        if data is not None:
            _find_twin(self, data)
            _RUNNING[self] = data
        try:
            for batch in self._batches():
                yield batch
                if self._iteration is not mine:
                    raise InputError(
                        f"two iterators take turns on one {type(self).__name__}, and each would get a part of its "
                        "stream; give every loader a sampler of its own, with another seed"
                    )
                if self._has_twin:
                    self._warn_of_twin()
        finally:
            if self._iteration is mine:
                _RUNNING.pop(self, None)

    def _warn_of_twin(self) -> None:
        self._has_twin = False
        _, n, seed = _draws(self) or (None, None, None)
        warnings.warn(
            f"two loaders of different data sets take turns, and both have a {type(self).__name__} with n={n} and "
            f"seed={seed}: their draws move in step and are not independent; give one of them another seed",
            VardassWarning,
            stacklevel=3,
        )

    def _warn_of_batches_under_way(self) -> None:
        """Say so where a state is taken that is ahead of training."""
        loader = None if self._loader is None else self._loader()
        ahead = 0 if loader is None else getattr(loader, "_send_idx", 0) - getattr(loader, "_rcvd_idx", 0)
        if ahead > 0:
            warnings.warn(
                f"this state is {ahead} batches ahead of training: the workers of a DataLoader have asked for them "
                "already, and a run that resumes from it leaves them out; use torchdata's StatefulDataLoader and save "
                "its state, or num_workers=0",
                VardassWarning,
                stacklevel=3,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_iteration", "_loader", "_has_twin")}


_RUNNING: weakref.WeakKeyDictionary[WatchedSampler, Any] = weakref.WeakKeyDictionary()
"""Samplers whose batches a loader is taking, and its data set."""


def _draws(sampler: Any) -> tuple[type, int, int] | None:
    """What the first draws depend on; None for samplers that do not say, or are in step on purpose."""
    is_known = hasattr(sampler, "n") and hasattr(sampler, "seed") and not getattr(sampler, "plans_both_domains", False)
    return (type(sampler), sampler.n, sampler.seed) if is_known else None


def _find_twin(sampler: WatchedSampler, data: Any) -> None:
    """Let samplers under way that draw in step with this one, for other data, notice it when they are asked again."""
    mine = _draws(sampler)
    for other, its_data in list(_RUNNING.items()):
        if mine is not None and other is not sampler and its_data is not data and _draws(other) == mine:
            other._has_twin = True


def _data_of(caller: Any) -> Any:
    """The data set of the loader that asks, without weights around it; None if something else asks."""
    data: Any = getattr(caller, "_dataset", None)
    return data.dataset if getattr(data, "weights_attached", False) else data


def self_of_caller() -> Any:
    """``self`` of whoever called the method that calls this."""
    return sys._getframe(2).f_locals.get("self")


def shares_out(caller: Any, sampler: Any) -> bool:
    """Whether a wrapper gives each process its share of the batches, as Accelerate's BatchSamplerShard does."""
    is_wrapper = caller is not sampler and getattr(caller, "batch_sampler", None) is sampler
    return is_wrapper and hasattr(caller, "num_processes") and hasattr(caller, "process_index")


def _asks_ahead(caller: Any) -> bool:
    # torchdata's loader has classes of its own, and takes a state with each batch
    return type(caller).__module__ == "torch.utils.data.dataloader" and getattr(caller, "_num_workers", 0) > 0


def called_by_torchdata() -> bool:
    """Whether the method that calls this was called by torchdata."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torchdata")
