"""A permutation test of two sets of rows by any statistic, with an exact level at any size.

Its level is exact for any subgroup of all permutations: many rows are permuted as about 4,096 random blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from vardass.validate import Progress, row_blocks

_PERMUTED_BLOCKS = 4096
_LEAST_BLOCKS = 256  # of the smaller set, if it has as many rows
_CHUNK = 64  # permutations at a time

Statistic: TypeAlias = Callable[[Tensor], Tensor]
"""Values (q,) of the test statistic for memberships (q, blocks): 1 where a block counts as one of x."""


@dataclass(frozen=True)
class Blocks:
    """Random blocks of ``size`` rows of one set each, which are permuted as a whole; rows that are left over stay.

    Blocks of x come first, then those of y, then the two rests, one of x and one of y.
    """

    labels: Tensor  # block of each row, x before y
    of_x: int
    of_y: int
    size: int

    @classmethod
    def of(cls, n: int, m: int, generator: torch.Generator) -> Blocks:
        """Blocks of n rows of x and m of y."""
        size = max(1, min(-(-(n + m) // _PERMUTED_BLOCKS), min(n, m) // _LEAST_BLOCKS))
        few = min(n, m) // size
        many = min(max(n, m) // size, max(few, _PERMUTED_BLOCKS - few))
        of_x, of_y = (few, many) if n <= m else (many, few)
        labels = []
        for count, whole, start, rest in ((n, of_x, 0, 0), (m, of_y, of_x, 1)):
            if count == whole:  # rows are their own blocks, in their order
                labels.append(torch.arange(count, device=generator.device) + start)
                continue
            block = torch.randperm(count, generator=generator, device=generator.device) // size
            labels.append(torch.where(block < whole, block + start, of_x + of_y + rest))
        return cls(torch.cat(labels), of_x, of_y, size)

    @property
    def is_plain(self) -> bool:
        """Whether all rows are permuted, each for itself."""
        return self.size == 1 and self.of_x + self.of_y == len(self.labels)

    @property
    def count(self) -> int:
        """Blocks, with the two rests."""
        return self.of_x + self.of_y + (0 if self.is_plain else 2)

    def __str__(self) -> str:
        return "rows" if self.is_plain else f"{self.of_x:,} and {self.of_y:,} blocks of {self.size:,} rows"

    def identity(self) -> Tensor:
        """Membership as it is: (1, blocks)."""
        members = torch.zeros(1, self.count, dtype=torch.float64, device=self.labels.device)
        members[:, : self.of_x] = 1.0
        if not self.is_plain:
            members[:, -2] = 1.0
        return members

    def permuted(self, count: int, generator: torch.Generator) -> Tensor:
        """Random memberships: (count, blocks)."""
        total = self.of_x + self.of_y
        members = self.identity().repeat(count, 1)
        keys = torch.rand(count, total, generator=generator, device=members.device)
        members[:, :total] = members[:, :total].gather(1, keys.argsort(1))
        return members

    def p_value(
        self, statistic: Statistic, scale: float, permutations: int, generator: torch.Generator, tell: Progress
    ) -> float:
        """(1 + permutations with at least the observed value) / (1 + permutations).

        ``scale`` is the size of the terms that the statistic is a difference of, for its rounding.
        """
        least = statistic(self.identity()) - 1e-12 * scale
        least = least - 1e-9 * least.abs()  # labels that swap two equal sets have the same value but for rounding
        above = 0
        for rows in row_blocks(permutations, _CHUNK):
            members = self.permuted(rows.stop - rows.start, generator)
            above += int((statistic(members) >= least).sum())
            tell(0.9 + 0.1 * rows.stop / permutations, "permutations")
        return (1 + above) / (1 + permutations)
