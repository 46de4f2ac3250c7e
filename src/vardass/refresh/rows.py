"""Row numbers of a batch: checks, and which of several equal ones counts."""

from __future__ import annotations

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.validate import ArrayLike

__all__ = ["as_rows", "last_occurrence"]


def as_rows(indices: ArrayLike | list[int], count: int, n: int) -> Tensor:
    """Return ``indices`` as an int64 tensor (count,), checked to be within ``range(n)`` on the CPU only."""
    rows = torch.as_tensor(indices)
    if rows.numel() == 0:
        rows = rows.long()
    if rows.ndim != 1 or rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise InputError(
            f"indices must be whole numbers of shape (b,), got {rows.dtype} of shape {tuple(rows.shape)}; "
            "pass the indices of the batch"
        )
    if len(rows) != count:
        raise InputError(f"got {len(rows)} indices for {count} rows of features; pass the indices of the same batch")
    if rows.device.type == "cpu" and count:
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= n:
            wrong = low if low < 0 else high
            raise InputError(f"index {wrong} is outside 0..{n - 1}; the bank was made for n={n} samples")
    return rows.long()


def last_occurrence(rows: Tensor) -> Tensor:
    """For each place the last place that holds the same number: [5, 7, 5] gives [2, 1, 2]."""
    count = len(rows)
    ordered, order = rows.sort(stable=True)
    ends = torch.ones(count, dtype=torch.bool, device=rows.device)
    ends[:-1] = ordered[1:] != ordered[:-1]
    place = torch.arange(count, device=rows.device)
    end = torch.where(ends, place, count).flip(0).cummin(0).values.flip(0)
    return torch.empty_like(order).scatter_(0, order, order.gather(0, end))
