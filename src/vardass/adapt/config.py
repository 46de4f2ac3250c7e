"""The settings of a run, as one value that can be written down and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from vardass.adapt.algorithms import algorithm_options
from vardass.adapt.algorithms.base import check_number
from vardass.adapt.names import choose, unknown
from vardass.adapt.samplers_by_name import SAMPLER_NAMES
from vardass.adapt.selection import SELECTION_NAMES
from vardass.errors import InputError
from vardass.validate import check_count

__all__ = ["RunConfig"]

_COUNTS = {
    "steps": 1,
    "batch_size": 1,
    "refresh_every": 0,
    "eval_every": 1,
    "checkpoint_every": 1,
    "eval_batch_size": 1,
    "workers": 0,
    "seed": 0,
}
_CHOICES = {
    "sampler": SAMPLER_NAMES,
    "optimiser": ("adam", "sgd"),
    "feature_source": ("bank", "full"),
    "selection": SELECTION_NAMES,
    "precision": ("32-true", "bf16-mixed"),
}


@dataclass(frozen=True)
class RunConfig:
    """Settings of one training run.

    Parameters
    ----------
    algorithm, algorithm_options
        See ``make_algorithm``.
    sampler, sampler_options
        Of both domains, see ``make_sampler``. ``"vardass"`` is the paper's.
    network, network_options
        See ``make_network``.
    steps : int
        Batches trained on; 3,000 in the paper.
    batch_size, target_batch_size : int
        Samples of the source and, unless None means as many, of the target.
    lr, weight_decay : float
        Of all optimisers.
    optimiser : {"adam", "sgd"}
        SGD has Nesterov momentum ``momentum``.
    refresh_every : int
        T, steps between refreshes of strata; 0 never refreshes. 100 in the paper.
    feature_source : {"bank", "full"}
        Strata are made from a store that the training batches keep up to date, or from a pass over all samples
        at each refresh, as in the paper.
    eval_every, checkpoint_every : int
        Steps between evaluations and between checkpoints.
    eval_batch_size : int
        Samples in a forward pass without gradient.
    selection : str
        Validator by which the model is chosen, see ``vardass.adapt.selection``.
    augment : bool
        Augment training images as DomainBed does.
    precision : {"32-true", "bf16-mixed"}
        Of the forward pass.
    device : str
        Such as ``"cuda:1"``; ``"auto"`` is a GPU if there is one.
    workers : int
        Processes that load samples which are not in memory.
    seed : int
        Determines the whole run.
    """

    algorithm: str = "mmd"
    algorithm_options: dict[str, Any] = field(default_factory=dict)
    sampler: str = "vardass"
    sampler_options: dict[str, Any] = field(default_factory=dict)
    network: str = "mlp"
    network_options: dict[str, Any] = field(default_factory=dict)
    steps: int = 3000
    batch_size: int = 32
    target_batch_size: int | None = None
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9
    optimiser: str = "adam"
    refresh_every: int = 100
    feature_source: str = "bank"
    eval_every: int = 100
    checkpoint_every: int = 500
    eval_batch_size: int = 256
    selection: str = "source-accuracy"
    augment: bool = False
    precision: str = "32-true"
    device: str = "auto"
    workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        algorithm_options(self.algorithm)  # says so if the name is unknown
        for name, low in _COUNTS.items():
            check_count(getattr(self, name), name, low=low)
        if self.target_batch_size is not None:
            check_count(self.target_batch_size, "target_batch_size")
        for name, choices in _CHOICES.items():
            choose(getattr(self, name), name, choices)
        if check_number(self.lr, "lr", low=0.0) == 0.0:
            raise InputError(f"lr must be above 0, got {self.lr}; 1e-3 is usual")
        check_number(self.weight_decay, "weight_decay", low=0.0)
        check_number(self.momentum, "momentum", low=0.0, below=1.0)
        for name in ("algorithm_options", "sampler_options", "network_options"):
            if not isinstance(getattr(self, name), Mapping):
                raise InputError(f"{name} must be a mapping of names to values, got {getattr(self, name)!r}")

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Type of a forward pass in mixed precision, or None."""
        return torch.bfloat16 if self.precision == "bf16-mixed" else None

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> RunConfig:
        """Make a configuration from settings by name; those that are absent have their defaults.

        Raises
        ------
        InputError
            If a name is unknown (the message has the nearest one) or a value cannot be used.

        Examples
        --------
        >>> RunConfig.from_dict({"algorithm": "coral", "steps": 10}).sampler
        'vardass'
        """
        known = [entry.name for entry in fields(cls)]
        for name in settings:
            if name not in known:
                raise unknown("setting", name, known)
        return cls(**settings)
