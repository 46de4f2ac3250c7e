"""Networks: a featuriser and a head."""

from vardass.adapt.networks.base import Network, output_size, widen_input
from vardass.adapt.networks.make import NETWORK_NAMES, make_network

__all__ = ["NETWORK_NAMES", "Network", "make_network", "output_size", "widen_input"]
