"""A store of the latest known features of every sample, filled by the batches as they pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.refresh.feature_extraction import as_device, extract_features
from vardass.validate import ArrayLike, as_features, check_count, check_state, check_tensor

_KEPT = 64  # batches that are written together


class FeatureBank:
    """The latest known features of n samples in single precision, so that a refresh costs no extra forward pass.

    Training computes the features of its batches anyway; `update` keeps them. Rows are then of different ages, and
    carry the noise of dropout and augmentation. `fill` recomputes all, for example before the first refresh.

    Parameters
    ----------
    n : int
        Number of samples. The width d of the (n, d) tensor is that of the first features.
    device : device
        Device of the store. `update` copies each batch to it: from a GPU to the default CPU store the copy waits for
        the batch to be computed, to a store on the same GPU it does not.

    Examples
    --------
    >>> bank = FeatureBank(4)
    >>> bank.fill(torch.nn.Identity(), torch.zeros(4, 2))
    >>> bank.update([0, 2], torch.ones(2, 2))
    >>> bank.features()[:, 0]
    tensor([1., 0., 1., 0.])
    """

    def __init__(self, n: int, *, device: torch.device | str = "cpu") -> None:
        self.n = check_count(n, "n")
        self.d: int | None = None
        self.device = as_device(device)
        self._rows: Tensor | None = None
        self._is_known = torch.zeros(self.n, dtype=torch.bool, device=self.device)  # whether a row has features
        self._kept: list[tuple[Tensor, Tensor]] = []  # batches that are still to be written

    def update(self, indices: ArrayLike | list[int], features: ArrayLike) -> None:
        """Store the ``features`` (b, d) of one batch, of any device and dtype, for the rows ``indices`` (b,).

        If an index occurs twice, the last row counts. The range is checked on the CPU only.
        """
        z = as_features(features, check_finite=False)
        self.keep(_as_rows(indices, len(z), self.n), z)
        self._write_kept()

    def keep(self, rows: Tensor, features: Tensor) -> None:
        """`update` in a few microseconds: nothing is checked, and the batch is written later.

        ``rows`` (b,) are int64 and within range; neither they nor ``features`` (b, d) may be changed afterwards.
        """
        self._kept.append((rows, features.detach()))
        if len(self._kept) == _KEPT:
            self._write_kept()

    def fill(self, model: Any, data: Any, **options: Any) -> None:
        """Compute all rows by a forward pass over ``data``, without augmentation; options of `extract_features`."""
        features = extract_features(model, data, out_device=self.device, **options)
        if len(features) != self.n:
            raise InputError(
                f"the data set has {len(features)} samples, the bank n={self.n}; pass the one the bank was made for"
            )
        self.update(torch.arange(self.n), features)

    def _write_kept(self) -> None:
        if not self._kept:
            return
        batches, self._kept = self._kept, []
        for _, z in batches:
            if self.d is not None and z.shape[1] != self.d:
                raise InputError(
                    f"features have {z.shape[1]} columns, the bank holds d={self.d}; make a new bank for another "
                    "featuriser"
                )
            self.d = z.shape[1]
        if self._rows is None:
            self._rows = torch.zeros(self.n, batches[0][1].shape[1], device=self.device, dtype=torch.float32)
        rows, z = batches[0] if len(batches) == 1 else (torch.cat(parts) for parts in zip(*batches))
        rows = self._here(rows)
        z = z.float() if z.element_size() > 4 else z  # the smaller one travels
        # index_copy_ lets any of several equal indices win: hand it the last row for all of them
        self._rows.index_copy_(0, rows, self._here(z).float().index_select(0, _last_occurrence(rows)))
        self._is_known[rows] = True

    def _here(self, x: Tensor) -> Tensor:
        # the one transfer; towards the CPU it must wait, or the host would read before the copy is done
        return x.to(self.device, non_blocking=self.device.type != "cpu")

    def features(self) -> Tensor:
        """Return the features of all samples (n, d), the store itself, not a copy; an error if any are missing."""
        self._write_kept()
        count = int(self._is_known.sum())
        if self._rows is None or count < self.n:
            raise InputError(
                f"features exist for {count} of n={self.n} rows; call bank.fill(model, dataset) before the first "
                "refresh, or start refreshing after training has passed every row (start=... of the policy)"
            )
        return self._rows

    def state_dict(self) -> dict[str, Any]:
        """The bank's tensors, not copies of them, and plain numbers, as for ``nn.Module``."""
        self._write_kept()
        return {
            "n": self.n,
            "d": self.d,
            "rows": self._rows,
            "is_known": self._is_known,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the rows of another bank with the same n and d."""
        check_state(state, self, self.state_dict())
        if state["n"] != self.n or (None not in (self.d, state["d"]) and state["d"] != self.d):
            raise InputError(
                f"the state has n={state['n']}, d={state['d']}, the bank n={self.n}, d={self.d}; use one of that size"
            )
        rows, is_known = state["rows"], state["is_known"]
        if rows is not None:
            check_tensor(rows, "rows of the state", (self.n, check_count(state["d"], "d of the state")))
        if not isinstance(is_known, Tensor) or is_known.dtype != torch.bool or is_known.shape != (self.n,):
            raise InputError(f"is_known of the state must be n={self.n} flags; pass what FeatureBank.state_dict() gave")
        self._rows = None if rows is None else rows.to(self.device, torch.float32, copy=True)
        self.d = self.d if state["d"] is None else state["d"]
        self._is_known.copy_(is_known)


def _as_rows(indices: ArrayLike | list[int], count: int, n: int) -> Tensor:
    """Return ``indices`` as an int64 tensor (count,), checked to be within ``range(n)`` on the CPU only."""
    rows = torch.as_tensor(indices)
    rows = rows if rows.numel() else rows.long()
    if rows.ndim != 1 or rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise InputError(
            f"indices must be whole numbers of shape (b,), got {rows.dtype} of shape {tuple(rows.shape)}; "
            "pass the indices of the batch"
        )
    if len(rows) != count:
        raise InputError(f"got {len(rows)} indices for {count} rows of features; pass the indices of the same batch")
    if rows.device.type == "cpu" and count:
        values = rows.numpy()
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= n:
            wrong = low if low < 0 else high
            raise InputError(f"index {wrong} is outside 0..{n - 1}; the bank was made for n={n} samples")
    return rows.long()


def _last_occurrence(rows: Tensor) -> Tensor:
    """For each place the last place that holds the same number: [5, 7, 5] gives [2, 1, 2]."""
    count = len(rows)
    ordered, order = rows.sort(stable=True)
    ends = torch.ones(count, dtype=torch.bool, device=rows.device)
    ends[:-1] = ordered[1:] != ordered[:-1]
    place = torch.arange(count, device=rows.device)
    end = torch.where(ends, place, count).flip(0).cummin(0).values.flip(0)
    return torch.empty_like(order).scatter_(0, order, order.gather(0, end))
