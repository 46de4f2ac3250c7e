"""The trained model: built from settings, saved, loaded, and its result; frozen backbones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vardass.adapt.algorithms import ARM, Algorithm, make_algorithm
from vardass.adapt.batches import Inputs
from vardass.adapt.evaluation import accuracy, outputs
from vardass.adapt.networks import Network, make_network
from vardass.adapt.run_folder import flatten_state, load_checkpoint, save_checkpoint, unflatten_state
from vardass.data.domains import Domain
from vardass.data.splits import TaskSplits, derived_seed
from vardass.errors import InputError
from vardass.refresh import extract_features
from vardass.validate import Progress

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig

__all__ = [
    "MODEL_FILE",
    "FrozenBackbone",
    "RunResult",
    "build_algorithm",
    "final_report",
    "load_model",
    "save_model",
]


# --- what a run leaves behind ---

MODEL_FILE = "model.safetensors"


@dataclass(frozen=True, eq=False)
class RunResult:
    """The end of a run, or where it was interrupted.

    Attributes
    ----------
    config : RunConfig
        Settings.
    algorithm : Algorithm
        With the chosen weights, in evaluation mode.
    step : int
        Steps trained.
    selected_step : int
        After how many of them the chosen weights were.
    score : float or None
        Of the chosen weights, by ``config.selection``; None if there was no evaluation yet.
    interrupted : bool
        Whether it stopped before ``config.steps``.
    metrics : list of dict
        One entry for each evaluation, as in ``metrics.jsonl``.
    seconds : dict of str to float
        Spent in training, features, solver, drawing, evaluation and saving.
    out : Path or None
        Folder of the run.
    """

    config: RunConfig
    algorithm: Algorithm
    step: int
    selected_step: int
    score: float | None
    interrupted: bool
    metrics: list[dict[str, Any]]
    seconds: dict[str, float]
    out: Path | None


def build_algorithm(config: RunConfig, input_shape: tuple[int, ...], num_classes: int) -> Algorithm:
    """Network and algorithm of a run, with the initial weights that its seed gives."""
    network_seed = {"seed": derived_seed("network", config.seed), **config.network_options}
    algorithm_seed = {"seed": derived_seed("algorithm", config.seed) % 2**31, **config.algorithm_options}
    network = make_network(config.network, input_shape, num_classes, **network_seed)
    return make_algorithm(config.algorithm, network, num_classes, **algorithm_seed)


def final_report(result: RunResult, splits: TaskSplits) -> dict[str, Any]:
    """Accuracy of the chosen model on held-out source and target: the only place that reveals target labels.

    Returns
    -------
    dict
        ``"source_accuracy"`` and ``"target_accuracy"``, None where there are no samples or labels;
        ``"target_samples"``, ``"selected_step"``, ``"selection"`` and ``"score"``.
    """
    target = splits.target_test
    # a copy is revealed: whoever holds the splits still cannot read the labels by mistake
    revealed = target.subset(torch.arange(len(target))).reveal()
    return {
        "algorithm": result.config.algorithm,
        "sampler": result.config.sampler,
        "selection": result.config.selection,
        "score": result.score,
        "selected_step": result.selected_step,
        "source_accuracy": _accuracy(result, splits.source_val),
        "target_accuracy": _accuracy(result, revealed),
        "target_samples": len(target),
    }


def _accuracy(result: RunResult, domain: Domain) -> float | None:
    if not len(domain) or not domain.has_labels:
        return None
    config = result.config
    inputs = Inputs(domain, next(result.algorithm.parameters()).device)
    _, logits = outputs(
        result.algorithm,
        inputs,
        batch_size=config.eval_batch_size,
        workers=config.workers,
        dtype=config.autocast_dtype,
    )
    return accuracy(logits, domain.known_labels())


def save_model(
    result: RunResult,
    path: str | os.PathLike[str],
    class_names: Sequence[str],
    *,
    input_shape: tuple[int, ...],
    kind: str,
) -> None:
    """Write the chosen weights with what `load_model` needs to build their network again."""
    state, tree = flatten_state(dict(result.algorithm.state_dict()))
    _, config = flatten_state(result.config.to_dict())
    meta = {
        "kind": "model",
        "config": config,
        "class_names": list(class_names),
        "data_kind": kind,
        "input_shape": list(input_shape),
        "step": result.selected_step,
        "score": result.score,
        "state": tree,
    }
    save_checkpoint(path, state, meta)


def load_model(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> tuple[Algorithm, dict[str, Any]]:
    """Read a model that a run wrote: the algorithm in evaluation mode, and a dict that describes it.

    Parameters
    ----------
    path : path
        ``model.safetensors``, or the folder of the run.
    device : device
        Where it is to predict.

    Returns
    -------
    algorithm : Algorithm
        ``algorithm.predict(x)`` gives logits.
    about : dict
        ``"config"``, ``"class_names"``, ``"data_kind"``, ``"input_shape"``, ``"step"`` and ``"score"``.
    """
    file = Path(path)
    file = file / MODEL_FILE if file.is_dir() else file
    tensors, meta = load_checkpoint(file)
    if meta.get("kind") != "model":
        raise InputError(f"{file} holds the state of a run, not a model; pass {MODEL_FILE} of the run's folder")
    from vardass.adapt.config import RunConfig  # which needs this module

    config = RunConfig.from_dict(unflatten_state({}, meta["config"]))
    algorithm = build_algorithm(config, tuple(meta["input_shape"]), len(meta["class_names"]))
    try:
        algorithm.load_state_dict(unflatten_state(tensors, meta.pop("state")))
    except RuntimeError as error:
        raise InputError(
            f"the weights in {file} do not fit the network {config.network!r}: {str(error).splitlines()[-1].strip()}; "
            "was the network changed since?"
        ) from None
    return algorithm.to(device).eval(), {**meta, "config": config}


# --- a frozen backbone computes the same outputs in every step ---


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
