"""Exact descent on the min-sum objective by blocks of single-point moves.

With W_ih = Σ_{j in S_h} d_ij, moving point i from stratum a to b changes J by exactly W_ib - W_ia. Several
moves at once interact: with E_i = e_b(i) - e_a(i),

    ΔJ = -Σ_i gain_i + Σ_{i<j} d_ij <E_i, E_j>.

A block proposes its best moves by one matrix product; the interactions among them are then computed exactly, so J
never rises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vardass.backend import compiled_loops
from vardass.solvers.labels import SizeLimits, Solution
from vardass.validate import Progress, check_count, check_number, row_blocks
from vardass.view import ExactView, LowRankView, View

__all__ = ["EXCHANGED", "min_sum"]

_BLOCK_NUMBERS = 2**22  # products of points with strata that are held together
_CANDIDATES = 512  # points of a block that are moved one after the other
EXCHANGED = 32_768
"""Samples up to which points of full strata are exchanged.

Beyond, a pass of exchanges takes longer than all the rest, for at most 2 % of the variance (n = 80,000, k = 8 to 128).
"""
_SMALL = 16
# Points of a stratum, on average, below which all points are exchanged. A move to a small stratum costs its size, so
# moves get stuck: exchanges gain 0.5 to 3 % there
_EXCHANGES = 3
# passes with exchanges of all points, in small strata or those of equal size; more gain less than 0.5 %
_NEAREST = 8  # strata that a point is compared with where there are many
_ROUNDS = 4  # of moves between the nearest strata until these are looked for again
_FAR = 1.0  # typical changes of a score beyond which a point need not be looked at in a round


class _State(ABC):
    """Labels with the statistics that give W for any rows, updated in place by `move`."""

    def __init__(self, view: View, labels: Tensor, k: int) -> None:
        self.diag = view.diag
        self.labels = labels.clone()
        self.k = k
        self.sizes = torch.bincount(labels, minlength=k).to(self.diag)
        self.diag_sums = torch.zeros_like(self.sizes).index_add_(0, labels, self.diag)

    @abstractmethod
    def scores(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """W transposed (k, b) and each row's value in its own stratum (b,)."""

    @abstractmethod
    def within(self) -> float:
        """Σ_h Σ_{i,j in S_h} K_ij."""

    def objective(self) -> float:
        """J from the statistics alone, whose rounding adds up over moves."""
        return max(0.0, float(self.sizes.double() @ self.diag_sums.double()) - self.within())

    def block_rows(self) -> int:
        """How many points to look at together."""
        return 2 * _CANDIDATES

    @abstractmethod
    def sweep(self, loops: ModuleType, limits: SizeLimits, noise: float, worthwhile: float) -> tuple[float, int]:
        """Compiled passes of moves over all points; returns the decrease of J and how many passes were made."""

    def interaction(self, rows: Tensor, source: Tensor, target: Tensor) -> float:
        """Σ_{i<j} d_ij <E_i, E_j> of moves made together; infinite where that is not cheap to know."""
        return float("inf")

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Move ``rows`` from ``source`` to ``target`` strata."""
        one = torch.ones_like(rows, dtype=self.sizes.dtype)
        self.sizes.index_add_(0, source, one, alpha=-1).index_add_(0, target, one)
        diag = self.diag[rows]
        self.diag_sums.index_add_(0, source, diag, alpha=-1).index_add_(0, target, diag)
        self.labels[rows] = target


class _ExactState(_State):
    """Keeps Σ_{j in S_h} K_ij for all i, as (k, n) so that a move adds one contiguous row."""

    def __init__(self, view: ExactView, labels: Tensor, k: int) -> None:
        super().__init__(view, labels, k)
        self.matrix = view.matrix.contiguous()
        self.cross = view.totals(labels, k)

    def sweep(self, loops: ModuleType, limits: SizeLimits, noise: float, worthwhile: float) -> tuple[float, int]:
        arrays = (self.matrix, self.diag, self.labels, self.cross, self.sizes, self.diag_sums)
        known = [a.numpy() for a in arrays]
        buffers = [np.empty(len(self.diag), dtype) for dtype in (known[0].dtype, known[0].dtype, np.int32, np.int64)]
        rules = limits.low, limits.high, noise, worthwhile
        return float(loops.sweep_exact(*known, *rules, *buffers, float("inf"))), 1

    def within(self) -> float:
        return float(self.cross.gather(0, self.labels[None]).sum(dtype=torch.float64))

    def scores(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.addcmul(self.diag_sums[:, None], self.sizes[:, None], self.diag[rows])
        scores.sub_(self.cross[:, rows], alpha=2.0)
        return scores, scores.gather(0, self.labels[None, rows])[0]

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        super().move(rows, source, target)
        columns = self.matrix[rows]
        self.cross.index_add_(0, source, columns, alpha=-1).index_add_(0, target, columns)


class _LowRankState(_State):
    """Keeps Σ_{j in S_h} φ_j (k, r): W is one product of features with stratum statistics."""

    def __init__(self, view: LowRankView, labels: Tensor, k: int) -> None:
        super().__init__(view, labels, k)
        self.features = view.features.contiguous()
        self.residual = view.residual
        self.sums = view.totals(labels, k)
        self.spread = 2.0 * float(view.spread.mean())

    def sweep(self, loops: ModuleType, limits: SizeLimits, noise: float, worthwhile: float) -> tuple[float, int]:
        if self.k <= 2 * _NEAREST:
            others = torch.arange(self.k - 1, dtype=torch.int32)
            nearest = others + (others >= self.labels[:, None]).int()
        else:  # one product finds the strata that each point is near to; moves between these need no other ones
            nearest = torch.empty(len(self.diag), _NEAREST, dtype=torch.int32)
            for rows in row_blocks(len(self.diag), _BLOCK_NUMBERS // self.k):
                cross = self.features[rows] @ self.sums.T
                given = (cross, self.diag[rows], self.labels[rows], self.sizes, self.diag_sums)
                loops.nearest_strata(*(a.numpy() for a in given), limits.high, nearest[rows].numpy())
        gaps = torch.zeros_like(self.diag)
        known = (self.features, self.residual, self.diag, self.labels, self.sums, self.sizes, self.diag_sums)
        arrays = [a.numpy() for a in (*known, nearest, gaps)]
        decrease, rounds, limit = 0.0, 0, float("inf")
        gained = float("inf")
        while rounds < _ROUNDS and gained > 5.0 * worthwhile:
            gained, moves = loops.sweep_nearest(*arrays, limit, limits.low, limits.high, noise)
            decrease += gained
            rounds += 1
            # m points that join or leave a stratum change a score by about √m distances
            limit = _FAR * self.spread * (2.0 * moves / self.k) ** 0.5
        return decrease, rounds

    def within(self) -> float:
        return float(self.sums.double().square().sum() + self.residual.sum(dtype=torch.float64))

    def scores(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.addcmul(self.diag_sums[:, None], self.sizes[:, None], self.diag[rows])
        scores.addmm_(self.sums, self.features[rows].T, alpha=-2.0)
        own = scores.gather(0, self.labels[None, rows])[0]
        return scores, own - 2.0 * self.residual[rows]

    def block_rows(self) -> int:
        # products pay in larger blocks, of which the best candidates are then taken
        return 2 * _CANDIDATES if len(self.diag) <= 2 * _CANDIDATES else 8 * _CANDIDATES

    def interaction(self, rows: Tensor, source: Tensor, target: Tensor) -> float:
        # through the change of each stratum's statistics: O(moves), not O(moves²)
        one = torch.ones_like(rows, dtype=self.diag.dtype)
        parts = torch.cat([one[:, None], self.diag[rows, None], self.features[rows]], 1)
        change = parts.new_zeros(self.k, parts.shape[1])
        change = change.index_add_(0, target, parts).index_add_(0, source, parts, alpha=-1).double()
        crossed = change[:, 0] @ change[:, 1] - change[:, 2:].square().sum()
        return float(crossed - 2.0 * self.residual[rows].double().sum())

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        super().move(rows, source, target)
        features = self.features[rows]
        self.sums.index_add_(0, source, features, alpha=-1).index_add_(0, target, features)


_STATES: dict[type[View], type[_State]] = {ExactView: _ExactState, LowRankView: _LowRankState}


def min_sum(
    view: View,
    k: int,
    *,
    limits: SizeLimits,
    labels: Tensor,
    generator: int | torch.Generator | None = None,
    max_passes: int = 100,
    tol: float = 1e-4,
    progress: Progress | None = None,
) -> Solution:
    """Descend from ``labels`` (n,), within ``limits``, until a pass gains less than ``tol`` of the objective."""
    max_passes = check_count(max_passes, "max_passes", low=0)
    tol = check_number(tol, "tol", low=0.0, remedy="0 ends when no move gains")
    loops = compiled_loops(view.diag)
    if loops is not None and view.n <= 2 * _CANDIDATES:
        view = view.in_full()  # few points: the best-first moves of the full matrix
    state = _STATES[type(view)](view, labels, k)
    noise = 4.0 * torch.finfo(state.diag.dtype).eps
    objective = state.objective()
    passes, converged = 0, False
    are_even = limits.high - limits.low <= 1  # so that all are at a limit
    for_all = _EXCHANGES if are_even or view.n < _SMALL * k else 0
    while passes < max_passes and not converged:
        rounds = 1
        if loops is not None:
            gained, rounds = state.sweep(loops, limits, noise, 0.1 * tol * objective)
        else:
            blocks = row_blocks(view.n, state.block_rows())
            gained = sum(_move_some(view, state, block, limits, noise, 0.1 * tol * objective) for block in blocks)
        if view.n <= EXCHANGED and (for_all > 0 or not are_even):
            gained += _exchange(view, state, limits, noise, passes, for_all=for_all > 0)
            for_all -= 1
        passes += rounds
        converged = gained <= tol * rounds * objective
        objective -= gained
        if progress is not None:
            progress(passes / max_passes, f"pass {passes}, objective {objective:.6g}")
    return Solution(state.labels, passes, view.objective(state.labels, k), converged)


def _at_limit(sizes: Any, limits: SizeLimits, n: int) -> Any:
    """Which strata cannot lose or cannot take a point, as an array like ``sizes`` (k,).

    Only these need exchanges, unless strata are small. That no stratum gets empty is not counted as a limit.
    """
    return ((sizes <= limits.low) & (limits.low > 1)) | ((sizes >= limits.high) & (limits.high < n))


def _move_some(view: View, state: _State, block: slice, limits: SizeLimits, noise: float, worthwhile: float) -> float:
    """Move some rows of ``block`` to better strata; return how much J fell."""
    scores, own = state.scores(block)
    gain = own - scores.amin(0)
    noise *= float(own.abs().amax())
    if not bool((gain > noise).any()):
        return 0.0
    rows = torch.arange(block.start, block.stop, device=gain.device)
    if len(gain) > 2 * _CANDIDATES:
        decrease = _move_many(state, block, scores, gain, noise, limits)
        if decrease > 0.0:
            return decrease
        local = gain.topk(_CANDIDATES).indices
        rows, own, scores = rows[local], own[local], scores[:, local]
    part = _Part.of(view, state, rows, scores, own, rows)
    decrease = part.move_points(limits, noise, worthwhile)
    part.hand_back(state, rows)
    return decrease


def _exchange(
    view: View, state: _State, limits: SizeLimits, noise: float, turn: int, *, for_all: bool = False
) -> float:
    """Exchange points of strata that are at a limit, or ``for_all``, with others; return how much J fell.

    Many such points have partners in their own block of rows, few among rows from everywhere, others in each ``turn``.
    """
    n = view.n
    at_limit = _at_limit(state.sizes, limits, n) | for_all
    if not bool(at_limit.any()):
        return 0.0
    points = at_limit[state.labels]
    found = points.nonzero().flatten()
    blocks: list[slice | Tensor] = list(row_blocks(n, 2 * _CANDIDATES))
    if n > 2 * _CANDIDATES and len(found) <= _CANDIDATES:
        others = (~points).nonzero().flatten()
        step = -(-len(others) // (2 * _CANDIDATES - len(found)))
        blocks = [torch.cat([found, others[turn % step :: step]])]
    decrease = 0.0
    for block in blocks:
        rows = torch.arange(block.start, block.stop, device=found.device) if isinstance(block, slice) else block
        if bool(points[rows].any()):
            scores, own = state.scores(block)
            part = _Part.of(view, state, rows, scores, own, block)
            decrease += part.swap_points(_at_limit(part.sizes, limits, n) | for_all, noise * float(own.abs().amax()))
            part.hand_back(state, rows)
    return decrease


def _move_many(state: _State, block: slice, scores: Tensor, gain: Tensor, noise: float, limits: SizeLimits) -> float:
    """Make the best moves at once, as many as keep half of what they would gain one by one.

    Far from an optimum, or in large strata, moves hardly interact, so this replaces many small steps.
    Returns the decrease of J, or 0 if nothing was moved.
    """
    local = (gain > noise).nonzero().flatten()
    if len(local) <= _CANDIDATES:
        return 0.0
    local = local[gain[local].argsort(descending=True)]
    target = scores[:, local].argmin(0)
    while len(local) > _CANDIDATES // 4:
        rows = local + block.start
        source = state.labels[rows]
        alone = float(gain[local].double().sum())
        decrease = alone - state.interaction(rows, source, target)
        fewest = state.sizes - torch.bincount(source, minlength=state.k)
        most = state.sizes + torch.bincount(target, minlength=state.k)
        if decrease >= 0.5 * alone and bool(((fewest >= limits.low) & (most <= limits.high)).all()):
            state.move(rows, source, target)
            return decrease
        local, target = local[: len(local) // 2], target[: len(target) // 2]
    return 0.0


class _Part:
    """q points whose strata are improved while all other points stay where they are.

    ``scores`` (k, q) is W transposed, ``kernel`` (q, q) K_ij among them, ``sizes`` (k,) those of all strata; with
    ``loops`` exchanges are compiled.
    """

    def __init__(
        self,
        scores: NDArray[np.floating],
        kernel: NDArray[np.floating],
        diag: NDArray[np.floating],
        labels: NDArray[np.int64],
        sizes: NDArray[np.floating],
        loops: ModuleType | None = None,
    ) -> None:
        self.scores, self.kernel, self.diag = scores, np.ascontiguousarray(kernel), diag
        self.labels, self.sizes = labels.copy(), sizes.copy()
        self.loops = loops
        self.points = np.arange(len(labels))
        self._buffer = np.empty_like(diag)

    @classmethod
    def of(cls, view: View, state: _State, rows: Tensor, scores: Tensor, own: Tensor, block: slice | Tensor) -> _Part:
        """The points ``rows`` (q,) with their W (k, q), and that of their own strata (q,), on the host.

        ``block`` are the same rows, if possible as a slice, which copies less. One transfer for each block.
        """
        source = state.labels[rows]
        on_host = scores.scatter_(0, source[None], own[None]).cpu()
        kernel, diag, labels, sizes = (
            a.cpu().numpy() for a in (view.block(block), state.diag[rows], source, state.sizes)
        )
        return cls(on_host.numpy(), kernel, diag, labels, sizes, compiled_loops(on_host))

    def hand_back(self, state: _State, rows: Tensor) -> None:
        """Make the moves and exchanges of ``rows`` in ``state`` too."""
        source, target = state.labels[rows], torch.from_numpy(self.labels).to(rows.device)
        changed = target != source
        state.move(rows[changed], source[changed], target[changed])

    def move_points(self, limits: SizeLimits, noise: float, worthwhile: float) -> float:
        """Descent by moves of one point, best first; returns the decrease of J.

        Moves are proposed together, and each is checked, exactly, against the moves made since.
        """
        decrease = 0.0
        for _ in range(8 * len(self.labels)):
            full = self.sizes >= limits.high
            scores = np.where(full[:, None], np.inf, self.scores) if full.any() else self.scores
            gain = self.scores[self.labels, self.points] - scores.min(0)
            gain[self.sizes[self.labels] <= limits.low] = 0.0
            proposed = (gain > noise).nonzero()[0]
            if len(proposed) == 0:
                break
            proposed = proposed[gain[proposed].argsort()[::-1]]
            targets = scores[:, proposed].argmin(0)
            before = decrease
            # plain lists and numbers: this loop is the whole cost of a small problem
            labels, sizes = self.labels.tolist(), self.sizes.tolist()
            for i, target in zip(proposed.tolist(), targets.tolist(), strict=True):
                source = labels[i]
                if sizes[source] <= limits.low or sizes[target] >= limits.high:
                    continue
                current = float(self.scores[source, i] - self.scores[target, i])
                if current > noise:
                    decrease += current
                    sizes[source] -= 1
                    sizes[target] += 1
                    self._relabel(i, target)
            self.sizes[:] = sizes
            if decrease - before < worthwhile:
                break
        return decrease

    def swap_points(self, at_limit: NDArray[np.bool_], noise: float) -> float:
        """One sweep of exchanges, which leave sizes alone; returns the decrease of J.

        The points of the strata that are ``at_limit`` (k,) look for partners, in whatever stratum.
        """
        if not at_limit.any():
            return 0.0
        if self.loops is not None:
            known = self.scores, self.kernel, self.diag, self.labels, at_limit, noise
            own = self.scores[self.labels, self.points]
            buffers = (np.empty_like(self.diag), np.empty_like(self.scores[:, 0]))
            return float(self.loops.swap_points(*known, own, *buffers, float(np.finfo(self.diag.dtype).max) / 4))
        decrease = 0.0
        for i in self.points.tolist():
            a = self.labels[i]
            if not at_limit[a]:
                continue
            own = self.scores[self.labels, self.points]
            gain = own[i] - self.scores[self.labels, i] + own - self.scores[a] + 2.0 * self._distances(i)
            gain[self.labels == a] = 0.0
            j = int(gain.argmax())
            if gain[j] > noise:
                decrease += float(gain[j])
                b = int(self.labels[j])
                self._relabel(j, int(a))
                self._relabel(i, b)
        return decrease

    def _distances(self, i: int) -> NDArray[np.floating]:
        """d_ij from point i to all q points, in a buffer that the next call overwrites."""
        np.multiply(self.kernel[i], -2.0, out=self._buffer)
        self._buffer += self.diag
        self._buffer += self.diag[i]
        self._buffer[i] = 0.0
        return self._buffer

    def _relabel(self, i: int, target: int) -> None:
        distances = self._distances(i)
        row = self.scores[self.labels[i]]
        row -= distances
        row = self.scores[target]
        row += distances
        self.labels[i] = target
