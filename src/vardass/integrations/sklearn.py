"""scikit-learn: strata as a clusterer, CORAL as a transformer, classifiers that adapt to a target."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from vardass.errors import InputError, VardassWarning, needs_extra

with needs_extra("sklearn"):
    from sklearn.base import BaseEstimator, ClassifierMixin, ClusterMixin, OneToOneFeatureMixin, TransformerMixin
    from sklearn.utils import _safe_indexing, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _num_samples, check_is_fitted, column_or_1d, validate_data

from vardass.adapt import RunConfig, Trainer
from vardass.data import Domain, Task, split_task
from vardass.kernels import KernelLike, fitted_kernel
from vardass.refresh import extract_features
from vardass.solvers import stratify
from vardass.validate import as_features, check_number

__all__ = ["CORALAdapter", "CORALTransformer", "MMDAdapter", "Stratifier"]

_FLOATS = (np.float64, np.float32)


class Stratifier(ClusterMixin, BaseEstimator):
    """Strata with minimal variance, as a clusterer; see `vardass.stratify`.

    Parameters
    ----------
    n_strata : int
        Number of strata, k.
    kernel, solver, options
        Of `vardass.stratify`; ``options`` is a mapping of further ones, such as ``{"min_size": 2}``.
    random_state : int, RandomState or None
        The same number gives the same strata.

    Attributes
    ----------
    labels_ : array of shape (n,)
        Stratum of each sample.
    variance_, uniform_variance_ : float
        Variance of the mean embedding of a batch with one sample of each stratum, and of k uniform samples.
    strata_, kernel_ : Strata, Kernel
        The strata with their statistics, and the kernel fitted to the samples.
    """

    def __init__(
        self,
        n_strata: int = 8,
        *,
        kernel: KernelLike = "mmd",
        solver: str = "min-sum",
        options: Mapping[str, Any] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_strata = n_strata
        self.kernel = kernel
        self.solver = solver
        self.options = options
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Make strata of the rows of X (n, d); y is ignored."""
        self._features = as_features(validate_data(self, X, dtype=_FLOATS, ensure_min_samples=self.n_strata))
        self.kernel_ = fitted_kernel(self.kernel, self._features)
        options = {"kernel": self.kernel_, "solver": self.solver, **(self.options or {})}
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        self.strata_ = stratify(self._features, self.n_strata, seed=seed, **options)
        self.labels_ = self.strata_.labels.numpy()
        self.variance_, self.uniform_variance_ = self.strata_.variance, self.strata_.uniform_variance
        return self

    def predict(self, X: Any) -> NDArray[np.int64]:
        """Strata of the rows of X (m, d), by `Strata.assign`: (m,)."""
        check_is_fitted(self)
        x = as_features(validate_data(self, X, dtype=_FLOATS, reset=False))
        return self.strata_.assign(x, self._features, kernel=self.kernel_).numpy()


class CORALTransformer(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """CORAL without a network: a linear map gives the source the target's means and covariances.

    A row x becomes (x - mean_s) C_s^(-1/2) C_t^(1/2) + mean_t: whitened and coloured again, as in Algorithm 1 of Sun,
    Feng and Saenko (AAAI 2016), who assume centred columns. ``matrix_`` (d, d) is the product of the two roots.
    Each row is taken as one of the source, also when a pipeline predicts: target rows go to the step after this one. To
    bring new data to where a model was trained, swap the roles: ``fit(X_new, target=X_training)``.

    Parameters
    ----------
    ridge : float
        Added to the diagonals of both covariances C, in units of the source's mean variance: 1 is the paper's identity
        matrix where columns are standardised; less matches covariances more closely.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(50, 2))
    >>> target = X @ [[2.0, 1.0], [0.0, 1.0]] + 3.0
    >>> moved = CORALTransformer(ridge=1e-9).fit_transform(X, target=target)
    >>> bool(np.allclose(np.cov(moved.T), np.cov(target.T)))
    True
    """

    def __init__(self, ridge: float = 1.0) -> None:
        self.ridge = ridge

    def fit(self, X: Any, y: Any = None, *, target: Any = None) -> Self:
        """Find the map from the rows of X (n, d) to those of ``target`` (m, d); y is ignored."""
        x = validate_data(self, X, dtype=_FLOATS, ensure_min_samples=2)
        if target is None:
            raise InputError("target is None; pass fit(X, target=rows), in a pipeline as STEP__target", field="target")
        rows = validate_data(self, target, dtype=_FLOATS, ensure_min_samples=2, reset=False)
        self._source_mean, source = _moments(x, "X")
        self._target_mean, covariance = _moments(rows, "target")
        shift = check_number(self.ridge, "ridge", low=1e-9) * source.diagonal().mean() * np.eye(x.shape[1])
        self.matrix_ = _power(source + shift, -0.5) @ _power(covariance + shift, 0.5)
        return self

    def transform(self, X: Any) -> NDArray[Any]:
        """Move rows X (m, d) of the source to where the target lies: (m, d), in the precision of X."""
        check_is_fitted(self)
        x = validate_data(self, X, dtype=_FLOATS, reset=False)
        return np.asarray((x - self._source_mean) @ self.matrix_ + self._target_mean, x.dtype)


class MMDAdapter(ClassifierMixin, BaseEstimator):
    """A network trained on a labelled source, its features kept close to those of an unlabelled target by MMD².

    Columns should have similar scales: put a ``StandardScaler`` before it.

    Parameters
    ----------
    penalty : float, optional
        λ, the weight of the discrepancy, which rises from 0; by default that of ``RunConfig.recommended``.
    sampler : str, optional
        How batches are drawn, see ``RunConfig``; by default as in ``RunConfig.recommended``.
    hidden : sequence of int
        Widths of the layers; the last are the features.
    steps, batch_size, lr
        Batches trained on, samples of each domain in one (at most all), learning rate.
    settings : mapping, optional
        Any other settings of ``RunConfig``, such as ``refresh_every``; they override the arguments above.
    random_state : int, RandomState or None
        The same number gives the same network.

    Attributes
    ----------
    classes_ : array of shape (classes,)
        Labels of the source.
    model_ : Algorithm
        The network, in double precision: ``model_.features(x)`` are its features, ``model_.predict(x)`` logits.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X, y = rng.normal(size=(80, 2)), np.repeat(["a", "b"], 40)
    >>> X[40:] += 5
    >>> MMDAdapter(steps=60, lr=1e-2).fit(X, y, X + [0.0, 2.0]).predict([[0.0, 2.0], [5.0, 7.0]]).tolist()
    ['a', 'b']
    """

    algorithm: ClassVar[str] = "mmd"
    __metadata_request__fit: ClassVar[dict[str, bool]] = {"sample_domain": True}  # asked for in a skada pipeline

    def __init__(
        self,
        *,
        penalty: float | None = None,
        sampler: str | None = None,
        hidden: Sequence[int] = (128, 64),
        steps: int = 600,
        batch_size: int = 32,
        lr: float = 1e-3,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.penalty = penalty
        self.sampler = sampler
        self.hidden = hidden
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Any, y: Any, X_target: Any = None, *, sample_domain: Any = None) -> Self:
        """Train on the source X (n, d), y (n,) and adapt to ``X_target`` (m, d).

        Without a target the network learns from the source alone, with a warning. Instead of ``X_target``,
        ``sample_domain`` (n,) may be negative for the rows of X that are of the target, as in skada; their labels are
        not read.
        """
        if sample_domain is not None:
            X, y, X_target = _split(X, y, X_target, sample_domain)
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(f"y has 1 class, {self.classes_.tolist()[0]!r}; a classifier needs two classes", field="y")
        names, adapts = [str(name) for name in self.classes_], X_target is not None
        target = validate_data(self, X_target, dtype=np.float32, reset=False) if adapts else X
        if not adapts:
            warnings.warn(
                f"{type(self).__name__} got no target, so it learns from the {len(X)} samples of the source alone; "
                "pass fit(X, y, X_target), or sample_domain with negative numbers for rows of the target",
                VardassWarning,
                stacklevel=2,
            )
        source = Domain("source", as_features(X), labels, names)
        task = Task("fit", (source,), Domain("target", as_features(target), None, names))
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        given = dict(self.settings or {})
        config = RunConfig.recommended(
            **{
                "algorithm": self.algorithm if adapts else "erm",
                "algorithm_options": {"penalty": self.penalty} if adapts and self.penalty is not None else {},
                **({} if self.sampler is None else {"sampler": self.sampler}),
                "network_options": {"hidden": list(self.hidden)},
                "steps": self.steps,
                "batch_size": min(self.batch_size, len(X)),
                "target_batch_size": min(self.batch_size, len(target)),
                "refresh_every": 100,
                "lr": self.lr,
                "seed": seed,
                "selection": "last",  # nothing is held out
                **({} if "selection" in given else {"eval_every": self.steps}),
                **given,
            }
        )
        result = Trainer(config, split_task(task, seed=seed, holdout=0.0, unlabelled_fraction=1.0)).run()
        if result.interrupted:
            raise KeyboardInterrupt  # a search over many fits is to end
        # in double precision the outputs of a row do not depend on the other rows of its batch
        self.model_ = result.algorithm.cpu().double()
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of the classes: (m, classes)."""
        check_is_fitted(self)
        x = as_features(validate_data(self, X, dtype=np.float64, reset=False))
        return extract_features(self.model_, x, dtype=torch.float64, batch_size=4096).softmax(1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Most likely class of each row of X: (m,)."""
        best = self.predict_proba(X).argmax(1)  # first: it says where nothing is fitted
        return np.asarray(self.classes_[best])


class CORALAdapter(MMDAdapter):
    """As `MMDAdapter`, with CORAL instead of MMD²: DomainBed's, of covariances and means."""

    algorithm = "coral"


def _moments(x: NDArray[Any], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and covariance of the rows of x, in double precision."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, covariance = x.mean(0, dtype=np.float64), np.atleast_2d(np.cov(x, rowvar=False, dtype=np.float64))
    total = 0.0 if (x == x[0]).all() else float(covariance.trace())  # rounding aside
    if not 1e-200 < total < 1e200:
        raise InputError(f"{name} has a total variance of {total:g}; pass rows that differ, in other units", field=name)
    return mean, covariance


def _power(covariance: NDArray[np.float64], exponent: float) -> Any:
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * values**exponent) @ vectors.T


def _split(X: Any, y: Any, X_target: Any, sample_domain: Any) -> tuple[Any, Any, Any]:
    """X and y of the source, X of the target."""
    if X_target is not None:
        raise InputError("X_target and sample_domain were both given; with sample_domain the rows of both are in X")
    domains = column_or_1d(sample_domain)
    if len(domains) != _num_samples(X):
        raise InputError(f"sample_domain has {len(domains)} entries, X {_num_samples(X)} rows; give one for each row")
    source, target = np.flatnonzero(domains >= 0), np.flatnonzero(domains < 0)
    if not len(source) or not len(target):
        raise InputError(f"sample_domain has {len(source)} rows >= 0 and {len(target)} of a target, < 0; give both")
    return _safe_indexing(X, source), _safe_indexing(y, source), _safe_indexing(X, target)
