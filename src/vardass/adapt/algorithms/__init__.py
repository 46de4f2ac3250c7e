"""Training rules for unsupervised domain adaptation."""

from vardass.adapt.algorithms.base import ERM, Algorithm, Batch, weighted_mean
from vardass.adapt.algorithms.discrepancy import CORAL, MMD
from vardass.adapt.algorithms.mcc import MCC
from vardass.adapt.algorithms.registry import ALGORITHM_NAMES, algorithm_options, make_algorithm

__all__ = [
    "ALGORITHM_NAMES",
    "CORAL",
    "ERM",
    "MCC",
    "MMD",
    "Algorithm",
    "Batch",
    "algorithm_options",
    "make_algorithm",
    "weighted_mean",
]
