"""The losses of other libraries, as plain sums, against `examples/losses_of_others.py`; skada's real ones too."""

import importlib.util
import math
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loss_batches import normal
from vardass import coral, mmd2
from vardass.adapt.algorithms.mcc import class_confusion

SPEC = importlib.util.spec_from_file_location(
    "losses_of_others", Path(__file__).parent.parent / "examples" / "losses_of_others.py"
)
assert SPEC is not None
assert SPEC.loader is not None
ours = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ours)

TLLIB_ALPHAS = (0.125, 0.25, 0.5, 1.0, 2.0)


def batches(n: int = 6, m: int = 6, d: int = 3) -> tuple[Tensor, Tensor]:
    x, y = 0.8 * normal(n, d, 1), 0.6 * normal(m, d, 2) + 0.3
    return x.requires_grad_(), y.requires_grad_()


def agree(found: Tensor, theirs: Tensor, *inputs: Tensor, rel: float = 1e-9) -> None:
    """The same value and the same gradient."""
    assert found.item() == pytest.approx(theirs.item(), rel=rel)
    for one, other in zip(gradients(found, *inputs), gradients(theirs, *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=100 * rel, atol=rel)


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs, retain_graph=True)


def squared(p: Tensor, q: Tensor) -> Tensor:
    return ((p - q) ** 2).sum()


# --- DomainBed --------------------------------------------------------------------------------------------


def seven_gaussians(p: Tensor, q: Tensor) -> Tensor:
    return torch.stack([torch.exp(-(10.0**power) * squared(p, q)) for power in range(-3, 4)]).sum()


def v_statistic(x: Tensor, y: Tensor, kernel: Any) -> Tensor:
    def mean(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([kernel(p, q) for p in a for q in b]).mean()

    return mean(x, x) + mean(y, y) - 2 * mean(x, y)


def u_statistic(x: Tensor, y: Tensor, kernel: Any) -> Tensor:
    def own(a: Tensor) -> Tensor:
        return torch.stack([kernel(a[i], a[j]) for i in range(len(a)) for j in range(len(a)) if i != j]).mean()

    return own(x) + own(y) - 2 * torch.stack([kernel(p, q) for p in x for q in y]).mean()


def covariance(z: Tensor) -> Tensor:
    mean = z.sum(0) / len(z)
    return sum((torch.outer(row - mean, row - mean) for row in z), torch.zeros(z.shape[1])) / (len(z) - 1)


def mean_and_covariance(x: Tensor, y: Tensor) -> Tensor:
    """The mean square over the d entries of the means' difference, plus that over the d² of the covariances'."""
    return (x.mean(0) - y.mean(0)).pow(2).mean() + (covariance(x) - covariance(y)).pow(2).mean()


def quarter_of_covariances(x: Tensor, y: Tensor) -> Tensor:
    """|C_x - C_y|² / (4 d²)."""
    return (covariance(x) - covariance(y)).pow(2).sum() / (4 * x.shape[1] ** 2)


@pytest.mark.parametrize("m", [6, 4])
def test_domainbed(m: int) -> None:
    x, y = batches(m=m)
    agree(ours.domainbed_mmd(x, y), v_statistic(x, y, seven_gaussians), x, y)
    agree(ours.domainbed_coral(x, y), mean_and_covariance(x, y), x, y)


def test_domainbed_averages_over_pairs_of_sources() -> None:
    parts = [normal(4, 2, seed).requires_grad_() for seed in range(3)]
    theirs = sum((v_statistic(a, b, seven_gaussians) for a, b in combinations(parts, 2)), torch.zeros(())) / 3
    agree(ours.domainbed_penalty(parts), theirs, *parts)


# --- TLlib --------------------------------------------------------------------------------------------


def tllib_kernel(rows: Tensor, alphas: tuple[float, ...]) -> Any:
    pairs = [squared(p, q) for p in rows.detach() for q in rows.detach()]
    variance = sum(pairs) / len(pairs)  # over all (2b)² pairs, without gradient

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return torch.stack([torch.exp(-squared(p, q) / (2 * alpha * variance)) for alpha in alphas]).sum()

    return kernel


def test_tllib_mk_mmd() -> None:
    x, y = batches()
    for alphas in (TLLIB_ALPHAS, (0.5, 1.0)):
        kernel = tllib_kernel(torch.cat([x, y]), alphas)
        agree(ours.tllib_mk_mmd(x, y, alphas), u_statistic(x, y, kernel) + 2 / (len(x) - 1), x, y)
    assert torch.equal(ours.tllib_mk_mmd(x, y), ours.tllib_mk_mmd(x, y, TLLIB_ALPHAS))


def test_the_constant_of_tllib_is_right_for_one_kernel_only() -> None:
    """With one kernel the loss is b/(b - 1) (mean Kxx + mean Kyy) - 2 mean Kxy, never negative; with five it may be."""
    x, y = (z.detach() for z in batches())
    b = len(x)
    kernel = ours.tllib_kernel(torch.cat([x, y]), (1.0,))
    whole = b / (b - 1) * (kernel.matrix(x).mean() + kernel.matrix(y).mean()) - 2 * kernel.matrix(x, y).mean()
    assert float(ours.tllib_mk_mmd(x, y, (1.0,))) == pytest.approx(float(whole))
    assert float(ours.tllib_mk_mmd(x, x, (1.0,))) >= 0
    assert float(ours.tllib_mk_mmd(x, x)) < 0


@pytest.mark.parametrize("width", [(1.68,), 0.92])
def test_tllib_joint_mmd(width: tuple[float, ...] | float) -> None:
    (x1, y1), (x2, y2) = batches(5, 5, 3), batches(5, 5, 2)
    widths: list[tuple[float, ...] | float] = [(0.5, 1.0), width]
    first = tllib_kernel(torch.cat([x1, y1]), (0.5, 1.0))
    if isinstance(width, float):  # as in TLlib's own example: a fixed σ for the class probabilities

        def second(p: Tensor, q: Tensor) -> Tensor:
            return torch.exp(-squared(p, q) / (2 * width**2))
    else:
        second = tllib_kernel(torch.cat([x2, y2]), width)

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return first(p[:3], q[:3]) * second(p[3:], q[3:])

    theirs = u_statistic(torch.cat([x1, x2], 1), torch.cat([y1, y2], 1), kernel) + 2 / 4
    agree(ours.tllib_joint_mmd([x1, x2], [y1, y2], widths), theirs, x1, y1, x2, y2)


def test_tllib_coral_has_the_mean_term_and_no_quarter() -> None:
    x, y = batches(m=4)
    agree(ours.tllib_coral(x, y), mean_and_covariance(x, y), x, y)


# --- pytorch-adapt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", [(1.0,), tuple(2.0**power for power in range(-3, 4))])
def test_pytorch_adapt_mmd(scales: tuple[float, ...]) -> None:
    x, y = batches(m=4)
    distances = sorted(float(squared(p, q)) for p in x.detach() for q in x.detach())
    median = distances[(len(distances) - 1) // 2]  # torch's: the lower of two, zeros of the diagonal among them

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return torch.stack([torch.exp(-scale * squared(p, q) / median) for scale in scales]).mean()

    agree(ours.pytorch_adapt_mmd(x, y, scales), u_statistic(x, y, kernel), x, y)


def test_pytorch_adapt_coral() -> None:
    x, y = batches(m=4)
    agree(ours.pytorch_adapt_coral(x, y), quarter_of_covariances(x, y), x, y)


def test_linear_time_estimators_have_the_mean_of_the_unbiased_one() -> None:
    """Pairs (1, 2), (3, 4), ...: over all orders of the rows their mean is the U-statistic, with more noise."""
    x, y = (z.detach() for z in batches(4, 4, 2))

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return torch.exp(-squared(p, q))

    def linear(a: Tensor, b: Tensor) -> float:
        return sum(
            float(kernel(a[i], a[i + 1]) + kernel(b[i], b[i + 1]) - kernel(a[i], b[i + 1]) - kernel(a[i + 1], b[i])) / 2
            for i in (0, 2)
        )

    orders = [list(order) for order in product(range(4), repeat=4) if len(set(order)) == 4]
    values = [linear(x[one], y[other]) for one in orders for other in orders]
    unbiased = float(mmd2(x, y, kernel="rbf", estimator="unbiased"))
    assert math.fsum(values) / len(values) == pytest.approx(unbiased, rel=1e-9)
    assert max(values) - min(values) > 0.1  # which a U-statistic, the same for all orders, does not do


# --- skada ------------------------------------------------------------------------------------------------


def test_skada_coral() -> None:
    x, y = batches(m=4)
    agree(ours.skada_coral(x, y), quarter_of_covariances(x, y), x, y)


def test_skada_dan() -> None:
    x, y = batches(m=4)
    sigmas = torch.tensor([0.5, 2.0], dtype=x.dtype)

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        distance = torch.linalg.vector_norm(p - q)
        return torch.exp(-distance / sigmas).sum()

    agree(ours.skada_dan(x, y, sigmas), v_statistic(x, y, kernel), x, y)
    median = sorted(float(squared(p, q)) ** 0.5 for p in x.detach() for q in x.detach())[(len(x) ** 2 - 1) // 2]
    expected = [(median + 1e-7) * 2 ** (-8 + step / 2) for step in range(33)]
    assert ours.skada_sigmas(x.detach()).tolist() == pytest.approx(expected)


def test_against_the_real_losses_of_skada() -> None:
    losses = pytest.importorskip("skada.deep.losses")
    x, y = (z.detach().float().requires_grad_() for z in batches(16, 12, 5))
    for centred in (False, True):
        theirs = losses.deepcoral_loss(x, y, assume_centered=centred)
        agree(ours.skada_coral(x, y), theirs, x, y, rel=1e-4)
    agree(ours.skada_dan(x, y, torch.tensor([0.5, 2.0])), losses.dan_loss(x, y, sigmas=[0.5, 2.0]), x, y, rel=1e-4)
    # by default skada's bandwidth carries a gradient: the value is ours, and with it the gradient too
    agree(ours.skada_dan(x, y, ours.skada_sigmas(x)), losses.dan_loss(x, y), x, y, rel=1e-4)


# --- ADAPT --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("match_mean", [False, True])
def test_adapt_coral(match_mean: bool) -> None:
    x, y = batches()
    theirs = 0.25 * (covariance(x) - covariance(y)).pow(2).mean()
    if match_mean:
        theirs = theirs + (x.mean(0) - y.mean(0)).pow(2).mean()
    agree(ours.adapt_coral(x, y, match_mean=match_mean), theirs, x, y)


# --- all --------------------------------------------------------------------------------------------------


def test_factors_between_the_corals() -> None:
    """The table of factors: what λ has to be multiplied with."""
    x, y = batches(8, 8, 4)
    d, b = 4, 8
    paper, deep = coral(x, y), coral(x, y, preset="deep-coral")
    agree(paper * (b / (b - 1)) ** 2 / (4 * d**2), deep, x, y)
    agree(4 * deep, coral(x, y, preset="domainbed", include_mean=False), x, y)
    agree(deep * 4 * d**2, coral(x, y, preset="deep-coral", normalization="none"), x, y)


def test_v_is_u_with_the_diagonals() -> None:
    """V = U + (k(0) - mean off the diagonal)/b of both sides: the excess that the table names."""
    x, y = batches()
    b, top = len(x), 5.0  # five kernels, each 1 on the diagonal

    def own(z: Tensor) -> Tensor:
        matrix = ours.RBFMixture().matrix(z)
        return (matrix.sum() - top * b) / (b * (b - 1))

    excess = (2 * top - own(x) - own(y)) / b
    agree(mmd2(x, y), mmd2(x, y, estimator="unbiased") + excess, x, y)


def confusion(logits: Tensor, temperature: float, eps: float, *, detach: bool) -> Tensor:
    p = (logits / temperature).softmax(1)
    entropy = -(p * (p + eps).log()).sum(1)
    certainty = 1 + torch.exp(-(entropy.detach() if detach else entropy))
    matrix = torch.zeros(p.shape[1], p.shape[1], dtype=p.dtype)
    for share, row in zip(len(p) * certainty / certainty.sum(), p):
        matrix = matrix + share * torch.outer(row, row)
    matrix = matrix / matrix.sum(1, keepdim=True)
    return (matrix.sum() - matrix.diagonal().sum()) / p.shape[1]


def test_class_confusion() -> None:
    """TLlib's exactly; pytorch-adapt and skada have T = 1 and another ε within the logarithm."""
    logits = (2 * normal(7, 4, 3)).requires_grad_()
    agree(class_confusion(logits), confusion(logits, 2.5, 1e-5, detach=True), logits)
    one = class_confusion(logits, temperature=1.0)
    agree(one, confusion(logits, 1.0, 1e-7, detach=True), logits, rel=1e-4)
    losses = pytest.importorskip("skada.deep.losses")
    theirs = losses.mcc_loss(logits)
    assert one.item() == pytest.approx(theirs.item(), rel=1e-4)
    torch.testing.assert_close(theirs, confusion(logits, 1.0, 1e-7, detach=False))
    (found,), (other,) = gradients(one, logits), gradients(theirs, logits)
    assert float((found - other).norm() / other.norm()) > 0.01  # skada's entropy carries a gradient
