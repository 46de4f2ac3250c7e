"""Unsupervised domain adaptation: networks, algorithms and their training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vardass.adapt.algorithms import ALGORITHM_NAMES, Algorithm, Batch, algorithm_options, make_algorithm, weighted_mean
from vardass.adapt.networks import NETWORK_NAMES, Network, make_network
from vardass.samplers.registry import make_sampler

if TYPE_CHECKING:
    from vardass.adapt.adaptation import Adaptation
    from vardass.adapt.config import RunConfig
    from vardass.adapt.model import RunResult, final_report, load_model
    from vardass.adapt.scores import ClassificationScores, Evaluation, classification_scores, evaluate_run
    from vardass.adapt.trainer import Trainer

__all__ = [
    "ALGORITHM_NAMES",
    "NETWORK_NAMES",
    "Adaptation",
    "Algorithm",
    "Batch",
    "ClassificationScores",
    "Evaluation",
    "Network",
    "RunConfig",
    "RunResult",
    "Trainer",
    "algorithm_options",
    "classification_scores",
    "evaluate_run",
    "final_report",
    "load_model",
    "make_algorithm",
    "make_network",
    "make_sampler",
    "weighted_mean",
]


def __getattr__(name: str) -> Any:
    # imported when they are first asked for: a loop of one's own needs neither the data sets nor pydantic
    for part in ("adaptation", "config", "model", "scores", "trainer") if name in __all__ else ():
        module = import_module(f"{__name__}.{part}")
        if hasattr(module, name):
            return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
