"""The doctor: each number against brute force, each rule on data made for it."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import vardass
from conftest import refused
from vardass import diagnose
from vardass.analysis.diagnosis import advise
from vardass.analysis.doctor import Limits
from vardass.errors import VardassWarning
from vardass.kernels import RBFMixture
from vardass.losses import CORALLoss, MMDLoss, mmd2


def normal(n, d=3, seed=0, scale=1.0):
    return scale * torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def three_classes(counts, seed, shift=0.0):
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    return 8.0 * F.one_hot(labels, 3).double() + normal(len(labels), seed=seed) + shift, labels


def chosen(found):
    return {line.topic: line.choice for line in found.advice}


# --- numbers ---------------------------------------------------------------------------------------------------


def test_the_mean_of_the_loss_over_all_batches_is_discrepancy_and_excess():
    x, y = normal(5), normal(6, seed=1) + 0.5
    loss = MMDLoss(kernel=RBFMixture((0.1, 1.0)))
    found = diagnose(x, y, loss=loss, batch_size=2, samplers=("stratified",), batches=2)
    assert found.discrepancy == pytest.approx(float(mmd2(x, y, kernel=loss.kernel)))
    draws = [list(itertools.permutations(range(n), 2)) for n in (5, 6)]
    values = [float(loss(x[list(i)], y[list(j)])) for i in draws[0] for j in draws[1]]
    uniform = found["uniform"]
    assert np.mean(values) == pytest.approx(found.discrepancy + uniform.excess.value)
    assert uniform.contraction == pytest.approx(1.0 - found.discrepancy / np.mean(values))
    assert uniform.excess.stderr == 0.0
    # one draw from each of two strata, all pairs of them
    strata = [vardass.stratify(z, 2, kernel=loss.kernel) for z in (x, y)]
    pairs = [list(itertools.product(*((s.labels == h).nonzero().flatten().tolist() for h in (0, 1)))) for s in strata]
    values = [
        float(loss(x[list(i)], y[list(j)], strata[0].weights.double(), strata[1].weights.double()))
        for i in pairs[0]
        for j in pairs[1]
    ]
    assert np.mean(values) == pytest.approx(found.discrepancy + found["stratified"].excess.value, rel=1e-6)


def test_coral_is_measured_with_the_kernel_of_its_loss():
    x, y = normal(40), normal(50, seed=1, scale=1.5) + 0.3
    loss = CORALLoss(preset="domainbed")
    found = diagnose(x, y, loss="coral", batch_size=8, batches=400, gradient=False)
    assert found.discrepancy == pytest.approx(float(loss(x, y)))
    generator = torch.Generator().manual_seed(5)
    values = [
        float(loss(x[torch.randperm(40, generator=generator)[:8]], y[torch.randperm(50, generator=generator)[:8]]))
        for _ in range(4000)
    ]
    # the kernel has a known mean, the loss one of the batch: near, not equal
    assert found["uniform"].excess.value == pytest.approx(np.mean(values) - found.discrepancy, rel=0.25)


def test_parts_of_the_kernel():
    x, y = normal(6), normal(7, seed=1)
    found = diagnose(x, y, loss=MMDLoss(kernel=RBFMixture((0.01, 1.0, 1e4))), batch_size=2, gradient=False)
    assert [part.name for part in found.parts] == ["γ=0.01", "γ=1", "γ=10000"]
    spreads, similar, best = [], [], []
    for gamma in (0.01, 1.0, 1e4):
        spread = likeness = least = 0.0
        for z in (x, y):
            matrix = torch.exp(-gamma * torch.cdist(z, z).square())
            n = len(z)
            spread += float(1.0 - matrix.mean())
            likeness += float((matrix - 2 * torch.eye(n)).amax(1).mean()) / 2
            least += min(  # of all partitions into two
                vardass.variance.stratified_variance(z, torch.tensor(labels), kernel=RBFMixture((gamma,)))
                for labels in itertools.product((0, 1), repeat=n)
                if 0 < sum(labels) < n
            )
        spreads.append(spread)
        similar.append(likeness)
        best.append(least / (spread / 2))
    for part, spread, likeness, least in zip(found.parts, spreads, similar, best, strict=True):
        assert part.share == pytest.approx(spread / sum(spreads))
        assert part.neighbour == pytest.approx(likeness, abs=1e-9)
        assert part.irreducible <= least + 1e-9
    # the identity: strata of n/k remove what drawing without replacement does
    assert found.parts[2].irreducible == pytest.approx(best[2])
    assert found.parts[2].irreducible > 0.8
    assert found.spread == pytest.approx(sum(spreads) / 6)


def test_gradients_are_those_of_a_linear_layer():
    x, y = normal(12), normal(12, seed=1) + 1.0
    labels = torch.arange(12) % 2
    loss = MMDLoss(kernel=RBFMixture((0.1,)))

    def gradient(value, *rows):
        layer = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(value(*(z + z @ layer for z in rows)), layer)[0]

    def head(z):
        return torch.stack([z[:, 0], z[:, 1]], 1)

    found = diagnose(x, y, loss=loss, labels=labels, head=head, batch_size=4, samplers=(), batches=1500, penalty=2.0)
    whole = 2.0 * gradient(loss, x, y)
    assert found.gradient == pytest.approx(float(whole.norm()))
    generator = torch.Generator().manual_seed(9)
    drawn = [[torch.randperm(12, generator=generator)[:4] for _ in range(2)] for _ in range(1500)]
    several = torch.stack([2.0 * gradient(loss, x[i], y[j]) for i, j in drawn])
    mean = several.mean(0)
    assert found["uniform"].gradient_noise == pytest.approx(
        float((several - mean).square().sum((1, 2)).mean().sqrt()), rel=0.05
    )
    # the bias is the gradient of the excess
    excess = 8 / 11 / 4

    def spread(z):
        return excess * (1.0 - torch.exp(-0.1 * torch.cdist(z, z).square()).mean())

    pull = 2.0 * sum(gradient(spread, z) for z in (x, y))
    assert found["uniform"].gradient_bias == pytest.approx(float(pull.norm()), rel=0.15)
    task = [gradient(lambda z, i=i: F.cross_entropy(head(z), labels[i]), x[i]) for i, _ in drawn]
    assert found.task_gradient == pytest.approx(float(torch.stack(task).square().sum((1, 2)).mean().sqrt()), rel=0.05)


def test_outliers_by_hand():
    x = torch.zeros(200, 1, dtype=torch.float64)
    x[:100] = 1.0
    x[0] = 21.0
    found = diagnose(x, x, loss=MMDLoss(kernel="linear"), batch_size=4, gradient=False)
    terms = (x - x.mean()).square().flatten().sort(descending=True).values
    assert found.top_share == pytest.approx(float(terms[:2].sum() / terms.sum()))
    assert found.beyond_clip == pytest.approx(1 / 200)
    scaled = diagnose(x, x, loss=MMDLoss(kernel="linear"), batch_size=4, gradient=False, scale=True)
    assert scaled.top_share < found.top_share
    assert scaled.beyond_clip == found.beyond_clip  # of what was given


def test_class_shares():
    x, labels = three_classes((100, 100, 100), 0)
    y, _ = three_classes((200, 60, 40), 1)
    found = diagnose(x, y, labels=labels, batch_size=8, gradient=False).classes
    assert found.source == pytest.approx((1 / 3,) * 3)
    assert found.target == pytest.approx((2 / 3, 0.2, 2 / 15))
    assert found.distance.value == pytest.approx(1 / 3)
    generator = np.random.default_rng(1)
    p, q = (generator.multinomial(300, share, 4000) / 300 for share in (found.source, found.target))
    assert found.distance.stderr == pytest.approx((np.abs(p - q).sum(1) / 2).std(), rel=0.2)
    p, q = (generator.multinomial(300, (0.5, 4 / 15, 7 / 30), 4000) / 300 for _ in range(2))
    assert found.chance == pytest.approx((np.abs(p - q).sum(1) / 2).mean(), rel=0.1)
    assert found.agreement == 1.0
    # labels need not be numbered from 0, and a head's classes may lack samples
    again = diagnose(x, y, labels=10 * labels + 5, batch_size=8, gradient=False).classes
    assert dataclasses.replace(again, names=found.names) == found
    assert again.names == ("5", "15", "25")
    named = diagnose(x, y, labels=labels, head=lambda z: F.pad(z, (0, 1), value=-9.0), batch_size=8, gradient=False)
    assert named.classes.target == pytest.approx((*found.target, 0.0))


# --- advice ----------------------------------------------------------------------------------------------------


def test_near_features_get_balanced_batches_and_the_v_statistic():
    found = diagnose(normal(300, 2), normal(300, 2, seed=1) + 1.0, batch_size=16)
    assert found.irreducible < 0.5
    assert chosen(found) == {
        "sampler": "balanced",
        "estimator": "v",
        "batch size": "16",
        "class alignment": "not known",
        "scaling": "as it is",
    }
    assert len(found.advice) == 5


def test_an_identity_kernel_is_left_to_uniform_batches():
    found = diagnose(normal(200, 50, scale=30.0), normal(200, 50, seed=1, scale=30.0), batch_size=16)
    assert found.irreducible > 0.9
    assert all(part.neighbour < 0.01 for part in found.parts)
    said = chosen(found)
    assert (said["sampler"], said["scaling"]) == ("uniform", "kernel with scale='median'")


def test_a_tiny_batch_on_a_small_discrepancy_asks_for_more():
    x, y = normal(400, 2), normal(400, 2, seed=1) + 0.3
    tiny = diagnose(x, y, batch_size=2, samplers=(), batches=300)
    said = chosen(tiny)
    assert said["estimator"] == "v with a small penalty"
    assert 2 < int(said["batch size"]) <= 100
    assert chosen(diagnose(x, y, batch_size=int(said["batch size"]), samplers=(), batches=300))["estimator"] == "v"
    large = diagnose(x, y, batch_size=256, samplers=(), batches=2, gradient=False)
    assert large.batches_per_epoch == 1
    assert chosen(large)["batch size"] == "64"


def test_outliers_are_left_to_strata_and_scaling():
    x, y = normal(300, 4), normal(300, 4, seed=1) + 0.5
    x[:2] *= 40.0
    found = diagnose(x, y, loss="coral", batch_size=16)
    assert found.top_share > 0.9
    assert (chosen(found)["sampler"], chosen(found)["scaling"]) == ("stratified", "robust")


def test_collapsed_features_are_named():
    found = diagnose(normal(100, scale=1e-3), normal(100, seed=1, scale=1e-3), batch_size=8)
    assert found.spread < 0.01
    assert "collapsed" in str(found.advice[0])
    with pytest.warns(VardassWarning, match="collapsed"):
        constant = diagnose(torch.ones(50, 3), torch.ones(50, 3), batch_size=8)
    assert "collapsed" in str(constant.advice[0])
    json.dumps(constant.to_dict(), allow_nan=False)


def test_classes_are_aligned_where_shares_differ_and_pseudo_labels_hold():
    x, y = normal(200), normal(200, seed=1)
    labels = (torch.arange(200) < 100).long()
    for far, target, choice in ((6.0, 170, "yes"), (6.0, 100, "not needed"), (0.05, 170, "no")):
        x0 = x + far * labels[:, None]
        y0 = y + far * (torch.arange(200) < target).double()[:, None]
        found = diagnose(x0, y0, labels=labels, batch_size=8, gradient=False)
        if choice == "no":  # what nearest centres would have to say
            found = dataclasses.replace(found, classes=dataclasses.replace(found.classes, agreement=0.4))
            found = dataclasses.replace(found, advice=advise(found, Limits()))
        assert chosen(found)["class alignment"] == choice


def nearest_corner(z):
    return 8.0 * z  # logits: the class of the largest coordinate


@pytest.mark.parametrize(
    ("counts", "shift", "choice"),
    [
        ((200, 60, 40), (0.0, 0.0, 0.0), "yes"),  # other shares of the same classes
        ((100, 100, 100), (12.0, 0.0, 0.0), "not yet"),  # the same shares: all is taken for the first class
        ((100, 100, 100), (6.0, 0.0, -6.0), "not yet"),  # most of it
    ],
    ids=["shares", "one class", "inputs"],
)
def test_shifted_inputs_are_not_taken_for_other_class_shares(counts, shift, choice):
    x, labels = three_classes((100, 100, 100), 0)
    y, truth = three_classes(counts, 1, torch.tensor(shift))
    found = diagnose(x, y, labels=labels, head=nearest_corner, class_names="abc", batch_size=8, gradient=False)
    shares = found.classes
    pseudo = torch.bincount(nearest_corner(y).argmax(1), minlength=3) / len(y)
    assert shares.distance.value == pytest.approx(float((pseudo - 1 / 3).abs().sum() / 2), abs=1e-6)
    assert shares.distance.value > 0.3
    assert shares.most_frequent == ("a", pytest.approx(float(pseudo.max()), abs=1e-6))
    of_truth = (torch.bincount(truth, minlength=3) / len(truth) - 1 / 3).abs().sum() / 2
    assert (shares.explained > 0.9) == (float(of_truth) > 0.3)
    assert chosen(found)["class alignment"] == choice
    if choice == "not yet" and shares.effective < 1.5:
        assert "100 % of pseudo-labels are a" in str(found)


def test_no_strata_go_below_what_is_called_irreducible():
    for seed, scale in ((0, 0.3), (1, 3.0)):
        x, y = normal(300, 8, seed=seed, scale=scale), normal(300, 8, seed=seed + 5, scale=scale)
        kernel = RBFMixture()
        found = diagnose(x, y, batch_size=8, gradient=False, bandwidths=False, samplers=("stratified",))
        uniform = sum(float(1.0 * len(kernel.gammas) - kernel.matrix(z, z).mean()) for z in (x, y)) / 8
        left = found["stratified"].excess.value / uniform
        assert found.irreducible <= left + 1e-12
        assert f"no strata can remove more than {100 * (1.0 - found.irreducible):.2g} % of" in str(found)


def test_labels_may_be_texts():
    x, y, labels = normal(80, 3), normal(80, 3, seed=1), torch.arange(80) % 2
    texts = np.array(["walk", "sit"])[labels.numpy()]
    found = diagnose(x, y, labels=texts, batch_size=8)
    assert found.classes == diagnose(x, y, labels=1 - labels, class_names=["sit", "walk"], batch_size=8).classes
    assert diagnose(x, y, labels=texts.tolist(), class_names=["walk", "sit"], batch_size=8).classes.names[0] == "walk"
    with refused("'sit'", "'Sit'", field="label"):
        diagnose(x, y, labels=texts, class_names=["walk", "Sit"], batch_size=8)


def test_noise_is_one_number_in_the_advice_and_below_it():
    found = diagnose(normal(300, 2), normal(300, 2, seed=1) + 1.0, batch_size=16)
    share = found["balanced"].gradient_noise / found["uniform"].gradient_noise
    assert found.relative_noise(found["balanced"]) == share
    text = f"{100 * share:.2g} %"
    assert f"sampler: balanced ({text} of the noise of uniform batches)" in str(found)
    assert f"noise {found['balanced'].gradient_noise:.3g} ({text})" in str(found)
    plain = diagnose(normal(300, 2), normal(300, 2, seed=1) + 1.0, batch_size=16, gradient=False)
    excess = [plain[name].excess.value for name in ("balanced", "uniform")]
    assert plain.relative_noise(plain["balanced"]) == pytest.approx((excess[0] / excess[1]) ** 0.5)


# --- form ------------------------------------------------------------------------------------------------------


def test_text_and_json_say_all():
    x, y = normal(60).float(), normal(80, seed=1).float()
    labels = torch.arange(60) % 3
    found = diagnose(x, y, labels=labels, batch_size=8, max_rows=50)
    assert found.sizes == (60, 80)
    assert found.measured == (50, 50)
    text = str(found)
    for words in ("60 and 80 samples (50 and 50 looked at)", "γ=0.1", "balanced: ", "cross-entropy", "class shares of"):
        assert words in text
    assert text.startswith("\n".join(["use", *(f"  {line}" for line in found.advice), "", "measured"]))
    assert len(found.short().splitlines()) == 1
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["batches_per_epoch"] == 7
    assert plain["classes"]["distance"]["stderr"] == found.classes.distance.stderr
    assert plain["samplers"][0]["name"] == "uniform"
    assert [line["topic"] for line in plain["advice"]] == [line.topic for line in found.advice]
    assert diagnose(x, y, labels=labels, batch_size=8, max_rows=50) == found  # the same seed, the same words


@pytest.mark.parametrize(
    ("change", "field", "named"),
    [
        ({"target": torch.ones(9, 2)}, None, ("source", "3 columns", "target", 2)),
        ({"batch_size": 61}, "batch_size", ("between 1 and 60", 61, "60 samples")),
        ({"loss": "mdm"}, "loss", ("'mdm'", "'mmd'")),
        ({"loss": 3}, None, ("loss", "MMDLoss", "CORALLoss", "int")),
        ({"labels": [0, 1]}, "labels", ((60,), (2,))),
        ({"labels": [-1] * 60, "head": lambda z: z}, None, ("labels", "head", -1, 0)),
        ({"labels": [7] * 60, "head": lambda z: z}, None, ("head", (60, 3), "60 samples", "labels up to 7")),
        ({"penalty": -1.0}, "penalty", (0, "-1.0")),
        ({"batches": 1}, "batches", (2, 1)),
        ({"samplers": ("balancd",)}, "sampler", ("'balancd'", "'balanced'")),
        ({"source": torch.full((60, 3), torch.nan)}, "source", ("NaN", "60 of 60")),
    ],
)
def test_bad_input_is_named(change, field, named):
    given = {"source": normal(60), "target": normal(60, seed=1), "batch_size": 8, **change}
    with refused(*named, field=field):
        diagnose(given.pop("source"), given.pop("target"), **given)


def test_the_terms_of_the_kernel_can_be_left_out():
    x, y = normal(60), normal(60, seed=1) + 1.0
    found = diagnose(x, y, batch_size=8, gradient=False, bandwidths=False, sizes=(600, 900))
    whole = diagnose(x, y, batch_size=8, gradient=False)
    assert found.parts == ()
    assert (found.sizes, found.batches_per_epoch) == ((600, 900), 75)
    assert found.irreducible == whole.irreducible
    assert found.samplers == whole.samplers
