"""What the samplers of diverse batches share: options, the uniform start, and draws of many batches at once."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import FunctionKernel, Kernel, KernelLike, as_kernel
from vardass.samplers.base import Chunk, MinibatchSampler
from vardass.solvers import EXACT_LIMIT
from vardass.validate import check_count

__all__ = ["DiverseBatchSampler", "MassTable", "check_values", "kernel_matrix"]

_BLOCK = 128  # masses that are summed before the draw looks at them one by one
_NUMBERS = 2**20  # masses held at a time
_FEWEST, _MOST = 16, 64  # batches drawn together: below, reading the features dominates; above, nothing is gained


class DiverseBatchSampler(MinibatchSampler):
    """Base of samplers whose batch spreads over the data: uniform until the first `refresh`.

    The uniform batches hold distinct samples, as all later ones do. Batches are drawn some tens at a time, with
    memory for that many numbers per sample. Under several processes each of them draws all batches.

    Parameters
    ----------
    n, batch_size, seed, batches, endless, num_replicas, rank
        As for `MinibatchSampler`; ``rank`` is that of the process.
    kernel : Kernel, name or callable
        Fitted to the features at each refresh.
    kernel_rank : int, optional
        Columns of the low-rank kernel features; 0 for the full kernel matrix. By default the full matrix up
        to 2,048 samples, low rank beyond.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        kernel: KernelLike = "mmd",
        kernel_rank: int | None = None,
        seed: int = 0,
        batches: int | None = None,
        endless: bool = False,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(
            n, batch_size, seed=seed, batches=batches, endless=endless, num_replicas=num_replicas, rank=rank
        )
        self.kernel = as_kernel(kernel)
        self.kernel_rank = None if kernel_rank is None else check_count(kernel_rank, "kernel_rank", low=0)

    @property
    @abstractmethod
    def _is_fitted(self) -> bool:
        """Whether there was a refresh."""

    @abstractmethod
    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw ``count`` independent batches from what `_fit` found: (count, batch_size)."""

    def _columns(self, default: int) -> int:
        """Columns of the low-rank features, 0 for the full matrix."""
        if self.kernel_rank is not None:
            return self.kernel_rank
        return 0 if self.n <= EXACT_LIMIT else default

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
        if not self._is_fitted:
            return Chunk(_disjoint_batches(self.n, self.batch_size, count, generator))
        parts = [self._draw(min(self._together, count - start), generator) for start in range(0, count, self._together)]
        return Chunk(torch.cat(parts).to("cpu"))


def _disjoint_batches(n: int, batch_size: int, count: int, generator: torch.Generator) -> Tensor:
    """Cut random permutations of the samples into batches: (count, batch_size)."""
    per_turn = n // batch_size
    turns = -(-count // per_turn)
    orders = [torch.randperm(n, generator=generator)[: per_turn * batch_size] for _ in range(turns)]
    return torch.cat(orders).view(-1, batch_size)[:count]


def kernel_matrix(kernel: Kernel, x: Tensor) -> Tensor:
    """Full matrix (n, n) of a fitted kernel, in double precision where the kernel allows it."""
    # a user's function may hold tensors of the features' type
    x = x if isinstance(kernel, FunctionKernel) else x.double()
    return check_values(kernel.square_matrix(x), kernel, x)


def check_values(values: Tensor, kernel: Kernel, x: Tensor) -> Tensor:
    """Return ``values`` that a kernel gave on ``x``, or raise an InputError if some are not finite."""
    if not bool(torch.isfinite(values).all()):
        raise InputError(
            f"{kernel!r} has NaN or infinite values in {values.dtype} on these features (largest entry "
            f"{float(x.abs().max()):.3g}); scale the features or choose another kernel"
        )
    return values


class MassTable:
    """Masses of n samples for each of several batches, from which one sample a batch is drawn at a time.

    A draw looks at the sums of blocks first and then into one block, which costs one pass over the masses.
    Where a batch has no mass left the draw is uniform among the samples that it lacks.

    Parameters
    ----------
    count, n : int
        Batches and samples.
    like : Tensor
        Gives dtype and device.

    Attributes
    ----------
    mass : Tensor of shape (count, n)
        A view to be written to, not negative. A drawn sample's mass is set to zero and must stay there.
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
        """Draw one sample a batch: (count,).

        ``levels`` (count, 2) are uniform on [0, 1), in double precision.
        """
        blocked = self._mass.view(*self._free_in_block.shape, _BLOCK)
        sums = blocked.sum(2).double()
        has_mass = sums.sum(1, keepdim=True) > 0.0
        block = _invert(torch.where(has_mass, sums, self._free_in_block), levels[:, 0])
        inside = blocked[self._batch, block].double()
        free = self._free.view(blocked.shape)[self._batch, block].double()
        sample = block * _BLOCK + _invert(torch.where(has_mass, inside, free), levels[:, 1])
        self._mass[self._batch, sample] = 0.0
        self._free[self._batch, sample] = False
        self._free_in_block[self._batch, block] -= 1.0
        return sample


def _invert(mass: Tensor, level: Tensor) -> Tensor:
    """Index in each row of ``mass`` (count, m) at which its running sum passes ``level`` (count,) of the total."""
    reached = mass.cumsum(1)
    # level < 1 in double precision leaves the product below the total, so an entry with mass is found
    found = torch.searchsorted(reached, (level * reached[:, -1])[:, None], right=True)
    return found[:, 0].clamp_max_(mass.shape[1] - 1)
