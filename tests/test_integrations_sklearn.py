"""scikit-learn's own checks of the estimators, what they compute, and skada's pipelines."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import vardass
from conftest import refused
from vardass.errors import VardassWarning
from vardass.integrations.sklearn import CORALAdapter, CORALRegressor, MMDAdapter, MMDRegressor, Stratifier
from vardass.kernels import RBFMixture

QUICK: dict[str, Any] = {"steps": 25, "lr": 3e-2, "hidden": (16,)}


class AdaptsToItself(CORALAdapter):
    """The checks know no target: they are made of the classifier with a target too."""

    def fit(self, X: Any, y: Any) -> Any:
        return super().fit(X, y, X)


class PredictsItself(CORALRegressor):
    """The same of the regressor."""

    def fit(self, X: Any, y: Any) -> Any:
        return super().fit(X, y, X)


@pytest.mark.parametrize(
    "estimator",
    [Stratifier(), MMDAdapter(**QUICK), AdaptsToItself(**QUICK), MMDRegressor(**QUICK), PredictsItself(**QUICK)],
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


# --- regressors -----------------------------------------------------------------------------------------------


def moved(seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Numbers of two hidden causes that six columns show, and a target whose columns are moved."""
    rng = np.random.default_rng(seed)
    gains = np.random.default_rng(1).normal(size=(2, 6))
    parts: list[Any] = []
    for shift in (0.0, 1.2 * np.array([1.5, -1.0, 0.5, 1.0, 0.0, -1.2])):
        causes = rng.normal(size=(400, 2))
        parts += [
            causes @ gains + shift + 0.3 * rng.normal(size=(400, 6)),
            500 + 80 * (np.sin(causes[:, 0]) + causes[:, 1]),
        ]
    return parts[0], parts[1], parts[2], parts[3]


@pytest.mark.parametrize("kind", [MMDRegressor, CORALRegressor])
def test_adapting_regressors_pays(kind: Any) -> None:
    x, y, target, truth = moved()
    options: dict[str, Any] = {"steps": 300, "lr": 3e-3}
    adapted = kind(**options).fit(x, y, target)
    with pytest.warns(VardassWarning, match="got no target"):
        alone = kind(**options).fit(x, y)
    assert adapted.score(x, y) > 0.8
    assert adapted.score(target, truth) > alone.score(target, truth) + 0.1
    assert adapted.predict(target).shape == (400,)
    assert 400 < adapted.predict(target).mean() < 600


def test_numbers_of_the_target_are_not_read_and_columns_stay() -> None:
    x, y, target, truth = moved()
    both, domain = np.concatenate([x, target]), np.repeat([1, -2], 400)
    apart = MMDRegressor(**QUICK).fit(x, y, target).predict(target)
    for labels in (truth, np.full(400, np.nan)):  # skada masks them so
        found = MMDRegressor(**QUICK).fit(both, np.concatenate([y, labels]), sample_domain=domain)
        assert (found.predict(target) == apart).all()
    column = MMDRegressor(**QUICK).fit(x, y[:, None], target).predict(target)
    assert (column == apart[:, None]).all()
    pair = MMDRegressor(**QUICK).fit(x, np.stack([y, -y / 7], 1), target)
    assert pair.predict(target).shape == (400, 2)
    assert (pickle.loads(pickle.dumps(pair)).predict(target) == pair.predict(target)).all()
    with refused("'y_0'", "400 samples", "mean 0.1", "deviation 0"):
        MMDRegressor(**QUICK).fit(x, np.full(400, 0.1), target)
    with pytest.raises(ValueError, match="NaN"):
        MMDRegressor(**QUICK).fit(x, np.where(y > 500, y, np.nan), target)


def test_a_regressor_in_a_pipeline_of_skada() -> None:
    skada = pytest.importorskip("skada")
    x, y, target, truth = moved()
    both, domain = np.concatenate([x, target]), np.repeat([1, -2], 400)
    pipeline = skada.make_da_pipeline(StandardScaler(), MMDRegressor(**QUICK))
    pipeline.fit(both, np.concatenate([y, truth]), sample_domain=domain)
    scaler = StandardScaler().fit(both)
    direct = MMDRegressor(**QUICK).fit(scaler.transform(x), y, scaler.transform(target))
    assert (pipeline.predict(target) == direct.predict(scaler.transform(target))).all()


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
