"""Keeping strata and plans up to date: when (policies), from what (features), and what it costs.

>>> import torch
>>> from vardass.refresh import FeatureBank, RefreshEvery
>>> policy, bank = RefreshEvery(100), FeatureBank(4)
>>> bank.fill(torch.nn.Identity(), torch.eye(4))
>>> bank.features() if policy.due(0) else None
tensor([[1., 0., 0., 0.],
        [0., 1., 0., 0.],
        [0., 0., 1., 0.],
        [0., 0., 0., 1.]])
"""

from vardass.refresh.feature_bank import FeatureBank
from vardass.refresh.feature_extraction import extract_features
from vardass.refresh.policies import DriftRefresh, GrowingRefresh, RefreshEvery, RefreshPolicy
from vardass.refresh.refresher import Refresher
from vardass.refresh.timer import Timer

__all__ = [
    "DriftRefresh",
    "FeatureBank",
    "GrowingRefresh",
    "RefreshEvery",
    "RefreshPolicy",
    "Refresher",
    "Timer",
    "extract_features",
]
