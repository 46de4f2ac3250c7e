"""Batches of a k-DPP: subsets of fixed size, as likely as their kernel matrix has a large determinant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import FunctionKernel, Kernel
from vardass.lowrank import fit_feature_map
from vardass.samplers.base import derive_seed
from vardass.samplers.diverse import DiverseBatchSampler, MassTable, check_values, kernel_matrix
from vardass.validate import as_generator, row_blocks

__all__ = ["DPPBatchSampler", "log_elementary_symmetric"]

_DEFAULT_RANK = 256
_SQUARES = 2**22  # squared entries of eigenvectors held at a time


class DPPBatchSampler(DiverseBatchSampler):
    """Each batch S of size k is drawn with probability det(L_S) / e_k, L being the kernel matrix of the data.

    The sampler is exact (Kulesza and Taskar 2012, section 5): k eigenvectors of L are chosen by the
    elementary symmetric polynomials e_l of its eigenvalues, in logarithms, then k samples by the projection on
    their span. The decomposition is kept between refreshes. Batches are independent of each other, hold
    distinct samples, and carry no weights: samples unlike the others are drawn more often than their share on
    purpose, so batch means are *not* unbiased for those of the data set. Uniform until the first `refresh`.

    Beyond 2,048 samples L = Φ Φᵀ with kernel features Φ (n, kernel_rank), decomposed through the small matrix
    Φᵀ Φ: memory is linear in n. What Φ misses of the kernel, its residual diagonal, is left out, so the
    rank of L is at most kernel_rank.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, num_replicas, rank
        As for `MinibatchSampler`; ``rank`` is that of the process.
    kernel : Kernel, name or callable
        L is its matrix on the features, not centred. The numerical rank of L must be at least batch_size: with
        ``"linear"`` a batch has at most as many samples as the features have columns.
    kernel_rank : int, optional
        Columns of Φ; 0 for the full matrix, with O(n³) time and O(n²) memory. By default 0 up to 2,048
        samples, the larger of 256 and 2 * batch_size beyond.

    Examples
    --------
    >>> z = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    >>> sampler = DPPBatchSampler(100, batch_size=8, seed=0)
    >>> sampler.refresh(z)
    >>> len(set(next(iter(sampler)))), round(float(sampler.inclusion_probabilities().sum()), 6)
    (8, 8.0)
    """

    _values: Tensor | None = None  # positive eigenvalues (r,), double precision
    _vectors: Tensor | None = None  # eigenvectors, the rows of (r, n), in the features' precision
    _accept: Tensor | None = None

    @property
    def _is_fitted(self) -> bool:
        return self._values is not None

    @torch.no_grad()
    def _fit(self, features: Tensor) -> None:
        kernel = self.kernel.fit(features)
        columns = self._columns(max(_DEFAULT_RANK, 2 * self.batch_size))
        if columns == 0:
            values, vectors = _decompose_matrix(kernel_matrix(kernel, features))
        else:
            generator = as_generator(derive_seed(self.seed, self._refreshes), features.device)
            values, vectors = _decompose_features(_features(features, kernel, columns, generator))
        if len(values) < self.batch_size:
            remedy = "raise kernel_rank " if 0 < columns < self.batch_size else ""
            raise InputError(
                f"a k-DPP with batch_size={self.batch_size} needs a kernel matrix of at least that rank, got numerical "
                f"rank {len(values)} for {kernel!r} on {self.n} samples; lower batch_size, {remedy}or choose a kernel "
                "of higher rank such as 'mmd'"
            )
        self._use(values, vectors.to(features.dtype).contiguous())

    def _use(self, values: Tensor, vectors: Tensor) -> None:
        self._values, self._vectors = values, vectors
        # eigenvectors are chosen one after the other on a few numbers each: work for the CPU
        self._accept = _acceptance(values.to("cpu"), self.batch_size)

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        vectors, accept = self._vectors, self._accept
        assert vectors is not None
        assert accept is not None
        k, device = self.batch_size, vectors.device
        picked = _choose_eigenvectors(accept, k, count, generator).to(device)
        levels = torch.rand(k, count, 2, dtype=torch.float64, generator=generator).to(device)
        used = torch.zeros(len(vectors), dtype=torch.bool, device=device)
        used[picked.flatten()] = True
        if not bool(used.all()):  # what none of these batches uses need not be multiplied with
            vectors, picked = vectors[used], (used.cumsum(0) - 1)[picked]
        return _sample_projections(vectors, picked, levels)

    def inclusion_probabilities(self) -> Tensor:
        """Exact probability of each sample to be in a batch, summing to batch_size: (n,), double precision."""
        if self._values is None or self._vectors is None or self._accept is None:
            return torch.full((self.n,), self.batch_size / self.n, dtype=torch.float64)
        chosen = _eigenvector_probabilities(self._accept, self.batch_size).to(self._vectors.device)
        return chosen @ self._vectors.double().square()

    def _extra_state(self) -> dict[str, Any]:
        return {"values": self._values, "vectors": self._vectors}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        if state["values"] is None:
            self._values = self._vectors = self._accept = None
        else:
            self._use(state["values"], state["vectors"])


# --- the spectrum of L ------------------------------------------------------------------------------------


def _decompose_matrix(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues above the rounding error, falling, and eigenvectors, rows of (r, n), of L (n, n)."""
    values, vectors = torch.linalg.eigh(matrix.double())
    lowest, highest = float(values[0]), float(values[-1])
    if lowest < -1e-4 * highest:
        raise InputError(
            f"the kernel matrix has eigenvalues from {lowest:.3g} to {highest:.3g}, so its determinants are no "
            "probabilities; use a positive semi-definite kernel such as RBFMixture()"
        )
    keep = values > len(matrix) * torch.finfo(matrix.dtype).eps * max(highest, 0.0)
    return values[keep].flip(0), vectors[:, keep].flip(1).T


def _features(x: Tensor, kernel: Kernel, columns: int, generator: torch.Generator) -> Tensor:
    """Kernel features Φ (n, at most ``columns``), not centred: a k-DPP depends on the origin."""
    x = x if isinstance(kernel, FunctionKernel) else x.double()
    check_values(kernel.diag(x), kernel, x)
    features, _ = fit_feature_map(x, kernel, columns, generator=generator)(x)
    return check_values(features, kernel, x)


def _decompose_features(features: Tensor) -> tuple[Tensor, Tensor]:
    """The same for L = Φ Φᵀ, from the eigenvectors w of Φᵀ Φ: those of L are Φ w / √λ."""
    precision = torch.finfo(features.dtype).eps
    features = features.double()
    values, dual = torch.linalg.eigh(features.T @ features)
    highest = float(values[-1].clamp_min(0.0))
    # the squared rounding error of Φ, or that of the product where Φ is in double precision
    floor = len(features) * max(precision**2, torch.finfo(torch.float64).eps) * highest
    keep = values > floor
    values, dual = values[keep].flip(0), dual[:, keep].flip(1)
    return values, (dual / values.sqrt()).T @ features.T


# --- choosing eigenvectors --------------------------------------------------------------------------------


def log_elementary_symmetric(log_values: Tensor, k: int) -> Tensor:
    """Logarithms of the elementary symmetric polynomials of the first m of r values.

    e_l(λ_1..λ_m) = Σ_{j <= m} λ_j e_{l-1}(λ_1..λ_{j-1}), summed in logarithms: no overflow and no
    cancellation, whatever the range of the values.

    Parameters
    ----------
    log_values : Tensor of shape (r,)
        log λ_j, -inf for zero.
    k : int
        Highest degree.

    Returns
    -------
    Tensor of shape (k + 1, r + 1)
        Entry (l, m) is log e_l(λ_1..λ_m), -inf for l > m.
    """
    table = log_values.new_full((k + 1, len(log_values) + 1), -torch.inf)
    table[0] = 0.0
    for degree in range(1, k + 1):
        table[degree, 1:] = torch.logcumsumexp(log_values + table[degree - 1, :-1], 0)
    return table


def _acceptance(values: Tensor, k: int) -> Tensor:
    """Probability to take eigenvector m when l more are to be taken from 1..m: entry (m - 1, l) of (r, k + 1)."""
    # a common factor of L changes no probability
    log_values = (values / values[0]).log()
    table = log_elementary_symmetric(log_values, k)
    accept = values.new_zeros(len(values), k + 1)
    accept[:, 1:] = (log_values + table[:-1, :-1] - table[1:, 1:]).exp().T
    return accept.nan_to_num_(0.0).clamp_(0.0, 1.0)  # NaN where l > m, which is never reached


def _choose_eigenvectors(accept: Tensor, k: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw k of r eigenvectors for each of ``count`` batches: (count, k), rising."""
    total = len(accept)
    levels = torch.rand(total, count, dtype=torch.float64, generator=generator)
    left = torch.full((count,), k)
    taken = torch.empty(total, count, dtype=torch.bool)
    for m in range(total - 1, -1, -1):
        taken[m] = levels[m] < accept[m, left]
        left -= taken[m].long()
    return taken.T.nonzero()[:, 1].view(count, k)


def _eigenvector_probabilities(accept: Tensor, k: int) -> Tensor:
    """Probability of each eigenvector to be among the k chosen: (r,)."""
    left = accept.new_zeros(k + 1)  # distribution of how many are still to be taken
    left[k] = 1.0
    result = accept.new_empty(len(accept))
    for m in range(len(accept) - 1, -1, -1):
        moved = left * accept[m]
        result[m] = moved.sum()
        left = left - moved
        left[:-1] += moved[1:]
    return result


# --- choosing samples -------------------------------------------------------------------------------------


def _sample_projections(vectors: Tensor, rows: Tensor, levels: Tensor) -> Tensor:
    """Draw from the projection DPPs on given eigenvectors, all batches together: (count, k).

    Sample i of a batch has the coordinates v_i (k,) in its eigenvectors. After t picks it is drawn with
    probability proportional to |v_i|² less its part in the span of the picks' coordinates, for which an
    orthonormal basis is kept. A step is one product with all eigenvectors.

    Parameters
    ----------
    vectors : Tensor of shape (r, n)
        Orthonormal rows.
    rows : Tensor of shape (count, k)
        Those of each batch.
    levels : Tensor of shape (k, count, 2)
        Uniform on [0, 1).
    """
    count, k = rows.shape
    masses = MassTable(count, vectors.shape[1], vectors)
    left = masses.mass
    along = vectors.new_zeros(count, len(vectors))
    members = along.scatter(1, rows, 1.0)
    for block in row_blocks(vectors.shape[1], _SQUARES // len(vectors)):
        left[:, block] = members @ vectors[:, block].square()
    product = torch.empty_like(left, memory_format=torch.contiguous_format)
    basis = rows.new_zeros(count, k, k, dtype=torch.float64)
    chosen = torch.empty_like(rows)
    for step in range(k):
        chosen[:, step] = sample = masses.draw(levels[step])
        if step == k - 1:
            break
        direction = vectors[rows, sample[:, None]].double()[:, :, None]
        known = basis[:, :step]
        for _ in range(2):  # once more takes away what rounding left
            direction = direction - known.mT @ (known @ direction)
        direction = direction[:, :, 0]
        direction = direction / direction.norm(dim=1, keepdim=True).clamp_min(1e-300)
        basis[:, step] = direction
        # each batch's own entries are set anew, the others stay zero
        torch.mm(along.scatter_(1, rows, direction.to(along.dtype)), vectors, out=product)
        left.addcmul_(product, product, value=-1.0).clamp_min_(0.0)
    return chosen
