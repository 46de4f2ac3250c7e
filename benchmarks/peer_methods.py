"""What a user would pick instead of `vardass adapt`: `METHODS`, from a `Problem` to predictions, for peers.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ot
import scipy.linalg
import scipy.special
import skada
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV
from sklearn.semi_supervised import SelfTrainingClassifier

from vardass.adapt import Adaptation, RunConfig, Trainer
from vardass.data import Domain, TaskSplits
from vardass.scaling import CLIP, standardise

Array = NDArray[Any]
STEPS = {"network": "mlp", "steps": 800, "batch_size": 32, "eval_every": 100, "checkpoint_every": 800}
MOST = 2000  # rows of each domain for optimal transport between samples


@dataclass
class Problem:
    """What a method may see: source rows x (n, d) with labels y, target rows t, and rows v (m, d) to predict."""

    x: Array
    y: Array
    t: Array
    v: Array
    classes: int
    splits: TaskSplits  # target labels are hidden
    seed: int
    regression: bool = False
    clock: list[float] = field(default_factory=lambda: [0.0])  # CPU seconds of what another method had computed
    _tuned: tuple[Any, float] | None = None
    _alike: Problem | None = None

    @classmethod
    def of(cls, splits: TaskSplits, seed: int) -> Problem:
        source, regression = splits.source_train, splits.source_train.regression
        labels = source.known_labels().numpy()
        rows = [rows_of(domain) for domain in (source, splits.target_unlabelled, splits.target_test)]
        y = labels[:, 0] if regression else labels
        return cls(rows[0], y, *rows[1:], len(source.class_names), splits, seed, regression)

    def per_domain(self) -> Problem:
        """Each domain standardised by its own statistics; made once."""
        if self._alike is None:
            x, t, v = (
                standardise(torch.from_numpy(z), reference=torch.from_numpy(domain)).clamp(-CLIP, CLIP).numpy()
                for z, domain in ((self.x, self.x), (self.t, self.t), (self.v, self.t))
            )
            self._alike = replace(self, x=x, t=t, v=v, _tuned=None)
        return self._alike

    def tuned(self) -> Any:
        """Logistic or ridge regression on the source, its strength chosen by cross-validation; made once."""
        if self._tuned is None:
            start = time.process_time()
            if self.regression:
                model: Any = RidgeCV(np.logspace(-3, 4, 8)).fit(self.x, self.y)
            else:
                search = GridSearchCV(LogisticRegression(max_iter=200, tol=1e-3), {"C": [1e-3, 1e-2, 0.1, 1.0]}, cv=3)
                model = search.fit(self.x, self.y).best_estimator_
            self._tuned = model, time.process_time() - start
        else:
            self.clock[0] += self._tuned[1]
        return self._tuned[0]

    def untrained(self) -> Any:
        """The same kind of model, of the strength that was chosen."""
        model = self.tuned()
        if self.regression:
            return RidgeCV(model.alphas)
        return LogisticRegression(C=model.C, max_iter=200, tol=1e-3)


def rows_of(domain: Domain) -> Array:
    return torch.stack([domain.dataset[i] for i in range(len(domain))]).numpy()


# --- methods ----------------------------------------------------------------------------------------

Method = Callable[[Problem], Array]  # labels or numbers (m,) of the rows v


def tuned(p: Problem) -> Array:
    return p.tuned().predict(p.v)


def self_training(p: Problem) -> Array:
    model = SelfTrainingClassifier(p.untrained(), threshold=0.75)
    return model.fit(np.concatenate([p.x, p.t]), np.concatenate([p.y, np.full(len(p.t), -1)])).predict(p.v)


def boosting(p: Problem) -> Array:
    kind = HistGradientBoostingRegressor if p.regression else HistGradientBoostingClassifier
    return kind(random_state=p.seed).fit(p.x, p.y).predict(p.v)


def adapter(make: Callable[[Problem], Any]) -> Method:
    """An adapter of skada, then logistic or ridge regression."""

    def run(p: Problem) -> Array:
        pipeline = skada.make_da_pipeline(make(p), p.untrained())
        hidden = np.full(len(p.t), np.nan if p.regression else -1)
        domains = np.concatenate([np.ones(len(p.x)), np.full(len(p.t), -2)]).astype(int)
        pipeline.fit(np.concatenate([p.x, p.t]).astype("f8"), np.concatenate([p.y, hidden]), sample_domain=domains)
        return pipeline.predict(p.v.astype("f8"), sample_domain=np.full(len(p.v), -2))

    return run


def transported(p: Problem) -> Array:
    """Source rows moved onto the target by optimal transport that keeps classes together, then logistic regression."""
    rng = np.random.default_rng(p.seed)
    rows, columns = (rng.permutation(len(z))[:MOST] for z in (p.x, p.t))
    plan = ot.da.SinkhornLpl1Transport(reg_e=0.1, reg_cl=0.1, norm="median", max_iter=3, max_inner_iter=20)
    plan.fit(Xs=p.x[rows].astype("f8"), ys=p.y[rows], Xt=p.t[columns].astype("f8"))
    moved = plan.transform(Xs=p.x[rows].astype("f8"))
    return p.untrained().fit(moved, p.y[rows]).predict(p.v)


def unit(x: Array) -> Array:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)


def prototypes(p: Problem, rounds: int = 3) -> Array:
    """Class centroids of the target by cosine, from predictions; the labelling step of Liang et al. (SHOT, 2020)."""
    t, v = unit(p.t), unit(p.v)
    weights = p.tuned().predict_proba(p.t)
    for _ in range(rounds):
        centroids = unit(weights.T @ t / np.maximum(weights.sum(0)[:, None], 1e-9))
        weights = np.eye(p.classes)[(t @ centroids.T).argmax(1)]
    return (v @ centroids.T).argmax(1)


def class_projection(x: Array, y: Array, classes: int, width: int, ridge: float = 1.0) -> Array:
    """Directions (d, width) in which rows of one class lie close together."""
    d = x.shape[1]
    total, within = np.zeros((2, d, d))
    for c in range(classes):
        z = x[y == c]
        gram, s = len(z) * z.T @ z, z.sum(0)
        total += gram
        within += gram - np.outer(s, s)
    return scipy.linalg.eigh(total, within + ridge * np.eye(d), subset_by_index=[max(0, d - width), d - 1])[1]


def selective(p: Problem, width: int = 128, rounds: int = 10, components: int = 512) -> Array:
    """Selective pseudo-labels (Wang and Breckon 2020): by class means and clusters, the surest share first."""
    x, t, v = unit(p.x), unit(p.t), unit(p.v)
    mean = np.concatenate([x, t]).mean(0)
    some = (np.concatenate([x, t]) - mean)[np.random.default_rng(p.seed).permutation(len(x) + len(t))[:4000]]
    axes = np.linalg.svd(some, full_matrices=False)[2][:components].T
    x, t, v = (unit((z - mean) @ axes) for z in (x, t, v))
    used, label = np.zeros(len(t), bool), np.zeros(len(t), int)
    for step in range(1, rounds + 1):
        labels = np.concatenate([p.y, label[used]])
        w = class_projection(np.concatenate([x, t[used]]), labels, p.classes, min(width, x.shape[1]))
        a, b, q = x @ w, t @ w, v @ w
        mean = np.concatenate([a, b]).mean(0)
        a, b, q = (unit(z - mean) for z in (a, b, q))
        means = unit(np.stack([a[p.y == c].mean(0) for c in range(p.classes)]))
        centres = means
        for _ in range(30):
            nearest = (b @ unit(centres).T).argmax(1)
            groups = [b[nearest == c] for c in range(p.classes)]
            centres = np.stack([z.mean(0) if len(z) else old for z, old in zip(groups, centres, strict=True)])
        sure = _certainty(b, means, centres)
        label = sure.argmax(1)
        used[:] = False
        for c in range(p.classes):
            rows = np.flatnonzero(label == c)
            used[rows[np.argsort(-sure[rows, c])[: len(rows) * step // rounds]]] = True
    return _certainty(q, means, centres).argmax(1)


def _certainty(z: Array, *centres: Array) -> Array:
    """For each class the larger of its shares by the distances to each set of centres."""
    distances = (np.sqrt(np.maximum(0.0, 2 - 2 * z @ unit(m).T)) for m in centres)
    return np.maximum.reduce([scipy.special.softmax(-d, axis=1) for d in distances])


def trained(algorithm: str) -> Method:
    """The product's trainer with uniform batches, λ = 1, and none of what `vardass adapt` adds."""

    def run(p: Problem) -> Array:
        settings: Any = {**STEPS, "algorithm": algorithm, "sampler": "uniform", "regression": p.regression}
        return _predicted(Trainer(RunConfig(**settings, seed=p.seed), p.splits).run(), p.splits)

    return run


def adapted(algorithm: str, **changes: Any) -> Method:
    """What `vardass adapt` runs, or the same with other batches: ``changes`` are settings."""

    def run(p: Problem) -> Array:
        settings: Any = {**STEPS, "algorithm": algorithm, "regression": p.regression, **changes}
        return _predicted(Adaptation(RunConfig.recommended(**settings, seed=p.seed), p.splits).run(), p.splits)

    return run


def _predicted(result: Any, splits: TaskSplits) -> Array:
    with torch.no_grad():
        scores = result.algorithm.predict(torch.from_numpy(rows_of(splits.target_test)))
    return (scores[:, 0] if splits.source_train.regression else scores.argmax(1)).numpy()


METHODS: dict[str, tuple[str, Method]] = {
    "logistic": ("logistic regression, tuned", tuned),
    "per-domain": ("+ each domain standardised", lambda p: tuned(p.per_domain())),
    "prototypes": ("+ prototypes", lambda p: prototypes(p.per_domain())),
    "self-training": ("self-training", self_training),
    "selective": ("each domain standardised, selective pseudo-labels", lambda p: selective(p.per_domain())),
    "coral": ("skada CORALAdapter", adapter(lambda p: skada.CORALAdapter())),
    "linear-ot": ("skada LinearOTMappingAdapter", adapter(lambda p: skada.LinearOTMappingAdapter(reg=0.01))),
    "subspace": (
        "skada SubspaceAlignmentAdapter",
        adapter(lambda p: skada.SubspaceAlignmentAdapter(n_components=min(64, p.x.shape[1]))),
    ),
    "sinkhorn": ("POT SinkhornLpl1Transport", transported),
    "boosting": ("gradient boosting", boosting),
    "erm": ("network, source only", trained("erm")),
    "mcc": ("network, MCC", trained("mcc")),
    "dan": ("network, DAN: MMD of uniform batches", trained("mmd")),
    "deep-coral": ("network, DeepCORAL: uniform batches", trained("coral")),
    "adapt-mmd": ("`vardass adapt`, MMD", adapted("mmd")),
    "adapt-coral": ("`vardass adapt`, CORAL", adapted("coral")),
    **{
        f"adapt-{loss}-{sampler}": (f"the same, {loss.upper()}, {sampler} batches", adapted(loss, sampler=sampler))
        for loss in ("mmd", "coral")
        for sampler in ("uniform", "vardass", "balanced", "ordered")
    },
    **{
        f"adapt-{loss}-strata": (
            f"the same, {loss.upper()}, equal strata without class alignment",
            adapted(loss, sampler="stratified", sampler_options={"equal": True}, class_shares="none"),
        )
        for loss in ("mmd", "coral")
    },
}

# `adapt` is no peer: it is what they are compared with
PEERS = [name for name in METHODS if not name.startswith("adapt")]
OURS = [name for name in METHODS if name not in PEERS]
NUMBERS = ["logistic", "per-domain", "coral", "linear-ot", "subspace", "boosting", "erm", "dan", "deep-coral", *OURS]
