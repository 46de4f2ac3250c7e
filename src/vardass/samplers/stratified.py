"""One draw from each stratum, weighted by its size: the paper's sampler."""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import KernelLike, as_kernel
from vardass.samplers.base import Chunk, MinibatchSampler, StreamOptions, derive_seed, plain
from vardass.samplers.plan import cycle_table
from vardass.solvers import stratify, stratify_groups
from vardass.solvers.grouped import Groups
from vardass.solvers.labels import SizeLimits
from vardass.solvers.stratification import option_names
from vardass.strata import Strata
from vardass.validate import ArrayLike, as_labels, as_tensor, check_count, check_tensor, unknown
from vardass.view import LowRankView

__all__ = ["GroupedSampler", "StratifiedBatchSampler"]

_OWN_OPTIONS = (
    "kernel",
    "solver",
    "seed",
    "rank",
    "kernel_features",
    "check_finite",
)  # of `stratify`, set by a sampler
_ONLY_REPORTED = ("bound", "progress")  # options of `stratify` that leave the strata as they are
_DRAWS = 8192  # indices drawn at a time
_MOST_DRAWS = 2**20  # at most, where a large stratum is to be gone through without replacement


class GroupedSampler(MinibatchSampler, ABC):
    """A sampler with ``groups`` (n,) and ``shares`` (g,), either None, that a refresh may replace."""

    groups: Tensor | None = None
    shares: Tensor | None = None

    @property
    def strata_count(self) -> int:
        """Number of strata."""
        return self.batch_size

    @property
    def min_size(self) -> int:
        """Minimum number of samples in a stratum; smaller groups cannot be drawn from."""
        return 1

    def _set_groups(self, groups: ArrayLike | None, shares: ArrayLike | None) -> None:
        if groups is None and shares is not None:
            raise InputError(f"shares need groups, got groups=None and {shares!r}; pass groups= too")
        if groups is None:
            self.groups = self.shares = None
            return
        Groups.of(groups, shares, self.n)  # says so if they do not fit
        self.groups = as_labels(groups, self.n, "groups").cpu()
        self.shares = None if shares is None else as_tensor(shares, "shares").double().cpu()

    def refresh(self, features: ArrayLike, *, groups: ArrayLike | None = None, shares: ArrayLike | None = None) -> None:
        """As `MinibatchSampler.refresh`; ``groups`` (n,) and ``shares`` (g,), if given, replace the current ones.

        Groups of zeros have no effect. New groups without shares get the shares of their samples.
        """
        before = self.groups, self.shares
        try:
            if groups is not None or shares is not None:
                self._set_groups(self.groups if groups is None else groups, shares)
            super().refresh(features)
        except BaseException:
            self.groups, self.shares = before
            raise

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "groups": self.groups, "shares": self.shares}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        groups, shares = state["groups"], state["shares"]
        self._set_groups(
            None if groups is None else check_tensor(groups, "groups", (self.n,), low=-1, high=self.n),
            None if shares is None else check_tensor(shares, "shares", (None,), low=0.0),
        )

    def _check_fits(self, strata: Any) -> None:
        """Refuse what is no strata of these samples."""
        if not isinstance(strata, Strata):
            raise InputError(
                f"strata must be Strata, got {type(strata).__name__}; make them with stratify, which takes labels to "
                "start from as init"
            )
        if strata.n != self.n or strata.k != self.strata_count:
            raise InputError(
                f"the strata have n={strata.n}, k={strata.k}, the sampler needs n={self.n}, k={self.strata_count}; "
                "make them from the features of this data set with k=batch_size"
            )


class StratifiedBatchSampler(GroupedSampler):
    """Draw from every stratum of the current features; uniform until the first `refresh`.

    Each batch holds one sample of each of ``batch_size`` strata, in stratum order, with the weight size / n (section
    2.2). The weighted mean of any function is unbiased.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, num_replicas, rank
        As for `MinibatchSampler`.
    kernel : Kernel, name or callable
        The kernel of the loss.
    solver : str
        See `vardass.solvers`: ``"min-sum"``, ``"dynamic-kmeans"`` (the paper), ``"kmeans"``, ...
    replacement : bool
        True: draws are independent, as in the paper. False: each stratum is cycled through in random order, reshuffled
        when strata change, when an epoch begins, and after about a million draws.
    groups : array of shape (n,), optional
        Class labels: strata are made within classes, with as many for each class as its share, so every
        batch keeps the class proportions. `refresh` may replace them.
    shares : array of shape (g,), optional
        Total weight of each group, 0 to g - 1, in each batch, as for `stratify_groups`. The weighted
        mean is then unbiased for the mixture Σ_c share_c P_c of the classes. See `vardass.samplers.class_alignment` for
        the same classes in both domains.
    kernel_rank : int, optional
        Columns of the low-rank kernel features, which `stratify` calls ``rank``.
    options
        Passed to `stratify`: ``min_size``, ``equal``, ``restarts``, ``trials``, ...

    Attributes
    ----------
    strata : Strata or None
        Those of the last refresh.

    Examples
    --------
    >>> z = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    >>> sampler = StratifiedBatchSampler(100, batch_size=8, kernel="mmd", seed=0)
    >>> sampler.refresh(z)
    >>> batch = next(iter(sampler))
    >>> len(batch), round(sum(batch.weights), 6)
    (8, 1.0)
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        kernel: KernelLike = "mmd",
        solver: str = "min-sum",
        replacement: bool = True,
        groups: ArrayLike | None = None,
        shares: ArrayLike | None = None,
        kernel_rank: int | None = None,
        **options: Any,
    ) -> None:
        stream = {name: options.pop(name) for name in StreamOptions.__optional_keys__ if name in options}
        super().__init__(n, batch_size, **stream)
        as_kernel(kernel)  # an unknown one is not to be found out at the first refresh only
        self.kernel = kernel
        known = self.passed_on(solver)
        for name in options:
            if name not in known:
                raise unknown(f"option of {type(self).__name__} with solver {solver!r}:", name, known)
        self.solver = solver
        self.replacement = bool(replacement)
        self._set_groups(groups, shares)
        self.kernel_rank = None if kernel_rank is None else check_count(kernel_rank, "kernel_rank", low=0)
        self.strata_options = options  # of `stratify`
        limits = {name: options[name] for name in ("min_size", "max_size") if options.get(name) is not None}
        for name, limit in limits.items():
            check_count(limit, name)
        # refuses what no strata can have
        limits["min_size"] = self.min_size
        SizeLimits.of(self.n, self.strata_count, equal=bool(options.get("equal", False)), **limits)
        self.strata: Strata | None = None

    @staticmethod
    def passed_on(solver: str = "min-sum") -> list[str]:
        """Options that go to `stratify` with this solver."""
        return [name for name in option_names(solver) if name not in _OWN_OPTIONS]

    @property
    def min_size(self) -> int:
        """Minimum samples of a stratum."""
        return int(self.strata_options.get("min_size", 1))

    def _fit(self, features: Tensor) -> None:
        self._stratify(features)

    def _stratify(self, features: Tensor, kernel_features: LowRankView | None = None) -> None:
        options: dict[str, Any] = {
            "kernel": self.kernel,
            "solver": self.solver,
            "seed": derive_seed(self.seed, self._refreshes),
            # the other solvers begin with k-means++, which is a better start for them
            "warm_start": self.strata if self.solver == "min-sum" else None,
            "min_size": self.min_size,
            "rank": self.kernel_rank,
            "check_finite": False,
            **self.strata_options,
        }
        if self.groups is not None:
            found = stratify_groups(features, self.strata_count, self.groups, shares=self.shares, **options)
        else:
            found = stratify(features, self.strata_count, kernel_features=kernel_features, **options)
        self._use(found)

    def use(self, strata: Strata) -> None:
        """Draw from given strata, for example loaded ones, from the next batch on."""
        self._use(strata)
        self._refreshes += 1
        self._drop_chunk()

    def _use(self, strata: Strata) -> None:
        self._check_fits(strata)
        self.strata = strata.to("cpu")
        self._column_weights = self.strata.exact_weights

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        strata = self.strata
        count = max(1, _DRAWS // self.batch_size) * self.num_replicas
        if strata is None:
            return Chunk(torch.randint(self.n, (count, self.batch_size), generator=generator))
        if not self.replacement:
            whole = min(int(strata.sizes.max()), _MOST_DRAWS // self.batch_size)
            count = -(-max(count, whole) // self.num_replicas) * self.num_replicas
            return Chunk(cycle_table(strata, count, generator), self._column_weights)
        draw = torch.rand(count, self.batch_size, dtype=torch.float64, generator=generator)
        offset = (draw * strata.sizes).long().clamp_max_(strata.sizes - 1)
        return Chunk(strata.order[strata.starts + offset], self._column_weights)

    def _settings(self) -> dict[str, Any]:
        given = {name: plain(value) for name, value in self.strata_options.items() if name not in _ONLY_REPORTED}
        return {**super()._settings(), "strata_options": given}

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "strata": None if self.strata is None else self.strata.to_dict()}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        self.strata = None
        if state["strata"] is not None:
            self._use(Strata.from_dict(state["strata"]))
