"""Samplers whose batches keep to given groups, such as classes, and to given shares of them."""

from __future__ import annotations

from abc import ABC
from typing import Any

from torch import Tensor

from vardass.errors import InputError
from vardass.samplers.base import MinibatchSampler
from vardass.solvers.grouped import Groups
from vardass.validate import ArrayLike, as_labels, as_tensor

__all__ = ["GroupedSampler"]


class GroupedSampler(MinibatchSampler, ABC):
    """A sampler with ``groups`` (n,) and ``shares`` (g,), either None, that a refresh may replace.

    They are what the stream depends on, so they are part of the state.
    """

    groups: Tensor | None = None
    shares: Tensor | None = None

    @property
    def strata_count(self) -> int:
        """Number of strata."""
        return self.batch_size

    @property
    def min_size(self) -> int:
        """Least samples of a stratum; smaller groups cannot be drawn from."""
        return 1

    def _set_groups(self, groups: ArrayLike | None, shares: ArrayLike | None) -> None:
        if groups is None and shares is not None:
            raise InputError(f"shares are those of groups, got groups=None and {shares!r}; pass groups= too")
        if groups is None:
            self.groups = self.shares = None
            return
        Groups.of(groups, shares, self.n)  # says so if they do not fit
        self.groups = as_labels(groups, self.n, "groups").cpu()
        self.shares = None if shares is None else as_tensor(shares, "shares").double().cpu()

    def refresh(self, features: ArrayLike, *, groups: ArrayLike | None = None, shares: ArrayLike | None = None) -> None:
        """As for `MinibatchSampler.refresh`, and from now on with other groups.

        Parameters
        ----------
        features : array of shape (n, d)
            Current features.
        groups : array of shape (n,), optional
            Instead of the present ones; by default these stay. All zeros is as good as none.
        shares : array of shape (g,), optional
            Instead of the present ones. New ``groups`` without them have the shares of their samples.
        """
        before = self.groups, self.shares
        try:
            if groups is not None or shares is not None:
                self._set_groups(self.groups if groups is None else groups, shares)
            super().refresh(features)
        except BaseException:
            self.groups, self.shares = before
            raise

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "groups": self.groups, "shares": self.shares}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        self.groups, self.shares = state["groups"], state["shares"]
