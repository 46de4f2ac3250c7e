"""How good a model is on labelled data: accuracy, classes, confusion and calibration, or errors of numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Inputs
from vardass.adapt.devices import pick_device
from vardass.adapt.model import load_model
from vardass.adapt.regression import regression_scores
from vardass.adapt.run_folder import reading_of
from vardass.adapt.selection import outputs
from vardass.data.domains import Domain
from vardass.data.embedding_files import EMBEDDING_ENDINGS
from vardass.data.from_paths import domain_from_path, subfolders
from vardass.errors import InputError, VardassWarning
from vardass.files import PathLike, as_path, plain
from vardass.validate import ArrayLike, as_features, as_labels, shorten

BINS = 15
_SMALLEST = torch.finfo(torch.float64).eps  # as in scikit-learn
_TOLERANCE = 1e-3  # of the sum of a row of probabilities

Data: TypeAlias = "PathLike | Domain"


# --- pure functions of probabilities and labels -------------------------------------------------------


class Reliability(NamedTuple):
    """Samples by the probability of their predicted class, in bins of equal width: three tensors of shape (bins,)."""

    counts: Tensor
    confidence: Tensor
    accuracy: Tensor


@dataclass(frozen=True, eq=False)
class ClassificationScores:
    """What `classification_scores` found.

    Attributes
    ----------
    classes : tuple of str
        Names of the C classes.
    n : int
        Samples.
    accuracy : float
        Share of samples whose largest probability is that of their class.
    accuracy_interval : tuple of float
        Ends of the 95 % Wilson interval, see `wilson_interval`; it takes samples as independent.
    balanced_accuracy : float
        Mean recall of the classes that have samples.
    confusion : Tensor of shape (C, C)
        Samples of class i that were predicted as class j.
    support, predicted : Tensor of shape (C,)
        Samples of each class, and predictions of it.
    precision, recall, f1 : Tensor of shape (C,)
        TP / predicted, TP / support, and 2 TP / (predicted + support); NaN where the divisor is 0.
    nll : float
        Negative log-likelihood: mean of -log p(label), in nats. Probabilities below 2.2e-16 count as that, so that one
        sample does not make it infinite.
    brier : float
        Mean over samples of Σ_c (p_c - [c is the label])², from 0 to 2; for two classes twice the value that looks at
        one of them.
    calibration_error : float
        Expected calibration error: Σ_m n_m / n |accuracy_m - confidence_m| over the bins of ``reliability``; biased
        upwards for few samples.
    reliability : Reliability
        Samples in each of 15 bins ((m - 1) / 15, m / 15], their mean largest probability, and the share that is
        right, NaN in an empty bin. The last two are equal where a model is calibrated.
    """

    classes: tuple[str, ...]
    n: int
    accuracy: float
    accuracy_interval: tuple[float, float]
    balanced_accuracy: float
    confusion: Tensor
    support: Tensor
    predicted: Tensor
    precision: Tensor
    recall: Tensor
    f1: Tensor
    nll: float
    brier: float
    calibration_error: float
    reliability: Reliability

    @property
    def missing(self) -> tuple[str, ...]:
        """Classes without a sample: their recall is not defined."""
        return tuple(name for name, count in zip(self.classes, self.support.tolist(), strict=True) if not count)

    def most_confused(self) -> list[tuple[str, str, int]]:
        """Up to three of the most frequent mistakes, as (class, what it was taken for, samples)."""
        wrong = self.confusion.clone().fill_diagonal_(0).flatten()
        order = wrong.argsort(descending=True, stable=True)[:3].tolist()
        size = len(self.classes)
        pairs = [(self.classes[i // size], self.classes[i % size], int(wrong[i])) for i in order]
        return [pair for pair in pairs if pair[2]]

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain values; what is not defined is None."""
        of_all = ("n", "accuracy", "accuracy_interval", "balanced_accuracy", "nll", "brier", "calibration_error")
        columns = {name: getattr(self, name) for name in ("support", "predicted", "precision", "recall", "f1")}
        found: dict[str, Any] = plain(
            {
                **{name: getattr(self, name) for name in (*of_all, "missing")},
                "classes": {
                    name: {key: values[place] for key, values in columns.items()}
                    for place, name in enumerate(self.classes)
                },
                "confusion": self.confusion,
                "reliability": self.reliability,
            }
        )
        return found


def classification_scores(
    probabilities: ArrayLike, labels: ArrayLike, *, classes: Sequence[str] | None = None
) -> ClassificationScores:
    """Accuracy, scores of each class, confusion matrix and calibration of predictions.

    All sums are in float64.

    Parameters
    ----------
    probabilities : Tensor or array of shape (n, C)
        Of each class for each sample; rows sum to 1. The prediction is the largest, of equal ones the first.
    labels : Tensor or array of shape (n,)
        Classes, from 0 to C - 1.
    classes : sequence of str, optional
        Names; by default "0", "1", ...

    Examples
    --------
    >>> p = [[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]]
    >>> scores = classification_scores(torch.tensor(p), torch.tensor([0, 0, 1, 1]), classes=("cat", "dog"))
    >>> scores.accuracy, scores.balanced_accuracy
    (0.75, 0.75)
    >>> scores.confusion
    tensor([[2, 0],
            [1, 1]])
    >>> scores.most_confused()
    [('dog', 'cat', 1)]
    """
    p = as_features(probabilities, "probabilities").double()
    n, count = p.shape
    if count < 2:
        raise InputError(f"probabilities must have a column for each of at least 2 classes, got {tuple(p.shape)}")
    totals = p.sum(1)
    wrong = ((totals - 1).abs() > _TOLERANCE) | (p < -_TOLERANCE).any(1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InputError(
            f"probabilities must be at least 0 and sum to 1 in each row, got a least one of {float(p[row].min()):.4g} "
            f"and a sum of {float(totals[row]):.4g} in row {row}; turn logits into them with softmax(1)"
        )
    names = tuple(map(str, range(count))) if classes is None else tuple(classes)
    if len(names) != count:
        raise InputError(f"there are {len(names)} names of classes for {count} columns of probabilities; give {count}")
    truth = as_labels(labels, n).to(p.device)
    low, high = int(truth.min()), int(truth.max())
    if low < 0 or high >= count:
        raise InputError(f"labels go from {low} to {high}, but there are {count} classes; number them 0 to {count - 1}")
    top, guess = p.max(1)
    confusion = torch.bincount(truth * count + guess, minlength=count * count).reshape(count, count)
    hits, support, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    recall = hits.double() / support  # 0 / 0 is NaN
    right = guess == truth
    own = p.gather(1, truth[:, None]).flatten()
    places = ((top * BINS).ceil().long() - 1).clamp(0, BINS - 1)
    in_bin = torch.bincount(places, minlength=BINS)
    reliability = Reliability(
        in_bin,
        torch.bincount(places, weights=top, minlength=BINS) / in_bin,
        torch.bincount(places, weights=right.double(), minlength=BINS) / in_bin,
    )
    gaps = (reliability.accuracy - reliability.confidence).abs().nan_to_num(0.0)
    return ClassificationScores(
        classes=names,
        n=n,
        accuracy=int(hits.sum()) / n,
        accuracy_interval=wilson_interval(int(hits.sum()), n),
        balanced_accuracy=float(recall[support > 0].mean()),
        confusion=confusion,
        support=support,
        predicted=predicted,
        precision=hits.double() / predicted,
        recall=recall,
        f1=2 * hits.double() / (support + predicted),
        nll=float(-own.clamp_min(_SMALLEST).log().mean()),
        brier=float((p - F.one_hot(truth, count)).square().sum(1).mean()),
        calibration_error=float((in_bin * gaps).sum() / n),
        reliability=reliability,
    )


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson's interval, at 95 %, for the probability behind ``successes`` of ``n`` independent trials.

    It holds the probabilities q for which the share of successes is within z standard errors √(q (1 - q) / n) of q,
    with z = 1.96 the normal quantile.
    """
    z = NormalDist().inv_cdf(0.975)
    share, extra = successes / n, z * z / n
    centre = (share + extra / 2) / (1 + extra)
    half = z * math.sqrt(share * (1 - share) / n + extra / (4 * n)) / (1 + extra)
    # rounding must not move an end across the share or out of [0, 1]
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


# --- the model of a run on labelled data --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Scores of a model, domain by domain and over all.

    Attributes
    ----------
    overall : ClassificationScores
        Of the samples of all domains together: a large domain counts more.
    domains : dict of str to ClassificationScores
        Of each domain.
    probabilities, labels : dict of str to Tensor of shape (n, C) and (n,)
        What they were computed from, float64 and int64, on the CPU.
    """

    overall: ClassificationScores
    domains: dict[str, ClassificationScores]
    probabilities: dict[str, Tensor]
    labels: dict[str, Tensor]

    def to_dict(self) -> dict[str, Any]:
        """All scores in plain values, without the samples."""
        return {
            "class_names": list(self.overall.classes),
            "overall": self.overall.to_dict(),
            "domains": {name: scores.to_dict() for name, scores in self.domains.items()},
        }


@dataclass(frozen=True)
class RegressionScores:
    """Errors of n predictions, see `regression_scores`; ``columns``: of each number, where there are several."""

    n: int
    rmse: float
    mae: float
    r2: float
    columns: dict[str, RegressionScores]

    @classmethod
    def of(cls, predicted: Tensor, truth: Tensor, names: Sequence[str]) -> RegressionScores:
        """Of predictions and true numbers (n, m)."""
        several = names if len(names) > 1 else ()
        columns = {name: cls.of(predicted[:, [i]], truth[:, [i]], [name]) for i, name in enumerate(several)}
        return cls(n=len(truth), columns=columns, **regression_scores(predicted, truth))


@dataclass(frozen=True, eq=False)
class RegressionEvaluation:
    """`Evaluation` of a model that predicts the m numbers ``names``; predictions and labels have shape (n, m)."""

    names: tuple[str, ...]
    overall: RegressionScores
    domains: dict[str, RegressionScores]
    predictions: dict[str, Tensor]
    labels: dict[str, Tensor]

    def to_dict(self) -> dict[str, Any]:
        """All scores in plain values, without the samples."""
        return {"numbers": list(self.names), "overall": asdict(self.overall), "domains": plain(self.domains)}


def evaluate_domains(
    algorithm: Algorithm, about: Mapping[str, Any], domains: Mapping[str, Domain], *, workers: int = 0
) -> Evaluation | RegressionEvaluation:
    """Scores of a model on the samples of domains whose label is known."""
    if not domains:
        raise InputError("0 domains to evaluate on; give at least one labelled data set")
    device, config = next(algorithm.parameters()).device, about["config"].changed(workers=workers)
    classes, shape = tuple(about["class_names"]), tuple(about["input_shape"])
    found, labels = {}, {}
    for name, domain in domains.items():
        if domain.class_names != classes:
            raise InputError(
                f"domain {name!r} has the classes {shorten(domain.class_names)}, the model {shorten(classes)}; give "
                "those of the model, in its order"
            )
        if not len(domain):
            raise InputError(f"domain {name!r} has 0 samples; at least 1 is needed, check its files")
        domain = domain.labelled()
        labels[name] = domain.known_labels()
        inputs = Inputs(domain, device)
        if inputs.shape != shape:
            raise InputError(
                f"samples of domain {name!r} have shape {inputs.shape}, the model was trained on {shape}; give samples "
                "of that shape"
            )
        _, given = outputs(algorithm, inputs, **config.pass_options)
        if not bool(given.isfinite().all()):
            raise InputError(f"the model gives NaN or infinite outputs on domain {name!r}; check the data and the run")
        found[name] = given.double() if config.regression else given.double().softmax(1)
    pairs = {name: (found[name], labels[name]) for name in found}
    whole = torch.cat(list(found.values())), torch.cat(list(labels.values()))
    if config.regression:
        errors = {name: RegressionScores.of(*pair, classes) for name, pair in pairs.items()}
        return RegressionEvaluation(classes, RegressionScores.of(*whole, classes), errors, found, labels)
    scores = {name: classification_scores(*pair, classes=classes) for name, pair in pairs.items()}
    return Evaluation(classification_scores(*whole, classes=classes), scores, found, labels)


def evaluate_run(
    run: PathLike,
    data: Data | Sequence[Data] | Mapping[str, Data],
    *,
    key: str | None = None,
    labels: str | None = None,
    workers: int = 0,
    device: str = "auto",
    **parts: Any,
) -> Evaluation | RegressionEvaluation:
    """Scores of the model of a run on labelled data; ``vardass evaluate`` in Python.

    Parameters
    ----------
    run : path
        Folder that ``vardass adapt``, ``vardass train`` or a `Trainer` wrote, or its ``model.safetensors``.
    data : path or Domain, several of them, or a mapping from names to them
        Each is a domain: a folder of class folders or a file of embeddings with labels, read and scaled as in the run,
        or a folder of such domains, or a `Domain`. Samples without label, or of a class that the model lacks, are left
        out. Without names, domains are named after their files.
    key, labels : str, optional
        Arrays of features and labels in files of embeddings; by default those of the run.
    workers : int
        Processes that decode files.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    **parts
        ``algorithm`` or ``network``, if the run was made with such objects, and ``trust_code``, see `load_model`.
    """
    place = as_path(run, "run")
    algorithm, about = load_model(place, device=pick_device(device), **parts)
    given: Iterable[tuple[str | None, Data]]
    if isinstance(data, Mapping):
        given = data.items()
    elif isinstance(data, Sequence) and not isinstance(data, str):
        given = [(None, entry) for entry in data]
    else:
        given = [(None, data)]
    domains = labelled_domains(given, about, place, key=key, labels=labels)
    return evaluate_domains(algorithm, about, domains, workers=workers)


def labelled_domains(
    given: Iterable[tuple[str | None, Data]],
    about: Mapping[str, Any],
    run: Path,
    *,
    key: str | None = None,
    labels: str | None = None,
) -> dict[str, Domain]:
    """Domains by name, read as a run read its own."""
    how = reading_of(run, about)
    entries: list[tuple[str, str, Data]] = []  # name, what stands in for it, data
    for name, entry in given:
        if isinstance(entry, Domain):
            entries.append((name or entry.name, name or entry.name, entry))
            continue
        whole = as_path(entry, "data")
        for path in _domains_in(whole, about):
            if str(path.resolve()) in how.get("sources", ()):
                warnings.warn(
                    f"{path} is a source of the run, which was trained on most of its samples, so the scores are "
                    "too good; give samples that it has not seen, or give no data to vardass evaluate: it then uses "
                    "the samples that were held out",
                    VardassWarning,
                    stacklevel=3,
                )
            own = path.resolve().stem if path.is_file() else path.resolve().name
            if name is None:
                entries.append((own, str(path), path))
            else:
                title = name if path == whole else f"{name}/{own}"
                entries.append((title, title, path))
    names = [name for name, _, _ in entries]
    titles = [name if names.count(name) == 1 else longer for name, longer, _ in entries]
    twice = sorted({title for title in titles if titles.count(title) > 1})
    if twice:
        raise InputError(f"two domains are called {shorten(twice)}; give each data set once, with a name of its own")
    return {
        title: entry
        if isinstance(entry, Domain)
        else domain_from_path(Path(entry), about, how, key=key, labels=labels, labelled=True)
        for title, (_, _, entry) in zip(titles, entries, strict=True)
    }


def _domains_in(path: Path, about: Mapping[str, Any]) -> list[Path]:
    """The domains in a folder of them; the path itself if it is no such folder."""
    if not path.is_dir():
        return [path]
    if about["data_kind"] == "features":
        files = [file for file in sorted(path.iterdir()) if file.suffix.lower() in EMBEDDING_ENDINGS and file.is_file()]
        return [file for file in files if not file.name.endswith(".labels.npy")] or [path]
    classes, folders = set(about["class_names"]), subfolders(path)
    if any(folder.name in classes for folder in folders):
        return [path]
    nested = [folder for folder in folders if any(inner.name in classes for inner in subfolders(folder))]
    return nested if nested and len(nested) == len(folders) else [path]
