"""scikit-learn's own checks of the estimators, what they compute, and skada's pipelines."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import vardass
from conftest import refused
from vardass.errors import VardassWarning
from vardass.integrations.sklearn import CORALAdapter, CORALTransformer, MMDAdapter, Stratifier
from vardass.kernels import RBFMixture

QUICK: dict[str, Any] = {"steps": 25, "lr": 3e-2, "hidden": (16,)}


class AdaptsToItself(CORALAdapter):
    """The checks know no target: they are made of the classifier with a target too."""

    def fit(self, X: Any, y: Any) -> Any:
        return super().fit(X, y, X)


class MovesToItself(CORALTransformer):
    """The same of the transformer, which refuses to be fitted without a target."""

    def fit(self, X: Any, y: Any = None) -> Any:
        return super().fit(X, y, target=X)


@pytest.mark.parametrize(
    "estimator",
    [Stratifier(), MMDAdapter(**QUICK), AdaptsToItself(**QUICK), MovesToItself()],
    ids=lambda estimator: type(estimator).__name__,
)
def test_the_checks_of_scikit_learn(estimator: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a target that is not there, of classes that are rare
        found = check_estimator(estimator, on_fail=None, on_skip=None)
    assert len(found) >= 45
    assert [check for check in found if check["status"] not in ("passed", "skipped")] == []
    assert {check["check_name"] for check in found if check["status"] == "skipped"} <= {"check_array_api_input"}


# --- strata ---------------------------------------------------------------------------------------------------


def cloud(n: int, d: int = 3, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(n, d))


@pytest.mark.parametrize("kernel", ["mmd", "coral", "linear", RBFMixture(scale="median")], ids=str)
def test_new_samples_go_where_the_objective_grows_least(kernel: Any) -> None:
    x, new = cloud(30), cloud(12, seed=1)
    strata = vardass.stratify(x, 4, kernel=kernel)
    fitted = vardass.kernels.fitted_kernel(kernel, torch.from_numpy(x))
    k = fitted.matrix(torch.from_numpy(np.concatenate([x, new])))
    d2 = k.diagonal()[:, None] + k.diagonal() - 2 * k
    expected = [min(range(4), key=lambda h: float(d2[30 + i, strata.members(h)].sum())) for i in range(12)]
    assert strata.assign(new, x, kernel=kernel).tolist() == expected
    assert strata.assign(new, x, kernel=fitted).tolist() == expected


@pytest.mark.parametrize("kernel", ["mmd", "linear"])
def test_samples_of_the_strata_get_their_own_labels_back(kernel: str) -> None:
    x = cloud(700, 5) + 1000.0 * (kernel == "linear")  # far from the origin, too
    stratifier = Stratifier(24, kernel=kernel, options={"tol": 0.0, "max_passes": 200}).fit(x)
    assert (stratifier.predict(x) == stratifier.labels_).all()


def test_strata_are_those_of_stratify() -> None:
    x = cloud(200)
    stratifier = Stratifier(10, kernel="coral", options={"min_size": 3}, random_state=7)
    labels = stratifier.fit_predict(x)
    assert np.bincount(labels).min() >= 3
    assert stratifier.variance_ == stratifier.strata_.variance < stratifier.uniform_variance_
    exact = vardass.variance.stratified_variance(x, labels, kernel=stratifier.kernel_)
    assert stratifier.variance_ == pytest.approx(exact)


def test_strata_of_other_features_are_refused() -> None:
    strata = vardass.stratify(cloud(30), 4)
    with refused("n=30", (29, 3), (5, 3)):
        strata.assign(cloud(5), cloud(29))
    with refused("n=30", (30, 3), (5, 2)):
        strata.assign(cloud(5, 2), cloud(30))


# --- adapters -------------------------------------------------------------------------------------------------


def shifted(seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Two classes, and a target that is moved so far that one of its classes lies where the other was."""
    rng = np.random.default_rng(seed)
    y = np.repeat(["up", "down"], 100)
    centres = np.where(y == "up", 1.5, -1.5)[:, None] * [[0.7, 1.0]]
    x, target = (centres + rng.normal(scale=0.4, size=(200, 2)) for _ in range(2))
    return x, y, target - [[3.0, 1.0]], y


@pytest.mark.parametrize("kind", [MMDAdapter, CORALAdapter])
def test_adapting_pays(kind: Any) -> None:
    x, y, target, truth = shifted()
    options = {"steps": 150, "lr": 1e-2, "hidden": (32, 16)}
    adapted = kind(**options).fit(x, y, target)
    with pytest.warns(VardassWarning, match="got no target, so it learns from the 200 samples of the source alone"):
        alone = kind(**options).fit(x, y)
    assert alone.score(target, truth) < 0.6
    assert adapted.score(target, truth) > 0.9
    assert adapted.score(x, y) > 0.95


def test_both_ways_to_name_the_target_are_one() -> None:
    x, y, target, _ = shifted()
    apart = MMDAdapter(**QUICK).fit(x, y, target)
    order = np.argsort(np.tile(np.arange(200), 2), kind="stable")  # rows of both in turn
    both, labels = np.concatenate([x, target])[order], np.concatenate([y, ["?"] * 200])[order]
    together = MMDAdapter(**QUICK).fit(both, labels, sample_domain=np.tile([1, -2], 200))
    assert together.classes_.tolist() == ["down", "up"]
    assert (together.predict_proba(target) == apart.predict_proba(target)).all()


def test_labels_of_the_target_are_not_read() -> None:
    x, y, target, truth = shifted()
    both, domain = np.concatenate([x, target]), np.repeat([0, -1], 200)
    found = [
        MMDAdapter(**QUICK).fit(both, np.concatenate([y, labels]), sample_domain=domain).predict_proba(target)
        for labels in (truth, truth[::-1], np.full(200, "masked"))
    ]
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


def test_seeds_settings_and_copies() -> None:
    x, y, target, _ = shifted()
    one = MMDAdapter(**QUICK, sampler="ordered", settings={"optimiser": "sgd"}).fit(x, y, target)
    again = clone(one).fit(x, y, target)
    other = clone(one).set_params(random_state=1).fit(x, y, target)
    proba = one.predict_proba(target)
    assert (again.predict_proba(target) == proba).all()
    assert (other.predict_proba(target) != proba).any()
    assert (pickle.loads(pickle.dumps(one)).predict_proba(target) == proba).all()
    assert one.model_.features(torch.from_numpy(target)).shape == (200, 16)


def test_what_cannot_be_used_is_named() -> None:
    x, y, target, _ = shifted()
    with refused("X_target", "sample_domain", "X"):
        MMDAdapter().fit(x, y, target, sample_domain=np.ones(200))
    with refused("sample_domain", "200 rows", "0 of a target"):
        MMDAdapter().fit(x, y, sample_domain=np.ones(200))
    with refused("sample_domain", "7 entries", "200 rows"):
        MMDAdapter().fit(x, y, sample_domain=np.ones(7))
    with refused("1 class", "'a'", "two classes"):
        MMDAdapter().fit(x, ["a"] * 200, target)
    with pytest.raises(ValueError, match="has 3 features, but MMDAdapter is expecting 2"):
        MMDAdapter().fit(x, y, cloud(9))
    with refused("'step'", "'steps'", field="setting"):
        MMDAdapter(settings={"step": 3}).fit(x, y, target)


def test_a_search_over_penalties() -> None:
    x, y, *_ = shifted()
    pipeline = make_pipeline(StandardScaler(), AdaptsToItself(**QUICK))
    search = GridSearchCV(pipeline, {"adaptstoitself__penalty": [0.1, 1.0]}, cv=2).fit(x, y)
    assert search.best_score_ > 0.9


# --- CORAL without a network ----------------------------------------------------------------------------------


def covariance(x: Any) -> Any:
    """By its definition, one entry after the other."""
    n, d = x.shape
    mean = [sum(x[:, j]) / n for j in range(d)]
    return np.array(
        [
            [sum((x[r, i] - mean[i]) * (x[r, j] - mean[j]) for r in range(n)) / (n - 1) for j in range(d)]
            for i in range(d)
        ]
    )


@pytest.mark.parametrize("ridge", [1e-6, 1.0])
@pytest.mark.parametrize("columns", [1, 4, 12])  # 12: more than rows, so covariances are singular
def test_coral_whitens_and_colours_again(columns: int, ridge: float) -> None:
    linalg = pytest.importorskip("scipy.linalg")
    mixed = np.random.default_rng(5).normal(size=(2, columns, columns))
    x, target, new = 3 + cloud(9, columns) @ mixed[0], cloud(11, columns, 1) @ mixed[1] - 7, cloud(5, columns, 2)
    source, shift = covariance(x), ridge * np.trace(covariance(x)) / columns * np.eye(columns)
    roots = [linalg.sqrtm(source + shift), linalg.sqrtm(covariance(target) + shift)]
    expected = (new - x.mean(0)) @ np.linalg.inv(roots[0]) @ roots[1] + target.mean(0)
    coral = CORALTransformer(ridge=ridge).fit(x, target=target)
    np.testing.assert_allclose(coral.transform(new), expected, rtol=1e-7, atol=1e-7)
    again = CORALTransformer(ridge=ridge).fit(x, target=target)
    assert (again.transform(new) == coral.transform(new)).all()
    single = CORALTransformer(ridge=ridge).fit(x.astype("float32"), target=target).transform(new.astype("float32"))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, expected, rtol=0, atol=1e-3 * np.abs(expected).max())


def test_coral_moves_means_and_covariances_and_a_pipeline_gains() -> None:
    x, y, *_ = shifted()
    rows, truth, *_ = shifted(1)
    target = rows @ [[2.0, -0.5], [-0.5, 0.6]] + 5  # a symmetric map, which covariances determine nearly
    moved = CORALTransformer(ridge=1e-9).fit_transform(x, target=target)
    np.testing.assert_allclose(moved.mean(0), target.mean(0))
    np.testing.assert_allclose(np.cov(moved.T), np.cov(target.T), rtol=1e-6)
    names = CORALTransformer().set_output(transform="pandas").fit_transform(x, target=target).columns
    assert names.tolist() == ["x0", "x1"]

    alone = LogisticRegression().fit(x, y)
    pipeline = make_pipeline(CORALTransformer(ridge=1e-3), LogisticRegression())
    with sklearn.config_context(enable_metadata_routing=False):  # importing skada turns it on
        pipeline.fit(x, y, coraltransformer__target=target)
    assert alone.score(target, truth) < 0.6
    assert pipeline[-1].score(target, truth) > 0.95
    back = CORALTransformer(ridge=1e-3).fit(target, target=x)  # the other way round: the model stays, new rows move
    assert make_pipeline(back, alone).score(target, truth) > 0.95


def test_coral_names_what_cannot_be_used() -> None:
    x = cloud(6)
    with refused("target", field="target"):
        CORALTransformer().fit(x)
    for ridge in (0.0, -1, "1", True, float("nan")):
        with refused(repr(ridge), field="ridge"):
            CORALTransformer(ridge=ridge).fit(x, target=x)
    for rows in (np.full((5, 3), 0.1), 1e200 * x, 1e-150 * x):
        with refused("variance", field="X"):
            CORALTransformer().fit(rows, target=x)
        with refused("variance", field="target"):
            CORALTransformer().fit(x, target=rows)
    for rows, message in [
        (cloud(6, 2), "X has 2 features, but CORALTransformer is expecting 3"),
        (cloud(1), "minimum of 2 is required"),
        (np.where(x > 0, x, np.nan), "contains NaN"),
    ]:
        with pytest.raises(ValueError, match=message):
            CORALTransformer().fit(x, target=rows)


# --- skada ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MMDAdapter, CORALAdapter])
def test_a_pipeline_of_skada(kind: Any) -> None:
    skada = pytest.importorskip("skada")
    from skada.metrics import PredictionEntropyScorer
    from skada.model_selection import SourceTargetShuffleSplit

    x, y, target, truth = shifted()
    both, domain = np.concatenate([x, target]), np.repeat([1, -2], 200)
    labels = np.unique(np.concatenate([y, truth]), return_inverse=True)[1]
    pipeline = skada.make_da_pipeline(StandardScaler(), kind(**QUICK))
    pipeline.fit(both, labels.copy(), sample_domain=domain)  # which masks the target's labels in place
    scaler = StandardScaler().fit(both)
    direct = kind(**QUICK).fit(scaler.transform(x), labels[:200], scaler.transform(target))
    assert (pipeline.predict_proba(target) == direct.predict_proba(scaler.transform(target))).all()
    assert set(pipeline.predict(target, sample_domain=domain[200:])) == {0, 1}

    search = GridSearchCV(
        skada.make_da_pipeline(StandardScaler(), kind(**QUICK)),
        {f"{kind.__name__.lower()}__penalty": [0.1, 1.0]},
        scoring=PredictionEntropyScorer(),
        cv=SourceTargetShuffleSplit(n_splits=1, random_state=0),
    ).fit(both, labels.copy(), sample_domain=domain)
    assert np.isfinite(search.best_score_)
