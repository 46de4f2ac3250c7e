"""The relaxed assignment problem of equation 16 by an interior-point method, for small problems."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["relaxed_objective", "relaxed_solution"]

_TO_BOUNDARY = 0.995  # share of the way to the nearest bound that a step may go
_LAST_BARRIER = 1e-8
_MOST_STEPS = 300


def relaxed_objective(distances: Tensor, shares: Tensor) -> Tensor:
    """Σ_j (Σ_i U_ij) (Σ_i D_ij U_ij) (equation 16) at ``shares`` U (n, k)."""
    return shares.sum(0) @ (distances * shares).sum(0)


def relaxed_solution(distances: Tensor) -> Tensor:
    """Local minimum of the relaxed program of equation 16, with D (n, k) fixed: U of the same shape, float64.

        min_U Σ_j (Σ_i U_ij) (Σ_i D_ij U_ij)   subject to   0 <= U_ij <= 1,  Σ_j U_ij = 1.

    The minimum need not be integral, contrary to what the paper infers from total unimodularity: that makes the
    *vertices* of the feasible set integral, but the term D_ij U_ij² is convex, so the minimum need not be a vertex. For
    D = (1, 1) it is 0.5 at U = (1/2, 1/2), while either integral U costs 1.

    The method is primal-dual with a logarithmic barrier and starts from U = 1/k. The Hessian of column j is
    1 d_jᵀ + d_j 1ᵀ, so a Newton step costs O(n k² + k³) rather than O(n³ k³). Where the Hessian is not
    positive definite on the feasible directions, a multiple of the identity is added until it is.
    """
    return _Barrier(distances.double()).solve()


class _Barrier:
    """Primal-dual barrier method for one scaled D (n, k)."""

    def __init__(self, distances: Tensor) -> None:
        n, k = distances.shape
        mean = float(distances.mean())
        # so that the gradient is of order 1
        self.d = distances * (k / (n * mean)) if mean > 0.0 else distances
        self.k = k
        eye = torch.eye(k, dtype=torch.float64, device=distances.device)
        zero = torch.zeros_like(eye)
        # column j of the Hessian is V_j C V_jᵀ with V_j = (1, d_j); C is its own inverse
        self.swap = torch.cat([torch.cat([zero, eye], 1), torch.cat([eye, zero], 1)], 0)

    def gradient(self, u: Tensor) -> Tensor:
        """∂/∂U_ij = Σ_l D_lj U_lj + D_ij Σ_l U_lj."""
        return (self.d * u).sum(0) + self.d * u.sum(0)

    def solve(self) -> Tensor:
        """Follow the barrier from 1/k down to ``_LAST_BARRIER``."""
        u = torch.full_like(self.d, 1.0 / self.k)
        if self.k == 1 or not bool(self.d.any()):
            return u
        barrier = 1.0 / self.k
        z = barrier / u
        shift = 0.0
        for _ in range(_MOST_STEPS):
            while self._error(u, z, barrier) <= 10.0 * barrier:
                if barrier <= _LAST_BARRIER:
                    return u
                barrier = max(_LAST_BARRIER, min(0.2 * barrier, barrier**1.5))
            step, shift = self._newton(self.gradient(u) - barrier / u, z / u, shift)
            dual_step = barrier / u - z - z / u * step
            size = self._line_search(u, step, barrier)
            if size == 0.0:
                return u
            u = u + size * step
            u = u / u.sum(1, keepdim=True)
            z = z + _largest_step(z, dual_step) * dual_step
            # keep the dual within reach of the primal central path
            z = torch.minimum(torch.maximum(z, 1e-10 * barrier / u), 1e10 * barrier / u)
        return u

    def _error(self, u: Tensor, z: Tensor, barrier: float) -> float:
        """Largest violation of the optimality conditions of the barrier problem."""
        reduced = self.gradient(u) - z
        multiplier = (u * reduced).sum(1, keepdim=True)
        return float(torch.maximum((reduced - multiplier).abs().max(), (u * z - barrier).abs().max()))

    def _newton(self, gradient: Tensor, curvature: Tensor, shift: float) -> tuple[Tensor, float]:
        """Step along which the barrier function falls, and the shift of the Hessian that it took.

        Minimises <gradient, x> + ½ <x, (curvature + shift + Hessian) x> over x with zero row sums, by the
        Woodbury identity. The reduced matrix is positive definite exactly if the 2k x 2k Schur complement
        has k negative eigenvalues, as ``swap`` has.
        """
        trial = shift / 3.0 if shift > 1e-8 else 0.0
        while True:  # a large shift leaves only ``swap``, so this ends
            inverse = 1.0 / (curvature + trial)
            spread = inverse.sum(1, keepdim=True)
            scaled = torch.cat([inverse, inverse * self.d], 1)
            schur = self.swap - scaled.T @ (scaled / spread)
            ones, mixed = inverse.sum(0), scaled[:, self.k :].sum(0)
            both = (scaled[:, self.k :] * self.d).sum(0)
            schur += torch.cat(
                [torch.cat([ones.diag(), mixed.diag()], 1), torch.cat([mixed.diag(), both.diag()], 1)], 0
            )
            values, vectors = torch.linalg.eigh(schur)
            noise = 1e-14 * values.abs().max()
            if int((values < -noise).sum()) == self.k == int((values > noise).sum()):
                break
            trial = max(1e-4, 4.0 * trial)

        def project(x: Tensor) -> Tensor:
            x = x * inverse
            return x - inverse * (x.sum(1, keepdim=True) / spread)

        first = project(gradient)
        moments = torch.cat([first.sum(0), (first * self.d).sum(0)])
        weights = vectors @ ((vectors.T @ moments) / values)
        correction = project(weights[: self.k] + self.d * weights[self.k :])
        return correction - first, trial

    def _line_search(self, u: Tensor, step: Tensor, barrier: float) -> float:
        """Largest of the halved steps that lowers the barrier function enough; 0 if none does."""
        slope = self.gradient(u)
        linear, quadratic = (slope * step).sum(), relaxed_objective(self.d, step)
        descent = float(linear - barrier * (step / u).sum())
        size = _largest_step(u, step)
        ratio = step / u
        for _ in range(40):
            change = float(size * linear + size**2 * quadratic - barrier * torch.log1p(size * ratio).sum())
            if change <= 1e-4 * size * descent:
                return size
            size *= 0.5
        return 0.0


def _largest_step(x: Tensor, step: Tensor) -> float:
    """Largest step size up to 1 that keeps x positive, with a margin."""
    return min(1.0, _TO_BOUNDARY / max(1e-300, float((-step / x).max())))
