"""Gradients of the losses, and their precision in float32 and below."""

import pytest
import torch
from torch import Tensor

from loss_batches import LOSSES, normal, some_weights
from vardass.kernels import RBFMixture
from vardass.losses import coral, mmd2


@pytest.fixture
def batches() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batches of unequal size with their weights."""
    return 0.5 * normal(7, 3, 1), 0.7 * normal(5, 3, 2) + 0.4, some_weights(7, 3), some_weights(5, 4)


# --- gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "weighted"), [(3, True), (30, False)])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name, d, weighted):
    x, y = (0.4 * normal(4, d, 1)).requires_grad_(), (0.4 * normal(3, d, 2) + 0.2).requires_grad_()
    weights = {"weights_x": some_weights(4), "weights_y": some_weights(3)} if weighted else {}
    assert torch.autograd.gradcheck(lambda a, b: LOSSES[name](a, b, **weights), (x, y))


@pytest.mark.parametrize("name", ["mmd v", "mmd u", "coral domainbed"])
def test_second_derivatives(name):
    x, y = (0.4 * normal(4, 2, 1)).requires_grad_(), (0.4 * normal(3, 2, 2)).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda a, b: LOSSES[name](a, b, weights_x=some_weights(4)), (x, y))


def test_mmd_gradient_is_autograds_through_the_kernel_matrix(batches):
    x, y, w_x, w_y = batches
    c = torch.cat([w_x, -w_y])
    joint = torch.cat([x, y]).requires_grad_()
    (3 * (c @ RBFMixture().matrix(joint) @ c)).backward()
    x.requires_grad_()
    y.requires_grad_()
    (3 * mmd2(x, y, weights_x=w_x, weights_y=w_y)).backward()
    torch.testing.assert_close(torch.cat([x.grad, y.grad]), joint.grad)


def test_gradient_of_one_side_and_function_transforms(batches):
    x, y, _, _ = batches
    y.requires_grad_()
    mmd2(x, y).backward()
    assert x.grad is None
    torch.testing.assert_close(torch.func.grad(lambda b: mmd2(x, b))(y.detach()), y.grad)


# --- precision -------------------------------------------------------------------------------------------


def relative(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference).detach().norm() / reference.detach().norm())


@pytest.mark.parametrize(("d", "offset"), [(8, 1e3), (200, 0.0), (200, 1e3)])
@pytest.mark.parametrize("name", LOSSES)
def test_float32_far_from_the_origin(name, d, offset):
    x = normal(40, d, 1, torch.float32) + offset
    y = 1.2 * normal(30, d, 2, torch.float32) + 0.5 + offset
    w = some_weights(40, dtype=torch.float32)
    results = []
    for dtype in (torch.float64, torch.float32):
        a = x.to(dtype).requires_grad_()
        value = LOSSES[name](a, y.to(dtype), weights_x=w.to(dtype))
        value.backward()
        assert value.dtype == a.grad.dtype == dtype
        results.append((value.detach(), a.grad))
    (exact, exact_grad), (value, grad) = results
    assert relative(value, exact) < 1e-4
    assert relative(grad, exact_grad) < 1e-4


@pytest.mark.parametrize("estimator", ["v", "unbiased"])
def test_float32_mmd_gradient_when_only_the_flattest_term_is_alive(estimator):
    """The steep terms' slopes on the diagonal, a million times larger, must not drown it."""
    x, y = 5 * normal(30, 50, 1, torch.float32), 5 * normal(30, 50, 2, torch.float32)
    grads = []
    for dtype in (torch.float64, torch.float32):
        a = x.to(dtype).requires_grad_()
        mmd2(a, y.to(dtype), preset="domainbed", estimator=estimator).backward()
        grads.append(a.grad)
    assert relative(grads[1], grads[0]) < 1e-5


def covariance_gap(x: Tensor, y: Tensor) -> Tensor:
    return (torch.cov(x.T, correction=0) - torch.cov(y.T, correction=0)).square().sum()


@pytest.mark.parametrize("d", [20, 300], ids=["covariance route", "Gram route"])
def test_float32_coral_of_nearly_equal_covariances(d):
    x = normal(50, d, 1, torch.float32)
    y = x + 1e-3 * normal(50, d, 2, torch.float32)
    assert relative(coral(x, y), covariance_gap(x.double(), y.double())) < 1e-4


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_is_off_inside(name):
    x, y = normal(20, 8, 1, torch.float32), normal(10, 8, 2, torch.float32) + 0.5
    results = []
    for enabled in (False, True):
        a = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = LOSSES[name](a, y)
        value.backward()
        assert value.dtype == torch.float32
        results.append((value.detach(), a.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_mmd_backward_under_autocast():
    x, y = normal(20, 8, 1, torch.float32).requires_grad_(), normal(10, 8, 2, torch.float32)
    (expected,) = torch.autograd.grad(mmd2(x, y), x)
    with torch.autocast("cpu", torch.bfloat16):
        (grad,) = torch.autograd.grad(mmd2(x, y), x)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_half_inputs(name):
    dtype = torch.float16 if name.startswith("mmd d") or name == "coral paper" else torch.bfloat16
    x, y = normal(12, 6, 1).to(dtype).requires_grad_(), (normal(9, 6, 2) + 1.5).to(dtype)
    value = LOSSES[name](x, y, weights_x=some_weights(12).to(torch.float32))
    value.backward()
    assert value.dtype == torch.float32
    assert x.grad.dtype == dtype
    exact_x = x.detach().double().requires_grad_()
    exact = LOSSES[name](exact_x, y.double(), weights_x=some_weights(12))
    exact.backward()
    assert relative(value, exact) < 1e-5
    assert relative(x.grad, exact_x.grad) < (2e-3 if dtype == torch.float16 else 1e-2)


def test_mixed_dtypes_take_the_widest():
    x = normal(4, 2, 1)
    assert mmd2(x.half(), x.float()).dtype == torch.float32
    assert mmd2(x.half(), x.bfloat16()).dtype == torch.float32
    assert coral(x.half(), x).dtype == torch.float64


def test_distances_whose_exponential_underflows():
    x, y = torch.zeros(2, 1), torch.full((3, 1), 1e4)
    a = x.clone().requires_grad_()
    value = mmd2(a, y)
    value.backward()
    assert float(value.detach()) == pytest.approx(10.0)
    assert float(mmd2(x, y)) == pytest.approx(10.0)
    assert float(a.grad.abs().max()) < 1e-20


@pytest.mark.parametrize("preset", ["paper", "domainbed"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_mmd_has_one_value_with_and_without_gradient(preset, offset):
    """Equal rows are at distance 0, which rounding of the expansion must not change where a gradient is wanted."""
    x = 3 * normal(32, 64, 1, torch.float32) + offset
    other = torch.cat([x[:16], 3 * normal(16, 64, 2, torch.float32) + offset])
    for y in (x.clone(), other):
        plain = mmd2(x, y, preset=preset)
        with_gradient = mmd2(x.clone().requires_grad_(), y, preset=preset)
        assert float(with_gradient.detach()) == float(plain)
        exact = mmd2(x.double(), y.double(), preset=preset)
        assert float(plain) == pytest.approx(float(exact), abs=1e-6)
    assert abs(float(mmd2(x.clone().requires_grad_(), x.clone(), preset=preset).detach())) < 1e-6


def test_kernel_matrix_has_one_value_with_and_without_gradient():
    x = 3 * normal(20, 64, 1, torch.float32)
    x = torch.cat([x, x])
    for kernel in (RBFMixture(), RBFMixture((1000.0,)), RBFMixture(scale="median").fit(x)):
        with_gradient = kernel.matrix(x.clone().requires_grad_()).detach()
        torch.testing.assert_close(with_gradient, kernel.matrix(x), rtol=1e-6, atol=1e-6)
        assert float((with_gradient[:20, 20:].diagonal() - with_gradient.diagonal()[:20]).abs().max()) < 1e-5
