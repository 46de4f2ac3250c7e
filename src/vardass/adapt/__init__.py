"""Unsupervised domain adaptation: networks, algorithms and their training."""

from vardass.adapt.algorithms import ALGORITHM_NAMES, Algorithm, Batch, algorithm_options, make_algorithm
from vardass.adapt.networks import NETWORK_NAMES, Network, make_network

__all__ = [
    "ALGORITHM_NAMES",
    "NETWORK_NAMES",
    "Algorithm",
    "Batch",
    "Network",
    "algorithm_options",
    "make_algorithm",
    "make_network",
]
