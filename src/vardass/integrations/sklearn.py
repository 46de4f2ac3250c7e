"""scikit-learn: strata as a clusterer; classifiers and regressors that adapt to a target, also in skada's pipelines."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from vardass.errors import InputError, VardassWarning, needs_extra

with needs_extra("sklearn"):
    from sklearn.base import BaseEstimator, ClassifierMixin, ClusterMixin, RegressorMixin
    from sklearn.utils import _safe_indexing, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _num_samples, check_is_fitted, column_or_1d, validate_data

from vardass.adapt import RunConfig, Trainer
from vardass.data import Domain, Task, split_task
from vardass.kernels import KernelLike, fitted_kernel
from vardass.refresh import extract_features
from vardass.solvers import stratify
from vardass.validate import as_features

__all__ = ["CORALAdapter", "CORALRegressor", "MMDAdapter", "MMDRegressor", "Stratifier"]

_FLOATS = (np.float64, np.float32)
_ROWS = 4096  # in one forward pass


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
        self.strata_ = stratify(self._features, self.n_strata, seed=_seed(self.random_state), **options)
        self.labels_ = self.strata_.labels.numpy()
        self.variance_, self.uniform_variance_ = self.strata_.variance, self.strata_.uniform_variance
        return self

    def predict(self, X: Any) -> NDArray[np.int64]:
        """Strata of the rows of X (m, d), by `Strata.assign`: (m,)."""
        check_is_fitted(self)
        x = as_features(validate_data(self, X, dtype=_FLOATS, reset=False))
        return self.strata_.assign(x, self._features, kernel=self.kernel_).numpy()


class _Adapter(BaseEstimator):
    """What classifiers and regressors share."""

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
        """Train on the source X (n, d), y (n,) and adapt to ``X_target`` (m, d); a regressor's y may be (n, outputs).

        Without a target the network learns from the source alone, with a warning. Instead of ``X_target``,
        ``sample_domain`` (n,) may be negative for the rows of X that are of the target, as in skada; their labels are
        not read.
        """
        if sample_domain is not None:
            X, y, X_target = _split(X, y, X_target, sample_domain)
        X, labels, names = self._checked(X, y)
        regression, adapts = isinstance(self, RegressorMixin), X_target is not None
        target = validate_data(self, X_target, dtype=np.float32, reset=False) if adapts else X
        if not adapts:
            warnings.warn(
                f"{type(self).__name__} got no target, so it learns from the {len(X)} samples of the source alone; "
                "pass fit(X, y, X_target), or sample_domain with negative numbers for rows of the target",
                VardassWarning,
                stacklevel=2,
            )
        source = Domain("source", as_features(X), labels, names, regression=regression)
        task = Task("fit", (source,), Domain("target", as_features(target), None, names, regression=regression))
        seed = _seed(self.random_state)
        given = dict(self.settings or {})
        config = RunConfig.recommended(
            **{
                "algorithm": self.algorithm if adapts else "erm",
                "algorithm_options": {"penalty": self.penalty} if adapts and self.penalty is not None else {},
                "regression": regression,
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

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any, list[str]]:
        """Samples, labels as a domain has them, and the names of classes or numbers."""
        raise NotImplementedError

    def _outputs(self, X: Any) -> torch.Tensor:
        check_is_fitted(self)
        x = as_features(validate_data(self, X, dtype=np.float64, reset=False))
        return extract_features(self.model_, x, dtype=torch.float64, batch_size=_ROWS)


class MMDAdapter(ClassifierMixin, _Adapter):
    """A network trained on a labelled source, its features kept close to those of an unlabelled target by MMD².

    Parameters
    ----------
    penalty : float, optional
        λ, the weight of the discrepancy, which rises from 0; by default that of ``RunConfig.recommended``, 3 for
        batches of 32.
    sampler : str, optional
        How batches are drawn, see ``RunConfig``; by default as in ``RunConfig.recommended``.
    hidden : sequence of int
        Widths of the layers; the last are the features.
    steps, batch_size : int
        Batches trained on, samples of each domain in one (at most all).
    lr : float
        Learning rate.
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

    Notes
    -----
    Columns should have similar scales: put a ``StandardScaler`` before it.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X, y = rng.normal(size=(80, 2)), np.repeat(["a", "b"], 40)
    >>> X[40:] += 5
    >>> MMDAdapter(steps=60, lr=1e-2).fit(X, y, X + [0.0, 2.0]).predict([[0.0, 2.0], [5.0, 7.0]]).tolist()
    ['a', 'b']
    """

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any, list[str]]:
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(
                f"a classifier needs samples of two classes, got 1 class, {self.classes_.tolist()[0]!r}; add others"
            )
        return X, codes, [str(name) for name in self.classes_]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of the classes: (m, classes)."""
        return self._outputs(X).softmax(1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Most likely class of each row of X: (m,)."""
        best = self._outputs(X).argmax(1).numpy()  # first: it says where nothing is fitted
        labels: NDArray[Any] = self.classes_[best]
        return labels


class MMDRegressor(RegressorMixin, _Adapter):
    """As `MMDAdapter`, for numbers: the network learns them by squared error, and ``score`` is R².

    Parameters and attributes are those of `MMDAdapter`, except ``classes_``. ``y`` has shape (n,) or (n, m); it is
    scaled inside, and predictions are in its units.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any, list[str]]:
        # scikit-learn knows finite real numbers itself; y in double precision is scaled before it becomes single
        X, y = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        self._is_column = y.ndim == 1
        return X, y, [f"y_{place}" for place in range(1 if y.ndim == 1 else y.shape[1])]

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Numbers for the rows of X, in the units of y: (m,), or (m, outputs) where y had two dimensions."""
        numbers = self._outputs(X).numpy()
        return numbers[:, 0] if self._is_column else numbers


class CORALAdapter(MMDAdapter):
    """As `MMDAdapter`, with CORAL instead of MMD²: DomainBed's, of covariances and means."""

    algorithm = "coral"


class CORALRegressor(MMDRegressor):
    """As `MMDRegressor`, with CORAL instead of MMD²: DomainBed's, of covariances and means."""

    algorithm = "coral"


def _split(X: Any, y: Any, X_target: Any, sample_domain: Any) -> tuple[Any, Any, Any]:
    """X and y of the source, X of the target."""
    if X_target is not None:
        raise InputError("X_target and sample_domain were both given; with sample_domain the rows of both are in X")
    domains = column_or_1d(sample_domain)
    if len(domains) != _num_samples(X):
        raise InputError(f"sample_domain has {len(domains)} entries, X {_num_samples(X)} rows; give one for each row")
    source, target = np.flatnonzero(domains >= 0), np.flatnonzero(domains < 0)
    if not len(source) or not len(target):
        raise InputError(
            f"sample_domain has {len(source)} rows of a source (0 or above) and {len(target)} of a target (negative); "
            "both are needed"
        )
    return _safe_indexing(X, source), _safe_indexing(y, source), _safe_indexing(X, target)


def _seed(random_state: Any) -> int:
    return int(check_random_state(random_state).randint(2**31 - 1))
