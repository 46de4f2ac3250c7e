"""Weighted discrepancies between a source and a target batch of features: MMD² and CORAL.

A batch drawn from strata carries the weights size/n of its rows (sections 2.2 and 2.3); without weights these are the
textbook losses. All follow the device of the features and are computed in float32 or float64 with autocast off.
``StreamWeights`` finds weights for batches that come without.
"""

from vardass.losses.coral import CORALLoss, coral
from vardass.losses.mmd import DOMAINBED_GAMMAS, MMDLoss, mmd2
from vardass.losses.stream_weights import StreamWeights

__all__ = ["DOMAINBED_GAMMAS", "CORALLoss", "MMDLoss", "StreamWeights", "coral", "mmd2"]
