"""Scores of predictions against their definitions in plain loops, and against scikit-learn."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn import metrics

from conftest import refused
from vardass.adapt import RunConfig, Trainer, classification_scores, evaluate_run
from vardass.adapt.scores import wilson_interval
from vardass.adapt.selection import label_scores
from vardass.data import Domain, Task, split_task


def random_predictions(seed, n, classes):
    generator = torch.Generator().manual_seed(seed)
    p = (2.0 * torch.randn(n, classes, generator=generator, dtype=torch.float64)).softmax(1)
    return p, torch.randint(classes, (n,), generator=generator)


@pytest.mark.parametrize(("n", "classes"), [(1, 2), (7, 2), (40, 3), (60, 5)])
def test_scores_are_those_of_plain_loops(n, classes):
    p, y = random_predictions(n, n, classes)
    found = classification_scores(p, y)
    rows, labels = p.tolist(), y.tolist()
    guesses = [row.index(max(row)) for row in rows]
    assert found.n == n
    assert found.classes == tuple(str(c) for c in range(classes))
    assert (
        found.accuracy
        == sum(g == t for g, t in zip(guesses, labels, strict=True)) / n
        == label_scores(p.log(), y)["accuracy"]
    )
    recalls = []
    for c in range(classes):
        hits = sum(g == t == c for g, t in zip(guesses, labels, strict=True))
        for d in range(classes):
            assert found.confusion[c, d] == sum(t == c and g == d for g, t in zip(guesses, labels, strict=True))
        for value, above, below in (
            (found.precision[c], hits, guesses.count(c)),
            (found.recall[c], hits, labels.count(c)),
            (found.f1[c], 2 * hits, guesses.count(c) + labels.count(c)),
        ):
            assert math.isnan(value) if below == 0 else float(value) == pytest.approx(above / below)
        assert found.support[c] == labels.count(c)
        assert found.predicted[c] == guesses.count(c)
        if labels.count(c):
            recalls.append(hits / labels.count(c))
    assert found.balanced_accuracy == pytest.approx(sum(recalls) / len(recalls))
    assert found.missing == tuple(str(c) for c in range(classes) if c not in labels)
    assert found.nll == pytest.approx(-sum(math.log(row[t]) for row, t in zip(rows, labels, strict=True)) / n)
    squares = [sum((q - (c == t)) ** 2 for c, q in enumerate(row)) for row, t in zip(rows, labels, strict=True)]
    assert found.brier == pytest.approx(sum(squares) / n)


def test_calibration_error_is_that_of_a_plain_loop():
    bins = 15
    p, y = random_predictions(3, 200, 3)
    found = classification_scores(p, y)
    error = 0.0
    for m in range(bins):
        inside = [i for i, row in enumerate(p.tolist()) if m / bins < max(row) <= (m + 1) / bins]
        assert found.reliability.counts[m] == len(inside)
        if not inside:
            assert math.isnan(found.reliability.confidence[m])
            assert math.isnan(found.reliability.accuracy[m])
            continue
        sure = sum(float(p[i].max()) for i in inside) / len(inside)
        right = sum(int(p[i].argmax()) == int(y[i]) for i in inside) / len(inside)
        assert float(found.reliability.confidence[m]) == pytest.approx(sure)
        assert float(found.reliability.accuracy[m]) == pytest.approx(right)
        error += len(inside) / len(p) * abs(right - sure)
    assert found.calibration_error == pytest.approx(error)


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_are_those_of_scikit_learn(classes):
    p, y = random_predictions(1, 300, classes)
    found = classification_scores(p.numpy(), y.numpy())
    guess, every = p.argmax(1).numpy(), list(range(classes))
    assert found.accuracy == pytest.approx(metrics.accuracy_score(y, guess))
    assert found.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(y, guess))
    assert (found.confusion.numpy() == metrics.confusion_matrix(y, guess)).all()
    precision, recall, f1, support = metrics.precision_recall_fscore_support(y, guess)
    np.testing.assert_allclose(found.precision, precision)
    np.testing.assert_allclose(found.recall, recall)
    np.testing.assert_allclose(found.f1, f1)
    np.testing.assert_array_equal(found.support, support)
    assert found.nll == pytest.approx(metrics.log_loss(y, p.numpy()))
    assert found.brier == pytest.approx(metrics.brier_score_loss(y, p.numpy(), labels=every, scale_by_half=False))
    if classes == 2:
        assert found.brier == pytest.approx(2 * metrics.brier_score_loss(y, p[:, 1].numpy()))


def test_a_class_without_samples_has_no_recall_and_stays_out_of_the_mean():
    p = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    found = classification_scores(p, torch.tensor([0, 0, 1, 1]), classes=("a", "b", "c"))
    assert found.missing == ("c",)
    assert found.recall.tolist()[:2] == [0.5, 0.0]
    assert math.isnan(found.recall[2])
    assert found.balanced_accuracy == 0.25
    assert found.f1[2] == 0.0  # predicted, always wrongly
    plain = found.to_dict()
    assert plain["classes"]["c"] == {"support": 0, "predicted": 2, "precision": 0.0, "recall": None, "f1": 0.0}
    assert plain["classes"]["b"]["precision"] is None
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert found.most_confused() == [("a", "c", 1), ("b", "a", 1), ("b", "c", 1)]


def test_sure_mistakes_and_sure_hits_stay_finite():
    found = classification_scores(torch.eye(2), torch.tensor([0, 0]))
    assert found.nll == pytest.approx(-0.5 * math.log(2.0**-52))
    assert found.brier == 1.0
    assert found.calibration_error == 0.5
    assert found.reliability.counts[-1] == 2
    best = classification_scores(torch.eye(3), torch.arange(3))
    assert (best.accuracy, best.nll, best.brier, best.calibration_error) == (1.0, 0.0, 0.0, 0.0)
    assert best.most_confused() == []


def test_the_prediction_is_the_first_of_equal_probabilities():
    assert classification_scores(torch.full((2, 2), 0.5), torch.tensor([0, 1])).predicted.tolist() == [2, 0]


def test_wilson_interval_holds_what_the_score_test_does_not_reject():
    z = 1.959963984540054
    for successes, n in ((0, 5), (3, 10), (9, 10), (10, 10), (480, 1000)):
        low, high = wilson_interval(successes, n)
        share = successes / n
        assert 0.0 <= low <= share <= high <= 1.0
        for end in (low, high):
            if 0.0 < end < 1.0:
                assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n))
    assert wilson_interval(0, 5)[0] == 0.0
    assert wilson_interval(5, 5)[1] == 1.0


@pytest.mark.parametrize(
    ("p", "y", "options", "field", "named"),
    [
        ([[2.0, 1.0]], [0], {}, None, ("sum of 3", "row 0", "softmax(1)")),
        ([[1.5, -0.5]], [0], {}, None, ("least one of -0.5", "row 0")),
        ([[0.5, 0.5]], [2], {}, None, ("labels", "2 to 2", "2 classes", "0 to 1")),
        ([[0.5, 0.5]], [-1], {}, None, ("labels", "-1 to -1", "2 classes")),
        ([[0.5, 0.5]], [0, 1], {}, "labels", ("(1,)", "(2,)")),
        ([[0.5, 0.5]], [0.5], {}, "labels", ("whole numbers", "torch.float64")),
        ([[math.nan, 0.5]], [0], {}, "probabilities", ("NaN", "1 of 1 rows")),
        ([[1.0]], [0], {}, None, ("probabilities", "2 classes", "(1, 1)")),
        (np.zeros((0, 2)), np.zeros(0, dtype=int), {}, "probabilities", ("(0, 2)",)),
        ([[0.5, 0.5]], [0], {"classes": ("a",)}, None, ("1 names", "2 columns")),
    ],
)
def test_bad_arrays_are_refused(p, y, options, field, named):
    with refused(*named, field=field):
        classification_scores(np.asarray(p), np.asarray(y), **options)


# --- runs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run, and domains of 30 and 50 samples."""

    def domain(name, seed, n, shift):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(n) % 3
        x = torch.randn(n, 4, generator=generator) + 2.0 * torch.eye(4)[labels] + shift
        return Domain(name, x, labels, ("cat", "dog", "emu"))

    task = Task("a->b", (domain("a", 0, 30, 0.0),), domain("b", 1, 50, 0.5))
    out = tmp_path_factory.mktemp("run")
    config = RunConfig(network="mlp", algorithm="erm", sampler="uniform", steps=20, eval_every=10, batch_size=8)
    return out, Trainer(config, split_task(task, seed=0), out).run(), task


def test_a_run_is_scored_on_its_domains_and_on_all_samples_together(trained):
    out, result, task = trained
    domains = {"first": task.sources[0], "second": task.target}
    found = evaluate_run(out, domains)
    assert list(found.domains) == ["first", "second"]
    probabilities = {}
    for name, domain in domains.items():
        logits = result.algorithm.predict(domain.dataset.tensor).detach()
        probabilities[name] = logits.double().softmax(1)
        torch.testing.assert_close(found.probabilities[name], probabilities[name], atol=1e-6, rtol=0)
        assert found.domains[name].accuracy == label_scores(logits, domain.known_labels())["accuracy"]
    assert found.overall.n == 80
    assert torch.equal(found.overall.confusion, sum(scores.confusion for scores in found.domains.values()))
    nll = (30 * found.domains["first"].nll + 50 * found.domains["second"].nll) / 80
    assert found.overall.nll == pytest.approx(nll)
    assert list(evaluate_run(out, [task.sources[0], task.target]).domains) == ["a", "b"]
    assert list(evaluate_run(out, task.target).domains) == ["b"]
    json.dumps(found.to_dict(), allow_nan=False)


def test_domains_that_do_not_fit_the_model_are_refused(trained):
    out, _, task = trained
    target = task.target
    names = target.class_names
    broken = target.dataset.tensor.clone()
    broken[3] = math.inf
    for domain, named in (
        (
            Domain("c", torch.zeros(4, 9), torch.zeros(4).long(), names),
            ("'c'", "(9,)", "(4,)"),
        ),
        (
            Domain("c", torch.zeros(4, 4), torch.zeros(4).long(), names[::-1]),
            ("'c'", "'emu', 'dog', 'cat'", "'cat', 'dog', 'emu'"),
        ),
        (Domain("c", torch.zeros(4, 4), None, names), ("'c'", "no labels")),
        (Domain("c", torch.zeros(0, 4), torch.zeros(0).long(), names), ("'c'", "0 samples")),
        (Domain("c", broken, target.labels, names), ("'c'", "NaN")),
        ([target, target], ("two domains", "'b'")),
        ([], ("0 domains",)),
        (7, ("data", "path", 7)),
    ):
        with refused(*named):
            evaluate_run(out, domain)
    with refused(out / "none", "no model"):
        evaluate_run(out / "none", target)
