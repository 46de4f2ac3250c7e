"""Keeping strata and plans up to date: when (policies), from what (features), and what it costs.

>>> import torch
>>> from vardass.refresh import FeatureBank, RefreshEvery
>>> policy, bank = RefreshEvery(100), FeatureBank(4)
>>> bank.fill(torch.nn.Identity(), torch.eye(4))
4
>>> bank.features() if policy.due(0) else None
tensor([[1., 0., 0., 0.],
        [0., 1., 0., 0.],
        [0., 0., 1., 0.],
        [0., 0., 0., 1.]])
"""

from vardass.refresh.accounting import TimeAccount
from vardass.refresh.bank import FeatureBank
from vardass.refresh.extract import extract_features
from vardass.refresh.observing import DriftRefresh, VarianceRefresh
from vardass.refresh.policy import EpochRefresh, GrowingRefresh, NeverRefresh, RefreshEvery, RefreshPolicy
from vardass.refresh.refresher import Refresher
from vardass.refresh.spread import StrataSpread, strata_spread

__all__ = [
    "DriftRefresh",
    "EpochRefresh",
    "FeatureBank",
    "GrowingRefresh",
    "NeverRefresh",
    "RefreshEvery",
    "RefreshPolicy",
    "Refresher",
    "StrataSpread",
    "TimeAccount",
    "VarianceRefresh",
    "extract_features",
    "strata_spread",
]
