"""A store of the latest known features of every sample, filled by the batches as they pass."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor

from vardass.errors import InputError
from vardass.kernels import as_kernel
from vardass.refresh.feature_extraction import PassOptions, as_device, evaluation_mode, feature_batches
from vardass.validate import ArrayLike, Progress, as_features, as_generator, as_weights, check_count, check_state

__all__ = ["FeatureBank"]

_STATE_VERSION = 1
_NEVER = -1
_KEPT = 64  # batches that are written together


class FeatureBank:
    """The latest known features of n samples, so that a refresh costs no extra forward pass.

    Training computes the features of its batches anyway; `update` keeps them. Rows are then of different
    ages, and of training mode: with dropout or augmentation they carry that noise. `fill` computes chosen
    rows anew, for example before the first refresh or the stalest few before each one.

    Parameters
    ----------
    n : int
        Number of samples.
    d : int, optional
        Width of the features; by default that of the first ones. The one (n, d) tensor is allocated then.
    dtype : torch.dtype
        Of the store; half precision halves its memory.
    device : device
        Of the store. `update` transfers each batch to it: from a GPU to the default CPU store that waits for
        the batch to be computed, a store on the same GPU does not.

    Attributes
    ----------
    last_step : int
        The latest step at which rows were written.

    Examples
    --------
    >>> bank = FeatureBank(4)
    >>> bank.update([0, 2], torch.ones(2, 3), step=7)
    >>> bank.filled, bank.stale_rows(2).tolist(), bank.updated_at.tolist()
    (0.5, [1, 3], [7, -1, 7, -1])
    """

    def __init__(
        self,
        n: int,
        d: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.n = check_count(n, "n")
        self.d = None if d is None else check_count(d, "d")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(f"dtype must be a floating-point type, got {dtype!r}; use torch.float32")
        self.dtype = dtype
        self.device = as_device(device)
        self._updated_at = torch.full((self.n,), _NEVER, device=self.device)
        self.last_step = _NEVER
        self._rows: Tensor | None = None
        # steps may repeat or be left out by the caller; the order of renewal is counted apart from them
        self._turn = 0
        self._turns = torch.full((self.n,), _NEVER, device=self.device)
        self._marked: int | None = None
        self._kept: list[tuple[Tensor, Tensor, int]] = []  # batches that are still to be written

    # --- writing --------------------------------------------------------------------------------------

    def update(self, indices: ArrayLike | list[int], features: ArrayLike, step: int | None = None) -> None:
        """Store the features of one batch.

        Parameters
        ----------
        indices : sequence of b ints
            Rows of the data set. Of a row that comes twice, the last one counts. Their range is checked only
            on the CPU: on a GPU the check would wait for the device.
        features : array of shape (b, d)
            Any device and dtype; detached.
        step : int, optional
            Present step, by default one more than at the last update.
        """
        z = as_features(features, check_finite=False)
        step = self.last_step + 1 if step is None else check_count(step, "step", low=0)
        self._write(_as_rows(indices, len(z), self.n), z, step)

    def keep(self, rows: Tensor, features: Tensor, step: int) -> None:
        """Do what `update` does in a few microseconds: nothing is checked, and the batch is written when it is needed.

        Parameters
        ----------
        rows : Tensor of shape (b,)
            Rows of the data set, int64, within range. Like ``features`` it must not be changed afterwards.
        features : Tensor of shape (b, d)
            Detached here.
        step : int
            Present step.
        """
        self._kept.append((rows, features.detach(), step))
        self.last_step = max(self.last_step, step)
        if len(self._kept) == _KEPT:
            self._write_kept()

    def fill(
        self,
        model: Any,
        dataset: Any,
        *,
        rows: ArrayLike | list[int] | None = None,
        budget: int | None = None,
        seconds: float | None = None,
        step: int | None = None,
        eval_mode: bool = True,
        progress: Progress | None = None,
        **options: Unpack[PassOptions],
    ) -> int:
        """Compute rows by a forward pass, as `extract_features` does, and return how many.

        Parameters
        ----------
        model, dataset
            As for `extract_features`; the data set must give samples by index, without augmentation.
        rows : sequence of int, optional
            Exactly these rows. By default all of them.
        budget : int, optional
            Only the so many stalest rows: a partial refresh.
        seconds : float, optional
            Go from the stalest row on, or through ``rows``, until the time is up. The batch that is under way
            then is finished.
        step : int, optional
            Present step, by default that of the last update.
        eval_mode, progress, options
            As for `extract_features`.
        """
        if rows is not None and budget is not None:
            raise InputError(f"give rows or a budget, got {len(rows)} rows and budget={budget}; leave one out")
        if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
            raise InputError(f"seconds must be positive, got {seconds}; budget=0 computes nothing")
        self._check_dataset(dataset)
        if rows is not None:
            wanted = _as_rows(rows, len(rows), self.n)
        elif budget is None and seconds is None:
            wanted = torch.arange(self.n)
        else:
            wanted = self.stale_rows(self.n if budget is None else budget)
        step = max(self.last_step, 0) if step is None else check_count(step, "step", low=0)
        done, total = 0, len(wanted)
        if total == 0:
            return 0
        began = time.perf_counter()
        with evaluation_mode(model) if eval_mode else nullcontext():
            for z in feature_batches(model, dataset, wanted, **options):
                self._write(wanted[done : done + len(z)], z, step)
                done += len(z)
                if progress is not None:
                    progress(done / total, f"features of {done} of {total} samples")
                if seconds is not None and time.perf_counter() - began >= seconds:
                    break
        return done

    def _write(self, rows: Tensor, z: Tensor, step: int) -> None:
        self._write_kept()
        self._write_batches([(rows, z, step)])

    def _write_kept(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            self._write_batches(kept)

    def _write_batches(self, batches: list[tuple[Tensor, Tensor, int]]) -> None:
        for _, z, _ in batches:
            if self.d is not None and z.shape[1] != self.d:
                raise InputError(
                    f"features have {z.shape[1]} columns, the bank holds d={self.d}; make a new bank for another "
                    "featuriser"
                )
        if self._rows is None:
            self.d = batches[0][1].shape[1]
            self._rows = torch.zeros(self.n, self.d, dtype=self.dtype, device=self.device)
        steps = [step for _, _, step in batches]
        turns = range(self._turn, self._turn + len(batches))
        self._turn += len(batches)
        self.last_step = max(self.last_step, *steps)
        step: int | Tensor
        turn: int | Tensor
        if len(batches) == 1:
            rows, z, step = batches[0]
            turn = turns[0]
        else:
            sizes = torch.tensor([len(rows) for rows, _, _ in batches])
            rows, z = (torch.cat(parts) for parts in list(zip(*batches))[:2])
            step, turn = (torch.tensor(list(values)).repeat_interleave(sizes) for values in (steps, turns))
        rows = self._here(rows)
        z = z.to(self.dtype) if z.element_size() > self.dtype.itemsize else z  # the smaller one travels
        if self.device.type == "cpu" and torch.bfloat16 not in (self.dtype, z.dtype):  # which numpy does not know
            # the same in few microseconds, at every step: numpy goes in order, so that the last of equal indices wins
            place = rows.numpy()
            self._rows.numpy()[place] = self._here(z).numpy()
            self._updated_at.numpy()[place] = step
            self._turns.numpy()[place] = turn
        else:
            # index_copy_ lets any of several equal indices win: hand it the last row for all of them
            last = _last_occurrence(rows)
            self._rows.index_copy_(0, rows, self._here(z).to(self.dtype).index_select(0, last))
            for store, value in ((self._updated_at, step), (self._turns, turn)):
                store[rows] = value.to(self.device)[last] if isinstance(value, Tensor) else value

    def _here(self, x: Tensor) -> Tensor:
        # the one transfer; towards the CPU it must wait, or the host would read before the copy is done
        return x.to(self.device, non_blocking=self.device.type != "cpu")

    # --- reading --------------------------------------------------------------------------------------

    @property
    def updated_at(self) -> Tensor:
        """Step at which each row was last renewed (n,), -1 for never."""
        self._write_kept()
        return self._updated_at

    @property
    def filled(self) -> float:
        """Share of the rows that have features."""
        return self._filled_count() / self.n

    def ages(self, step: int | None = None) -> Tensor:
        """Steps since each row was renewed (n,), by default at the last update; ``step + 1`` for never."""
        return (self.last_step if step is None else check_count(step, "step", low=0)) - self.updated_at

    def stale_rows(self, count: int) -> Tensor:
        """Indices of the ``count`` rows that have not been renewed for longest, never filled ones first."""
        count = check_count(count, "count", low=0, high=self.n)
        self._write_kept()
        return self._turns.argsort(stable=True)[:count]

    def features(self, *, missing: str = "error", seed: int | torch.Generator = 0) -> Tensor:
        """Return the features of all samples (n, d): the store itself, not a copy, so clone it to keep it.

        Parameters
        ----------
        missing : {"error", "sample"}
            What to do with rows that never had features. ``"sample"`` gives each one those of a random row
            that has: unseen samples then spread over the strata like the others. Draws stay unbiased, as
            they are with any strata, but the variance that a solver reports is too low.
        seed : int or torch.Generator
            For ``"sample"``.

        Raises
        ------
        InputError
            If rows are missing, or all of them.
        """
        if missing not in ("error", "sample"):
            raise InputError(f"missing must be 'error' or 'sample', got {missing!r}")
        count = self._filled_count()
        if self._rows is None or count == 0 or (count < self.n and missing == "error"):
            raise InputError(
                f"features exist for {count} of n={self.n} rows; call bank.fill(model, dataset) before the first "
                "refresh, or start refreshing after training has passed every row (start=... of the policy)"
                + (", or accept missing='sample'" if count else "")
            )
        if count < self.n:
            known = (self._turns != _NEVER).nonzero().flatten()
            unknown = (self._turns == _NEVER).nonzero().flatten()
            generator = as_generator(seed, self.device)
            picked = torch.randint(count, (len(unknown),), generator=generator, device=self.device)
            self._rows.index_copy_(0, unknown, self._rows[known[picked]])
        return self._rows

    def mark(self) -> None:
        """Remember that strata were made from the present rows, for `drift`."""
        self._write_kept()
        self._marked = self._turn

    @torch.no_grad()
    def drift(
        self,
        indices: ArrayLike | list[int],
        features: ArrayLike,
        *,
        kernel: Any = None,
        weights: ArrayLike | None = None,
    ) -> Tensor:
        """How far a batch has moved from its stored rows, Σ_h w_h |φ_new - φ_bank|²; ask **before** `update`.

        After a `mark` only rows count that still hold what they held then: others have been renewed since,
        so their distance says less than the strata are out of date. If no row counts the result is NaN,
        which `DriftRefresh` ignores. A bank that is renewed more slowly than the features move keeps a high
        drift after a refresh; the remedy is `fill` with a budget.

        Parameters
        ----------
        indices, features
            As for `update`.
        kernel : Kernel, str, callable or None
            Fitted kernel whose feature map φ is meant; None compares the features themselves.
        weights : array of shape (b,), optional
            Those of the batch; None means equal.

        Returns
        -------
        Tensor
            A scalar on the bank's device.
        """
        z = as_features(features, check_finite=False)
        rows = _as_rows(indices, len(z), self.n)
        fitted = as_kernel("linear" if kernel is None else kernel)
        self._write_kept()
        precision = torch.promote_types(self.dtype, torch.float32)
        if self._rows is None:
            return torch.full((), math.nan, dtype=precision, device=self.device)
        if z.shape[1] != self.d:
            raise InputError(f"features have {z.shape[1]} columns, the bank holds d={self.d}")
        rows, z = self._here(rows), self._here(z).to(precision)
        squared = fitted.paired_distances(z, self._rows.index_select(0, rows).to(precision))
        w = as_weights(weights, len(z), squared)
        turns = self._turns[rows]
        counts = turns != _NEVER if self._marked is None else (turns != _NEVER) & (turns < self._marked)
        w = counts.to(squared) if w is None else w * counts
        return torch.where(counts, w * squared, 0.0).sum() / w.sum()

    # --- state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The bank's tensors, not copies of them, and plain numbers, as for ``nn.Module``."""
        self._write_kept()
        return {
            "bank": _STATE_VERSION,
            "n": self.n,
            "d": self.d,
            "rows": self._rows,
            "updated_at": self.updated_at,
            "last_step": self.last_step,
            "turns": self._turns,
            "turn": self._turn,
            "marked": self._marked,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the rows and ages of another bank of the same n and d."""
        check_state(state, self)
        absent = self.state_dict().keys() - state.keys()
        if absent or state["bank"] != _STATE_VERSION:
            raise InputError(
                f"not the state of a FeatureBank of version {_STATE_VERSION}: version {state.get('bank')!r}, "
                f"without {sorted(absent)}; pass what FeatureBank.state_dict() gave"
            )
        if state["n"] != self.n or (None not in (self.d, state["d"]) and state["d"] != self.d):
            raise InputError(
                f"the state has n={state['n']}, d={state['d']}, the bank n={self.n}, d={self.d}; make the bank for "
                "the same data set and featuriser"
            )
        if state["rows"] is None:
            self._rows = None
        else:
            if self._rows is None:
                self._rows = torch.empty(state["rows"].shape, dtype=self.dtype, device=self.device)
            self._rows.copy_(state["rows"])
        self.d = self.d if state["d"] is None else state["d"]
        self._updated_at.copy_(state["updated_at"])
        self._turns.copy_(state["turns"])
        self.last_step, self._turn, self._marked = state["last_step"], state["turn"], state["marked"]

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"FeatureBank(n={self.n}, d={self.d}, filled={self.filled:.3g}, device={str(self.device)!r})"

    # --- checks ---------------------------------------------------------------------------------------

    def _filled_count(self) -> int:
        self._write_kept()
        return int((self._turns != _NEVER).sum())

    def _check_dataset(self, dataset: Any) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise InputError(f"fill needs a data set that gives samples by index, got {type(dataset).__name__}")
        if len(dataset) != self.n:
            raise InputError(
                f"the data set has {len(dataset)} samples, the bank n={self.n}; pass the one the bank was made for"
            )


def _as_rows(indices: ArrayLike | list[int], count: int, n: int) -> Tensor:
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
