"""Networks: a featuriser and a head."""

from vardass.adapt.networks.base import Network, output_size, widen_input
from vardass.adapt.networks.registry import NETWORK_NAMES, is_pretrained, make_network, preprocessing_of

__all__ = [
    "NETWORK_NAMES",
    "Network",
    "is_pretrained",
    "make_network",
    "output_size",
    "preprocessing_of",
    "widen_input",
]
