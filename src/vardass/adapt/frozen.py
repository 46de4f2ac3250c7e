"""A frozen backbone computes the same outputs in every step: compute them once and train the rest on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from vardass.adapt.algorithms import ARM, Algorithm
from vardass.adapt.config import RunConfig
from vardass.adapt.networks import Network
from vardass.adapt.streams import Inputs
from vardass.errors import InputError
from vardass.refresh.extract import Progress, extract_features

__all__ = ["FrozenBackbone"]


class FrozenBackbone:
    """The backbone of an algorithm, taken out while its outputs are cached, and put back into the chosen model.

    Use `take_out`. The algorithm then takes embeddings (b, m) instead of samples.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.featuriser: nn.Module = algorithm.network.featuriser.eval()
        algorithm.network.featuriser = nn.Identity()

    @classmethod
    def take_out(cls, config: RunConfig, algorithm: Algorithm) -> FrozenBackbone | None:
        """Take the backbone out if ``config.cache_embeddings`` asks for it.

        Raises
        ------
        InputError
            If it is True and the outputs change from step to step.
        """
        if not config.cache_embeddings:
            return None
        reason = _why_not(config, algorithm)
        if reason is None:
            return cls(algorithm)
        if config.cache_embeddings == "auto":
            return None
        raise InputError(f"cache_embeddings=True needs outputs that stay the same, but {reason}; use 'auto' or False")

    def put_back(self, algorithm: Algorithm) -> Algorithm:
        """Let ``algorithm`` take samples again."""
        algorithm.network.featuriser = self.featuriser
        return algorithm

    def embed(self, inputs: Sequence[Inputs], config: RunConfig, *, progress: Progress | None = None) -> None:
        """Replace all samples by their embeddings, in memory; those that are replaced already are left alone."""
        waiting = [part for part in inputs if not part.is_embedded]
        total, done = sum(len(part) for part in waiting), 0
        for part in waiting:
            embeddings = extract_features(
                self.featuriser,
                part.data,
                forward=partial(_prepared, part),
                out_device=part.device,
                batch_size=config.eval_batch_size,
                device=part.device,
                num_workers=config.workers,
                autocast_dtype=config.autocast_dtype,
                progress=_shifted(progress, done, len(part), total),
            )
            part.replace(embeddings)
            done += len(part)


def _prepared(inputs: Inputs, model: nn.Module, x: Tensor) -> Tensor:
    z: Tensor = model(inputs.prepare(x))
    return z.flatten(1)


def _why_not(config: RunConfig, algorithm: Algorithm) -> str | None:
    network = algorithm.network
    if not network.freeze_backbone:
        return "the backbone is trained (network_options freeze_backbone=True would freeze it)"
    if config.augment:
        return "images are augmented at random"
    if isinstance(algorithm, ARM):
        return "ARM feeds the backbone a context that is trained"
    kind = type(network)
    if kind.embed is not Network.embed or kind.features is not Network.features:
        return f"{kind.__name__} computes its features in its own way"
    return None


def _shifted(progress: Progress | None, done: int, count: int, total: int) -> Callable[[float, str], object] | None:
    if progress is None:
        return None
    return lambda share, message: progress(0.0, f"embeddings of {done + round(share * count):,} of {total:,} samples")
