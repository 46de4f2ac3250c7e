"""When and from what a run updates its strata: policies by name, features and classes of both domains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.algorithms.registry import find_algorithm
from vardass.adapt.batches import Draw, Stream, counted, pass_over
from vardass.adapt.selection import outputs
from vardass.errors import InputError
from vardass.refresh import FeatureBank, GrowingRefresh, Refresher, RefreshEvery, RefreshPolicy, Timer
from vardass.refresh.feature_extraction import evaluation_mode
from vardass.samplers.class_alignment import EXPLAINED, align_classes, explained_by_shares, task_weights
from vardass.samplers.registry import check_takes_shares, find_sampler
from vardass.validate import Progress, check_count, check_number, choose

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig


_MIN_MOVEMENT = 1e-4  # share of their spread that features must have moved by for a refresh, see `Refresher`


def make_policy(config: RunConfig) -> RefreshPolicy:
    """Policy of a run; strata of inputs are made once."""
    if find_sampler(config.sampler).of_inputs:
        return RefreshEvery(0)
    return GrowingRefresh() if isinstance(config.refresh_every, str) else RefreshEvery(config.refresh_every)


# --- classes ------------------------------------------------------------------------------------------

_STEPS, _SHARES = ("start", "early"), ("explained", "confidence", "floor")  # options
_START = 300  # steps before the first pseudo-labels: a network that is not adapted yet gives many wrong ones


class ClassAligner:
    """Groups and shares of both domains for the refreshes of a run, see ``vardass.samplers.align_classes``.

    Batches are aligned from ``start`` steps on; or already at ``early`` steps, if different class shares explain at
    least ``explained`` of the discrepancy (ARCHITECTURE.md says why). There is a refresh at both steps, whatever the
    policy says. What is returned depends on the network, the step and the samplers' state alone, so a resumed run is
    the same. No label of the target is read.
    """

    def __init__(self, config: RunConfig, algorithm: Algorithm, streams: Mapping[str, Stream]) -> None:
        self.config, self.algorithm, self.streams = config, algorithm, streams
        self.options = dict(config.class_options)
        self.start = self.options.pop("start", _START)
        self.early = self.options.pop("early", self.start)
        self.explained = self.options.pop("explained", EXPLAINED)
        self.log: dict[str, float] = {}
        self._groups: tuple[Any, ...] = (None,)  # of the source's sampler, the same on the device, and their sizes
        for name, stream in streams.items():
            if getattr(stream.sampler, "strata_count", None) is None:
                raise InputError(
                    f"class_shares='uniform' needs groups with shares, which the {name} sampler "
                    f"({type(stream.sampler).__name__}) lacks; use stratified, ordered or balanced"
                )
        _need_target(algorithm.name, uses_target="target" in streams)

    @staticmethod
    def check(config: RunConfig) -> None:
        """Refuse settings that do not go together."""
        for name, value in config.class_options.items():
            if choose(name, "option of class_shares:", (*_STEPS, *_SHARES)) in _STEPS:
                check_count(value, name, low=0)
            else:
                check_number(value, name, low=0.0, high=math.inf if name == "explained" else 1.0)
        what = f"class_shares={config.class_shares!r}"
        if config.class_shares != "none":
            check_takes_shares(config.sampler, what)
        if config.class_shares != "uniform":
            return
        _need_target(config.algorithm, uses_target=find_algorithm(config.algorithm).uses_target)
        if config.refresh_every == 0 or find_sampler(config.sampler).of_inputs:
            raise InputError(
                f"{what} takes predictions at each refresh, got refresh_every={config.refresh_every} and sampler "
                f"{config.sampler!r}, which are never refreshed; use refresh_every=100 and another sampler",
                field="class_shares",
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
            strata=(samplers[0].strata_count, samplers[1].strata_count),
            min_size=max(sampler.min_size for sampler in samplers),
            **self.options,
        )
        unsure = float((found.target["groups"] < 0).double().mean())
        self.log = {"classes/aligned": float(found.is_aligned), "classes/unsure": unsure}
        return found.by_domain

    def with_task_weights(self, source: Draw) -> Draw:
        """The source's classes as they are in the task loss, where its sampler gives them other shares."""
        sampler: Any = self.streams["source"].sampler
        weights = source.batch.weights
        if sampler.shares is None or not isinstance(weights, Tensor):
            return source
        if sampler.groups is not self._groups[0]:
            on_device = sampler.groups.to(weights.device)
            self._groups = sampler.groups, on_device, torch.bincount(on_device + 1)[1:]
        _, groups, sizes = self._groups
        return source._replace(
            batch=source.batch._replace(task_weights=task_weights(weights, groups[source.rows], sizes))
        )


def _need_target(algorithm: str, *, uses_target: bool) -> None:
    if not uses_target:
        raise InputError(
            f"class_shares='uniform' aligns source and target, but {algorithm!r} draws no target batches; use "
            "class_shares='none'",
            field="class_shares",
        )


# --- strata -------------------------------------------------------------------------------------------


class StrataUpdater:
    """Keep the strata of ``streams`` up to date with the features of ``algorithm`` while a run trains.

    A bank holds features before dropout, with the network's own parameters: what the discrepancy sees at evaluation,
    apart from age (rows of the last step differ by 0.02 of their deviation, of the last 20 steps by 0.25: an MLP on the
    watch data). BatchNorm normalises by the batch in training and by running statistics in evaluation, so there they
    differ by 0.6 to 1.2 (a convolutional network on digits), and strata are those of features as training sees them;
    for those of evaluation take ``feature_source="full"``, or ``freeze_bn`` with a pretrained network.

    With several processes the leading one makes the strata and sends them to the others: those of another one might
    differ by rounding, and then no batch would fit together.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        streams: Mapping[str, Stream],
        *,
        account: Timer,
    ) -> None:
        self.config, self.algorithm, self.streams, self.account = config, algorithm, streams, account
        self.processes, self.device = algorithm.processes, streams["source"].inputs.device
        policy = make_policy(config)
        from_bank = config.feature_source == "bank" and getattr(policy, "period", None) != 0
        self.banks = {
            name: FeatureBank(len(stream.inputs), device=self.device)
            for name, stream in streams.items()
            if from_bank and stream.sampler.needs_features
        }
        self.classes = ClassAligner(config, algorithm, streams) if config.class_shares == "uniform" else None
        self.refresher = Refresher(
            policy,
            {name: stream.sampler for name, stream in streams.items()},
            {name: self.banks.get(name) or partial(self.all_features, name) for name in streams},
            groups=self._other_domain if find_sampler(config.sampler).kind.plans_both_domains else self.classes,
            timer=account,
            broadcast=False,  # `_send_strata` does it, with the rest of what the leading process decides
            min_movement=_MIN_MOVEMENT,
        )

    def begin(self, progress: Progress | None = None) -> None:
        """Fill the banks, and make the strata that come from inputs."""
        if self.processes.is_first:
            total, done = sum(bank.n for bank in self.banks.values()), 0
            with self.account("features"):
                for name, bank in self.banks.items():
                    share = counted(progress, "features", done, bank.n, total)
                    bank.update(torch.arange(bank.n), self.all_features(name, progress=share))
                    done += bank.n
        if find_sampler(self.config.sampler).of_inputs:
            for stream in self.streams.values() if self.processes.is_first else ():
                with self.account("solver"):
                    stream.sampler.refresh(stream.inputs.flat(workers=self.config.pass_options["num_workers"]))
            self._send_strata()

    def _other_domain(self, step: int) -> dict[str, dict[str, Any]]:
        """For samplers that order both domains together: the features of the other one."""
        if "target" not in self.streams:
            return {}
        sources = self.refresher.sources  # those of the refresh itself: both samplers must see the same numbers
        z = {name: each.features() if isinstance(each, FeatureBank) else each() for name, each in sources.items()}
        return {"source": {"other": z["target"]}, "target": {"other": z["source"]}}

    def before_step(self, step: int, *, stop: bool = False) -> tuple[bool, dict[str, Any] | None]:
        """Refresh if it is time, and agree with the other processes on whether to ``stop``."""
        log = None
        if self.processes.is_first and not stop:
            # whatever the policy: shares are compared before the discrepancy pulls at the features
            now = self.classes is not None and step in (self.classes.early, self.classes.start)
            log = self.refresher.step(step, now=now)
            if log is not None and self.classes is not None:
                log |= self.classes.log
        stop, log = self.processes.same((stop, log))
        if log is not None:
            self._send_strata()
        return stop, log

    def _send_strata(self) -> None:
        if self.processes.count == 1:
            return
        states = {name: stream.sampler.state_dict() for name, stream in self.streams.items()}
        for name, state in self.processes.same(states).items():
            if not self.processes.is_first:
                self.streams[name].sampler.load_state_dict(state)

    def after_step(self, draws: Mapping[str, Draw], computed: Mapping[str, Tensor]) -> None:
        """Store the features of a step by domain; those that it did not compute are computed here."""
        for name, bank in self.banks.items():
            z = computed.get(name)
            if z is None:
                with evaluation_mode(self.algorithm), torch.no_grad(), self.config.autocast(self.device):
                    z = self.algorithm.features(draws[name].batch.x)
            z = self.processes.whole(z)
            if self.processes.is_first:  # nobody else looks at the bank
                bank.keep(draws[name].rows, z)

    def completed(self, draws: dict[str, Draw]) -> dict[str, Draw]:
        """Give aligned batches of the source their task weights."""
        if self.classes is None:
            return draws
        return {**draws, "source": self.classes.with_task_weights(draws["source"])}

    def all_features(self, name: str, *, progress: Progress | None = None) -> Tensor:
        """Features (n, d) of a domain by a pass over all its samples."""
        return pass_over(
            self.algorithm,
            self.streams[name].inputs,
            lambda model, x: model.features(x),
            out_device=self.device,
            progress=progress,
            **self.config.pass_options,
        )
