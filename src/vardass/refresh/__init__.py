"""Keeping strata and plans up to date: when (policies), from what (features), and what it costs."""

from vardass.refresh.feature_bank import FeatureBank
from vardass.refresh.feature_extraction import extract_features
from vardass.refresh.policies import GrowingRefresh, RefreshEvery, RefreshPolicy
from vardass.refresh.refresher import Refresher, Timer

__all__ = [
    "FeatureBank",
    "GrowingRefresh",
    "RefreshEvery",
    "RefreshPolicy",
    "Refresher",
    "Timer",
    "extract_features",
]
