"""Every algorithm: hand-computed losses, gradients, equalities between algorithms, training, state, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import refused
from vardass.adapt import Algorithm, Batch, Network, algorithm_options, make_algorithm, make_network
from vardass.adapt.algorithms.mcc import class_confusion
from vardass.losses import StreamWeights, coral, mmd2
from vardass.paper.adversarial import GradientReversal, at_ascent, domain_loss

SMALL = {"discriminator_width": 16}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("erm", {}),
    ("mmd", {}),
    ("mmd", {"confusion": 0.3}),
    ("coral", {}),
    ("coral", {"preset": "paper"}),
    ("dann", SMALL),
    ("dann", {**SMALL, "adversary": "alternating", "grad_penalty": 0.1, "smoothing": 0.1}),
    ("dann+sdat", {**SMALL, "adversary": "alternating"}),
    ("dann+els", SMALL),
    ("cdan", SMALL),
    ("cdan+e", SMALL),
    ("cdan+sdat", SMALL),
    ("cdan+els", SMALL),
    ("arm", {}),
    ("arm", {"support_size": 4}),
    ("mcc", {}),
]
SHOWN = ("adversary", "preset", "support_size")
IDS = [name + "".join(f"-{options[key]}" for key in SHOWN if key in options) for name, options in VARIANTS]
every = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)


def build(name: str, options: dict[str, Any], *, seed: int = 0, d: int = 5, classes: int = 2) -> Algorithm:
    network = make_network("mlp", (d,), classes, hidden=(16,), bottleneck=8, seed=seed)
    return make_algorithm(name, network, classes, seed=seed, **options)


def batches(seed: int = 0, *, n_s: int = 8, n_t: int = 12, d: int = 5, weighted: bool = False) -> tuple[Batch, Batch]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n_s) % 2
    x_s = torch.randn(n_s, d, generator=g) + 3.0 * y[:, None]
    x_t = torch.randn(n_t, d, generator=g) + 3.0 * (torch.arange(n_t) % 2)[:, None] + 0.5
    w_s, w_t = torch.rand(n_s, generator=g) + 0.1, torch.rand(n_t, generator=g) + 0.1
    source, target = Batch(x_s, y, w_s / w_s.sum()), Batch(x_t, None, w_t / w_t.sum())
    return (source, target) if weighted else (source._replace(weights=None), target._replace(weights=None))


def sgd(algorithm: Algorithm, lr: float = 0.05, momentum: float = 0.9) -> dict[str, torch.optim.Optimizer]:
    groups = algorithm.parameter_groups()
    return {role: torch.optim.SGD(parameters, lr=lr, momentum=momentum) for role, parameters in groups.items()}


def train(algorithm: Algorithm, optimisers: dict[str, Any], steps: range, *, weighted: bool = True) -> None:
    for step in steps:
        source, target = batches(step, weighted=weighted)
        algorithm.update(source, target, step, optimisers=optimisers, backward=lambda loss: loss.backward())


def plain_network(classes: int = 2, d: int = 2) -> Network:
    """z = x and logits = z."""
    head = nn.Linear(d, classes, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(classes, d))
    return Network(nn.Identity(), head, input_shape=(d,)).double()


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same_state(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def bce(logit: float, label: float) -> float:
    p = 1.0 / (1.0 + math.exp(-logit))
    return -label * math.log(p) - (1.0 - label) * math.log(1.0 - p)


# hand-computed values

SOURCE = Batch(rows([1.0, 0.0], [0.0, 2.0]), torch.tensor([0, 0]), rows([0.25, 0.75])[0])
TARGET = Batch(rows([2.0, 1.0], [0.0, 1.0], [1.0, 1.0]), None, rows([0.5, 0.25, 0.25])[0])
CE = (math.log(1.0 + math.exp(-1.0)), math.log(1.0 + math.exp(2.0)))


def value(name: str, part: str, *, weighted: bool = True, **options: Any) -> float:
    algorithm = make_algorithm(name, plain_network(), 2, **options).double()
    source = SOURCE if weighted else SOURCE._replace(weights=None)
    target = TARGET if weighted else TARGET._replace(weights=None)
    return float(algorithm.losses(source, target, 0)[part].detach())


@pytest.mark.parametrize("name", ["mmd", "coral"])
def test_stream_weights_reach_the_discrepancy_and_nothing_else(name: str) -> None:
    algorithm = make_algorithm(name, plain_network(d=2), 2, stream_weights=True, confusion=0.5)
    plain = make_algorithm(name, plain_network(d=2), 2, confusion=0.5)
    source_weights, target_weights = StreamWeights(algorithm.kernel), StreamWeights(algorithm.kernel)
    loss = mmd2 if name == "mmd" else partial(coral, preset="domainbed")
    for step in range(3):
        source, target = (batch._replace(x=batch.x.double()) for batch in batches(step, d=2))
        found, usual = algorithm.losses(source, target, step), plain.losses(source, target, step)
        weights = {"weights_x": source_weights(source.x), "weights_y": target_weights(target.x)}
        torch.testing.assert_close(found[name], loss(source.x, target.x, **weights))
        assert torch.allclose(found[name], usual[name]) == (step == 0)  # the first batch has equal weights
        assert torch.equal(found["task"], usual["task"])
        assert torch.equal(found["confusion"], usual["confusion"])


def test_stream_weights_go_with_batches_without_weights() -> None:
    with refused("stream_weights=True", "weights", "uniform", "balanced", "stream_weights=False"):
        value("mmd", "mmd", stream_weights=True)


def test_task_loss_by_hand() -> None:
    assert value("erm", "task") == pytest.approx(0.25 * CE[0] + 0.75 * CE[1])
    assert value("erm", "task", task_weighting="plain") == pytest.approx(0.5 * CE[0] + 0.5 * CE[1])
    assert value("erm", "task", weighted=False) == pytest.approx(0.5 * CE[0] + 0.5 * CE[1])
    # the weights reach the discrepancy either way
    assert value("mmd", "mmd", task_weighting="plain") == value("mmd", "mmd")


def test_mmd_by_hand() -> None:
    # means (0.25, 1.5) and (1.25, 1)
    assert value("mmd", "mmd", kernel="linear") == pytest.approx(1.0 + 0.25)
    total = value("mmd", "total", kernel="linear", penalty=3.0)
    assert total == pytest.approx(0.25 * CE[0] + 0.75 * CE[1] + 3.0 * 1.25)
    assert value("mmd", "mmd", preset="domainbed") == pytest.approx(
        float(mmd2(SOURCE.x, TARGET.x, weights_x=SOURCE.weights, weights_y=TARGET.weights, preset="domainbed"))
    )


def test_coral_by_hand() -> None:
    # unweighted covariances with 1/b: [[1/4, -1/2], [-1/2, 1]] and [[2/3, 0], [0, 0]]; means (1/2, 1), (1, 1)
    gap = (1 / 4 - 2 / 3) ** 2 + 2 * (1 / 2) ** 2 + 1.0
    assert value("coral", "coral", weighted=False, preset="paper") == pytest.approx(gap)
    # with 1/(b-1): [[1/2, -1], [-1, 2]] and [[1, 0], [0, 0]], over d^2 = 4, and the means' term over d = 2
    gap = ((1 / 2) ** 2 + 2.0 + 4.0) / 4 + 0.25 / 2
    assert value("coral", "coral", weighted=False) == pytest.approx(gap)


def test_ramp_by_hand() -> None:
    for options, step, share in (
        *(({"ramp": 4}, step, share) for step, share in ((0, 0.0), (1, 0.25), (4, 1.0), (9, 1.0))),
        *(({"ramp": 4, "delay": 2}, step, share) for step, share in ((1, 0.0), (3, 0.25), (6, 1.0))),
        *(({"delay": 2}, step, share) for step, share in ((1, 0.0), (2, 1.0))),
    ):
        algorithm = build("coral", {**options, "penalty": 2.0})
        parts = algorithm.losses(*batches(), step)
        gained = (parts["total"] - parts["task"]).item()
        assert gained == pytest.approx(2.0 * share * parts["coral"].item(), rel=1e-4)


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_confusion_is_that_of_mcc_and_rises_with_the_penalty(penalty: float) -> None:
    source, target = batches(weighted=True)
    rule = build("mmd", {"penalty": penalty, "confusion": 0.5, "delay": 1, "ramp": 2})
    alone = class_confusion(rule.network.head(rule.features(target.x)), target.weights)
    for step, risen in enumerate([0.0, 0.0, 0.5, 1.0]):
        found = rule.losses(source, target, step)
        torch.testing.assert_close(found["confusion"], alone)
        expected = found["task"] + risen * (penalty * found["mmd"] + 0.5 * alone)
        torch.testing.assert_close(found["total"], expected)
    assert rule.full_strength == 3
    with refused("confusion=0.5", "regression", "confusion=0"):
        build("mmd", {"confusion": 0.5, "regression": True})


@pytest.mark.parametrize("d", [2, 64])
def test_the_penalty_of_coral_means_the_same_at_every_width(d: int) -> None:
    g = torch.Generator().manual_seed(0)
    pair = torch.randn(40, 2, generator=g, dtype=torch.float64), 1.0 + 2.0 * torch.randn(40, 2, generator=g).double()
    wide_s, wide_t = (z.repeat(1, d // 2) for z in pair)  # the same statistics in every pair of columns
    narrow = make_algorithm("coral", plain_network(), 2).loss(*pair)
    wide = make_algorithm("coral", plain_network(d=d), 2).loss(wide_s, wide_t)
    assert float(wide) == pytest.approx(float(narrow))
    paper = make_algorithm("coral", plain_network(d=d), 2, preset="paper").loss(wide_s, wide_t)
    assert float(paper) == pytest.approx(float(coral(*pair)) * (d / 2) ** 2)


@pytest.mark.parametrize("preset", ["domainbed", "paper", "deep-coral"])
@pytest.mark.parametrize("include_mean", [True, False])
def test_strata_of_coral_are_made_in_the_kernel_of_its_loss(preset: str, include_mean: bool) -> None:
    # around the midpoint of the means both second moments have the same excess over the covariances
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 3, generator=g).double(), 1.0 + 2.0 * torch.randn(9, 3, generator=g).double()
    algorithm = make_algorithm("coral", plain_network(d=3), 2, preset=preset, include_mean=include_mean)
    kernel = algorithm.kernel.fit(torch.cat([x, y]))  # type: ignore[union-attr]
    loss = coral(x, y, preset=preset, include_mean=include_mean, correction="none")
    assert float(mmd2(x, y, kernel=kernel)) == pytest.approx(float(loss))
    phi = kernel.explicit_features(torch.cat([x, y]))
    assert phi is not None
    torch.testing.assert_close(phi @ phi.T, kernel.matrix(torch.cat([x, y])))
    torch.testing.assert_close(kernel.diag(x), kernel.matrix(x).diagonal())
    torch.testing.assert_close(kernel.paired(x, y), kernel.matrix(x, y).diagonal())


class Logit(nn.Module):
    """A discriminator whose logit is the sum of its input, times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * h.sum(1)


def adversarial(name: str, **options: Any) -> Algorithm:
    algorithm = make_algorithm(name, plain_network(), 2, **options)
    algorithm.discriminator = Logit()
    return algorithm.double()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dann_by_hand(smoothing: float) -> None:
    algorithm = adversarial("dann", smoothing=smoothing)
    source = 0.25 * bce(1.0, 1 - smoothing) + 0.75 * bce(2.0, 1 - smoothing)
    target = 0.5 * bce(3.0, smoothing) + 0.25 * bce(1.0, smoothing) + 0.25 * bce(2.0, smoothing)
    assert float(algorithm.losses(SOURCE, TARGET, 0)["domain"].detach()) == pytest.approx(0.5 * (source + target))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cdan_by_hand(entropy: bool, smoothing: float) -> None:
    # the sum over p ⊗ z is the sum of z, as p sums to 1; shares are 2/5 and 3/5 of the weights
    algorithm = adversarial("cdan", smoothing=smoothing, entropy=entropy)
    logits, labels = [1.0, 2.0, 3.0, 1.0, 2.0], [1 - smoothing] * 2 + [smoothing] * 3
    shares = [0.4 * 0.25, 0.4 * 0.75, 0.6 * 0.5, 0.6 * 0.25, 0.6 * 0.25]
    if entropy:
        p = torch.cat([SOURCE.x, TARGET.x]).softmax(1).tolist()
        certain = [1 + math.exp(sum(q * math.log(q + 1e-5) for q in row)) for row in p]
        shares = [s * c for s, c in zip(shares, certain)]
        shares = [s / sum(shares) for s in shares]
    expected = sum(s * bce(logit, label) for s, logit, label in zip(shares, logits, labels))
    assert float(algorithm.losses(SOURCE, TARGET, 0)["domain"].detach()) == pytest.approx(expected)


def test_alternating_dann_by_hand_with_gradient_penalty() -> None:
    algorithm = make_algorithm("dann", plain_network(), 2, adversary="alternating", grad_penalty=2.0, smoothing=0.1)
    weight = rows([0.5, 0.0], [0.0, -1.0])
    algorithm.discriminator = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    algorithm.discriminator.weight.data.copy_(weight)
    expected = 0.0
    shares = [0.4 * 0.25, 0.4 * 0.75, 0.6 * 0.5, 0.6 * 0.25, 0.6 * 0.25]
    for i, (z, share) in enumerate(zip(torch.cat([SOURCE.x, TARGET.x]), shares)):
        label = rows([0.9, 0.1])[0] if i < 2 else rows([0.1, 0.9])[0]
        p = (weight @ z).softmax(0)
        expected += share * float(-(label * p.log()).sum() + 2.0 * (weight.T @ (p - label)).square().sum())
    parts = algorithm.losses(SOURCE, TARGET, 0)
    assert float(parts["domain"].detach()) == pytest.approx(expected)
    assert float(parts["total"].detach()) == pytest.approx(float(parts["task"].detach()) - expected)


def slow_confusion(logits: Tensor, weights: Tensor | None, temperature: float) -> Tensor:
    b, classes = logits.shape
    p = (logits / temperature).softmax(1)
    u = []
    for i in range(b):
        h = -sum(p[i, c].detach() * torch.log(p[i, c].detach() + 1e-5) for c in range(classes))
        u.append((1.0 + torch.exp(-h)) * (1.0 if weights is None else weights[i]))
    scale = b / sum(u)
    loss = logits.new_zeros(())
    for c in range(classes):
        row = [sum(scale * u[i] * p[i, c] * p[i, e] for i in range(b)) for e in range(classes)]
        loss = loss + sum(row[e] / sum(row) for e in range(classes) if e != c)
    return loss / classes


@pytest.mark.parametrize("weighted", [False, True])
def test_class_confusion_equals_a_slow_loop_with_its_gradient(weighted: bool) -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 4, generator=g, dtype=torch.float64).mul(3).requires_grad_()
    weights = torch.tensor([0.1, 0.3, 0.2, 0.2, 0.15, 0.05], dtype=torch.float64) if weighted else None
    fast, slow = class_confusion(logits, weights), slow_confusion(logits, weights, 2.5)
    assert float(fast.detach()) == pytest.approx(float(slow.detach()))
    assert torch.allclose(torch.autograd.grad(fast, logits)[0], torch.autograd.grad(slow, logits)[0])
    assert float(class_confusion(torch.zeros(5, 4))) == pytest.approx(3 / 4)
    assert float(class_confusion(100.0 * torch.eye(4))) == pytest.approx(0.0, abs=1e-6)


def test_arm_context_by_hand() -> None:
    network = Network(nn.Linear(2, 2, bias=False), nn.Linear(2, 2), input_shape=(2,)).double()
    algorithm = make_algorithm("arm", network, 2, support_size=2).double()
    algorithm.context = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    algorithm.context.weight.data.copy_(rows([1.0, 1.0]))
    x = rows([1.0, 0.0], [0.0, 2.0], [2.0, 1.0], [0.0, 1.0])
    assert algorithm.with_context(x)[:, 2].tolist() == [1.5, 1.5, 2.0, 2.0]
    weights = rows([0.1, 0.3, 0.45, 0.15])[0]
    assert algorithm.with_context(x, weights)[:, 2].tolist() == pytest.approx([1.75, 1.75, 2.5, 2.5])
    assert algorithm.with_context(x[:3])[:, 2].tolist() == [1.5, 1.5, 2.5]  # the last set is filled up from before
    # each domain has support sets of its own: samples 0 and 2, and samples 1, 3 and 4
    x = torch.cat([x, rows([5.0, 0.0])])
    domains = torch.tensor([0, 1, 0, 1, 1])
    assert algorithm.with_context(x, domains=domains)[:, 2].tolist() == [2.0, 1.5, 2.0, 1.5, 3.0]
    weights = rows([0.1, 0.3, 0.3, 0.1, 0.2])[0]
    expected = [2.5, 1.75, 2.5, 1.75, 11 / 3]
    assert algorithm.with_context(x, weights, domains=domains)[:, 2].tolist() == pytest.approx(expected)
    y = torch.tensor([0, 1, 0, 1, 1])
    with refused("support_size=2", 1, "batch_size"):
        algorithm.losses(Batch(x[:1], y[:1]), None, 0)


def test_arm_gives_images_one_more_channel() -> None:
    network = make_network("conv", (3, 16, 16), 2, widths=(4, 8))
    before = network.featuriser[0].weight.detach().clone()
    algorithm = make_algorithm("arm", network, 2, support_size=4)
    after = network.featuriser[0].weight.detach()
    assert torch.equal(after[:, :3], before)
    assert torch.equal(after[:, 3], before[:, 0])
    x = torch.rand(4, 3, 16, 16)
    joined = algorithm.eval().with_context(x)
    assert torch.allclose(joined[:, 3], algorithm.context(x)[:, 0].mean(0).expand(4, 16, 16), atol=1e-6)
    assert algorithm.predict(x).shape == (4, 2)


# gradients


def test_gradient_reversal_and_its_schedule() -> None:
    reversal = GradientReversal()
    assert float(reversal.coefficient) == 0.0
    for calls, expected in ((1000, 0.46), (3000, 0.905)):
        reversal.calls.fill_(calls)
        assert float(reversal.coefficient) == pytest.approx(expected, abs=3e-3)
        x = torch.ones(3, requires_grad=True)
        (2.0 * reversal(x)).sum().backward()
        assert torch.allclose(x.grad, torch.full((3,), -2.0 * math.tanh(calls / 2000)))
    assert int(reversal.calls) == 3001
    reversal.eval()(torch.ones(3))
    assert int(reversal.calls) == 3001, "evaluation must not move the schedule"


SMOOTH: list[tuple[str, dict[str, Any]]] = [
    ("mmd", {}),
    ("mmd", {"kernel": "rbf"}),
    ("coral", {}),
    ("coral", {"preset": "domainbed"}),
]


@pytest.mark.parametrize(("name", "options"), SMOOTH)
def test_discrepancies_pass_gradcheck(name: str, options: dict[str, Any]) -> None:
    algorithm = make_algorithm(name, plain_network(), 2, **options)
    z_s, z_t = SOURCE.x.clone().requires_grad_(), TARGET.x.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: algorithm.loss(a, b, SOURCE.weights, TARGET.weights),
        (z_s, z_t),
        atol=1e-6,
    )


def test_task_and_domain_losses_pass_gradcheck() -> None:
    erm = make_algorithm("erm", plain_network(), 2)
    assert torch.autograd.gradcheck(lambda z: erm.task_loss(z, SOURCE), (SOURCE.x.clone().requires_grad_(),))
    shares = rows([0.1, 0.3, 0.4, 0.2])[0]
    logits = rows([0.3, -1.0, 2.0, 0.1])[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda o: domain_loss(o, 2, shares, smoothing=0.1), (logits,))
    dann = make_algorithm("dann", plain_network(), 2, adversary="alternating", grad_penalty=0.5)
    dann.discriminator = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    z = torch.cat([SOURCE.x, TARGET.x]).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: dann.alternating_domain(z, SOURCE, TARGET), (z,))


@pytest.mark.parametrize("name", ["dann", "cdan"])
def test_adversarial_gradient_is_reversed_for_features_only(name: str) -> None:
    network = plain_network()
    network.head.weight.data.zero_()  # predictions do not move with z, so that differences see only the map
    algorithm = make_algorithm(name, network, 2, discriminator_width=4).double().eval()
    algorithm.reversal.calls.fill_(3000)

    def domain(z: Tensor) -> Tensor:
        return algorithm.domain(z[:2], z[2:], network.head(z[:2]), SOURCE, TARGET)

    z = torch.cat([SOURCE.x, TARGET.x]).add(0.1).requires_grad_()
    slope, scale = torch.autograd.grad(domain(z), [z, algorithm.discriminator[0].bias])
    with torch.no_grad():
        for i, j in ((0, 0), (1, 1), (4, 0)):
            step = torch.zeros_like(z)
            step[i, j] = 1e-6
            numeric = float(domain(z + step) - domain(z - step)) / 2e-6
            assert float(slope[i, j]) == pytest.approx(-math.tanh(1.5) * numeric, abs=1e-7)
        bias = algorithm.discriminator[0].bias
        bias[0] += 1e-6
        up = float(domain(z))
        bias[0] -= 2e-6
        assert float(scale[0]) == pytest.approx((up - float(domain(z))) / 2e-6, abs=1e-7)


# equalities


@every
def test_no_weights_equals_equal_weights(name: str, options: dict[str, Any]) -> None:
    source, target = batches()
    equal_s = source._replace(weights=torch.full((8,), 1 / 8))
    equal_t = target._replace(weights=torch.full((12,), 1 / 12))
    plain = build(name, options).losses(source, target, 0)
    weighted = build(name, options).losses(equal_s, equal_t, 0)
    assert plain.keys() == weighted.keys()
    for part in plain:
        assert torch.allclose(plain[part], weighted[part], rtol=1e-4, atol=1e-6), part


@every
def test_weights_change_every_part(name: str, options: dict[str, Any]) -> None:
    source, target = batches(weighted=True)
    weighted = build(name, options).losses(source, target, 0)
    plain = build(name, options).losses(source._replace(weights=None), target._replace(weights=None), 0)
    for part in plain:
        assert not torch.allclose(plain[part], weighted[part], rtol=1e-4), part


EQUAL: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("cdan+sdat", {**SMALL, "sharpness": 0.0}, "cdan", SMALL),
    ("cdan+sdat", {**SMALL, "sharpness": 1e-45}, "cdan", SMALL),  # both passes, but the ascent is below rounding
    ("cdan+els", {**SMALL, "smoothing": 0.0}, "cdan", SMALL),
    ("dann+els+sdat", {**SMALL, "smoothing": 0.0, "sharpness": 0.0}, "dann", SMALL),
    ("mmd", {"penalty": 0.0}, "erm", {}),
    ("coral", {"penalty": 0.0}, "erm", {}),
]


@pytest.mark.parametrize(("name", "options", "other", "others"), EQUAL)
def test_neutral_options_give_the_simpler_algorithm(
    name: str, options: dict[str, Any], other: str, others: dict[str, Any]
) -> None:
    a, b = build(name, options), build(other, others)
    train(a, sgd(a), range(3))
    train(b, sgd(b), range(3))
    assert same_state(a, b)


def test_sharpness_step_by_hand() -> None:
    source, target = batches(weighted=True)
    algorithm, twin = build("dann+sdat", {**SMALL, "sharpness": 0.3}), build("dann", SMALL)
    algorithm.update(source, target, 0, optimisers=sgd(algorithm, 0.1, 0.0), backward=lambda loss: loss.backward())
    parameters = twin.parameter_groups()["network"]
    start = [p.detach().clone() for p in parameters]
    gradients = torch.autograd.grad(twin.task_loss(twin.pair_features(source, target)[0], source), parameters)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    with torch.no_grad():
        for p, g in zip(parameters, gradients):
            p.add_(0.3 * g / norm)
    at_top = torch.autograd.grad(twin.losses(source, target, 0)["total"], parameters)
    for p, w, g in zip(algorithm.parameter_groups()["network"], start, at_top):
        assert torch.allclose(p, w - 0.1 * g, atol=1e-6)
    plain = build("dann", SMALL)
    plain.update(source, target, 0, optimisers=sgd(plain, 0.1, 0.0), backward=lambda loss: loss.backward())
    assert not same_state(plain.network.head, algorithm.network.head)


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_nothing_climbs_after_an_overflow(wrong: float) -> None:
    first, second = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))
    first.grad, second.grad = torch.tensor([wrong, 1.0]), torch.tensor([0.5])
    with at_ascent([first, second], 0.3):
        assert first.tolist() == [1.0, 2.0]
        assert second.tolist() == [3.0]
    first.grad = torch.tensor([0.0, 1.2])
    with at_ascent([first, second], 1.3):
        assert torch.allclose(first, torch.tensor([1.0, 3.2]))
        assert torch.allclose(second, torch.tensor([3.5]))


def test_sharpness_climbs_under_autocast_too() -> None:
    source, target = batches()
    task = {}
    for rho in (0.0, 2.0):
        algorithm = build("dann", {**SMALL, "sharpness": rho})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            parts = algorithm.update(source, target, 0, optimisers=sgd(algorithm), backward=lambda l: l.backward())
        task[rho] = float(parts["task"])
    assert task[2.0] > task[0.0] + 0.1, "the loss after the ascent must be higher"


def test_batchnorm_and_reversal_count_once_under_sharpness() -> None:
    algorithm = build("cdan+sdat", SMALL)
    train(algorithm, sgd(algorithm), range(3))
    assert int(algorithm.network.bottleneck[1].num_batches_tracked) == 3
    assert int(algorithm.reversal.calls) == 3


def test_alternating_steps_take_turns() -> None:
    for steps, order in ((1, "nd" * 3), (2, "dnddnd")):
        algorithm = build("dann", {**SMALL, "adversary": "alternating", "d_steps_per_g_step": steps})
        optimisers = sgd(algorithm)
        for step, turn in enumerate(order):
            before = {k: v.clone() for k, v in algorithm.named_parameters()}
            source, target = batches(step)
            parts = algorithm.update(source, target, step, optimisers=optimisers, backward=lambda l: l.backward())
            changed = {k.split(".")[0] for k, v in algorithm.named_parameters() if not torch.equal(v, before[k])}
            assert changed == {"network" if turn == "n" else "discriminator"}, step
            assert ("task" in parts) == (turn == "n")


# errors

BAD: list[tuple[Callable[[], Any], str | None, tuple[Any, ...]]] = [
    (lambda: build("corla", {}), "algorithm", ("'corla'", "'coral'")),
    (lambda: build("cdan+sdta", {}), "algorithm", ("'cdan+sdta'", "'cdan+sdat'")),
    (lambda: build("mmd+els", {}), None, ("'mmd+els'", "'smoothing'", "'cdan'")),
    (lambda: build("mmd", {"penaltie": 1}), None, ("'mmd'", "'penaltie'", "'penalty'")),
    (lambda: build("mmd", {"penalty": -1.0}), "penalty", (0, "-1.0")),
    (lambda: build("mmd+sdat", {}), None, ("'mmd+sdat'", "'sharpness'", "'cdan'")),
    (lambda: build("dann", {"adversary": "alternate"}), "adversary", ("'alternate'", "'alternating'")),
    (lambda: build("dann", {"discriminator_width": "big"}), "discriminator_width", ("whole number", "'big'")),
    (lambda: build("dann", {"discriminator_width": 0}), "discriminator_width", (1, 0)),
    (lambda: build("dann", {"adversary": "alternating", "discriminator_width": 0}), "discriminator_width", (1, 0)),
    (lambda: build("cdan+els", {"smoothing": 0.51}), "smoothing", ("at most 0.5", 0.51)),
    (lambda: build("cdan", {"entropy": "no"}), "entropy", ("true", "false", "'no'")),
    (lambda: build("mcc", {"temperature": 0}), None, ("temperature", "positive", 0)),
    (lambda: build("erm", {"task_weighting": "none"}), "task_weighting", ("'none'", "weighted", "plain")),
    (lambda: make_algorithm("erm", make_network("mlp", (3,), 2), 4), None, ("2 logits", "num_classes", 4)),
    (
        lambda: make_algorithm("arm", Network(nn.Linear(3, 2), nn.Linear(2, 2)), 2),
        None,
        ("'arm'", "input_shape", None, "make_network"),
    ),
    (lambda: build("mmd", {}).losses(batches()[0], None, 0), None, ("'mmd'", "target", None, "'erm'")),
    (lambda: build("erm", {}).losses(batches()[1], None, 0), None, ("source", "labels", "Batch(x, y, weights)")),
    (
        lambda: build("erm", {}).losses(batches()[0]._replace(weights=torch.ones(7)), None, 0),
        "weights",
        ("(8,)", "(7,)"),
    ),
]


@pytest.mark.parametrize(("call", "field", "named"), BAD)
def test_errors_name_the_value_and_a_remedy(call: Callable[[], Any], field: str | None, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        call()


def test_options_are_listed_with_defaults() -> None:
    assert algorithm_options("cdan+sdat")["sharpness"] == 0.05
    assert algorithm_options("cdan+els")["smoothing"] == 0.1
    assert algorithm_options("mcc")["temperature"] == 2.5
    wide = make_algorithm("cdan", plain_network(), 2).discriminator
    assert [m.out_features for m in wide if isinstance(m, nn.Linear)] == [1024, 1024, 1]
