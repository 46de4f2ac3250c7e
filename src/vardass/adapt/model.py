"""The trained model: built from settings or a user's own parts, scored, saved, loaded and exported."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, PositiveInt, ValidationError, model_validator
from torch import Tensor, nn

from vardass.adapt.algorithms import Algorithm, make_algorithm
from vardass.adapt.batches import Inputs
from vardass.adapt.class_structure import Vote
from vardass.adapt.config import RunConfig, as_input_error
from vardass.adapt.networks import Network, make_network, pretrained_source
from vardass.adapt.pretrained import backbone_config, backbone_from_config
from vardass.adapt.run_folder import Reading
from vardass.adapt.selection import SCORE_NAMES, label_scores, outputs
from vardass.data.domains import Domain, Kind
from vardass.data.from_paths import preparation
from vardass.data.images import ImagePreprocessing
from vardass.data.splits import TaskSplits, named_seed
from vardass.errors import InputError, needs_extra
from vardass.files import PathLike, as_path, atomic_write, check_replaceable, parse_json, plain, write_output
from vardass.validate import refuse_code

MODEL_FILE = "model.safetensors"
_HEADER = "vardass"  # the entry of the file's meta data that describes the model


@dataclass(frozen=True)
class Choice:
    """Which model was kept, and what the choice was based on; nothing of it uses target labels.

    Attributes
    ----------
    model : str
        ``"vote"``, ``"adapted"`` (in a regression) or ``"source-only"``.
    objection : str or None
        Why adaptation was not kept.
    source_only_score, adapted_score : float or None
        Accuracy, or R², on held-out source samples.
    evidence : dict
        Measurements by name, see `vardass.adapt.class_structure.Evidence` and `RegressionEvidence`.
    """

    model: str
    objection: str | None
    source_only_score: float | None
    adapted_score: float | None
    evidence: dict[str, Any]


@dataclass(frozen=True, eq=False)
class RunResult:
    """The result of a run, complete or interrupted.

    Attributes
    ----------
    config : RunConfig
        Settings.
    algorithm : Algorithm
        With the chosen weights, in evaluation mode.
    step : int
        Steps trained.
    selected_step : int
        Step of the chosen weights.
    score : float or None
        Score of the chosen weights under ``config.selection``; None if there was no evaluation yet.
    equal_steps : list of int
        Steps of the competing evaluations that did not differ from the best one, see ``vardass.adapt.selection``.
    competing : int
        Number of evaluations that competed.
    interrupted : bool
        Whether it stopped before ``config.steps``.
    metrics : list of dict
        One entry for each evaluation, as in ``metrics.jsonl``.
    seconds : dict of str to float
        Spent in training, features, solver, drawing, evaluation and saving.
    out : Path or None
        Folder of the run.
    own_parts : dict of str to str
        Types of the objects that the trainer was given instead of names in the settings.
    choice : Choice or None
        Which model was kept, where a source-only reference was trained too, see ``Adaptation``.
    """

    config: RunConfig
    algorithm: Algorithm
    step: int
    selected_step: int
    score: float | None
    equal_steps: list[int]
    competing: int
    interrupted: bool
    metrics: list[dict[str, Any]]
    seconds: dict[str, float]
    out: Path | None
    own_parts: dict[str, str]
    choice: Choice | None = None


def build_algorithm(
    config: RunConfig,
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    algorithm: Algorithm | type[Algorithm] | None = None,
    network: nn.Module | None = None,
) -> Algorithm:
    """Network and algorithm of a run, with the initial weights that its seed gives."""
    if isinstance(algorithm, Algorithm):
        if network is not None:
            raise InputError(f"the {type(algorithm).__name__} object has its network already; leave network= out")
        if algorithm.num_classes != num_classes:
            raise InputError(
                f"the {type(algorithm).__name__} object is for {algorithm.num_classes} classes, the task has "
                f"{num_classes}; make it with num_classes={num_classes}"
            )
        if (algorithm.units is not None) != config.regression:
            raise InputError(
                f"the settings say regression={config.regression}, the {type(algorithm).__name__} object was made with "
                f"regression={not config.regression}; give both the same"
            )
        return algorithm
    network_options = {"seed": named_seed("network", config.seed), **config.network_options}
    algorithm_options = {"seed": named_seed("algorithm", config.seed) % 2**31, **config.algorithm_options}
    if config.regression:
        network_options["regression"] = algorithm_options["regression"] = True
    whole = make_network(config.network if network is None else network, input_shape, num_classes, **network_options)
    return make_algorithm(algorithm or config.algorithm, whole, num_classes, **algorithm_options)


def types_of(**parts: Any) -> dict[str, str]:
    """Types by name of the parts that are given, to tell whether a saved run had the same."""

    def kind(part: Any) -> str:
        found = part if isinstance(part, type) else type(part)
        return f"{found.__module__}.{found.__qualname__}"

    return {name: kind(part) for name, part in parts.items() if part is not None}


def final_report(result: RunResult, splits: TaskSplits) -> dict[str, Any]:
    """Accuracy of the chosen model on held-out source and target: the only place that reveals target labels.

    Returns
    -------
    dict
        ``"source_accuracy"`` and ``"target_accuracy"``, None where there are no samples or labels;
        ``"target_samples"``, ``"selected_step"``, ``"selection"`` and ``"score"``. In a regression ``rmse``, ``mae``
        and ``r2`` instead of the accuracies, see ``regression_scores``.
    """
    target = splits.target_test
    # a copy is revealed, so that the labels of the splits stay hidden
    revealed = target.subset(torch.arange(len(target))).reveal()
    return {
        "algorithm": result.own_parts.get("algorithm", result.config.algorithm),
        "sampler": result.own_parts.get("sampler", result.config.sampler),
        "selection": result.config.selection,
        "score": result.score,
        "selected_step": result.selected_step,
        **_scores(result, "source", splits.source_val),
        **_scores(result, "target", revealed),
        "target_samples": len(target),
    }


def _scores(result: RunResult, name: str, domain: Domain) -> dict[str, float | None]:
    if not len(domain) or not domain.has_labels:
        return {f"{name}_{score}": None for score in SCORE_NAMES[result.config.regression]}
    inputs = Inputs(domain, next(result.algorithm.parameters()).device)
    _, found = outputs(result.algorithm, inputs, **result.config.pass_options)
    return {f"{name}_{score}": value for score, value in label_scores(found, domain.known_labels()).items()}


# --- the model's file ---------------------------------------------------------------------------------


def save_model(
    result: RunResult, path: str | os.PathLike[str], domain: Domain, *, input_shape: tuple[int, ...]
) -> None:
    """Write the chosen weights, with all that it takes to predict samples like those of ``domain``, to one file."""
    size = {"size": list(input_shape[1:])} if domain.kind == "image" else {}  # that of training, if not the network's
    about = {
        "config": result.config.to_json(),
        "class_names": list(domain.class_names),
        "data_kind": domain.kind,
        "input_shape": list(input_shape),
        "reading": preparation(domain),
        "step": result.selected_step,
        "score": result.score,
        "own_parts": result.own_parts,
        "vote": list(final.spaces) if isinstance(final := result.algorithm.final, Vote) else None,
        "preprocessing": {**plain(result.algorithm.network.preprocessing), **size},
        "backbone": backbone_config(result.algorithm.network.featuriser),
    }
    # safetensors refuses tensors that share memory, so each one gets its own
    weights = result.algorithm.state_dict()
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
    content = require_safetensors().torch.save(own, metadata={_HEADER: json.dumps(about)})
    with atomic_write(path) as file:
        file.write(content)


def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    algorithm: Algorithm | type[Algorithm] | None = None,
    network: nn.Module | None = None,
    trust_code: bool = False,
) -> tuple[Algorithm, dict[str, Any]]:
    """Read a model that a run wrote: the algorithm in evaluation mode, and a dict that describes it.

    Parameters
    ----------
    path : path
        ``model.safetensors``, or the folder of the run.
    device : device
        Device for predictions.
    algorithm, network
        Objects of the same kind as those given to the trainer, if any; they get the weights of the file.
    trust_code : bool
        Import code that the file names as ``package.module:Name``, which runs it.

    Returns
    -------
    algorithm : Algorithm
        ``algorithm.predict(x)`` gives logits, or numbers in their own units.
    about : dict
        ``"config"``, ``"class_names"``, ``"data_kind"``, ``"input_shape"``, ``"preprocessing"`` of images, ``"step"``
        and ``"score"``; and ``"reading"``, how samples were read: with ``"scale"``, columns were scaled, and
        ``vardass.scaling.scale_columns(x, about["reading"]["scale"])`` does so before ``predict``.
    """
    file = Path(path)
    file = file / MODEL_FILE if file.is_dir() else file
    weights, about = _read_model(file)
    given = types_of(algorithm=algorithm, network=network)
    for part in ("algorithm", "network"):
        before, now = about["own_parts"].get(part), given.get(part)
        if before != now:
            raise InputError(
                f"the model in {file} was made {_with(part, before)}, this call is {_with(part, now)}; call "
                + (f"load_model(..., {part}=...) with such an object" if before else f"load_model without {part}=")
            )
    refuse_code(about["config"], file, trust_code=trust_code)
    for name, tensor in weights.items():
        # float8 has no isfinite
        if not bool((tensor.float() if tensor.is_floating_point() else tensor).isfinite().all()):
            raise InputError(
                f"the weights {name!r} in {file} are not finite, so the model predicts nothing; its training diverged "
                "or the file is damaged: train again"
            )
    config = RunConfig(**about["config"])
    if about["backbone"] is None and not given and pretrained_source(config.network) is not None:
        raise InputError(
            f"{file} does not describe its backbone {config.network!r}, which a model that is read is not loaded from; "
            "train again"
        )

    def build() -> Algorithm:
        layout, module = config, network
        if about["backbone"] is not None and algorithm is None:
            module = backbone_from_config(about["backbone"], weights)
            options = {name: value for name, value in config.network_options.items() if name != "local_files_only"}
            layout = config.changed(network_options=options)
        shape, classes = tuple(about["input_shape"]), len(about["class_names"])
        return build_algorithm(layout, shape, classes, algorithm=algorithm, network=module)

    built = build()
    if about["vote"] is not None:
        built.final = _vote(build().network, about, weights, file)
    built.network.preprocessing = ImagePreprocessing.from_dict(about["preprocessing"])
    try:
        built.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(
            f"the weights in {file} do not fit the network {given.get('network', config.network)!r}: "
            f"{str(error).splitlines()[-1].strip()}; was the network changed since?"
        ) from None
    return built.to(device).eval(), {**about, "config": config}


def _vote(reference: Network, about: Mapping[str, Any], weights: Mapping[str, Tensor], file: Path) -> Vote:
    """The vote of a model's file; its weights are loaded with those of the networks."""
    prefix = "final.spaces."
    tensors = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    width, inputs = reference.feature_dim, math.prod(about["input_shape"])
    try:
        vote = Vote.from_tensors(reference, about["vote"], tensors)
        vote.check(
            {"inputs": inputs, "inputs_by_domain": inputs, "reference": width, "adapted": width},
            len(about["class_names"]),
        )
    except InputError as error:
        raise InputError(f"the vote in {file} does not fit: {error}; train again") from None
    return vote


def _with(part: str, kind: str | None) -> str:
    return f"with the {part} object of type {kind}" if kind else f"without a {part} object"


def _read_model(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    safetensors = require_safetensors()
    if not file.is_file():
        raise InputError(f"there is no model at {file}; name the folder of a run that has ended")
    try:
        with safetensors.safe_open(str(file), framework="pt") as opened:
            header = (opened.metadata() or {}).get(_HEADER)
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}; check its permissions") from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise InputError(
            f"{file} is not a whole safetensors file, so not a model: {error}; pass {MODEL_FILE} of a run's folder"
        ) from None
    try:
        about = parse_json(header or "{}")
        _Description.model_validate(about)
    except InputError as error:
        why = f"its description cannot be read: {error}"
    except ValidationError as error:
        whole = isinstance(about, dict) and {"config", "own_parts", "backbone"} <= about.keys()
        why = f"its {as_input_error(error)}" if whole else "it was not written by this version of vardass"
    else:
        return weights, about
    raise InputError(f"{file} is not a model that can be used: {why}; train again, or use the version that wrote it")


class _Backbone(BaseModel):
    library: Literal["transformers"]
    config: dict[str, Any]


class _Description(BaseModel):
    """What a model's file says of the model, as far as its types go."""

    config: dict[str, Any]
    class_names: Annotated[list[str], Field(min_length=1)]
    data_kind: Kind
    input_shape: list[PositiveInt]
    own_parts: dict[str, str]
    vote: Annotated[list[Literal["inputs", "inputs_by_domain", "reference", "adapted"]], Field(min_length=1)] | None
    preprocessing: dict[str, Any]
    backbone: _Backbone | None
    reading: Reading

    @model_validator(mode="after")
    def _scale_fits(self) -> _Description:
        scale = self.reading.scale
        if self.data_kind == "features" and "scale" not in self.reading.model_fields_set:
            raise InputError("reading does not say how inputs are scaled")
        if scale is not None and not len(scale.mean) == len(scale.deviation) == math.prod(self.input_shape):
            raise InputError(
                f"scaling is of {len(scale.mean)} means and {len(scale.deviation)} deviations, its samples have shape "
                f"{tuple(self.input_shape)}"
            )
        return self


def require_safetensors() -> Any:
    """The package that writes models, or an error that says how to install it."""
    with needs_extra("adapt"):
        import safetensors.torch
    return safetensors


# --- the model as a program of torch alone --------------------------------------------------------------


class _WholeModel(nn.Module):
    """Samples as they are, (b, *input_shape) -> probabilities (b, classes), or numbers (b, m) in their own units."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, algorithm: Algorithm, about: Mapping[str, Any], reading: Mapping[str, Any]) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.clip: float | None = None
        shape = [1] * len(about["input_shape"])
        mean, deviation = torch.zeros(shape), torch.ones(shape)
        if about["data_kind"] == "image":
            values = algorithm.network.preprocessing.for_channels(about["input_shape"][0])
            mean, deviation = (torch.tensor(value)[:, None, None] for value in values)
        elif reading.get("scale"):
            mean, deviation = (torch.tensor(reading["scale"][name]) for name in ("mean", "deviation"))
            self.clip = reading["scale"].get("clip")
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, x: Tensor) -> Tensor:
        """Prepare, predict and turn logits into probabilities."""
        x = (x - self.mean) / self.deviation
        x = x if self.clip is None else x.clamp(-self.clip, self.clip)
        found = self.algorithm.predict(x)
        return found.softmax(1) if self.algorithm.units is None else found


def export_model(
    algorithm: Algorithm, about: Mapping[str, Any], reading: Mapping[str, Any], path: PathLike
) -> tuple[Path, Path]:
    """Write a model of `load_model` as a program that ``torch.export.load`` reads, and a description in JSON beside it.

    The program takes float32 samples of any batch size as a user has them: rows of embeddings unscaled, pixels from 0
    to 1 at the size that is described, mel patches of sounds. It returns probabilities, or numbers.
    """
    file = as_path(path)
    beside = file.with_suffix(".json")
    for each in (file, beside):  # both or none
        check_replaceable(each, "export")
    if algorithm.seen_together > 1:
        raise InputError(
            f"predictions of {algorithm.name!r} depend on {algorithm.seen_together} samples that are seen together, so "
            "it cannot be exported for single samples; train with another algorithm"
        )
    whole = _WholeModel(algorithm, about, reading).eval()
    example = torch.zeros(2, *about["input_shape"])
    try:
        program = torch.export.export(whole, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # whatever the network does that torch cannot follow
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"torch.export cannot follow the network: {reason}; change it, or use load_model") from error
    content = io.BytesIO()
    torch.export.save(program, content)
    write_output(file, content.getvalue(), "export")
    image = about["data_kind"] == "image"
    description = {
        "input": "pixels from 0 to 1" if image else "mel patches" if reading.get("front_end") else "rows of features",
        "input_shape": list(about["input_shape"]),
        **({"interpolation": reading.get("interpolation", "bilinear")} if image else {}),
        **({"front_end": reading["front_end"]} if reading.get("front_end") else {}),
        "output": "probabilities" if algorithm.units is None else "numbers",
        "classes" if algorithm.units is None else "numbers": list(about["class_names"]),
        "torch": torch.__version__,
    }
    write_output(beside, json.dumps(description, indent=2) + "\n", "export")
    return file, beside
