"""Estimators of the loss of all data: mean and mean gradient over all draws, enumerated; what is refused; precision."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from conftest import refused
from loss_batches import normal, of_batches
from vardass import losses
from vardass.kernels import FunctionKernel, RBFMixture
from vardass.losses import Bank, Batch

mmd2, coral = of_batches(losses.mmd2), of_batches(losses.coral)


def MMDLoss(**options: Any) -> Callable[..., Tensor]:
    return of_batches(losses.MMDLoss(**options))


def CORALLoss(**options: Any) -> Callable[..., Tensor]:
    return of_batches(losses.CORALLoss(**options))


X, Y = 0.8 * normal(5, 2, 1), 1.1 * normal(6, 2, 2) + 0.5
STRATA = {"x": torch.tensor([0, 1, 0, 1, 1]), "y": torch.tensor([1, 0, 0, 1, 1, 1])}
KERNELS = {
    "mixture": RBFMixture((0.05, 0.5, 3.0)),
    "polynomial": FunctionKernel(lambda x, y: (0.5 * x @ y.T + 1.0) ** 2),
}
CORALS = {
    "paper": {},
    "domainbed": {"preset": "domainbed"},
    "population": {"preset": "domainbed", "correction": "population", "population_x": 5, "population_y": 6},
}


class Drawn(NamedTuple):
    """One possible batch of a domain: its rows, what the loss is told of it, and its probability."""

    rows: list[int]
    told: dict[str, Any]
    probability: float


# --- all batches of a way to draw --------------------------------------------------------------------------


def multisets(n: int, b: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Draws with replacement, up to their order."""
    for rows in itertools.combinations_with_replacement(range(n), b):
        ways = math.factorial(b) / math.prod(math.factorial(m) for m in Counter(rows).values())
        yield rows, ways / n**b


def subsets(n: int, b: int) -> Iterator[tuple[tuple[int, ...], float]]:
    for rows in itertools.combinations(range(n), b):
        yield rows, 1 / math.comb(n, b)


def independent(s: str, n: int, b: int = 2) -> list[Drawn]:
    return [Drawn(list(rows), {}, p) for rows, p in multisets(n, b)]


def without_replacement(s: str, n: int, b: int = 2) -> list[Drawn]:
    return [Drawn(list(rows), {f"pool_{s}": n}, p) for rows, p in subsets(n, b)]


def of_strata(s: str, n: int, q: int, *, replacement: bool = True, bank: Tensor | None = None) -> list[Drawn]:
    """``q`` draws from each stratum, with the weights of the paper."""
    members = [(STRATA[s] == h).nonzero().flatten().tolist() for h in (0, 1)]
    draw = multisets if replacement else subsets
    found = []
    for choice in itertools.product(*(list(draw(len(group), q)) for group in members)):
        rows = [members[h][i] for h, (places, _) in enumerate(choice) for i in places]
        told: dict[str, Any] = {f"strata_{s}": STRATA[s][rows]}
        told[f"weights_{s}"] = torch.tensor([len(members[int(STRATA[s][i])]) / (n * q) for i in rows], dtype=X.dtype)
        if not replacement:
            told[f"pool_{s}"] = n
        if bank is not None:
            told[f"bank_{s}"] = Bank(bank, strata=STRATA[s])
        found.append(Drawn(rows, told, math.prod(p for _, p in choice)))
    return found


def coupled(s: str, n: int) -> list[Drawn]:
    """A plan of equal strata: each row of it takes one of either stratum, small with large."""
    size = n // 2 * 2
    order = (X if s == "x" else Y)[:size, 0].argsort().tolist()
    rows = list(zip(order[: size // 2], reversed(order[size // 2 :])))
    return [Drawn(list(row), {}, 1 / len(rows)) for row in rows]


def mean_over(loss: Callable[..., Tensor], x: Tensor, y: Tensor, draws_x: list[Drawn], draws_y: list[Drawn]) -> Any:
    """Mean of the loss, and of its gradient with respect to every sample of both domains."""
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    assert sum(d.probability for d in draws_x) == pytest.approx(1.0)
    assert sum(d.probability for d in draws_y) == pytest.approx(1.0)
    total = torch.zeros((), dtype=x.dtype)
    for a, b in itertools.product(draws_x, draws_y):
        value = loss(x[a.rows], y[b.rows], **a.told, **b.told)
        total = total + a.probability * b.probability * value
    return total.detach(), *torch.autograd.grad(total, (x, y))


def of_all(loss: Callable[..., Tensor], x: Tensor = X, y: Tensor = Y) -> Any:
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    value = loss(x, y)
    return value.detach(), *torch.autograd.grad(value, (x, y))


def assert_same(found: Any, truth: Any) -> None:
    for got, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


DRAWS: dict[str, Callable[[str, int], list[Drawn]]] = {
    "independent": independent,
    "without replacement": without_replacement,
    "three without replacement": lambda s, n: without_replacement(s, n, 3),
    "strata, two draws": lambda s, n: of_strata(s, n, 2),
    "strata, two draws without replacement": lambda s, n: of_strata(s, n, 2, replacement=False),
    "strata, one draw and a bank": lambda s, n: of_strata(s, n, 1, bank=X if s == "x" else Y),
}


# --- MMD ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "kernel"), [*((draw, "mixture") for draw in DRAWS), *(("strata, one draw and a bank", k) for k in KERNELS)]
)
def test_unbiased_mmd_has_the_mean_and_the_mean_gradient_of_all_data(draw, kernel):
    draws = DRAWS[draw]("x", 5), DRAWS[draw]("y", 6)
    loss = MMDLoss(kernel=KERNELS[kernel], estimator="unbiased")
    assert_same(mean_over(loss, X, Y, *draws), of_all(MMDLoss(kernel=KERNELS[kernel])))


def test_the_two_domains_may_be_drawn_in_different_ways():
    loss = MMDLoss(kernel="rbf", estimator="unbiased")
    draws = of_strata("x", 5, 3), without_replacement("y", 6)
    assert_same(mean_over(loss, X, Y, *draws), of_all(MMDLoss(kernel="rbf")))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("draw", ["independent", "one draw", "coupled", "one row"])
def test_reference_mmd_has_the_mean_and_the_mean_gradient_of_all_data(draw, kernel):
    x, y = X[:4], Y
    ways: dict[str, Callable[[str, int], list[Drawn]]] = {
        "independent": independent,
        "one draw": lambda s, n: without_strata(of_strata(s, n, 1)),
        "coupled": coupled,
        "one row": lambda s, n: independent(s, n, 1),
    }
    x = X if draw == "one draw" else x
    loss = MMDLoss(kernel=KERNELS[kernel], estimator="reference")

    def with_banks(a: Tensor, b: Tensor, **told: Any) -> Tensor:
        return loss(a, b, bank_x=x, bank_y=y, **told)

    found = mean_over(with_banks, x, y, ways[draw]("x", len(x)), ways[draw]("y", len(y)))
    assert_same(found, of_all(MMDLoss(kernel=KERNELS[kernel]), x, y))


def without_strata(draws: list[Drawn]) -> list[Drawn]:
    kept = [{name: value for name, value in d.told.items() if name.startswith("weights")} for d in draws]
    return [d._replace(told=told) for d, told in zip(draws, kept)]


def test_no_pairs_of_coupled_rows_are_unbiased():
    """Strata {-3, -1} and {1, 3}, in batches (-3, 3) and (-1, 1): products across strata have the mean -5, not -4.

    So |μ̂|² less the right part within strata has the mean -1/2 instead of 0, in either domain.
    """
    x = torch.tensor([[-3.0], [-1.0], [1.0], [3.0]], dtype=torch.float64)
    ids = torch.tensor([0, 0, 1, 1])
    plan = [[0, 3], [1, 2]]
    draws = [
        [Drawn(row, {f"strata_{s}": ids[row], f"bank_{s}": Bank(z, strata=ids)}, 0.5) for row in plan]
        for s, z in (("x", x), ("y", x + 1.0))
    ]
    loss = MMDLoss(kernel="linear", estimator="unbiased")
    assert float(mean_over(loss, x, x + 1.0, *draws)[0]) == pytest.approx(1.0 - 0.5 - 0.5)


def test_rows_of_a_bank_may_be_drawn_too():
    """Weighted representatives that are drawn independently of the batch leave the mean alone."""
    kernel = KERNELS["mixture"]
    draws = independent("x", 5, 1), [Drawn(list(range(6)), {}, 1.0)]
    parts = []
    for a, b in itertools.product(of_strata("x", 5, 1), of_strata("y", 6, 1)):
        banks = {"bank_x": Bank(X[a.rows], a.told["weights_x"]), "bank_y": Bank(Y[b.rows], b.told["weights_y"])}
        loss = partial(mmd2, kernel=kernel, estimator="reference", **banks)
        parts.append([a.probability * b.probability * part for part in mean_over(loss, X, Y, *draws)])
    assert_same([sum(part) for part in zip(*parts)], of_all(MMDLoss(kernel=kernel)))


def test_u_statistic_of_strata_as_it_was_is_refused_and_was_far_off():
    z = normal(200, 3, 5)
    truth = float(mmd2(z[:100], z[100:] + 0.1))
    with refused("estimator='unbiased'", "x", "weights", "strata=True", "estimator='reference'"):
        mmd2(X, Y, weights_x=[0.2] * 5, estimator="unbiased")
    labels = (z[:, 0] > 0).long() * 2 + (z[:, 1] > 0)
    generator = torch.Generator().manual_seed(0)
    values: dict[str, list[float]] = {"as if independent": [], "strata": []}
    parts = [torch.arange(100), torch.arange(100, 200)]
    for _ in range(225):
        rows, ids, weights = [], [], []
        for part in parts:
            groups = [part[labels[part] == h] for h in range(4)]
            rows.append(torch.cat([g[torch.randint(len(g), (2,), generator=generator)] for g in groups]))
            ids.append(torch.arange(4).repeat_interleave(2))
            weights.append(torch.tensor([len(g) / 200 for g in groups]).repeat_interleave(2))
        x, y = z[rows[0]], z[rows[1]] + 0.1
        w = {"weights_x": weights[0], "weights_y": weights[1]}
        one = torch.zeros(8, dtype=torch.long)
        values["as if independent"].append(float(mmd2(x, y, estimator="unbiased", strata_x=one, strata_y=one, **w)))
        values["strata"].append(float(mmd2(x, y, estimator="unbiased", strata_x=ids[0], strata_y=ids[1], **w)))
    means = {name: torch.tensor(found) for name, found in values.items()}
    error = float(means["strata"].std()) / 15
    assert float(means["as if independent"].mean()) < truth - 5 * error
    assert abs(float(means["strata"].mean()) - truth) < 4 * error


def test_strata_do_not_go_without_a_pool():
    """For draws without replacement the estimator for draws with replacement is off, so one must say which they are."""
    draws = of_strata("x", 5, 2, replacement=False), of_strata("y", 6, 2, replacement=False)
    loss, truth = MMDLoss(kernel="rbf", estimator="unbiased"), of_all(MMDLoss(kernel="rbf"))
    assert_same(mean_over(loss, X, Y, *draws), truth)
    wrong = [[d._replace(told={**d.told, f"pool_{s}": math.inf}) for d in each] for s, each in zip("xy", draws)]
    assert float((mean_over(loss, X, Y, *wrong)[0] - truth[0]).abs()) > 0.01
    for loss in (losses.mmd2, losses.coral):
        for estimator in ("v", "unbiased", "reference"):
            with refused("x", "strata", "pool=math.inf", field="pool"):
                loss(Batch(X, strata=STRATA["x"], bank=X), Batch(Y, bank=Y), estimator=estimator)


def test_weighted_rows_of_one_stratum():
    """Independent draws with fixed, unequal weights: pairs are divided by their total weight."""
    w = torch.tensor([0.2, 0.8], dtype=torch.float64)
    one = torch.zeros(2, dtype=torch.long)
    draws = [Drawn([i, j], {}, 1 / 9) for i in range(3) for j in range(3)]
    loss = partial(mmd2, weights_x=w, weights_y=w.flip(0), strata_x=one, strata_y=one, estimator="unbiased")
    assert_same(mean_over(loss, X[:3], Y[:3], draws, draws), of_all(mmd2, X[:3], Y[:3]))


def test_reference_gradient_is_autograds_through_the_kernel_matrix():
    x, y, banks = X[:3].clone().requires_grad_(), Y[:2].clone().requires_grad_(), (X + 0.3, Y - 0.2)
    fast = mmd2(x, y, kernel=KERNELS["mixture"], estimator="reference", bank_x=banks[0], bank_y=banks[1])
    kernel = KERNELS["mixture"].matrix
    means = [[kernel(z, bank).mean() for bank in banks] for z in (x, y)]
    slow = means[0][0] - means[0][1] - means[1][0] + means[1][1]
    torch.testing.assert_close(fast, slow)
    for got, half in zip(torch.autograd.grad(fast, (x, y)), torch.autograd.grad(slow, (x, y))):
        torch.testing.assert_close(got, 2 * half)
    with torch.no_grad():
        same = mmd2(x, y, kernel=KERNELS["mixture"], estimator="reference", bank_x=banks[0], bank_y=banks[1])
    torch.testing.assert_close(same, fast)


def test_a_kernel_that_must_be_fitted_takes_its_parameter_from_the_banks():
    kernel = RBFMixture(scale="median")
    fitted = kernel.fit(torch.cat([X, Y]))
    for estimator in ("unbiased", "reference"):
        told: dict[str, Any] = {"estimator": estimator, "bank_x": X, "bank_y": Y}
        torch.testing.assert_close(mmd2(X[:2], Y[:3], kernel=kernel, **told), mmd2(X[:2], Y[:3], kernel=fitted, **told))
    with refused("RBFMixture", "scale='median'", "kernel.fit(features)", "banks"):
        mmd2(X, Y, kernel=kernel, estimator="unbiased")


# --- CORAL -------------------------------------------------------------------------------------------------


def coral_of_all(options: dict[str, Any]) -> Any:
    """The loss of all data; its covariances need no correction for the batch."""
    whole = options if "population_x" in options else {**options, "correction": "none"}
    return of_all(lambda x, y: coral(x, y, **whole))


@pytest.mark.parametrize(
    ("draw", "options"), [*((d, "domainbed") for d in DRAWS), *(("strata, one draw and a bank", o) for o in CORALS)]
)
def test_unbiased_coral_about_the_banks_means(draw, options):
    draws = DRAWS[draw]("x", 5), DRAWS[draw]("y", 6)
    loss = CORALLoss(estimator="unbiased", **CORALS[options])

    def with_banks(a: Tensor, b: Tensor, **told: Any) -> Tensor:
        return loss(a, b, **{"bank_x": X, "bank_y": Y, **told})

    assert_same(mean_over(with_banks, X, Y, *draws), coral_of_all(CORALS[options]))


@pytest.mark.parametrize("options", CORALS)
@pytest.mark.parametrize("draw", ["one row", "one draw", "coupled"])
def test_reference_coral_has_the_mean_and_the_mean_gradient_of_all_data(draw, options):
    ways: dict[str, Callable[[str, int], list[Drawn]]] = {
        "one row": lambda s, n: independent(s, n, 1),
        "one draw": lambda s, n: without_strata(of_strata(s, n, 1)),
        "coupled": coupled,
    }
    x, y = (X[:4], Y) if draw == "coupled" else (X, Y)
    given = {**CORALS[options]}
    if options == "population":
        given |= {"population_x": len(x), "population_y": len(y)}
    loss = CORALLoss(estimator="reference", **given)
    found = mean_over(
        lambda a, b, **told: loss(a, b, bank_x=x, bank_y=y, **told),
        x,
        y,
        ways[draw]("x", len(x)),
        ways[draw]("y", len(y)),
    )
    whole = given if options == "population" else {**given, "correction": "none"}
    assert_same(found, of_all(lambda a, b: coral(a, b, **whole), x, y))


def test_coral_of_drawn_rows_of_a_bank_centres_by_the_mean_of_all():
    draws = independent("x", 5, 1), [Drawn(list(range(6)), {}, 1.0)]
    parts = []
    for a, b in itertools.product(independent("x", 5, 1), independent("y", 6, 1)):
        banks = {"bank_x": Bank(X[a.rows], mean=X.mean(0)), "bank_y": Bank(Y[b.rows], mean=Y.mean(0))}
        loss = partial(coral, preset="domainbed", estimator="reference", **banks)
        parts.append([a.probability * b.probability * part for part in mean_over(loss, X, Y, *draws)])
    assert_same([sum(part) for part in zip(*parts)], coral_of_all(CORALS["domainbed"]))


# --- what is refused, and precision ------------------------------------------------------------------------

LABELS = torch.tensor([0, 0, 1, 1, 2])


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            lambda: mmd2(X, Y, estimator="unbiased", strata_x=LABELS),
            ("1 of 3", "x", "draws_per_stratum=2", "estimator='reference'"),
        ),
        (
            lambda: mmd2(X, Y, estimator="unbiased", strata_x=LABELS, bank_x=Bank(X, strata=LABELS.clamp_max(1))),
            ("stratum 2", "x", "bank"),
        ),
        (lambda: mmd2(X, Y[:1], estimator="unbiased"), ("estimator='unbiased'", 2, 1, "batch")),
        (lambda: mmd2(X, Y, estimator="unbiased", pool_y=5), ("pool", "y", 6, 5)),
        (lambda: mmd2(X, Y, estimator="reference", bank_x=X), ("estimator='reference'", "y", "bank.features()")),
        (
            lambda: mmd2(X, Y, estimator="reference", bank_x=X[:, :1], bank_y=Y),
            ("bank", "x", "(m, 2)", (5, 1), "bank.features()"),
        ),
        (
            lambda: mmd2(X, Y, estimator="reference", bank_x="all", bank_y=Y),
            ("bank", "x", "(m, 2)", "str", "bank.features()"),
        ),
        (lambda: losses.mmd2(Batch(X), Y, weights_x=[0.2] * 5), ("x", "Batch", "weights_x")),
        (lambda: mmd2(X, Y, estimator="w"), ("estimator", "'w'", "v, unbiased, reference")),
        (lambda: coral(X, Y, estimator="unbiased"), ("estimator='unbiased'", "x", "bank.features()")),
        (lambda: coral(X, Y, estimator="unbiased", bank_x=X), ("estimator='unbiased'", "y", "bank.features()")),
        (lambda: coral(X, Y, estimator="reference"), ("estimator='reference'", "x", "bank.features()")),
    ],
)
def test_what_cannot_be_unbiased_is_refused_with_a_remedy(call, named):
    with refused(*named):
        call()


@pytest.mark.parametrize("estimator", ["unbiased", "reference"])
@pytest.mark.parametrize("loss", ["mmd", "mmd one draw", "coral", "coral one draw"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_float32_is_close_to_float64(loss, estimator, offset):
    x, y, big_x, big_y = normal(16, 20, 1), 1.2 * normal(12, 20, 2) + 0.1, normal(200, 20, 3), normal(150, 20, 4)
    function = mmd2 if loss.startswith("mmd") else coral
    told: dict[str, Any] = {}
    if "one draw" in loss:
        told = {"strata_x": torch.arange(16), "strata_y": torch.arange(12)}

    def value(dtype: torch.dtype) -> list[Tensor]:
        a, b = ((z + offset).to(dtype).requires_grad_() for z in (x, y))
        banks = (big_x + offset).to(dtype), (big_y + offset).to(dtype)
        given = {
            "bank_x": Bank(banks[0], strata=torch.arange(200) % 16),
            "bank_y": Bank(banks[1], strata=torch.arange(150) % 12),
        }
        found = function(a, b, estimator=estimator, **told, **given)
        return [found.detach(), *torch.autograd.grad(found, (a, b))]

    for half, full in zip(value(torch.float32), value(torch.float64)):
        assert half.dtype == torch.float32
        scale = float(full.abs().max()) if full.ndim else float(function(x, y))
        torch.testing.assert_close(half.double(), full, rtol=0.0, atol=2e-4 * scale)
