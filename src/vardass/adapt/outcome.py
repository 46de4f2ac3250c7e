"""What a run leaves behind: the chosen model, its history, and the report that may look at target labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vardass.adapt.algorithms import Algorithm, make_algorithm
from vardass.adapt.checkpoint import flatten_state, load_checkpoint, save_checkpoint, unflatten_state
from vardass.adapt.config import RunConfig
from vardass.adapt.networks import make_network
from vardass.adapt.selection import accuracy
from vardass.adapt.streams import Inputs
from vardass.data.domains import Domain
from vardass.data.splits import TaskSplits, derived_seed
from vardass.errors import InputError
from vardass.refresh import extract_features

__all__ = ["MODEL_FILE", "RunResult", "build_algorithm", "final_report", "load_model", "outputs", "save_model"]

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


def outputs(
    algorithm: Algorithm, inputs: Inputs, *, batch_size: int = 256, workers: int = 0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Features (n, d) and logits (n, classes) of all samples, on the CPU, in evaluation mode.

    Parameters
    ----------
    algorithm : Algorithm
        On the device of ``inputs``.
    inputs : Inputs
        Samples of one domain.
    batch_size, workers : int
        Samples in a forward pass; processes that load them.
    dtype : torch.dtype, optional
        Of a forward pass in mixed precision.
    """

    def both(model: Algorithm, x: Tensor) -> Tensor:
        z = model.features(inputs.prepare(x))
        return torch.cat([z, model.network.head(z)], 1)

    joint = extract_features(
        algorithm,
        inputs.data,
        forward=both,
        batch_size=batch_size,
        device=inputs.device,
        num_workers=workers,
        autocast_dtype=dtype,
    )
    width = joint.shape[1] - algorithm.num_classes
    return joint[:, :width], joint[:, width:]


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
