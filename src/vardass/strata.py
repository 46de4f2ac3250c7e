"""Strata: a partition of n samples into k groups, with the exact variance it gives."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.files import atomic_write, parse_json
from vardass.kernels import KernelLike, LinearKernel, fitted_kernel
from vardass.validate import ArrayLike, as_features, as_weights, check_count, reading

__all__ = ["LowerBound", "Strata"]

_FORMAT = "vardass-strata"
_VERSION = 1
_PLAIN_FIELDS = ("k", "variance", "uniform_variance", "variance_stderr", "solver", "kernel", "info", "shares")


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on Var(μ̂) over all partitions into k strata: it is at least ``variance``.

    ``stderr`` is 0 if the bound is rigorous; otherwise it was estimated from sampled rows.
    """

    variance: float
    stderr: float


class StrataSummary:
    """Measures of strata, whether or not their labels are held in memory."""

    sizes: Tensor
    variance: float
    uniform_variance: float
    bound: LowerBound | None

    @property
    def reduction(self) -> float:
        """How many times smaller the variance is than with uniform draws."""
        if self.variance > 0:
            return self.uniform_variance / self.variance
        return 1.0 if self.uniform_variance == 0 else float("inf")

    @property
    def gap(self) -> float | None:
        """Relative distance to the lower bound: 0.03 means at most 3 % above the best possible partition."""
        if self.bound is None or self.bound.variance <= 0:
            return None
        return self.variance / self.bound.variance - 1.0

    @property
    def singletons(self) -> int:
        """Number of strata with a single sample, which is then in every minibatch; ``min_size=2`` avoids them."""
        return int((self.sizes == 1).sum())


@dataclass(frozen=True, eq=False)
class Strata(StrataSummary):
    """A partition of n samples into k non-empty strata.

    Attributes
    ----------
    labels : Tensor of shape (n,)
        Stratum of each sample, 0 to k - 1; with ``shares`` also -1, for samples that are never drawn.
    k : int
        Number of strata, the minibatch size that draws one sample from each.
    variance : float
        Var(μ̂) of the weighted minibatch mean embedding, one uniform draw from each stratum (equation 7).
    uniform_variance : float
        The same for k uniform draws with replacement.
    variance_stderr : float
        Standard error of ``variance`` if there were too many within-stratum pairs to sum; 0 means exact.
    solver, kernel : str
        Solver and kernel that made the strata.
    bound : LowerBound or None
        Lower bound on the variance of any partition, if requested.
    info : mapping
        Details of the solver: passes, seconds, rank, captured and irreducible share.
    shares : sequence of float or None
        Weight of each stratum, summing to 1, where it is not size / n: ``stratify_groups`` sets them for a mixture of
        groups other than the data's.

    Examples
    --------
    >>> strata = Strata(torch.tensor([0, 0, 1, 1, 1]), k=2, variance=0.2, uniform_variance=0.5)
    >>> strata.sizes.tolist(), strata.weights.tolist(), strata.reduction
    ([2, 3], [0.4..., 0.6...], 2.5)
    """

    labels: Tensor
    k: int
    variance: float
    uniform_variance: float
    variance_stderr: float = 0.0
    solver: str = ""
    kernel: str = ""
    bound: LowerBound | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    shares: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.labels.ndim != 1 or self.labels.dtype != torch.int64:
            raise InputError(
                f"labels must be int64 of shape (n,), got {self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )
        least = 0 if self.shares is None else -1
        if len(self.labels) == 0 or int(self.labels.min()) < least or int(self.labels.max()) >= self.k:
            raise InputError(f"labels must lie in 0..{self.k - 1}, one for each sample")
        if int(self.sizes.min()) == 0:
            empty = int((self.sizes == 0).sum())
            raise InputError(f"{empty} of k={self.k} strata are empty; every stratum needs a sample")
        if self.shares is not None and len(self.shares) != self.k:
            raise InputError(f"shares are one for each of k={self.k} strata, got {len(self.shares)}")
        if self.shares is not None:
            as_weights(torch.tensor(self.shares, dtype=torch.float64), self.k, self.labels, "shares")

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.labels)

    @cached_property
    def sizes(self) -> Tensor:  # type: ignore[override]
        """Samples in each stratum: (k,) int64."""
        return torch.bincount(self.labels + 1, minlength=self.k + 1)[1:]

    @cached_property
    def exact_weights(self) -> Tensor:
        """Weight of the draw from each stratum, size / n unless there are ``shares``: (k,) float64, sums to 1."""
        if self.shares is not None:
            return torch.tensor(self.shares, dtype=torch.float64, device=self.labels.device)
        return self.sizes.double() / self.n

    @cached_property
    def weights(self) -> Tensor:
        """`exact_weights` as float32."""
        return self.exact_weights.float()

    @cached_property
    def row_weights(self) -> Tensor:
        """Weight of each sample in the expected batch mean, 1 / n without shares: (n,) float64."""
        each = self.exact_weights / self.sizes
        return torch.cat([each, each.new_zeros(1)])[self.labels]  # -1, in no stratum, is the last

    @cached_property
    def order(self) -> Tensor:
        """Indices of samples in strata, sorted: stratum h is ``order[starts[h]:starts[h] + sizes[h]]``."""
        return self.labels.argsort(stable=True)[self.n - int(self.sizes.sum()) :]

    @cached_property
    def starts(self) -> Tensor:
        """First position of each stratum in ``order``: (k,)."""
        return self.sizes.cumsum(0) - self.sizes

    def members(self, stratum: int) -> Tensor:
        """Indices of the samples in one stratum."""
        start = int(self.starts[stratum])
        return self.order[start : start + int(self.sizes[stratum])]

    @torch.no_grad()
    def assign(self, new: ArrayLike, features: ArrayLike, *, kernel: KernelLike = "mmd") -> Tensor:
        """Find the stratum, of (m,), that each new sample adds least to: argmin_h Σ_{z in S_h} |φ(new) - φ(z)|².

        This is the increase of the objective (equation 8). Nearly all samples that the strata were made from get their
        own labels back; all of them after ``min-sum`` on the full kernel matrix with ``tol=0`` and without limits on
        sizes. Takes m n kernel evaluations, a block at a time.

        Parameters
        ----------
        new : array of shape (m, d)
            Features to find strata for.
        features : array of shape (n, d)
            The features that the strata were made from, in the same order.
        kernel : Kernel, str or callable
            The kernel of the strata. Fitted to ``features`` unless it is fitted.
        """
        x = as_features(features)
        z = as_features(new, "new features").to(x)
        if len(x) != self.n or z.shape[1] != x.shape[1]:
            raise InputError(
                f"the strata are of n={self.n} samples, got features {tuple(x.shape)} and new ones {tuple(z.shape)}; "
                "pass the features that the strata were made of, and new ones of the same width"
            )
        fitted = fitted_kernel(kernel, x)
        fitted.check_range(z)
        if isinstance(fitted, LinearKernel):  # distances stay, and far from the origin their rounding errors go
            x, z = x - x.mean(0), z - x.mean(0)
        labels = self.labels.to(x.device)
        sizes = self.sizes.to(x.device).double()
        own = sizes.new_zeros(self.k).index_add_(0, labels, fitted.diag(x).double())
        outer = fitted.diag(z).double()
        found = labels.new_empty(len(z))
        for rows, block in fitted.blocks(z, x):
            sums = sizes.new_zeros(len(block), self.k).index_add_(1, labels, block.double())
            found[rows] = (outer[rows, None] * sizes + own - 2.0 * sums).argmin(1)
        return found

    def to(self, device: torch.device | str) -> Strata:
        """Return the same strata with labels on ``device``."""
        return replace(self, labels=self.labels.to(device))

    def to_dict(self) -> dict[str, Any]:
        """Labels as a tensor and everything else as plain values."""
        fields = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        bound = None if self.bound is None else vars(self.bound)
        return {"format": _FORMAT, "version": _VERSION, "labels": self.labels, **fields, "bound": bound}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Strata:
        """Restore strata from the result of `to_dict`."""
        if state.get("format") != _FORMAT or state.get("version") != _VERSION:
            raise InputError(f"not strata of version {_VERSION}; make them with Strata.to_dict or Strata.save")
        with reading("this state of strata", "make it with Strata.to_dict or Strata.save"):
            bound = None if state["bound"] is None else LowerBound(**state["bound"])
            fields = {name: state[name] for name in _PLAIN_FIELDS}
            fields["k"] = check_count(fields["k"], "k", high=len(state["labels"]))
            numbers = [fields[name] for name in ("variance", "uniform_variance", "variance_stderr")]
            numbers += [] if bound is None else vars(bound).values()
            kinds = (*((value, Real) for value in numbers), (fields["info"], Mapping))
            for value, kind in (*kinds, (fields["solver"], str), (fields["kernel"], str)):
                if not isinstance(value, kind) or value != value:  # NaN is unequal to itself
                    raise TypeError(f"{value!r} in place of a {kind.__name__}")
            return cls(labels=state["labels"], bound=bound, **fields)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to an ``.npz`` file that holds only numbers and text; a crash leaves the old file whole."""
        meta = self.to_dict()
        labels = meta.pop("labels").cpu().numpy()
        weights = self.weights.cpu().numpy()
        with atomic_write(path) as file:
            np.savez_compressed(file, labels=labels, weights=weights, meta=np.array(json.dumps(meta)))
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Strata:
        """Read what ``save`` wrote. No pickle is read, so a file from elsewhere can do no harm."""
        name = os.fspath(path)
        try:
            file = np.load(path, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise InputError("it holds a single array")
            with file:
                labels = torch.from_numpy(file["labels"].astype(np.int64, casting="safe"))
                state = {**parse_json(str(file["meta"])), "labels": labels}
        except FileNotFoundError:
            raise InputError(f"no strata file at {name}") from None
        except Exception as error:  # numpy, zipfile, zlib and json each raise their own for a foreign file
            raise InputError(f"{name} is not a strata file ({error}); write one with Strata.save") from None
        try:
            return cls.from_dict(state)
        except InputError as error:
            raise InputError(f"{name} cannot be read: {error}") from None

    def __repr__(self) -> str:
        relative = self.variance / self.uniform_variance if self.uniform_variance > 0 else 0.0
        text = f"n={self.n}, k={self.k}, variance={self.variance:.4g}, relative to uniform={relative:.4g}"
        text += f", sizes={int(self.sizes.min())}..{int(self.sizes.max())}"
        text += "" if self.gap is None else f", gap<={self.gap:.1%}"
        return f"Strata({text}{f', solver={self.solver!r}' if self.solver else ''})"
