"""When and from what a run refreshes its strata: policies by name, and the features of both domains."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Draw, Stream, pass_over
from vardass.adapt.class_aligner import ClassAligner
from vardass.adapt.distributed import Processes
from vardass.data.splits import derived_seed
from vardass.errors import InputError
from vardass.losses import Bank
from vardass.refresh import (
    FeatureBank,
    NeverRefresh,
    Refresher,
    RefreshPolicy,
    TimeAccount,
)
from vardass.refresh.feature_extraction import evaluation_mode
from vardass.refresh.policies import POLICIES
from vardass.registry import check_options, declared_options
from vardass.samplers.registry import find_sampler
from vardass.strata import Strata
from vardass.validate import as_generator

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig

__all__ = [
    "POLICY_NAMES",
    "StrataUpdater",
    "make_policy",
]


POLICY_NAMES = tuple(POLICIES)

_STILL = 1e-4  # share of their spread that features must have moved by for a refresh, see `Refresher`


def make_policy(config: RunConfig) -> RefreshPolicy:
    """Policy of a run; strata of inputs are made once, and with T = 0 nothing is refreshed.

    Raises
    ------
    InputError
        If an option is unknown, or a policy that observes batches has no bank to compare them with.
    """
    name = config.refresh_policy
    kind = POLICIES.find(name)
    options = dict(config.refresh_options)
    if "period" in options:
        raise InputError("the period is set with refresh_every; leave it out of refresh_options")
    check_options(f"refresh_policy {name!r}", options, kind, without=("period",))
    if "period" in declared_options(kind):
        options["period"] = max(1, config.refresh_every)
    made = kind(**options)
    if made.observes == "drift" and config.feature_source != "bank":
        raise InputError(
            f"refresh_policy {name!r} compares batches with a bank, got feature_source={config.feature_source!r}; use "
            "feature_source='bank', or refresh_policy 'every' or 'growing'"
        )
    if made.observes is not None and config.background:
        raise InputError(
            f"refresh_policy {name!r} measures strata right after a refresh, but background={config.background} brings "
            "them later; use background=False, or refresh_policy 'every' or 'growing'"
        )
    return made if config.refresh_every > 0 and not find_sampler(config.sampler).of_inputs else NeverRefresh()


class StrataUpdater:
    """Keep the strata of ``streams`` up to date with the features of ``algorithm`` while a run trains.

    A bank holds what the discrepancy sees at evaluation, apart from age and what training mode changes: features
    before dropout, with the network's own parameters. BatchNorm makes them differ, as training normalises by the
    batch, evaluation by running statistics of both domains; so does augmentation. Measured after 60 steps of MMD at
    batch 32 as the root mean square difference to a full pass, over the deviation of the features: rows of the last
    step 0.02 for an MLP on the watch data, with dropout or without, rows of the last 20 steps 0.25 to 0.28; for a
    convolutional network on digits, rows of the last step 0.23 without BatchNorm's statistics (``freeze_bn``), with
    them 0.6 to 0.7 of the source (0.83 augmented) and 1.1 to 1.2 of the target. There strata are those of features as
    training sees them; for those of evaluation take ``feature_source="full"``, or ``freeze_bn`` with a pretrained
    network.

    With several processes the leading one makes the strata and sends them to the others: those of another one might
    differ by rounding, and then no batch would fit together.

    Attributes
    ----------
    banks : dict of str to FeatureBank
        Of the domains whose sampler needs features, unless each refresh makes a full pass; of all domains where the
        loss looks at banks.
    refresher : Refresher
        Policy, samplers and sources.
    classes : ClassAligner or None
        Renews classes, if batches are aligned.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        streams: Mapping[str, Stream],
        *,
        device: torch.device,
        processes: Processes,
        account: TimeAccount,
    ) -> None:
        self.config, self.algorithm, self.streams = config, algorithm, streams
        self.device, self.processes, self.account = device, processes, account
        policy = make_policy(config)
        from_bank = config.feature_source == "bank" and not isinstance(policy, NeverRefresh)
        self.banks = {
            name: FeatureBank(len(stream.inputs), device=device)
            for name, stream in streams.items()
            if algorithm.uses_banks or (from_bank and stream.sampler.needs_features)
        }
        self.classes = None if config.class_aligned == "none" else ClassAligner(config, algorithm, streams)
        # nobody looks at the banks before the next refresh
        self._only_keeps = policy.observes is None and not algorithm.uses_banks
        self._rows: dict[str, Tensor] = {}  # of the banks, as `with_banks` hands them on
        self.refresher = Refresher(
            policy,
            {name: stream.sampler for name, stream in streams.items()},
            {
                name: self.banks[name] if from_bank and name in self.banks else partial(self._renewed, name)
                for name in streams
            },
            groups=self._other_domain if find_sampler(config.sampler).kind.plans_both_domains else self.classes,
            account=account,
            share=False,  # `_send_strata` does it, with the rest of what the leading process decides
            still=_STILL,
        )

    def begin(self) -> None:
        """Fill the banks, and make the strata that come from inputs."""
        if self.processes.leads or self.algorithm.uses_banks:
            with self.account("features"):
                for name, bank in self.banks.items():
                    bank.update(torch.arange(bank.n), self.all_features(name), step=0)
        if find_sampler(self.config.sampler).of_inputs:
            for stream in self.streams.values() if self.processes.leads else ():
                with self.account("solver"):
                    stream.sampler.refresh(stream.inputs.flat(workers=self.config.workers))
            self._send_strata()

    def _other_domain(self, step: int) -> dict[str, dict[str, Any]]:
        """For samplers that order both domains together: the features of the other one."""
        if "target" not in self.streams:
            return {}
        sources = self.refresher.sources  # those of the refresh itself: both samplers must see the same numbers
        z = {name: each.features() if isinstance(each, FeatureBank) else each() for name, each in sources.items()}
        return {"source": {"other": z["target"]}, "target": {"other": z["source"]}}

    def before_step(self, step: int, *, stop: bool = False) -> tuple[bool, dict[str, Any] | None]:
        """Refresh if it is time, and agree with the other processes on whether to ``stop``.

        Returns
        -------
        stop : bool
            What the leading process wants.
        log : dict or None
            Of a refresh, see ``Refresher.step``.
        """
        log = None if stop or not self.processes.leads else self._refresh(step)
        if self.processes.count > 1:
            stop, log = self.processes.same((stop, log))
            if log is not None:
                self._send_strata()
        return stop, log

    def _refresh(self, step: int) -> dict[str, Any] | None:
        # whatever the policy: shares are compared before the discrepancy pulls at the features
        log = self.refresher.step(
            step, now=self.classes is not None and step in (self.classes.early, self.classes.start)
        )
        return log if log is None or self.classes is None else {**log, **self.classes.log}

    def _send_strata(self) -> None:
        if self.processes.count == 1:
            return
        states = {name: stream.sampler.state_dict() for name, stream in self.streams.items()}
        for name, state in self.processes.same(states).items():
            if not self.processes.leads:
                self.streams[name].sampler.load_state_dict(state)

    def after_step(self, step: int, draws: Mapping[str, Draw], features: Mapping[str, Tensor]) -> None:
        """Store the features that a step computed; a batch that only SDAT's ascent looked at is computed anew."""
        for name in self.banks:
            found = features.get(name)
            if found is None and name == "source":
                raise InputError(
                    f"a network of type {type(self.algorithm.network).__name__} does not show the features of its "
                    "steps to the feature bank; use feature_source='full'"
                )
            if found is None and self.algorithm.sharpness > 0.0:
                found = self._features_of(draws[name])
            if found is not None:
                draw, whole = draws[name], self.processes.whole(found)
                source = self.refresher.sources[name]
                if self.processes.leads and isinstance(source, FeatureBank):
                    if self._only_keeps:
                        source.keep(draw.rows, whole, step)
                        continue
                    self.refresher.observe(name, draw.rows, whole, step=step, weights=draw.batch.weights)
                elif self.algorithm.uses_banks:
                    self.banks[name].update(draw.rows, whole, step)

    def with_banks(self, draws: dict[str, Draw], step: int) -> dict[str, Draw]:
        """Give each batch the bank of its domain, where the loss looks at it.

        The bank has the strata of the sampler, and weights where these have shares of their own, so that it stands
        for the mixture that batches are drawn from.
        """
        if not self.algorithm.uses_banks:
            return draws
        return {
            name: draw._replace(batch=draw.batch._replace(bank=self._bank(name, draw, step)))
            for name, draw in draws.items()
        }

    def _bank(self, name: str, draw: Draw, step: int) -> Bank:
        if name not in self._rows:
            self._rows[name] = self.banks[name].features()
        rows, stream = self._rows[name], self.streams[name]
        strata: Strata | None = getattr(stream.sampler, "strata", None)
        weights = None if strata is None or strata.shares is None else strata.row_weights.to(rows)
        if getattr(self.algorithm, "estimator", "") == "reference":
            most = self.config.reference_rows
            if len(rows) <= most:
                return Bank(rows, weights)
            # independent of the batch, so that the mean stays as it is
            generator = as_generator(derived_seed("bank", name, self.config.seed, step), rows.device)
            if weights is None:
                return Bank(
                    rows[torch.randint(len(rows), (most,), generator=generator, device=rows.device)], mean=rows.mean(0)
                )
            picked = torch.multinomial(weights, most, replacement=True, generator=generator)
            return Bank(rows[picked], mean=weights @ rows)
        if strata is None or draw.batch.strata is None or bool((draw.batch.strata.bincount() > 1).all()):
            return Bank(rows, weights)
        if stream.asks_ahead:
            raise InputError(
                f"estimator='unbiased' with one draw from each stratum needs the strata of each batch, but the "
                f"{stream.workers} workers of the {name} ask for batches ahead of a refresh; use workers=0, "
                "sampler_options={'draws_per_stratum': 2}, or estimator='reference'"
            )
        return Bank(rows, weights, strata.labels.to(rows.device))

    def _features_of(self, draw: Draw) -> Tensor:
        half = self.config.autocast_dtype
        autocast = torch.autocast(self.device.type, dtype=half or torch.bfloat16, enabled=half is not None)
        with evaluation_mode(self.algorithm), torch.no_grad(), autocast:
            return self.algorithm.features(draw.batch.x)

    def _renewed(self, name: str) -> Tensor:
        """Features by a pass over all samples, which also renews the bank that the loss looks at."""
        features = self.all_features(name)
        if name in self.banks and self.processes.count == 1:  # elsewhere all processes must have the same bank
            self.banks[name].update(torch.arange(len(features)), features)
        return features

    def all_features(self, name: str) -> Tensor:
        """Features (n, d) of a domain by a pass over all its samples."""
        return pass_over(
            self.algorithm,
            self.streams[name].inputs,
            lambda model, x: model.features(x),
            out_device=self.device,
            **self.config.pass_options,
        )
