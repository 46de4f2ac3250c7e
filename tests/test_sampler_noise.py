"""The report against closed forms, explicit feature maps and plain loops, on small seeded data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler

from conftest import refused
from vardass.analysis.sampler_noise import Estimate, VarianceReport, variance_report
from vardass.kernels import CoralKernel, FunctionKernel, RBFMixture
from vardass.losses import CORALLoss, MMDLoss, coral, mmd2
from vardass.paper.paired_sampler import PairedBatchSampler
from vardass.samplers import (
    BalancedBatchSampler,
    IndexBatch,
    OrderedBatchSampler,
    StratifiedBatchSampler,
    UniformBatchSampler,
)

N, M, D, K = 90, 70, 3, 6


def features(n: int, shift: float = 0.0, seed: int = 0, d: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    blobs = 2.0 * torch.randn(4, d, generator=generator, dtype=torch.float64)
    spread = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return blobs[torch.randint(4, (n,), generator=generator)] + 0.6 * spread + shift


X, Y = features(N), features(M, 0.7, seed=1)


def uniform(n: int) -> UniformBatchSampler:
    return UniformBatchSampler(n, K, replacement=True)


def factories(kernel: Any = "mmd") -> dict[str, Callable[[int], Any]]:
    return {
        "uniform": uniform,
        "epoch": lambda n: UniformBatchSampler(n, K),
        "paper": lambda n: StratifiedBatchSampler(n, K, kernel=kernel, solver="dynamic-kmeans"),
        "strata": lambda n: StratifiedBatchSampler(n, K, kernel=kernel),
        "cycling": lambda n: StratifiedBatchSampler(n, K, kernel=kernel, replacement=False),
        "ordered": lambda n: OrderedBatchSampler(n, K, kernel=kernel),
        "balanced": lambda n: BalancedBatchSampler(n, K, kernel=kernel),
    }


@cache
def measured(kernel: str) -> VarianceReport:
    return variance_report(factories(kernel), X, Y, kernel=kernel, batches=300, gradient_batches=40)


@pytest.fixture(params=["mmd", "coral"])
def report(request: pytest.FixtureRequest) -> VarianceReport:
    return measured(request.param)


class FixedBatches:
    """A sampler of given batches, in a given order, with given weights: nothing is random."""

    def __init__(self, rows: Tensor, weights: Tensor | None = None) -> None:
        self.rows, self.weights = rows, weights

    def __iter__(self) -> Iterator[IndexBatch]:
        for i, row in enumerate(self.rows.tolist()):
            batch = IndexBatch(row)
            if self.weights is not None:
                batch.weights = self.weights[i].tolist()
            yield batch


def made(*samplers: Any) -> list[Any]:
    """A factory of each of them."""
    return [lambda n, sampler=sampler: sampler for sampler in samplers]


def fixed(n: int, count: int, seed: int = 0, *, weighted: bool = True) -> FixedBatches:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(n, (count, K), generator=generator)
    weights = torch.rand(count, K, generator=generator, dtype=torch.float64)
    return FixedBatches(rows, weights / weights.sum(1, keepdim=True) if weighted else None)


# --- the mean embedding -----------------------------------------------------------------------------------


def test_drawn_variance_agrees_with_the_closed_form(report: VarianceReport) -> None:
    for name in ("uniform", "epoch", "paper", "strata", "cycling"):
        row = report[name]
        assert row.exact_variance is not None
        assert abs(row.variance.value - row.exact_variance) < 4 * row.variance.stderr, name
        # a standard error that is too wide would let anything pass
        assert row.variance.stderr < 0.15 * row.exact_variance


def test_closed_form_of_draws_without_replacement() -> None:
    parts = [variance_report({"with": uniform, "without": factories()["epoch"]}, x, batches=2) for x in (X, Y)]
    for n, part in zip((N, M), parts, strict=True):
        with_replacement, without = part["with"].exact_variance, part["without"].exact_variance
        assert with_replacement is not None
        assert without == pytest.approx(with_replacement * (n - K) / (n - 1))


def test_coupled_samplers_have_no_closed_form_and_less_variance(report: VarianceReport) -> None:
    assert report["ordered"].exact_variance is None
    assert report["balanced"].exact_variance is None
    strata = report["strata"].exact_variance
    assert strata is not None
    assert report["ordered"].variance.value + 4 * report["ordered"].variance.stderr < strata
    assert report["balanced"].variance.value < report["epoch"].variance.value
    assert strata < report["uniform"].exact_variance  # type: ignore[operator]


@pytest.mark.parametrize(("kernel", "phi"), [("linear", "rows"), (CoralKernel(), "squares")])
def test_error_of_each_batch_equals_that_of_explicit_features(kernel: Any, phi: str) -> None:
    batches = fixed(N, 5)
    centred = X - X.mean(0)
    explicit = X if phi == "rows" else torch.einsum("ni,nj->nij", centred, centred).reshape(N, -1)
    means = torch.einsum("bk,bkr->br", batches.weights, explicit[batches.rows])
    errors = (means - explicit.mean(0)).square().sum(1)
    row = variance_report({"fixed": made(batches)}, X, kernel=kernel, batches=5)["fixed"]
    assert row.variance.value == pytest.approx(float(errors.mean()), rel=1e-9)
    assert row.variance.stderr == pytest.approx(float(errors.std()) / math.sqrt(5), rel=1e-9)
    bias = float((means.mean(0) - explicit.mean(0)).norm())
    assert row.bias_ratio == pytest.approx(bias / math.sqrt(float(errors.mean()) / 5), rel=1e-9)


def test_unbiased_samplers_are_seen_as_such_and_a_biased_one_is_not() -> None:
    far = X.norm(dim=1).argsort()[-N // 3 :]

    class Outer(FixedBatches):
        def __init__(self, n: int) -> None:
            generator = torch.Generator().manual_seed(3)
            super().__init__(far[torch.randint(len(far), (300, K), generator=generator)])

    samplers = {**factories(), "biased": Outer}
    rows = variance_report(samplers, X, kernel=RBFMixture((0.1,)), batches=300)
    for name in factories():
        assert rows[name].bias_ratio < 1.6, name  # type: ignore[operator]
    assert rows["biased"].bias_ratio > 4  # type: ignore[operator]


def test_a_sample_of_columns_gives_the_same_variance_in_the_mean() -> None:
    x = features(400)
    batches = FixedBatches(torch.randperm(400, generator=torch.Generator().manual_seed(0)).view(4, 100))
    samplers = {"fixed": made(batches), "uniform": uniform}
    whole = variance_report(samplers, x, kernel="linear", batches=4)
    parts = [variance_report(samplers, x, kernel="linear", batches=4, max_columns=60, seed=s) for s in range(400)]
    values = torch.tensor([part["fixed"].variance.value for part in parts])
    stderr = float(values.std()) / math.sqrt(400)
    assert abs(float(values.mean()) - whole["fixed"].variance.value) < 4 * stderr
    # without the correction the error of the sample itself would be added, far outside this noise
    spread = float((x - x.mean(0)).square().sum(1).mean())
    assert spread / 60 * (400 - 60) / 399 > 12 * stderr
    assert parts[0]["uniform"].exact_variance is None
    assert parts[0]["uniform"].bias_ratio is None
    assert any("more than 60 samples" in note for note in parts[0].notes)
    assert not any("more than" in note for note in whole.notes)


# --- the loss ---------------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[..., Tensor]] = {
    "mmd2": mmd2,
    "coral": lambda x, y, **w: coral(x, y, population_x=N, population_y=M, **w),
}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_against_a_plain_loop(loss: str, weighted: bool) -> None:
    count = 12
    source, target = fixed(N, count, weighted=weighted), fixed(M, count, 1, weighted=weighted)
    report = variance_report(
        {"fixed": made(source, target)}, X, Y, loss=loss, batches=count, gradient_batches=0, seed=5
    )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(5)).tolist()
    values = []
    for i, j in enumerate(order):
        weights = {}
        if weighted:
            weights = {"weights_x": source.weights[i], "weights_y": target.weights[j]}  # type: ignore[index]
        values.append(float(LOSSES[loss](X[source.rows[i]], Y[target.rows[j]], **weights)))
    row = report["fixed"]
    assert row.loss_mean is not None
    assert row.loss_variance is not None
    assert row.loss_mean.value == pytest.approx(np.mean(values), rel=1e-9)
    assert row.loss_variance.value == pytest.approx(np.var(values, ddof=1), rel=1e-9)
    whole = float(LOSSES[loss](X, Y))
    assert report.loss_value == pytest.approx(whole, rel=1e-9)
    assert row.loss_bias == pytest.approx(np.mean(values) - whole, rel=1e-9)
    assert row.gradient_mse is None


def test_bias_of_the_v_statistic_is_the_variance_of_both_embeddings() -> None:
    for row in measured("mmd").rows:
        assert row.loss_mean is not None
        assert abs(row.loss_bias - row.variance.value) < 4 * row.loss_mean.stderr, row.name  # type: ignore[operator]


def test_default_loss_follows_the_kernel_and_modules_are_taken() -> None:
    def run(**options: Any) -> VarianceReport:
        return variance_report({"uniform": uniform}, X, Y, batches=4, gradient_batches=0, **options)

    assert run().loss == "mmd2"
    assert run(kernel="coral").loss == "coral"
    assert (
        run(kernel="coral").rows[0].loss_mean == run(loss=CORALLoss(population_x=N, population_y=M)).rows[0].loss_mean
    )
    assert run(kernel="rbf").rows[0].loss_mean == run(loss=MMDLoss(kernel="rbf")).rows[0].loss_mean
    assert run(loss=lambda x, y, **w: mmd2(x, y, **w)).rows[0].loss_mean == run().rows[0].loss_mean
    product = FunctionKernel(lambda x, y: x @ y.T)
    mine, named = run(kernel=product).rows[0], run(kernel="linear").rows[0]
    assert mine.variance.value == pytest.approx(named.variance.value)
    assert mine.loss_mean is not None
    assert mine.loss_mean.value == pytest.approx(named.loss_mean.value)  # type: ignore[union-attr]


# --- the gradient -----------------------------------------------------------------------------------------


class Featuriser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 2)).double()
            self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def flat(grads: tuple[Tensor | None, ...]) -> Tensor:
    return torch.cat([g.flatten().double() for g in grads if g is not None])


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_of_a_model_against_a_plain_loop(loss: str) -> None:
    count = 6
    source, target = fixed(N, count), fixed(M, count, 1)
    model = Featuriser().train()
    with torch.no_grad():
        z_x, z_y = model.eval()(X), model(Y)
    model.train()
    report = variance_report(
        {"fixed": made(source, target)},
        z_x,
        z_y,
        loss=loss,
        batches=count,
        gradient_batches=count,
        model=model,
        source_inputs=X,
        target_inputs=Y.numpy(),
    )
    assert all(module.training for module in model.modules())  # as it was
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    parameters = list(model.parameters())
    truth = flat(torch.autograd.grad(LOSSES[loss](model(X), model(Y)), parameters, allow_unused=True))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    gradients = []
    for i, j in enumerate(order):
        weights = {"weights_x": source.weights[i], "weights_y": target.weights[j]}  # type: ignore[index]
        value = LOSSES[loss](model(X[source.rows[i]]), model(Y[target.rows[j]]), **weights)
        gradients.append(flat(torch.autograd.grad(value, parameters, allow_unused=True)))
    stacked = torch.stack(gradients)
    row, size = report["fixed"], truth.square().sum()
    assert row.gradient_mse is not None
    mse = (stacked - truth).square().sum(1).mean() / size
    assert row.gradient_mse.value == pytest.approx(float(mse), rel=1e-6)


def test_gradient_without_a_model_is_that_of_a_linear_layer() -> None:
    count = 4
    source, target = fixed(N, count), fixed(M, count, 1)
    layer = nn.Linear(D, D, bias=False, dtype=torch.float64)
    layer.weight.data = torch.eye(D, dtype=torch.float64)  # z + z A at A = 0
    options: dict[str, Any] = {"batches": count, "gradient_batches": count}
    alone = variance_report({"fixed": made(source, target)}, X, Y, **options)
    given = variance_report(
        {"fixed": made(source, target)}, X, Y, model=layer, source_inputs=X, target_inputs=Y, **options
    )
    assert alone["fixed"].gradient_mse == pytest.approx(given["fixed"].gradient_mse)
    assert any("no model was given" in note for note in alone.notes)
    assert not any("no model was given" in note for note in given.notes)


def test_coupling_lowers_the_error_of_the_gradient(report: VarianceReport) -> None:
    ratio = report.relative("ordered", "gradient_mse")
    assert ratio is not None
    assert ratio.value + 4 * ratio.stderr < 1


# --- samplers of all kinds ----------------------------------------------------------------------------------


def test_a_batch_without_weights_leaves_those_of_the_others() -> None:
    class First(FixedBatches):
        def __iter__(self) -> Iterator[IndexBatch]:
            batches = list(super().__iter__())
            batches[0].weights = None
            return iter(batches)

    given = fixed(N, 5)
    assert given.weights is not None
    even = FixedBatches(given.rows, given.weights.clone())
    even.weights[0] = 1 / K  # type: ignore[index]
    report = variance_report({"first": made(First(given.rows, given.weights)), "even": made(even)}, X, batches=5)
    assert report["first"].variance == report["even"].variance


def test_any_iterable_of_batches_can_be_measured() -> None:
    generator = torch.Generator().manual_seed(0)
    plain = BatchSampler(RandomSampler(range(N), generator=generator), K + 1, drop_last=False)
    row = variance_report({"torch": made(plain), "ours": lambda n: UniformBatchSampler(n, K + 1)}, X, batches=300)
    torchs, ours = row["torch"], row["ours"]
    assert torchs.batch_sizes == (K + 1,)
    assert ours.exact_variance is not None
    assert abs(torchs.variance.value - ours.exact_variance) < 4 * torchs.variance.stderr


def test_the_seed_decides_and_domains_of_one_size_get_their_own_draws() -> None:
    def run(seed: int) -> VarianceReport:
        return variance_report({"uniform": uniform}, X, X, batches=30, gradient_batches=0, seed=seed)

    first, again, other = run(0), run(0), run(1)
    assert first.rows[0].loss_mean == again.rows[0].loss_mean != other.rows[0].loss_mean
    # the same rows in both domains would make the mean loss zero
    assert first.rows[0].loss_mean.value > 0.1  # type: ignore[union-attr]


# --- what is shown ------------------------------------------------------------------------------------------


def test_dictionary_is_plain_and_complete(report: VarianceReport) -> None:
    record = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert list(record["samplers"]) == [row.name for row in report.rows]
    ordered = record["samplers"]["ordered"]
    assert ordered["exact_variance"] is None
    assert ordered["variance"] == report["ordered"].variance.value
    assert ordered["variance_stderr"] == report["ordered"].variance.stderr
    assert ordered["loss_variance_relative"] == report.relative("ordered", "loss_variance").value  # type: ignore[union-attr]
    assert record["samplers"]["uniform"]["gradient_mse_relative"] == 1.0
    assert record["sizes"] == [N, M]


def test_missing_and_infinite_values_are_none_in_the_dictionary() -> None:
    constant = variance_report({"uniform": uniform}, torch.zeros(20, 2), torch.zeros(20, 2), kernel="linear", batches=3)
    record = json.loads(json.dumps(constant.to_dict(), allow_nan=False))["samplers"]["uniform"]
    assert record["gradient_mse"] is None
    assert record["bias_ratio"] is None
    assert record["variance"] == 0.0
    alone = variance_report({"uniform": uniform}, X, batches=3).to_dict()
    assert alone["loss_value"] is None
    assert alone["samplers"]["uniform"]["loss_mean"] is None


def test_text_has_a_line_for_each_sampler(report: VarianceReport) -> None:
    lines = str(report).splitlines()
    first = lines.index(next(line for line in lines if set(line) <= set("-: ") and line)) + 1
    for row, line in zip(report.rows, lines[first : first + len(report.rows)], strict=True):
        assert line.startswith(row.name)
        assert f"{row.variance.value:.3g}" in line
        assert f"{report.relative(row.name, 'gradient_mse').value:.3g}" in line  # type: ignore[union-attr]
    assert "relative to uniform" in "\n".join(lines)
    assert "loss" not in str(variance_report({"uniform": uniform}, X, batches=2))


def test_relative_to_the_baseline(report: VarianceReport) -> None:
    assert report.baseline == "uniform"
    assert report.relative("uniform", "loss_variance") == Estimate(1.0, 0.0)
    ratio = report.relative("strata", "variance")
    assert ratio is not None
    a, b = report["strata"].variance, report["uniform"].variance
    assert ratio.value == pytest.approx(a.value / b.value)
    assert ratio.stderr == pytest.approx(ratio.value * math.hypot(a.stderr / a.value, b.stderr / b.value))
    first = variance_report({"strata": factories()["strata"], "u": uniform}, X, batches=2)
    assert first.baseline == "u"
    assert variance_report({"strata": factories()["strata"]}, X, batches=2).baseline == "strata"


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samplers", "options", "field", "named"),
    [
        ({}, {}, None, ("samplers", "{}")),
        ([uniform], {}, None, ("samplers", "[<function uniform")),
        (
            {"u": UniformBatchSampler(N, K)},
            {},
            None,
            ("'u'", "vardass.samplers.uniform.UniformBatchSampler", "factory"),
        ),
        ({"u": (uniform,)}, {}, None, ("'u'", "(<function uniform", "2 domains")),
        ({"u": made(UniformBatchSampler(N, K), UniformBatchSampler(N, K))}, {}, None, ("'u'", f"n={N}", f"{M} rows")),
        ({"u": lambda n: 3}, {}, None, ("'u'", "int")),
        ({"u": lambda n: FixedBatches(torch.tensor([[0, N + 5]]))}, {}, None, ("'u'", f"0 to {N + 5}", f"{N} rows")),
        ({"u": lambda n: []}, {}, None, ("'u'", "no batches", "drop_last=False")),
        ({"u": uniform}, {"loss": "wasserstein"}, None, ("loss", "'wasserstein'", "mmd2", "coral")),
        ({"u": uniform}, {"batches": 1}, "batches", ("at least 2", 1)),
        ({"u": uniform}, {"gradient_batches": -1}, "gradient_batches", (0, -1)),
        ({"u": uniform}, {"gradient_batches": 1}, None, ("gradient_batches", "0 or at least 2", 1)),
        ({"u": uniform}, {"kernel": "sigmoid"}, "kernel", ("'sigmoid'", "rbf")),
        ({"u": uniform}, {"model": Featuriser(), "source_inputs": X}, None, ("target_inputs", f"{M} rows", "none")),
        (
            {"u": uniform},
            {"model": Featuriser(), "source_inputs": X, "target_inputs": X},
            None,
            ("target_inputs", f"{M} rows", f"{N} rows"),
        ),
        ({"u": uniform}, {"source_inputs": X}, None, ("source_inputs", "model=...")),
        (
            {"u": uniform},
            {"model": nn.Flatten(0), "source_inputs": X, "target_inputs": Y},
            None,
            ("no parameter of the model", "model.requires_grad_()"),
        ),
        (
            {"u": uniform},
            {"model": nn.Sequential(nn.Linear(D, 1).double(), nn.Flatten(0)), "source_inputs": X, "target_inputs": Y},
            None,
            ("model", f"({N}, d)", f"({N},)"),
        ),
    ],
)
def test_bad_input_is_refused(
    samplers: Any, options: dict[str, Any], field: str | None, named: tuple[Any, ...]
) -> None:
    with refused(*named, field=field):
        variance_report(samplers, X, Y, **{"batches": 4, "gradient_batches": 2, **options})


def test_domains_must_fit_together() -> None:
    with refused("source has 3 columns", "target 2"):
        variance_report({"u": uniform}, X, Y[:, :2])
    with refused("NaN", f"{N} of {N} rows", field="source"):
        variance_report({"u": uniform}, X * math.nan, Y)


def test_two_samplers_that_plan_both_domains_are_refreshed_with_both_and_taken_in_step() -> None:
    z = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (90, 120)]
    entries = {
        "uniform": lambda n: UniformBatchSampler(n, 6, replacement=True),
        "alone": lambda n: PairedBatchSampler(n, 6, kernel="linear", seed=n, role="source" if n == 90 else "target"),
        "pair": [
            partial(PairedBatchSampler, batch_size=6, role=role, kernel="linear") for role in ("source", "target")
        ],
    }
    report = variance_report(entries, *z, kernel="linear", loss=MMDLoss(kernel="linear"), batches=64)
    noise = {row.name: row.loss_variance.value for row in report.rows}
    means = {row.name: row.loss_mean.value for row in report.rows}
    assert noise["pair"] < 0.1 * noise["uniform"]
    assert means["pair"] < 0.5 * means["uniform"]
    assert noise["alone"] > 3 * noise["pair"]  # of two seeds: each knows its own domain only
