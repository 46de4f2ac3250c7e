"""Weights for the batches of any stream that match each batch's statistics to their running mean.

After the abstract of arXiv 2607.20374 (ARROW): for a batch of n rows with statistics φ_i and their running mean μ,

    minimise |Σ_i w_i φ_i - μ|²  over  Σ_i w_i = 1,  0 ≤ w_i ≤ c/n,  Σ_i w_i² ≤ 1/(e n),    c = 4.

The bound of Σ w² is the relaxation. It binds in nearly every batch, so that each has the effective size e n: the
V-statistic counts each row with itself, Σ_i w_i² κ(z_i, z_i), and with a fixed multiple of |w - 1/n|² as a penalty
instead the variance of that sum took back much of the gain.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import CoralKernel, Kernel, KernelLike, LinearKernel, RBFMixture, as_kernel, fitted_kernel
from vardass.validate import (
    ArrayLike,
    as_features,
    as_generator,
    check_count,
    check_number,
    check_seed,
    check_state,
    check_tensor,
    is_readable,
    reading,
)

_MOST = 4.0  # c
_FREQUENCIES = 128  # random ones, for each bandwidth of a mixture


class StreamWeights:
    """Weights for the batches of one domain, without strata, refreshes or a known number of samples.

    Call it once with the features of each batch, gathered over all processes. It adds them to the running statistics
    of the loss and returns weights that match the batch to these statistics; the first batch gets equal weights.
    For an RBF mixture the statistics are the means of random Fourier features of its bandwidths (Rahimi and
    Recht 2007), each bandwidth weighted by its |μ|². For CORAL they are the covariance and, if the loss compares them,
    the mean.

    The weights are not unbiased: they depend on the batch, and statistics lag behind features that move, by about
    1.4 ``half_life`` batches (see the page "Stream weights"). The loader's batches must be random.

    Parameters
    ----------
    kernel : Kernel or name
        Kernel of the loss: an `RBFMixture` (``"mmd"``, ``"rbf"``), a `CoralKernel` (``"coral"``, or the
        ``CORALLoss(...).kernel(d)`` of a loss with other options) or a `LinearKernel`. It is fitted to the first batch.
    half_life : float
        Batches after which a batch counts half. A longer one has less noise, a shorter one tracks features faster.
    effective_size : float
        e, the minimum effective size 1 / Σ w² as a share of the batch, above 0; 1 gives equal weights.
    seed : int
        Seed for the frequencies of the random Fourier features.
    """

    def __init__(
        self, kernel: KernelLike = "mmd", *, half_life: float = 20.0, effective_size: float = 0.85, seed: int = 0
    ) -> None:
        self.kernel = as_kernel(kernel)
        if not isinstance(self.kernel, RBFMixture | CoralKernel | LinearKernel):
            raise InputError(
                "running statistics are known for RBFMixture, CoralKernel and LinearKernel, got "
                f"{self.kernel!r}; use one of these, or a sampler such as BalancedBatchSampler, which takes any kernel"
            )
        self.half_life = check_number(half_life, "half_life", low=0.5)
        self.effective_size = check_number(effective_size, "effective_size", low=1e-3, high=1.0)
        self.seed = check_seed(seed)
        self.batches = 0
        self._mass = 0.0  # rows that the running mean counts, the older the less
        self._statistics: _Statistics | None = None

    @torch.no_grad()
    def __call__(self, features: ArrayLike) -> Tensor:
        """Add a batch (n, d) to the running statistics and return its weights (n,), without gradient.

        They have the dtype and device of the features, float32 for half precision. Values are checked on the CPU only.
        """
        on_host = not isinstance(features, Tensor) or is_readable(features)
        z = as_features(features, check_finite=on_host)
        with torch.autocast(z.device.type, enabled=False):
            if self._statistics is None:
                self._statistics = self._new_statistics(fitted_kernel(self.kernel, z, check_range=False), z.shape[1])
            if self._statistics.columns != z.shape[1]:
                raise InputError(
                    f"a batch has {z.shape[1]} columns, those before had {self._statistics.columns}; make one "
                    f"{type(self).__name__} for each domain and layer"
                )
            self._statistics.follow(z)
            mass = self._mass * 0.5 ** (1.0 / self.half_life) + len(z)
            products = self._statistics.add(z, len(z) / mass)
            self._mass, self.batches = mass, self.batches + 1
            weights = matching_weights(products, effective_size=self.effective_size, most=_MOST)
        return weights.to(z.dtype)

    def _new_statistics(self, kernel: Kernel, columns: int) -> _Statistics:
        if isinstance(kernel, RBFMixture):
            return _Fourier(kernel, columns, self.seed)
        scales = (kernel.scale, kernel.mean_scale) if isinstance(kernel, CoralKernel) else (0.0, 1.0)
        return _Moments(columns, *scales)

    def state_dict(self) -> dict[str, Any]:
        """Everything that future weights depend on."""
        state = {"settings": self._settings(), "batches": self.batches, "mass": self._mass, "statistics": None}
        if self._statistics is not None:
            state["statistics"] = {name: value.clone() for name, value in self._statistics.running.items()}
            state |= {"columns": self._statistics.columns, "kernel": self._statistics.kernel_state}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where ``state`` was taken."""
        check_state(state, self, ("settings", "batches", "mass", "statistics"))
        for key, value in self._settings().items():
            if state["settings"].get(key) != value:
                raise InputError(
                    f"the state has {key}={state['settings'].get(key)!r}, this {type(self).__name__} {key}={value!r}; "
                    "make it with the same arguments or start over"
                )
        batches = check_count(state["batches"], "batches of the state", low=0)
        mass = check_number(state["mass"], "mass of the state", low=0.0)
        statistics = None
        if state["statistics"] is not None:
            kernel = self.kernel.with_state(state["kernel"]) if isinstance(self.kernel, RBFMixture) else self.kernel
            statistics = self._new_statistics(kernel, check_count(state["columns"], "columns of the state"))
            with reading(f"the state of this {type(self).__name__}", "pass what its state_dict() gave"):
                statistics.running = {
                    name: check_tensor(state["statistics"][name], name, value.shape).clone()
                    for name, value in statistics.running.items()
                }
        self._statistics, self.batches, self._mass = statistics, batches, mass

    def _settings(self) -> dict[str, Any]:
        own = {"half_life": self.half_life, "effective_size": self.effective_size, "seed": self.seed}
        return {"kernel": repr(self.kernel), **own}


class _Statistics(ABC):
    """Means over the rows of batches, which are tensors in ``running``."""

    def __init__(self, columns: int, **running: Tensor) -> None:
        self.columns, self.running = columns, running
        self.kernel_state: dict[str, Any] = {}  # what the kernel took from the first batch

    def follow(self, z: Tensor) -> None:
        """Move to the device and dtype of the rows."""
        self.running = {name: value.to(z) for name, value in self.running.items()}

    @abstractmethod
    def add(self, z: Tensor, rate: float) -> Tensor:
        """Move the means by ``rate`` to those of the rows ``z`` (n, d).

        Return the inner products <φ_i - μ, φ_j - μ> of the rows with the new means: (n, n), double.
        """


class _Fourier(_Statistics):
    """Means of random Fourier features: exp(-r |z - z'|²) = E cos(ωᵀ(z - z')) for ω normal with variance 2r."""

    def __init__(self, kernel: RBFMixture, columns: int, seed: int, frequencies: int = _FREQUENCIES) -> None:
        super().__init__(columns, mean=torch.zeros(len(kernel.rates), 2 * frequencies))
        self.kernel_state = kernel.state()
        roots = torch.tensor([math.sqrt(2.0 * rate) for rate in kernel.rates])
        normal = torch.randn(len(roots), frequencies, columns, generator=as_generator(seed))
        self._frequencies = roots[:, None, None] * normal

    def follow(self, z: Tensor) -> None:
        super().follow(z)
        self._frequencies = self._frequencies.to(z)

    def _features(self, z: Tensor) -> Tensor:
        """Features (bandwidths, n, 2 frequencies) of rows (n, d)."""
        phases = torch.matmul(z, self._frequencies.transpose(1, 2))
        return torch.cat([phases.cos(), phases.sin()], 2) / math.sqrt(phases.shape[2])

    def add(self, z: Tensor, rate: float) -> Tensor:
        rows = self._features(z)
        self.running["mean"] = mean = self.running["mean"].lerp(rows.mean(1), rate)
        norms = mean.square().sum(1).sqrt()[:, None, None]
        rows = ((rows - mean[:, None]) * norms).transpose(0, 1).flatten(1)
        return (rows @ rows.T).double()


class _Moments(_Statistics):
    """Mean and covariance: the kernel a (xᵀx')² + b xᵀx' of rows x about the running mean."""

    def __init__(self, columns: int, scale: float, mean_scale: float) -> None:
        super().__init__(columns, mean=torch.zeros(columns), covariance=torch.zeros(columns, columns))
        self._scales = scale, mean_scale

    def add(self, z: Tensor, rate: float) -> Tensor:
        mean, covariance = self.running["mean"], self.running["covariance"]
        centre = z.mean(0)
        rows, away = z - centre, centre - mean
        # of the two covariances, each about its own mean, and of the means
        covariance = covariance.lerp(rows.T @ rows / len(z), rate) + rate * (1.0 - rate) * torch.outer(away, away)
        mean = mean + rate * away
        self.running = {"mean": mean, "covariance": covariance}
        scale, mean_scale = self._scales
        covariance, rows = covariance.double(), z.double() - mean.double()
        linear = rows @ rows.T
        mixed = ((rows @ covariance) * rows).sum(1)
        squares = linear.square() - mixed[:, None] - mixed + covariance.square().sum()
        return scale * squares + mean_scale * linear


_STEPS = 40  # |Σ w φ - μ|² is then nearly the least: the rest is below 0.002 of that of equal weights
_STIFFNESS, _RELAXATION = 0.3, 1.6  # of the splitting, for products with a mean diagonal of 1


@torch.no_grad()
def matching_weights(products: Tensor, *, effective_size: float, most: float, steps: int = _STEPS) -> Tensor:
    """Weights w (n,) that make wᵀ A w small; A (n, n) are inner products of the rows' deviations.

    The minimum over Σ w = 1, 0 ≤ w ≤ ``most``/n and Σ w² ≤ 1/(``effective_size`` n) is found by splitting (ADMM)
    between the plane Σ w = 1, the box and the ball. With a fixed number of steps a GPU need not wait.
    """
    n = len(products)
    even, limit, radius = 1.0 / n, most / n, math.sqrt((1.0 / effective_size - 1.0) / n)
    form = products / products.diagonal().mean().clamp_min(torch.finfo(products.dtype).tiny)
    form.diagonal().add_(2.0 * _STIFFNESS)
    inverse = torch.linalg.inv(form)
    column = inverse.sum(1)
    start = column / column.sum()
    step = _STIFFNESS * (inverse - torch.outer(column, start))
    # all of them as deviations from equal weights; few operations, because their number is what the time goes to
    start = start - even
    ahead = products.new_zeros(2, n)
    nearest = torch.zeros_like(ahead)
    box, ball, in_box, in_ball = ahead[:1], ahead[1:], nearest[:1], nearest[1:]
    for _ in range(steps):
        torch.clamp(box, -even, limit - even, out=in_box)
        torch.renorm(ball, 2, 0, radius, out=in_ball)
        w = torch.addmv(start, step, torch.lerp(ahead, nearest, 2.0).sum(0))
        ahead.add_(w - nearest, alpha=_RELAXATION)
    found = _in_capped_simplex(w + even, limit) - even
    return even + torch.renorm(found[None], 2, 0, radius)[0]


def _in_capped_simplex(w: Tensor, limit: float) -> Tensor:
    """Nearest point (n,) with sum 1 and entries from 0 to ``limit``: w - τ, clamped, for the τ that gives the sum."""
    shifts = torch.cat([w, w - limit]).sort().values  # where an entry begins or ends to move with τ
    sums = (w - shifts[:, None]).clamp(0.0, limit).sum(1)
    # two places at once: an index without dimensions would be read on the host
    places = ((sums >= 1.0).sum() - 1).clamp(0, len(shifts) - 2) + torch.arange(2, device=w.device)
    above, below = sums[places].unbind()
    share = (above - 1.0) / (above - below).clamp_min(torch.finfo(w.dtype).tiny)
    left, right = shifts[places].unbind()
    shift = torch.lerp(left, right, share.clamp(0.0, 1.0))
    return (w - shift).clamp(0.0, limit)
