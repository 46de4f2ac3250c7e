"""Class-aligned batches of a run: pseudo-labels of the target, renewed at each refresh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.algorithms.registry import algorithm_uses_target
from vardass.adapt.batches import Stream
from vardass.adapt.evaluation import outputs
from vardass.errors import InputError
from vardass.samplers.class_alignment import EXPLAINED, ClassAlignment, align_classes, explained_by_shares
from vardass.samplers.registry import check_takes_shares, find_sampler
from vardass.validate import check_count, check_number, unknown

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig

__all__ = ["ClassAligner"]

_START = 300  # steps before the first pseudo-labels: a network that is not adapted yet gives many wrong ones


class ClassAligner:
    """Groups and shares of both domains for the refreshes of a run, see ``vardass.samplers.align_classes``.

    Batches are aligned from ``start`` steps on; or already at ``early`` steps, if different class shares explain at
    least ``explained`` of the discrepancy, see `explained_by_shares`. There is a refresh at both steps, whatever the
    policy says. Where the predictions leave too few samples for a batch, strata know no classes. What is returned
    depends on the network, the step and the samplers' state alone, so a resumed run is the same. No label of the target
    is read.

    Shares of predictions alone do not tell: before the discrepancy acts, a shift of the inputs makes them differ from
    the source's as well, and soon after it acts they are the source's, whatever the truth. Where the inputs have
    shifted, the order matters: first the discrepancy alone, which corrects most wrong predictions, then the classes.

    Parameters
    ----------
    config : RunConfig
        With ``class_aligned`` other than none.
    algorithm : Algorithm
        Predicts the classes of the target.
    streams : mapping of str to Stream
        ``"source"`` with labels, and ``"target"``.

    Attributes
    ----------
    log : dict of str to float
        Of the last call: ``classes/aligned`` (0 or 1), ``classes/distance`` (of the shares of labels and predictions),
        ``classes/unsure`` (share of target samples in no class) and ``classes/missing`` (classes of the source that no
        target sample is given).
    """

    def __init__(self, config: RunConfig, algorithm: Algorithm, streams: Mapping[str, Stream]) -> None:
        self.config, self.algorithm, self.streams = config, algorithm, streams
        self.options = dict(config.class_options)
        self.start = self.options.pop("start", _START)
        self.early = self.options.pop("early", self.start)
        self.explained = self.options.pop("explained", EXPLAINED)
        self.log: dict[str, float] = {}
        for name, stream in streams.items():
            if getattr(stream.sampler, "strata_count", None) is None:
                raise InputError(
                    f"class_aligned={config.class_aligned!r} needs groups with shares, which the {name} sampler "
                    f"({type(stream.sampler).__name__}) has not; use stratified, ordered or balanced"
                )
        _need_target(config.class_aligned, algorithm.name, uses_target="target" in streams)

    @staticmethod
    def check(config: RunConfig) -> None:
        """Refuse settings that do not go together."""
        checks: dict[str, Any] = {
            "start": lambda value: check_count(value, "start", low=0),
            "early": lambda value: check_count(value, "early", low=0),
            "explained": lambda value: check_number(value, "explained", low=0.0),
            "confidence": lambda value: check_number(value, "confidence", low=0.0, high=1.0),
            "floor": lambda value: check_number(value, "floor", low=0.0, high=1.0),
            "smoothing": lambda value: check_number(value, "smoothing", low=0.0, high=1.0),
        }
        for name, value in config.class_options.items():
            if name not in checks:
                raise unknown("option of class_aligned:", name, checks)
            checks[name](value)
        if config.class_aligned != "none":
            ClassAligner._check_parts(config)

    @staticmethod
    def can_align(config: RunConfig) -> bool:
        """Whether the algorithm, sampler and refreshes of ``config`` go with aligned classes."""
        if config.regression:
            return False
        try:
            ClassAligner._check_parts(config)
        except InputError:
            return False
        return True

    @staticmethod
    def _check_parts(config: RunConfig) -> None:
        what = f"class_aligned={config.class_aligned!r}"
        _need_target(config.class_aligned, config.algorithm, uses_target=algorithm_uses_target(config.algorithm))
        check_takes_shares(config.sampler, what)
        if config.groups is not None:
            raise InputError(f"{what} makes strata within classes itself, got groups={config.groups!r}; leave it out")
        if config.refresh_every == 0 or find_sampler(config.sampler).of_inputs:
            raise InputError(
                f"{what} takes predictions at each refresh, got refresh_every={config.refresh_every} and sampler "
                f"{config.sampler!r}, which are never refreshed; use refresh_every=100 and another sampler"
            )

    def __call__(self, step: int) -> Mapping[str, Mapping[str, Any]]:
        """Groups and shares by domain at ``step``; nothing before the start."""
        source, target = self.streams["source"], self.streams["target"]
        samplers: list[Any] = [source.sampler, target.sampler]
        if step < self.start and step != self.early and samplers[0].shares is None:
            return {}
        assert source.labels is not None
        z, logits = outputs(self.algorithm, target.inputs, **self.config.pass_options)
        if step == self.early < self.start:
            z_s, _ = outputs(self.algorithm, source.inputs, **self.config.pass_options)
            explained = explained_by_shares(z_s, source.labels, z, logits.argmax(1))
            if explained < self.explained:
                self.log = {"classes/aligned": 0.0, "classes/explained": explained}
                return {}
        found = align_classes(
            source.labels.cpu(),
            logits,
            shares=self.config.class_aligned,
            strata=(samplers[0].strata_count, samplers[1].strata_count),
            min_size=max(sampler.min_size for sampler in samplers),
            **self.options,
        )
        distance = _distance(source.labels.cpu(), logits.argmax(1).cpu(), logits.shape[1])
        self.log = {**_numbers(found), "classes/distance": distance}
        return found.by_domain


def _need_target(shares: str, algorithm: str, *, uses_target: bool) -> None:
    if not uses_target:
        raise InputError(
            f"class_aligned={shares!r} aligns source and target, but {algorithm!r} draws no target batches; use "
            "class_aligned='none'"
        )


def _distance(source: Tensor, target: Tensor, classes: int) -> float:
    """Total variation distance of the class shares of two sets of labels."""
    a, b = (torch.bincount(labels, minlength=classes).double() / len(labels) for labels in (source, target))
    return float((a - b).abs().sum() / 2.0)


def _numbers(found: ClassAlignment) -> dict[str, float]:
    groups = found.target["groups"]
    shares = [domain.get("shares", torch.ones(1)) > 0 for domain in found]
    return {
        "classes/aligned": float(found.is_aligned),
        "classes/unsure": float((groups < 0).double().mean()),
        "classes/missing": float((shares[0] & ~shares[1]).sum()),
    }
