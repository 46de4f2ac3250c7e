"""Batches that spread over the data: seeds of k-means++, and subsets of a determinantal point process (k-DPP)."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any, Unpack

import torch
from torch import Tensor

from vardass.errors import InputError, VardassWarning
from vardass.kernels import FunctionKernel, Kernel, KernelLike, as_kernel, fitted_kernel
from vardass.lowrank import DEFAULT_RANK, fit_feature_map
from vardass.samplers.base import Chunk, MinibatchSampler, StreamOptions, derive_seed
from vardass.solvers.labels import draw_by_mass
from vardass.validate import as_generator, check_count, check_flag, check_tensor, row_blocks
from vardass.view import EXACT_LIMIT, LowRankView

__all__ = ["DPPBatchSampler", "KMeansPlusPlusBatchSampler"]

_BLOCK = 128  # masses that are summed before the draw looks at them one by one
_NUMBERS = 2**20  # masses held at a time
_FEWEST, _MOST = 16, 64  # batches drawn together: below, reading the features dominates; above, nothing is gained
_ROUNDING = 32.0  # squared distances below this many units of rounding are taken for zero
_DPP_RANK = 256  # columns of the features of a k-DPP, which profits from more than distances do
_SQUARES = 2**22  # squared entries of eigenvectors held at a time


class DiverseBatchSampler(MinibatchSampler):
    """Base of samplers whose batch spreads over the data: uniform until the first `refresh`, without repeats.

    Batches are drawn some tens at a time. Each of several processes draws all batches.
    """

    _has_warned = False  # that it works on low-rank features

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        kernel: KernelLike = "mmd",
        kernel_rank: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__(n, batch_size, **options)
        self.kernel = as_kernel(kernel)
        self.kernel_rank = None if kernel_rank is None else check_count(kernel_rank, "kernel_rank", low=0)

    @abstractmethod
    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw ``count`` independent batches from what `_fit` found: (count, batch_size)."""

    def _columns(self, default: int) -> int:
        """Columns of the low-rank features, 0 for the full matrix."""
        if self.kernel_rank is not None:
            return self.kernel_rank
        if self.n <= EXACT_LIMIT:
            return 0
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(self).__name__} is defined on the full kernel matrix of {self.n:,} samples; above "
                f"{EXACT_LIMIT:,} it works on {default} low-rank features, so it is not the published sampler; give "
                f"kernel_rank=0 for the full matrix, or kernel_rank={default} to say that you accept it",
                VardassWarning,
                stacklevel=5,  # past _fit, no_grad around it, and refresh
            )
        return default

    @property
    def _together(self) -> int:
        return min(_MOST, max(_FEWEST, _NUMBERS // self.n))

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        count = -(-self._together // self.num_replicas)
        if not self.endless:  # what is left of the epoch: another one starts a new chunk
            count = max(1, min(count, self._rounds - self.position))
        return self._chunk_of(count * self.num_replicas, generator)

    def _sample_chunk(self, generator: torch.Generator) -> Chunk:
        return self._chunk_of(self._together, generator)

    def _chunk_of(self, count: int, generator: torch.Generator) -> Chunk:
        if self._refreshes:
            sizes = (min(self._together, count - start) for start in range(0, count, self._together))
            return Chunk(torch.cat([self._draw(size, generator) for size in sizes]).to("cpu"))
        # random permutations of the samples, cut into batches
        per_turn = self.n // self.batch_size
        orders = [torch.randperm(self.n, generator=generator) for _ in range(-(-count // per_turn))]
        kept = torch.stack(orders)[:, : per_turn * self.batch_size]
        return Chunk(kept.reshape(-1, self.batch_size)[:count])


def _as_double(kernel: Kernel, x: Tensor) -> Tensor:
    """``x`` in double precision, but for a user's function, which may hold tensors of the features' type."""
    return x if isinstance(kernel, FunctionKernel) else x.double()


def _kernel_matrix(kernel: Kernel, x: Tensor) -> Tensor:
    """Full matrix (n, n) of a fitted kernel."""
    return _check_values(kernel.square_matrix(_as_double(kernel, x)), kernel, x)


def _check_values(values: Tensor, kernel: Kernel, x: Tensor) -> Tensor:
    """Return ``values`` that a kernel gave on ``x``, or raise an InputError if some are not finite."""
    if not bool(torch.isfinite(values).all()):
        raise InputError(
            f"{kernel!r} has NaN or infinite values in {values.dtype} on these features (largest entry "
            f"{float(x.abs().max()):.3g}); scale the features or choose another kernel"
        )
    return values


class _MassTable:
    """Masses of n samples for each of several batches, from which one sample a batch is drawn at a time.

    A draw chooses a block by its sum, then a sample in it. Without any mass it is uniform among the samples not yet in
    the batch. ``mass`` (count, n) is a view to be written to, not negative; drawn samples keep zero mass.
    """

    def __init__(self, count: int, n: int, like: Tensor) -> None:
        blocks = -(-n // _BLOCK)
        # the last block is filled up with samples that cannot be drawn
        self._mass = like.new_zeros(count, blocks * _BLOCK)
        self._free = torch.ones_like(self._mass, dtype=torch.bool)
        self._free[:, n:] = False
        self._free_in_block = self._free.view(count, blocks, _BLOCK).sum(2).double()
        self._batch = torch.arange(count, device=like.device)
        self.mass = self._mass[:, :n]

    def draw(self, levels: Tensor) -> Tensor:
        """Draw one sample a batch, (count,), by ``levels`` (count, 2), uniform on [0, 1) in double precision."""
        blocked = self._mass.view(*self._free_in_block.shape, _BLOCK)
        sums = blocked.sum(2).double()
        has_mass = sums.sum(1, keepdim=True) > 0.0
        block = draw_by_mass(torch.where(has_mass, sums, self._free_in_block), levels[:, 0])
        inside = blocked[self._batch, block].double()
        free = self._free.view(blocked.shape)[self._batch, block].double()
        sample = block * _BLOCK + draw_by_mass(torch.where(has_mass, inside, free), levels[:, 1])
        self._mass[self._batch, sample] = 0.0
        self._free[self._batch, sample] = False
        self._free_in_block[self._batch, block] -= 1.0
        return sample


# --- k-means++ ----------------------------------------------------------------------------------------------


class KMeansPlusPlusBatchSampler(DiverseBatchSampler):
    """Each batch is one run of k-means++ seeding in the kernel's feature space.

    The first sample is uniform, each next one has a probability proportional to its squared kernel distance
    d_ij = κ(z_i, z_i) + κ(z_j, z_j) - 2 κ(z_i, z_j) to the nearest sample so far. Batches are independent of each
    other, hold distinct samples, and carry no weights: rare regions are drawn more often than their share on purpose,
    so batch means are *not* unbiased for those of the data set. Uniform until the first `refresh`.

    On the low-rank path κ(z_i, z_i) stays exact, so copies of a sample are a little apart for kernels with a residual.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, num_replicas, rank
        As for `MinibatchSampler`.
    kernel : Kernel, name or callable
        The kernel of the loss; ``"linear"`` is k-means++ on the features themselves.
    kernel_rank : int, optional
        Columns of the low-rank kernel features, with time O(n kernel_rank batch_size) and memory
        O(n kernel_rank); 0 for all distances between samples, with memory O(n²). By default 0 up to 2,048
        samples, 128 beyond.

    Examples
    --------
    >>> z = torch.cat([torch.zeros(98, 2), torch.tensor([[3.0, 0.0], [0.0, 3.0]])])
    >>> sampler = KMeansPlusPlusBatchSampler(100, batch_size=3, kernel="linear", seed=0)
    >>> sampler.refresh(z)
    >>> all({98, 99} <= set(batch) for batch in sampler)
    True
    """

    _table: Tensor | None = None  # squared distances (n, n), or points (n, r + 2) that give them
    _is_exact = True

    @torch.no_grad()
    def _fit(self, features: Tensor) -> None:
        kernel = fitted_kernel(self.kernel, features)
        columns = self._columns(DEFAULT_RANK)
        if columns == 0:
            matrix = _kernel_matrix(kernel, features)
            diag = matrix.diagonal().clone()
            distances = matrix.mul_(-2.0).add_(diag[:, None]).add_(diag)
            table = torch.threshold_(distances, _tolerance(diag), 0.0).to(features.dtype)
        else:
            generator = as_generator(derive_seed(self.seed, self._refreshes), features.device)
            _check_values(kernel.diag(features), kernel, features)
            low_rank = LowRankView.of(features, kernel, columns, generator=generator)
            diag = low_rank.diag
            table = torch.cat([low_rank.features, diag[:, None], torch.ones_like(diag)[:, None]], dim=1)
        self._table, self._is_exact = _check_values(table, kernel, features), columns == 0

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        table = self._table
        assert table is not None
        # one transfer: the generator is on the CPU, as for all samplers
        levels = torch.rand(self.batch_size, count, 2, dtype=torch.float64, generator=generator).to(table.device)
        masses = _MassTable(count, self.n, table)
        nearest = masses.mass
        chosen = torch.empty(count, self.batch_size, dtype=torch.int64, device=table.device)
        tolerance = 0.0 if self._is_exact else _tolerance(table[:, -2])
        distances = torch.empty_like(nearest, memory_format=torch.contiguous_format)
        for step in range(self.batch_size):
            # no mass yet makes the first draw uniform
            chosen[:, step] = seeds = masses.draw(levels[step])
            if self._is_exact:
                torch.index_select(table, 0, seeds, out=distances)
            else:
                torch.mm(_facing(table[seeds]), table.T, out=distances)
            if step == 0:
                nearest.copy_(distances)
                nearest.scatter_(1, seeds[:, None], 0.0)
            else:
                torch.minimum(nearest, distances, out=nearest)
            if not self._is_exact:
                torch.threshold_(nearest, tolerance, 0.0)
        return chosen

    def _extra_state(self) -> dict[str, Any]:
        return {"table": self._table, "is_exact": self._is_exact}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        self._table, self._is_exact = state["table"], check_flag(state["is_exact"], "is_exact")
        if self._table is not None:
            check_tensor(self._table, "table", (self.n, self.n if self._is_exact else None))


def _facing(points: Tensor) -> Tensor:
    """Rows (-2 φ_j, 1, K_jj), whose inner product with a point (φ_i, K_ii, 1) is d_ij."""
    return torch.cat([points[:, :-2] * -2.0, points[:, -2:].flip(1)], dim=1)


def _tolerance(diag: Tensor) -> float:
    return _ROUNDING * torch.finfo(diag.dtype).eps * float(diag.max())


# --- k-DPP --------------------------------------------------------------------------------------------------


class DPPBatchSampler(DiverseBatchSampler):
    """Each batch S of size k is drawn with probability det(L_S) / e_k, L being the kernel matrix of the data.

    The sampler is exact (Kulesza and Taskar 2012, section 5): k eigenvectors of L are chosen by the elementary
    symmetric polynomials e_l of its eigenvalues, then k samples by the projection on their span. Batches are
    independent of each other, hold distinct samples, and carry no weights: samples unlike the others are drawn more
    often than their share on purpose, so batch means are *not* unbiased for those of the data set. Uniform until the
    first `refresh`.

    Beyond 2,048 samples L = Φ Φᵀ with kernel features Φ (n, kernel_rank), without their residual diagonal.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, num_replicas, rank
        As for `MinibatchSampler`.
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
    >>> len(set(next(iter(sampler))))
    8
    """

    _values: Tensor | None = None  # positive eigenvalues (r,), double precision
    _vectors: Tensor | None = None  # eigenvectors, the rows of (r, n), in the features' precision
    _accept: Tensor | None = None

    @torch.no_grad()
    def _fit(self, features: Tensor) -> None:
        kernel = fitted_kernel(self.kernel, features)
        columns = self._columns(max(_DPP_RANK, 2 * self.batch_size))
        if columns == 0:
            values, vectors = _decompose_matrix(_kernel_matrix(kernel, features))
        else:
            generator = as_generator(derive_seed(self.seed, self._refreshes), features.device)
            x = _as_double(kernel, features)
            _check_values(kernel.diag(x), kernel, x)
            # not centred: a k-DPP depends on the origin
            phi, _ = fit_feature_map(x, kernel, columns, generator=generator)(x)
            values, vectors = _decompose_features(_check_values(phi, kernel, x))
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

    def _extra_state(self) -> dict[str, Any]:
        return {"values": self._values, "vectors": self._vectors}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        if state["values"] is None:
            self._values = self._vectors = self._accept = None
        else:
            values = check_tensor(state["values"], "values", (None,), low=0.0)
            self._use(values, check_tensor(state["vectors"], "vectors", (len(values), self.n)))


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


def _log_elementary_symmetric(log_values: Tensor, k: int) -> Tensor:
    """Logarithms of e_l(λ_1..λ_m) for l = 0..k and m = 0..r, from log λ (r,): (k + 1, r + 1), -inf for l > m.

    e_l(λ_1..λ_m) = Σ_{j <= m} λ_j e_{l-1}(λ_1..λ_{j-1}), summed in logarithms: no overflow and no cancellation.
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
    table = _log_elementary_symmetric(log_values, k)
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


# --- choosing samples -------------------------------------------------------------------------------------


def _sample_projections(vectors: Tensor, rows: Tensor, levels: Tensor) -> Tensor:
    """Draw from the projection DPPs on given eigenvectors, all batches together: (count, k).

    Sample i of a batch has the coordinates v_i (k,) in its eigenvectors, the ``rows`` (count, k) of the orthonormal
    ``vectors`` (r, n). After t picks it is drawn with probability proportional to |v_i|² less its part in the span of
    the picks' coordinates, for which an orthonormal basis is kept. A step is one product with all eigenvectors.
    ``levels`` (k, count, 2) are uniform on [0, 1).
    """
    count, k = rows.shape
    masses = _MassTable(count, vectors.shape[1], vectors)
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
