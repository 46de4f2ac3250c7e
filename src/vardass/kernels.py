"""Positive-definite kernels on feature rows.

A kernel is a small immutable object. ``fit`` returns a copy with whatever it takes from the data (CORAL's
mean, a data-driven scale); ``matrix`` and ``diag`` evaluate it. ``matrix`` is differentiable, follows the
device and dtype of its input, and never runs under autocast. `fitted_kernel` fits a kernel unless it is fitted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from vardass.backend import compiled_loops
from vardass.errors import InputError
from vardass.registry import Registry
from vardass.validate import is_readable, row_blocks

__all__ = [
    "PAPER_GAMMAS",
    "CoralKernel",
    "EnergyKernel",
    "FunctionKernel",
    "Kernel",
    "KernelLike",
    "LinearKernel",
    "RBFMixture",
    "as_kernel",
    "fitted_kernel",
]

PAPER_GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0)
"""Bandwidths of the paper's mixture (section 3); DomainBed adds 100 and 1000."""

_BLOCK_BYTES = 64 * 2**20  # of a block and its temporaries
_BATCH_PAIRS = 2**20  # pairs of rows that two batches of a training loop may have


class Kernel(ABC):
    """A positive-definite function κ(z, z') = <φ(z), φ(z')>.

    Examples
    --------
    >>> x = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
    >>> kernel = RBFMixture(scale="median")
    >>> kernel.is_fitted, kernel.fit(x).is_fitted
    (False, True)
    >>> kernel.fit(x).matrix(x).shape, kernel.fit(x).diag(x)
    (torch.Size([3, 3]), tensor([5., 5., 5.]))
    """

    _taken: ClassVar[str] = ""  # the field that ``fit`` sets, of the kernels here

    @property
    def is_fitted(self) -> bool:
        """Whether the kernel can be evaluated; False if it must be fitted to data first."""
        return True

    def fit(self, x: Tensor) -> Kernel:
        """Return a copy with its data-driven parts, if any, recomputed from ``x`` of shape (n, d)."""
        return self

    def state(self) -> dict[str, Any]:
        """What ``fit`` took from the data, for a checkpoint; a kernel with its own ``fit`` overrides it."""
        value = getattr(self, self._taken, None)
        return {} if value is None else {self._taken: value}

    def with_state(self, state: Mapping[str, Any]) -> Kernel:
        """Return this kernel with the fitted parts in ``state``, see `state`; an empty state changes nothing."""
        if state and not self._taken:
            raise InputError(
                f"{self!r} takes nothing from data, but the state holds {', '.join(state)}; "
                "use the kernel that the state was saved from"
            )
        return replace(cast(Any, self), **{self._taken: state[self._taken]}) if self._taken in state else self

    def matrix(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Evaluate κ between the rows of ``x`` (n, d) and ``y`` (m, d), or of ``x`` with itself: (n, m)."""
        self._require_fit()
        with torch.autocast(x.device.type, enabled=False):
            return self._matrix(_full_precision(x), None if y is None else _full_precision(y))

    def diag(self, x: Tensor) -> Tensor:
        """Evaluate κ(z, z) for each row of ``x``, without the matrix: (n,)."""
        self._require_fit()
        with torch.autocast(x.device.type, enabled=False):
            return self._diag(_full_precision(x))

    def _require_fit(self) -> None:
        if not self.is_fitted:
            raise InputError(f"{self!r} takes a parameter from the data; call kernel.fit(features) first")

    def blocks(self, x: Tensor, y: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield ``(rows, κ(x[rows], y))``, with y = x if it is None; each block and its temporaries take 64 MB."""
        y = x if y is None else y
        for block in row_blocks(len(x), _BLOCK_BYTES // (4 * len(y) * max(4, x.element_size()))):
            yield block, self.matrix(x[block], y)

    def check_range(self, x: Tensor) -> None:
        """Raise an InputError if values on the rows of ``x`` (n, d) overflow their floating-point type."""
        self._require_finite(self.diag(x), x)

    def _require_finite(self, values: Tensor, x: Tensor) -> None:
        if not bool(torch.isfinite(values.double().sum())):
            raise overflow(repr(self), x)

    def square_matrix(self, x: Tensor) -> Tensor:
        """Assemble ``matrix(x)`` (n, n) from blocks, with ``diag(x)`` on its diagonal; no gradient."""
        if 16 * len(x) ** 2 <= _BLOCK_BYTES:
            matrix = self.matrix(x)
        else:
            matrix = x.new_empty(len(x), len(x))
            for rows, block in self.blocks(x):
                matrix[rows] = block
        matrix.diagonal().copy_(self.diag(x))
        return matrix

    def paired(self, x: Tensor, y: Tensor) -> Tensor:
        """Evaluate κ(x_i, y_i) for each pair of rows of ``x`` and ``y``, both (n, d): (n,)."""
        return torch.cat([self.matrix(x[b], y[b]).diagonal() for b in row_blocks(len(x), 32)])

    def paired_distances(self, x: Tensor, y: Tensor) -> Tensor:
        """|φ(x_i) - φ(y_i)|² for each pair of rows of ``x`` and ``y``, both (n, d): (n,)."""
        return (self.diag(x) + self.diag(y) - 2.0 * self.paired(x, y)).clamp_min(0.0)

    def explicit_features(self, x: Tensor) -> Tensor | None:
        """Return φ(x) of shape (n, D) if φ has only a few columns, else None."""
        return None

    @abstractmethod
    def _matrix(self, x: Tensor, y: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _diag(self, x: Tensor) -> Tensor: ...


def overflow(what: str, x: Tensor) -> InputError:
    """The error of values that are not finite in the type of the features ``x``."""
    remedy = "scale them down" if x.dtype == torch.float64 else "scale them down or pass float64"
    return InputError(f"{what} overflows {x.dtype} on features of up to {float(x.abs().max()):.3g}; {remedy}")


def _full_precision(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def squared_distances(x: Tensor, y: Tensor | None = None, *, reach: float = 0.0) -> Tensor:
    """Squared Euclidean distances (n, m), accurate far from the origin.

    The expansion |x|² + |y|² - 2<x, y> cancels for features with a large common offset, so the data are centred
    first. What error is left matters only for pairs closer than ``reach``, which are computed again, exactly.
    """
    # any common shift leaves distances alone, so its gradient is zero and need not be followed
    shift = x.detach().mean(0)
    same = y is None
    x = x - shift
    y = x if y is None else y - shift
    norm_x = x.square().sum(1)
    norm_y = norm_x if same else y.square().sum(1)
    d2 = torch.addmm(norm_x[:, None] + norm_y, x, y.T, alpha=-2.0).clamp_min(0.0)
    if torch.is_grad_enabled() and d2.requires_grad:
        if same:
            d2 = d2 * (1 - torch.eye(len(x), dtype=x.dtype, device=x.device))
        rough, x, y, norm_x, norm_y = d2.detach(), x.detach(), y.detach(), norm_x.detach(), norm_y.detach()
        # the exact value with the gradient of the expansion
        return d2 + (_with_exact_close_pairs(rough.clone(), x, y, norm_x, norm_y, reach, same) - rough)
    return _with_exact_close_pairs(d2, x, y, norm_x, norm_y, reach, same)


def _with_exact_close_pairs(
    d2: Tensor, x: Tensor, y: Tensor, norm_x: Tensor, norm_y: Tensor, reach: float, same: bool
) -> Tensor:
    if same:
        d2.fill_diagonal_(0.0)
    if reach <= 0.0:
        return d2
    is_large = d2.numel() > _BATCH_PAIRS and not torch.compiler.is_compiling()
    if is_readable(d2) or is_large or d2.device.type == "mps":  # which lacks double precision
        error = torch.finfo(x.dtype).eps * (float(norm_x.max()) + float(norm_y.max()))
        if error < 1e-6 * reach:
            return d2
        # flatter kernels still see distant pairs: recompute also where the error is large against the distance
        close = d2 < max(reach, 1e5 * error)
        if same:
            close.fill_diagonal_(False)
        i, j = close.nonzero(as_tuple=True)
        if len(i) * x.shape[1] <= 4 * d2.numel():  # few enough to gather
            d2[i, j] = (x[i] - y[j]).square().sum(1)
            return d2
    x, y = x.double(), y.double()
    d2.copy_((x.square().sum(1)[:, None] + y.square().sum(1) - 2.0 * (x @ y.T)).clamp_min_(0.0))
    return d2.fill_diagonal_(0.0) if same else d2


def mixture_reach(rates: Sequence[float]) -> float:
    """Squared distance within which the mixture Σ exp(-rate d²) needs exact ones."""
    return 20.0 / max(rates)  # beyond, the steepest term is below 2e-9 and its error with it


def _median(values: Tensor) -> Tensor:
    """The lower median of values (n,), as of ``torch.median``, which takes three times as long on a CPU."""
    if values.device.type != "cpu" or bool(values.sum().isnan()):
        return values.median()
    middle = (len(values) - 1) // 2
    return torch.from_numpy(np.partition(values.numpy(), middle))[middle]


_SYMMETRIC_ROWS = 256  # of a square matrix whose products are computed together
_COMPILED_PAIRS = 2**12  # where numba is worth its start


def _compiled_mixture(loops: ModuleType, x: Tensor, y: Tensor | None, rates: Sequence[float]) -> Tensor:
    shift = x.detach().mean(0)

    def shifted(rows: Tensor) -> tuple[Tensor, Tensor]:
        moved, norms = (rows.detach() - shift).contiguous(), rows.new_empty(len(rows))
        loops.squared_norms(moved.numpy(), norms.numpy())
        return moved, norms

    rows, norms = shifted(x)
    others, other_norms = (rows, norms) if y is None else shifted(y)
    if y is not None:
        products = rows @ others.T
    else:  # no product of a pair is asked for twice
        products = x.new_empty(len(x), len(x))
        for block in row_blocks(len(x), _SYMMETRIC_ROWS):
            torch.mm(rows[block], rows[block.start :].T, out=products[block, block.start :])
    arrays = (products, rows, others, norms, other_norms, torch.tensor(rates, dtype=x.dtype))
    near, small = np.float32(mixture_reach(rates)), np.float32(1e-6 * mixture_reach(rates))
    buffer = np.empty(len(others), np.float32)
    loops.gaussian_mixture(*(array.numpy() for array in arrays), near, small, y is None, buffer)
    return products


@dataclass(frozen=True)
class RBFMixture(Kernel):
    """Sum of Gaussian kernels, Σ_γ exp(-γ |z - z'|² / scale). The paper's MMD kernel is the default.

    Parameters
    ----------
    gammas : sequence of float
        Inverse bandwidths. ``(1.0,)`` is a single Gaussian.
    scale : float, "median" or "mean"
        Divides the squared distances. ``"median"`` and ``"mean"`` take that statistic of the data at each ``fit``:
        with γ |z - z'|² >> 1 for all pairs the kernel is the identity and no sampler can help.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    >>> RBFMixture(gammas=(1.0,)).matrix(x)
    tensor([[1.0000, 0.3679],
            [0.3679, 1.0000]], dtype=torch.float64)
    """

    gammas: Sequence[float] = PAPER_GAMMAS
    scale: float | str = 1.0
    fitted_scale: float | None = None
    _taken: ClassVar[str] = "fitted_scale"

    def __post_init__(self) -> None:
        try:
            gammas = tuple(float(g) for g in self.gammas)
        except (TypeError, ValueError):
            gammas = ()
        if not gammas or not all(0 < g < float("inf") for g in gammas):
            raise InputError(f"gammas must be a sequence of positive numbers, got {self.gammas!r}")
        object.__setattr__(self, "gammas", gammas)
        if isinstance(self.scale, str):
            if self.scale not in ("median", "mean"):
                raise InputError(f"scale must be a positive number, 'median' or 'mean', got {self.scale!r}")
        elif not 0 < self.scale < float("inf"):
            raise InputError(f"scale must be positive, got {self.scale}")

    @property
    def is_fitted(self) -> bool:
        """Whether the scale is known; False if it must still be taken from data."""
        return not isinstance(self.scale, str) or self.fitted_scale is not None

    def fit(self, x: Tensor) -> Self:
        """Take the scale from (a thousand rows of) ``x``; zero distances count as scale 1."""
        if not isinstance(self.scale, str):
            return self
        step = max(1, len(x) // 1000)
        d2 = squared_distances(_full_precision(x.detach())[::step])
        i, j = torch.triu_indices(len(d2), len(d2), 1, device=d2.device)
        pairs = d2[i, j]
        value = float(_median(pairs) if self.scale == "median" else pairs.mean()) if len(pairs) else 0.0
        return replace(self, fitted_scale=value if value > 0 else 1.0)

    def check_range(self, x: Tensor) -> None:
        """Raise an InputError if squared distances between rows of ``x`` overflow, which would give NaN."""
        low, high = (float(value) for value in torch.aminmax(x))
        if high - low < (0.1 * torch.finfo(_full_precision(x[:0]).dtype).max / x.shape[1]) ** 0.5:
            return  # no distance is larger
        mean = x.mean(0)
        largest = [_full_precision(x[b] - mean).square().sum(1).max() for b in row_blocks(len(x), 65536)]
        self._require_finite(4.0 * torch.stack(largest), x)  # |x - y|² is at most 4 times the larger |x - mean|²

    @property
    def rates(self) -> list[float]:
        """The factors γ / scale of the squared distances."""
        scale = self.fitted_scale if isinstance(self.scale, str) else self.scale
        assert scale is not None
        return [g / scale for g in self.gammas]

    def _matrix(self, x: Tensor, y: Tensor | None) -> Tensor:
        rates = self.rates
        other = x if y is None else y
        tracked = torch.is_grad_enabled() and (x.requires_grad or other.requires_grad)
        many = len(x) * len(other) >= _COMPILED_PAIRS and x.dtype == torch.float32
        if many and not tracked and (loops := compiled_loops(x)) is not None:
            values = _compiled_mixture(loops, x, y, rates)
            return values.fill_diagonal_(float(len(rates))) if y is None else values
        d2 = squared_distances(x, y, reach=mixture_reach(rates))
        if d2.requires_grad:
            return torch.stack([torch.exp(d2 * -rate) for rate in rates]).sum(0)
        total = torch.zeros_like(d2)
        term = torch.empty_like(d2)
        for rate in rates:
            # exp is an order of magnitude slower where it underflows, and e^-80 is zero beside any other term
            total += torch.exp(torch.mul(d2, -rate, out=term).clamp_min_(-80.0), out=term)
        return total

    def _diag(self, x: Tensor) -> Tensor:
        return x.new_full((len(x),), float(len(self.gammas)))

    def paired(self, x: Tensor, y: Tensor) -> Tensor:
        """Evaluate row by row, without a matrix."""
        d2 = (_full_precision(x) - _full_precision(y)).square().sum(1)
        return torch.exp(d2[:, None] * -torch.tensor(self.rates, dtype=d2.dtype, device=d2.device)).sum(1)


@dataclass(frozen=True, eq=False)
class CoralKernel(Kernel):
    """CORAL's kernel ((z - μ)ᵀ(z' - μ))² (section 2.3); μ is the mean of the data at each ``fit``.

    Its feature map is the d x d matrix (z - μ)(z - μ)ᵀ, so the variance of the mean embedding is that of the
    covariance estimate around a known mean. A loss that compares the means too has a (zᵀz')² + b zᵀz' of the centred
    rows; see ``CORALLoss.kernel``.

    Parameters
    ----------
    mean : Tensor of shape (d,), optional
        μ; None until it is fitted.
    scale : float
        a, the factor of the covariance term.
    mean_scale : float
        b, the factor of the mean term; 0 for none.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [2.0], [4.0]])
    >>> CoralKernel().fit(x).matrix(x)  # squares of products of the deviations -2, 0, 2
    tensor([[16.,  0., 16.],
            [ 0.,  0.,  0.],
            [16.,  0., 16.]])
    """

    mean: Tensor | None = None
    scale: float = 1.0
    mean_scale: float = 0.0
    _taken: ClassVar[str] = "mean"

    def __post_init__(self) -> None:
        if not 0 < self.scale < float("inf") or not 0 <= self.mean_scale < float("inf"):
            raise InputError(
                f"CORAL's kernel needs scale > 0 and mean_scale >= 0, got {self.scale} and {self.mean_scale}; the "
                "paper's has 1 and 0"
            )

    @property
    def is_fitted(self) -> bool:
        """Whether the mean is known."""
        return self.mean is not None

    def fit(self, x: Tensor) -> Self:
        """Take μ from ``x``."""
        return replace(self, mean=_full_precision(x.detach()).mean(0))

    def _centred(self, x: Tensor) -> Tensor:
        assert self.mean is not None
        return x - self.mean.to(x)

    def _matrix(self, x: Tensor, y: Tensor | None) -> Tensor:
        x = self._centred(x)
        return self._of_products(x @ (x if y is None else self._centred(y)).T)

    def _diag(self, x: Tensor) -> Tensor:
        return self._of_products(self._centred(x).square().sum(1))

    def _of_products(self, products: Tensor) -> Tensor:
        if self.scale == 1.0 and self.mean_scale == 0.0:
            return products.square()
        return products * (self.scale * products + self.mean_scale)

    def paired(self, x: Tensor, y: Tensor) -> Tensor:
        """Evaluate row by row, without a matrix."""
        return self._of_products((self._centred(_full_precision(x)) * self._centred(_full_precision(y))).sum(1))

    def explicit_features(self, x: Tensor) -> Tensor | None:
        """The d(d+1)/2 distinct products, off-diagonal ones times √2, and the row if means count, for d up to 22."""
        d = x.shape[1]
        if d > 22:  # 253 columns: beyond that the low-rank map is cheaper
            return None
        x = self._centred(_full_precision(x))
        i, j = torch.triu_indices(d, d, device=x.device)
        root = x.new_ones(len(i)).masked_fill(i != j, 2.0**0.5)
        products = x[:, i] * x[:, j] * (root * self.scale**0.5)
        return products if self.mean_scale == 0.0 else torch.cat([products, x * self.mean_scale**0.5], 1)

    def __repr__(self) -> str:
        if self.scale == 1.0 and self.mean_scale == 0.0:
            return "CoralKernel()"
        return f"CoralKernel(scale={self.scale:.6g}, mean_scale={self.mean_scale:.6g})"


@dataclass(frozen=True)
class LinearKernel(Kernel):
    """κ(z, z') = zᵀz'. Its strata are those of size-weighted k-means on the features themselves."""

    def _matrix(self, x: Tensor, y: Tensor | None) -> Tensor:
        return x @ (x if y is None else y).T

    def _diag(self, x: Tensor) -> Tensor:
        return x.square().sum(1)

    def paired_distances(self, x: Tensor, y: Tensor) -> Tensor:
        """From differences: accurate far from the origin."""
        return (x - y).square().sum(1)

    def explicit_features(self, x: Tensor) -> Tensor | None:
        """The rows themselves."""
        return _full_precision(x) if x.shape[1] <= 256 else None


@dataclass(frozen=True, eq=False)
class EnergyKernel(Kernel):
    """κ(z, z') = |z - b| + |z' - b| - |z - z'|, whose MMD² is the energy distance 2 E|x - y| - E|x - x'| - E|y - y'|.

    -|z - z'| is only conditionally positive definite. With any base point b it becomes a kernel, and distances of mean
    embeddings do not depend on b (Sejdinovic et al. 2013, arXiv 1207.6076). Where points coincide the gradient of their
    distance is 0.

    Parameters
    ----------
    base : Tensor of shape (d,), optional
        b; the mean of the data at each ``fit``.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [2.0], [4.0]])
    >>> EnergyKernel().fit(x).matrix(x)
    tensor([[4., 0., 0.],
            [0., 0., 0.],
            [0., 0., 4.]])
    """

    base: Tensor | None = None
    _taken: ClassVar[str] = "base"

    @property
    def is_fitted(self) -> bool:
        """Whether the base point is known."""
        return self.base is not None

    def fit(self, x: Tensor) -> Self:
        """Take b from ``x``."""
        return replace(self, base=_full_precision(x.detach()).mean(0))

    def check_range(self, x: Tensor) -> None:
        """Raise an InputError if squared distances between rows of ``x`` overflow."""
        self._require_finite((2.0 * self._lengths(_full_precision(x))).square(), x)

    def _lengths(self, x: Tensor) -> Tensor:
        assert self.base is not None
        return _lengths(x - self.base.to(x))

    def _matrix(self, x: Tensor, y: Tensor | None) -> Tensor:
        other, length = x if y is None else y, self._lengths(x)
        tracked = torch.is_grad_enabled() and (x.requires_grad or other.requires_grad)
        if tracked or len(x) * len(other) <= _BATCH_PAIRS:
            distances = torch.cdist(x, other, compute_mode="donot_use_mm_for_euclid_dist")
        else:  # products in double precision: at close points the root of a rounding error would show
            assert self.base is not None
            left = x.double() - self.base.to(x)
            right = left if y is None else y.double() - self.base.to(x)
            squares = left.square().sum(1)[:, None] + right.square().sum(1) - 2.0 * (left @ right.T)
            distances = squares.clamp_min_(0.0).sqrt_().to(x.dtype)
            if y is None:
                distances.fill_diagonal_(0.0)
        return length[:, None] + (length if y is None else self._lengths(other)) - distances

    def _diag(self, x: Tensor) -> Tensor:
        return 2.0 * self._lengths(x)

    def paired(self, x: Tensor, y: Tensor) -> Tensor:
        """Evaluate row by row, without a matrix."""
        x, y = _full_precision(x), _full_precision(y)
        return self._lengths(x) + self._lengths(y) - _lengths(x - y)

    def paired_distances(self, x: Tensor, y: Tensor) -> Tensor:
        """2 |x_i - y_i|."""
        return 2.0 * _lengths(_full_precision(x) - _full_precision(y))

    def __repr__(self) -> str:
        return "EnergyKernel()"


def _lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)  # the gradient at 0 is 0
    return lengths


@dataclass(frozen=True)
class FunctionKernel(Kernel):
    """Any user ``function(x, y) -> (n, m)`` on rows (n, d) and (m, d), assumed positive semi-definite."""

    function: Callable[[Tensor, Tensor], Tensor]

    def _matrix(self, x: Tensor, y: Tensor | None) -> Tensor:
        y = x if y is None else y
        result = self.function(x, y)
        if not isinstance(result, Tensor) or result.shape != (len(x), len(y)):
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise InputError(
                f"the kernel function must return a tensor of shape {(len(x), len(y))} for {len(x)} and "
                f"{len(y)} rows, got {shape}"
            )
        return result.to(x.dtype)

    def _diag(self, x: Tensor) -> Tensor:
        return torch.cat([self._matrix(x[b], x[b]).diagonal() for b in row_blocks(len(x), 64)])

    def check_range(self, x: Tensor) -> None:
        """Nothing: values are checked where they are used."""


_KERNELS: Registry[Callable[[], Kernel]] = Registry(
    "kernel",
    {
        "mmd": RBFMixture,
        "rbf": lambda: RBFMixture(gammas=(1.0,)),
        "coral": CoralKernel,
        "linear": LinearKernel,
        "energy": EnergyKernel,
    },
    base=Kernel,
    own=("class", "object", "function"),
)

KernelLike: TypeAlias = Kernel | str | Callable[[Tensor, Tensor], Tensor]
"""What `as_kernel` takes."""


def as_kernel(kernel: Any) -> Kernel:
    """Return a Kernel for a kernel, a name, ``"package.module:Name"``, or a callable.

    ``"mmd"`` is the paper's RBF mixture, ``"rbf"`` a single Gaussian with unit bandwidth (the paper's Figure 4),
    ``"energy"`` the kernel of the energy distance.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, str):
        found = _KERNELS.find(kernel)
        return found() if kernel in _KERNELS or isinstance(found, type) else as_kernel(found)
    if isinstance(kernel, type):
        raise InputError(f"kernel must be an object, got the class {kernel.__name__}; write {kernel.__name__}()")
    if callable(kernel):
        return FunctionKernel(kernel)
    raise InputError(f"kernel must be a Kernel, a name or a callable, got {type(kernel).__name__}")


def fitted_kernel(kernel: KernelLike, x: Tensor, *, check_range: bool = True) -> Kernel:
    """Return what `as_kernel` makes of ``kernel``, fitted to the rows of ``x`` (n, d) unless it is fitted already.

    Features whose kernel overflows are refused, unless ``check_range`` is False: the check would make a training
    loop wait for the device.
    """
    known = as_kernel(kernel)
    fitted = known if known.is_fitted else known.fit(x)
    if check_range:
        fitted.check_range(x)
    return fitted
