"""`stratify`: strata for one domain, by any solver."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vardass.bounds import nearest_neighbour_bound
from vardass.errors import InputError, VardassWarning
from vardass.kernels import FunctionKernel, Kernel, KernelLike, LinearKernel, fitted_kernel, overflow
from vardass.lowrank import DEFAULT_RANK
from vardass.registry import Registry, check_options, declared_options
from vardass.solvers.labels import (
    INITS,
    SizeLimits,
    Solution,
    given_labels,
    random_balanced_labels,
    start_labels,
    within_limits,
)
from vardass.solvers.min_sum import EXCHANGED, min_sum
from vardass.strata import Strata
from vardass.validate import ArrayLike, Progress, as_features, as_generator, check_count, choose
from vardass.variance import judge_strata
from vardass.view import EXACT_LIMIT, ExactView, KernelView, LowRankView, View

__all__ = ["BASELINE_EXACT_LIMIT", "SOLVERS", "option_names", "solve", "stratify"]

BASELINE_EXACT_LIMIT = 32_768
"""`EXACT_LIMIT` of solvers other than min-sum: they are defined on the full matrix, so memory is the limit (4 GiB)."""

_SOLVERS: Registry[Callable[..., Solution]] = Registry(
    "solver",
    {
        "min-sum": min_sum,
        "dynamic-kmeans": "vardass.paper.kmeans:dynamic_kmeans",
        "kernel-kmeans": "vardass.paper.kmeans:kernel_kmeans",
        "kmeans": "vardass.paper.kmeans:kernel_kmeans",
    },
)
_SET_HERE = ("limits", "labels", "generator", "progress")  # arguments of a solver that are no options of its own

SOLVERS = tuple(_SOLVERS)


@torch.no_grad()
def stratify(
    features: ArrayLike,
    k: int,
    *,
    kernel: KernelLike = "mmd",
    solver: str = "min-sum",
    init: str | ArrayLike = "auto",
    warm_start: Strata | ArrayLike | None = None,
    min_size: int = 1,
    max_size: int | None = None,
    equal: bool = False,
    rank: int | None = None,
    kernel_features: LowRankView | None = None,
    seed: int | torch.Generator = 0,
    restarts: int = 1,
    bound: bool = False,
    check_finite: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Strata:
    """Partition samples into k strata to minimise the variance of a batch with one draw from each.

    Minimises Σ_h |S_h| Σ_{z in S_h} |φ(z) - μ_h|² (equation 8), which is n² Var(μ̂).

    Parameters
    ----------
    features : tensor or array of shape (n, d)
        Current features of one domain. float16 and bfloat16 are computed in float32.
    k : int
        Number of strata: the minibatch size.
    kernel : Kernel, name or callable
        The kernel of the loss: ``"mmd"`` (the paper's RBF mixture), ``"coral"``, ``"rbf"``, ``"linear"``,
        ``"energy"``, a `Kernel` object or a function ``f(x, y) -> (n, m)``. Fitted to ``features`` unless it is fitted.
    solver : {"min-sum", "dynamic-kmeans", "kmeans", "kernel-kmeans"}
        ``min-sum`` is exact descent on the objective; ``dynamic-kmeans`` is the paper's Algorithm 1 with
        Algorithm 2; the others ignore stratum sizes.
    init : {"auto", "bisection", "kmeans++", "random"} or labels of shape (n,)
        Where the solver starts. ``"auto"`` is bisection for ``min-sum``, with k-means++ tried too where a few
        outliers make up most of the spread, and k-means++ for the others.
    warm_start : Strata or labels of shape (n,), optional
        Earlier strata to start from. The result is never worse than they are on the new features.
    min_size, max_size : int
        Limits on stratum sizes. ``min_size=2`` avoids singletons, which would be in every minibatch.
    equal : bool
        Make sizes differ by at most one, so that losses without weights can be used. Beyond 32,768 samples the strata
        are those of bisection, without further optimisation.
    rank : int, optional
        Columns of the low-rank kernel features; 0 forces the full matrix. The default is the full matrix for up to
        2,048 samples (32,768 for solvers other than ``min-sum``, 4 GiB). Beyond, it is at most 24 columns for up to 8
        strata, 64 for up to 32 and 128 for more, without negligible columns. ``kmeans`` needs neither.
    kernel_features : LowRankView, optional
        Low-rank kernel features of these samples, instead of those that would be computed for the default ``rank``.
    seed : int or torch.Generator
        The same seed gives the same strata.
    restarts : int
        Independent starts; the best result is kept.
    bound : bool
        Also compute a lower bound on the variance of any partition.
    check_finite : bool
        Look for NaN and infinite values; False is for features that were checked already.
    progress : callable, optional
        Called as ``progress(fraction, message)``.
    **options
        For the solver: ``trials``, ``parallel``, ``max_iter`` (dynamic-kmeans), ``max_iter`` (kmeans,
        kernel-kmeans), ``max_passes``, ``tol`` (min-sum).

    Returns
    -------
    Strata
        If the kernel cannot tell the samples apart (a collapsed network), strata of equal size, with a warning.

    Examples
    --------
    >>> z = torch.randn(500, 16, generator=torch.Generator().manual_seed(0))
    >>> strata = stratify(z, k=20)
    >>> strata.n, strata.k, int(strata.sizes.sum()), strata.reduction > 1.0
    (500, 20, 500, True)
    """
    started = time.perf_counter()
    x = as_features(features, check_finite=check_finite)
    n = len(x)
    k = check_count(k, "k")
    choose(solver, "solver", _SOLVERS)
    min_size = check_count(min_size, "min_size")
    max_size = None if max_size is None else check_count(max_size, "max_size")
    limits = SizeLimits.of(n, k, min_size=min_size, max_size=max_size, equal=equal)
    generator = as_generator(seed, x.device)
    fitted = fitted_kernel(kernel, x)
    if isinstance(fitted, FunctionKernel):
        _check_function_kernel(fitted, x)
    if kernel_features is not None and kernel_features.n != n:
        raise InputError(
            f"kernel_features have {kernel_features.n} rows, the features {n}; compute both from the same samples"
        )
    if warm_start is not None:
        start = given_labels(warm_start, n, k, "warm_start", x.device)
    elif isinstance(init, str):
        start, _ = None, choose(init, "init", INITS)
    else:
        start = given_labels(init, n, k, "init", x.device)
    is_valid_start = start is not None and limits.hold(torch.bincount(start, minlength=k))
    if isinstance(fitted, LinearKernel):  # distances stay, and far from the origin their rounding errors go
        x = x - x.mean(0)

    truth = KernelView(x, fitted)
    searched: View
    seen: View = truth
    info: dict[str, Any] = {"path": "features"}
    if solver == "kmeans":  # looks for strata in the features themselves, so nothing else is needed to find them
        searched = LowRankView(x - x.mean(0), x.new_zeros(n))
    else:
        searched, info = _view(x, k, fitted, solver, rank, kernel_features, generator)
        seen = searched
    if not bool(torch.isfinite(searched.diag.double().sum())):  # k-means squares features, whatever the kernel does
        raise overflow(f"solver {solver!r}", x)
    prepared = time.perf_counter()
    solution = None
    restarts = check_count(restarts, "restarts")
    if k == n:  # a stratum for each sample: nothing to look for
        solution, restarts = Solution(torch.arange(n, device=x.device), 0, 0.0, True), 0
    elif k > 1 and is_collapsed(searched, searched.diag if solver == "kmeans" else truth.diag):
        warn_of_collapse(fitted, x, "strata are random and of equal size")
        labels = random_balanced_labels(n, k, generator, x.device)
        if start is not None and is_valid_start:
            labels = start
        solution, restarts = Solution(labels, 0, searched.objective(labels, k), True), 0
    # no point can be moved then: cuts are recomputed, and compared with the earlier strata below
    is_even = solver == "min-sum" and limits.high - limits.low <= 1
    recut = warm_start is not None and is_even and (n > EXCHANGED or options.get("max_passes") == 0)
    for attempt in range(restarts):
        found = solve(
            searched,
            k,
            solver=solver,
            # the default start of min-sum has no randomness on low-rank features: further ones are drawn
            init=init if isinstance(init, str) and (attempt == 0 or init != "auto") else "kmeans++",
            start=start if attempt == 0 and not recut else None,
            limits=limits,
            generator=generator,
            progress=progress,
            **options,
        )
        if solution is None or found.objective < solution.objective:
            solution = found
    assert solution is not None
    labels = solution.labels
    solved = time.perf_counter()
    value = judge_strata(seen, truth, labels, k, generator, solution.objective if seen is searched else None)
    # min-sum on the full matrix descends on the very variance that is judged: it cannot be worse
    descended = solver == "min-sum" and info["path"] == "exact"
    if warm_start is not None and start is not None and is_valid_start and not descended:
        before = judge_strata(seen, truth, start, k, generator)
        if before.variance < value.variance:
            labels, value = start, before
    evaluated = time.perf_counter()
    lower = None
    if bound:
        lower = nearest_neighbour_bound(x, k, kernel=fitted, seed=generator, min_size=limits.low, max_size=limits.high)
    return Strata(
        labels=labels,
        k=k,
        variance=value.variance,
        uniform_variance=value.uniform_variance,
        variance_stderr=value.variance_stderr,
        solver=solver,
        kernel=repr(fitted),
        bound=lower,
        info={
            **info,
            "n_iter": solution.n_iter,
            "converged": solution.converged,
            "uniform_stderr": value.uniform_stderr,
            "seconds_kernel": prepared - started,
            "seconds_solve": solved - prepared,
            "seconds_evaluate": evaluated - solved,
            "seconds_bound": time.perf_counter() - evaluated,
        },
    )


def default_rank(k: int) -> int:
    """Columns of low-rank features for k strata: few large strata see only the leading ones."""
    return 24 if k <= 8 else 64 if k <= 32 else DEFAULT_RANK


_NEGLIGIBLE = 0.01  # share of the variance that columns must hold to be kept: a fifth of it can be lost


def _view(
    x: Tensor,
    k: int,
    kernel: Kernel,
    solver: str,
    rank: int | None,
    known: LowRankView | None,
    generator: torch.Generator,
) -> tuple[View, dict[str, Any]]:
    limit = EXACT_LIMIT if solver == "min-sum" else BASELINE_EXACT_LIMIT
    negligible = 0.0
    if rank is not None:
        known = None
    else:
        rank, negligible = (0, 0.0) if len(x) <= limit else (default_rank(k), _NEGLIGIBLE)
        if rank and solver in ("dynamic-kmeans", "kernel-kmeans"):
            size = len(x) ** 2 * x.element_size() / 2**30
            warnings.warn(
                f"solver {solver!r} is defined on the full kernel matrix, which for {len(x):,} samples takes "
                f"{size:.1f} GiB; above {limit:,} samples it works on {rank} low-rank features, so it is not the "
                f"published solver; give rank=0 for the full matrix, or rank={rank} to accept this",
                VardassWarning,
                stacklevel=4,  # past no_grad, which wraps stratify
            )
    if check_count(rank, "rank", low=0) == 0:
        return ExactView.of(x, kernel), {"path": "exact"}
    if known is None:
        low_rank = LowRankView.of(x, kernel, rank, generator=generator)
    else:  # an explicit map misses nothing, and keeps all its columns
        low_rank = known.leading(rank) if bool(known.residual.any()) else known
    low_rank = low_rank.leading(negligible=negligible)
    shares = {"captured": low_rank.captured, "irreducible": 1.0 - low_rank.captured}
    return low_rank, {"path": "low-rank", "rank": low_rank.width, **shares}


_COLLAPSED = 32.0  # units of rounding


def is_collapsed(view: View, diag: Tensor) -> bool:
    """Whether no point is farther from the mean than the rounding of kernel values κ(z, z) = ``diag`` (n,)."""
    rounding = torch.finfo(diag.dtype).eps * float(diag.double().mean())
    return float(view.spread.max()) <= _COLLAPSED * rounding


def warn_of_collapse(kernel: Kernel, x: Tensor, outcome: str) -> None:
    """Say that no strata or batches are better than random ones, and what was made."""
    spread = float((x - x.mean(0)).abs().max())
    warnings.warn(
        f"all {len(x)} samples are alike to {kernel!r} in {x.dtype}: they differ from their mean by up to {spread:.3g} "
        f"in features of up to {float(x.abs().max()):.3g}; {outcome}, as none are better; "
        "look for collapsed features, scale them up or use RBFMixture(scale='median') and float64",
        VardassWarning,
        stacklevel=4,  # past no_grad, which wraps stratify
    )


def _check_function_kernel(kernel: FunctionKernel, x: Tensor) -> None:
    """Reject an asymmetric user kernel, warn of one that is not positive semi-definite."""
    sample = x[:: max(1, len(x) // 128)][:128]
    matrix = kernel.matrix(sample).double()
    if not bool(torch.isfinite(matrix).all()):
        raise InputError("the kernel function returns NaN or infinite values; fix it or scale the features")
    scale = float(matrix.abs().max())
    if float((matrix - matrix.T).abs().max()) > 1e-4 * scale:
        raise InputError("the kernel function is not symmetric: f(x, y) must equal f(y, x).T; use (f + f.T) / 2")
    lowest = float(torch.linalg.eigvalsh(matrix)[0])
    if lowest < -1e-4 * scale:
        warnings.warn(
            f"the kernel is not positive semi-definite (an eigenvalue of {lowest:.3g} on {len(sample)} samples), so "
            "its variance has no meaning and may be negative; use a positive-definite kernel such as RBFMixture()",
            VardassWarning,
            stacklevel=4,  # past no_grad, which wraps stratify
        )


def option_names(solver: str) -> list[str]:
    """Names of the options that `stratify` takes with the given solver."""
    return [*declared_options(stratify), *_solver_options(_SOLVERS.find(solver))]


def _solver_options(function: Callable[..., Solution]) -> list[str]:
    return sorted(name for name in declared_options(function) if name not in _SET_HERE)


def solve(
    view: View,
    k: int,
    *,
    solver: str = "min-sum",
    init: str = "auto",
    start: Tensor | None = None,
    limits: SizeLimits,
    generator: torch.Generator,
    progress: Progress | None = None,
    **options: Any,
) -> Solution:
    """Run one solver on ``view`` from ``start`` labels, or from the start named by ``init``; see `stratify`."""
    function = _SOLVERS[solver]
    check_options(f"solver {solver!r}", options, function, without=_SET_HERE)
    inits = [init]
    if init == "auto":
        inits = ["bisection"] if solver == "min-sum" else ["kmeans++"]
        if solver == "min-sum" and start is None and _has_heavy_tails(view):
            inits.append("kmeans++")  # a few far points decide: cuts may miss them, distances do not
    best: Solution | None = None
    for name in inits:
        if start is None:
            labels = start_labels(view, k, name, limits=limits, generator=generator)
        else:
            labels = within_limits(view, start, k, limits)
        found = function(view, k, limits=limits, labels=labels, generator=generator, progress=progress, **options)
        if best is None or found.objective < best.objective:
            best = found
    assert best is not None
    return best


def _has_heavy_tails(view: View) -> bool:
    """Whether fewer than a tenth of the points, in effect, make up the total spread."""
    spread = view.spread.double()
    return float(spread.sum()) ** 2 < 0.1 * view.n * float(spread.square().sum())
