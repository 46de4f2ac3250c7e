"""The losses of other libraries in terms of `mmd2` and `coral`, equal in value and in gradient.

`tests/test_migration.py` compares each with the library's formula. The page "Migrating from other
libraries" includes the code between the marks.
"""

import torch
from torch import Tensor

from vardass import RBFMixture, coral, mmd2


# --8<-- [start:domainbed]
def domainbed_mmd(x: Tensor, y: Tensor) -> Tensor:
    return mmd2(x, y, preset="domainbed")


def domainbed_coral(x: Tensor, y: Tensor) -> Tensor:
    return coral(x, y, preset="domainbed")


def domainbed_penalty(features: list[Tensor]) -> Tensor:
    """Several sources: the mean over all pairs of them."""
    pairs = [(x, y) for i, x in enumerate(features) for y in features[:i]]
    return torch.stack([domainbed_mmd(x, y) for x, y in pairs]).mean()


# --8<-- [end:domainbed]


# --8<-- [start:tllib]
def tllib_kernel(z: Tensor, alphas: tuple[float, ...]) -> RBFMixture:
    """Σ_α exp(-|z - z'|² / (2 α m)), m the mean of all (2b)² squared distances, including the zero diagonal."""
    n = len(z)
    with_zeros = n / (n - 1)  # RBFMixture averages over distinct rows
    gammas = [with_zeros / (2.0 * alpha) for alpha in alphas]
    return RBFMixture(gammas, scale="mean").fit(z)


def tllib_mk_mmd(x: Tensor, y: Tensor, alphas: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0, 2.0)) -> Tensor:
    """MultipleKernelMaximumMeanDiscrepancy(linear=False) of DAN; the last term is a constant and can be left out."""
    kernel = tllib_kernel(torch.cat([x, y]), alphas)
    return mmd2(x, y, kernel=kernel, estimator="unbiased") + 2.0 / (len(x) - 1)


def tllib_coral(x: Tensor, y: Tensor) -> Tensor:
    return coral(x, y, preset="domainbed")


# --8<-- [end:tllib]


# --8<-- [start:tllib-joint]
def tllib_joint_mmd(xs: list[Tensor], ys: list[Tensor], widths: list[tuple[float, ...] | float]) -> Tensor:
    """JointMultipleKernelMaximumMeanDiscrepancy(linear=False) of JAN: the product of the layers' kernels.

    Each layer has its α as a tuple, or a number for GaussianKernel(sigma=..., track_running_stats=False): TLlib's
    example has (1/8, ..., 2) for the features and 0.92 for the class probabilities.
    """
    columns = [x.shape[1] for x in xs]
    kernels = [
        RBFMixture((0.5 / width**2,)) if isinstance(width, float) else tllib_kernel(torch.cat([x, y]), width)
        for x, y, width in zip(xs, ys, widths)
    ]

    def product(a: Tensor, b: Tensor) -> Tensor:
        parts = zip(kernels, a.split(columns, 1), b.split(columns, 1))
        return torch.stack([kernel.matrix(p, q) for kernel, p, q in parts]).prod(0)

    joint = mmd2(torch.cat(xs, 1), torch.cat(ys, 1), kernel=product, estimator="unbiased")
    return joint + 2.0 / (len(xs[0]) - 1)


# --8<-- [end:tllib-joint]


# --8<-- [start:pytorch-adapt]
def pytorch_adapt_mmd(x: Tensor, y: Tensor, kernel_scales: tuple[float, ...] = (1.0,)) -> Tensor:
    """MMDLoss(kernel_scales, mmd_type="quadratic"): bandwidth from the first batch, mean over the kernels."""
    with torch.no_grad():
        median = float(torch.cdist(x, x).square().median())
    kernel = RBFMixture(kernel_scales, scale=median)
    return mmd2(x, y, kernel=kernel, estimator="unbiased") / len(kernel_scales)


def pytorch_adapt_coral(x: Tensor, y: Tensor) -> Tensor:
    return coral(x, y, preset="deep-coral")


# --8<-- [end:pytorch-adapt]


# --8<-- [start:skada]
def skada_coral(x: Tensor, y: Tensor) -> Tensor:
    """deepcoral_loss, with either value of assume_centered."""
    return coral(x, y, preset="deep-coral")


def skada_dan(x: Tensor, y: Tensor, sigmas: Tensor) -> Tensor:
    """dan_loss(x, y, sigmas): exp(-|z - z'| / σ), the distance not squared."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        distances = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")  # exactly 0 from a row to itself
        return torch.exp(-distances[..., None] / sigmas.to(a)).sum(-1)

    return mmd2(x, y, kernel=kernel)


def skada_sigmas(x: Tensor) -> Tensor:
    """Its default: 33 multiples, 2^-8 to 2^8, of the median distance within the source."""
    return (torch.cdist(x, x).median() + 1e-7) * 2.0 ** torch.linspace(-8.0, 8.0, 33, dtype=x.dtype)


# --8<-- [end:skada]


# --8<-- [start:adapt]
def adapt_coral(x: Tensor, y: Tensor, *, match_mean: bool = False) -> Tensor:
    """DeepCORAL of ADAPT, without its factor λ."""
    return coral(x, y, preset="deep-coral", include_mean=match_mean)


# --8<-- [end:adapt]


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = torch.randn(32, 64), torch.randn(32, 64) + 0.2
    losses = (mmd2, domainbed_mmd, tllib_mk_mmd, pytorch_adapt_mmd, coral, domainbed_coral, skada_coral)
    for loss in losses:
        print(f"{loss.__name__:<20} {float(loss(x, y)):.5f}")
