"""When a run refreshes its strata: the policies by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from vardass.adapt.names import choose, unknown
from vardass.errors import InputError
from vardass.refresh import DriftRefresh, GrowingRefresh, NeverRefresh, RefreshEvery, RefreshPolicy, VarianceRefresh

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig

__all__ = ["POLICY_NAMES", "make_policy"]

_KINDS: dict[str, Callable[..., RefreshPolicy]] = {
    "every": RefreshEvery,
    "growing": GrowingRefresh,
    "drift": DriftRefresh,
    "variance": VarianceRefresh,
}

POLICY_NAMES = tuple(_KINDS)


def make_policy(config: RunConfig) -> RefreshPolicy:
    """Policy of a run; strata of inputs are made once, and with T = 0 nothing is refreshed.

    Raises
    ------
    InputError
        If an option is unknown, or a policy that observes batches has no bank to compare them with.
    """
    name = config.refresh_policy
    kind = _KINDS[choose(name, "refresh_policy", POLICY_NAMES)]
    options = dict(config.refresh_options)
    known = [option for option in inspect.signature(kind).parameters if option != "period"]
    for option in options:
        if option == "period":
            raise InputError("the period is set with refresh_every; leave it out of refresh_options")
        if option not in known:
            raise unknown(f"option of refresh_policy {name!r}:", option, known)
    if name == "every":
        made: RefreshPolicy = RefreshEvery(max(1, config.refresh_every), **options)
    else:
        made = kind(**options)
    if made.observes is not None and config.feature_source != "bank":
        raise InputError(
            f"refresh_policy {name!r} compares batches with a bank, got feature_source={config.feature_source!r}; use "
            "feature_source='bank', or refresh_policy 'every' or 'growing'"
        )
    if made.observes is not None and config.background:
        raise InputError(
            f"refresh_policy {name!r} measures strata right after a refresh, but background={config.background} brings "
            "them later; use background=False, or refresh_policy 'every' or 'growing'"
        )
    return made if config.refresh_every > 0 and config.sampler != "kmeans-inputs" else NeverRefresh()
