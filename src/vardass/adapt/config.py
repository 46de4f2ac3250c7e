"""The settings of a run, as one value that can be written down and read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from vardass.adapt.algorithms import algorithm_options
from vardass.adapt.algorithms.base import check_number
from vardass.adapt.names import choose, unknown
from vardass.adapt.policies import POLICY_NAMES, make_policy
from vardass.adapt.precision import PRECISIONS, autocast_dtype
from vardass.adapt.samplers_by_name import SAMPLER_NAMES
from vardass.adapt.schedule import PARTS, SCHEDULE_NAMES
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
    "lr_schedule": SCHEDULE_NAMES,
    "refresh_policy": POLICY_NAMES,
    "feature_source": ("bank", "full"),
    "selection": SELECTION_NAMES,
    "precision": PRECISIONS,
    "accelerator": ("auto", "cpu", "cuda", "gpu", "mps"),
    "strategy": ("auto", "ddp", "ddp_spawn", "ddp_fork"),
}
_MAPPINGS = ("algorithm_options", "sampler_options", "network_options", "refresh_options", "lr_multipliers")


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
        Samples of the source and, unless None means as many, of the target, over all devices together.
    groups : {"classes"}, optional
        Strata of the source are made within its classes; samplers without strata or plan refuse.
    lr, weight_decay : float
        Of all optimisers.
    lr_schedule : {"none", "cosine", "inverse"}
        The rate at step i of N is lr times 1, (1 + cos(π i/N)) / 2, or TLlib's (1 + 0.001 i)^-0.75.
    lr_multipliers : dict of str to float
        Further factors of the rates of ``featuriser``, ``bottleneck``, ``head``, ``discriminator`` or ``context``.
    optimiser : {"adam", "sgd"}
        SGD has Nesterov momentum ``momentum``.
    adam_betas : (float, float), optional
        None: (0.9, 0.999), and DomainBed's (0.5, 0.9) for adversaries in alternating steps.
    refresh_every : int
        T, steps between refreshes of strata; 0 never refreshes. 100 in the paper.
    refresh_policy : {"every", "growing", "drift", "variance"}
        Refresh every T steps, ever less often, or when the features have drifted or the strata's variance has
        risen (both with a bank); these three use of T only whether it is 0.
    refresh_options : dict
        Of ``RefreshEvery``, ``GrowingRefresh``, ``DriftRefresh`` or ``VarianceRefresh``.
    feature_source : {"bank", "full"}
        Strata are made from a store that the training batches keep up to date, or from a pass over all samples
        at each refresh, as in the paper.
    background : bool
        Refresh and draw in a process of their own, see ``BackgroundSampler``: training does not wait, and new strata
        apply a quarter to a half of ``refresh_every`` later (at most 64 steps). The run is as repeatable.
    eval_every, checkpoint_every : int
        Steps between evaluations and between checkpoints.
    eval_batch_size : int
        Samples in a forward pass without gradient.
    selection : str
        Validator by which the model is chosen, see ``vardass.adapt.selection``.
    augment : bool
        Augment training images as DomainBed does.
    cache_embeddings : bool or "auto"
        Compute the outputs of a frozen backbone once and train the rest on them; ``"auto"`` does so where nothing
        random comes before them.
    tensorboard : bool
        Write the metrics for TensorBoard too.
    precision : {"32-true", "bf16-mixed", "16-mixed"}
        Of the forward pass, by Lightning's names. ``"16-mixed"`` scales the loss.
    device : str
        Such as ``"cuda:1"``; ``"auto"`` is a GPU if there is one.
    devices : int or "auto"
        Processes that train together, each on a device of its own, see ``vardass.adapt.launch``. ``"auto"`` takes
        all GPUs.
    accelerator : {"auto", "cpu", "cuda", "gpu", "mps"}
        Kind of the devices, where ``device`` leaves it open.
    strategy : {"auto", "ddp", "ddp_spawn", "ddp_fork"}
        How Lightning Fabric starts several processes; ``"auto"`` is ``"ddp"`` under torchrun, else ``"ddp_spawn"``.
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
    groups: str | None = None
    lr: float = 1e-3
    lr_schedule: str = "none"
    lr_multipliers: dict[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    momentum: float = 0.9
    optimiser: str = "adam"
    adam_betas: Sequence[float] | None = None
    refresh_every: int = 100
    refresh_policy: str = "every"
    refresh_options: dict[str, Any] = field(default_factory=dict)
    feature_source: str = "bank"
    background: bool = False
    eval_every: int = 100
    checkpoint_every: int = 500
    eval_batch_size: int = 256
    selection: str = "source-accuracy"
    augment: bool = False
    cache_embeddings: bool | str = False
    tensorboard: bool = False
    precision: str = "32-true"
    device: str = "auto"
    devices: int | str = 1
    accelerator: str = "auto"
    strategy: str = "auto"
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
        for name in ("background", "augment", "tensorboard"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if check_number(self.lr, "lr", low=0.0) == 0.0:
            raise InputError(f"lr must be above 0, got {self.lr}; 1e-3 is usual")
        check_number(self.weight_decay, "weight_decay", low=0.0)
        check_number(self.momentum, "momentum", low=0.0, below=1.0)
        for name in _MAPPINGS:
            if not isinstance(getattr(self, name), Mapping):
                raise InputError(f"{name} must be a mapping of names to values, got {getattr(self, name)!r}")
        if self.groups is not None:
            choose(self.groups, "groups", ("classes",))
        if self.cache_embeddings not in (True, False, "auto"):
            raise InputError(f"cache_embeddings must be True, False or 'auto', got {self.cache_embeddings!r}")
        if self.devices != "auto":
            check_count(self.devices, "devices", remedy="'auto' takes all GPUs")
        for name, factor in self.lr_multipliers.items():
            check_number(factor, f"lr_multipliers[{choose(name, 'part of lr_multipliers', PARTS)!r}]", low=0.0)
        self._check_betas()
        make_policy(self)

    def _check_betas(self) -> None:
        if self.adam_betas is None:
            return
        betas = list(self.adam_betas) if isinstance(self.adam_betas, Sequence) else []
        if len(betas) != 2:
            raise InputError(f"adam_betas must be two numbers such as (0.9, 0.999), got {self.adam_betas!r}")
        object.__setattr__(self, "adam_betas", [check_number(beta, "adam_betas", low=0.0, below=1.0) for beta in betas])

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Type of a forward pass in mixed precision, or None."""
        return autocast_dtype(self.precision)

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
