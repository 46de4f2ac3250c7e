"""Options that ``vardass adapt`` and ``vardass train`` share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "Algorithm",
    "Augment",
    "BatchSize",
    "CheckpointEvery",
    "Device",
    "Devices",
    "EvalEvery",
    "FeatureSource",
    "Holdout",
    "Json",
    "LearningRate",
    "Network",
    "NetworkOptions",
    "Optimiser",
    "Options",
    "Out",
    "Penalty",
    "Precision",
    "RefreshEvery",
    "Resume",
    "Sampler",
    "SamplerOptions",
    "Seed",
    "Selection",
    "Settings",
    "Standardise",
    "Steps",
    "TargetBatchSize",
    "TensorBoard",
    "WeightDecay",
    "Workers",
    "parse_pairs",
    "settings_of",
]

_SAMPLER = "uniform, stratified, vardass (the paper's), ordered, balanced, kmeans++, dpp or kmeans-features."
_SELECTION = "source-accuracy, entropy, information-maximisation, snd, mmd or last; train knows oracle too."
_NETWORK = (
    "mlp, conv, audio, resnet18, efficientnet-lite0, a transformers backbone (folder or owner/name), or "
    "package.module:Class; by default the small one for the data."
)

Algorithm = Annotated[str, typer.Option(help="erm, mmd, coral, dann, cdan, cdan+sdat, cdan+els, arm or mcc.")]
Sampler = Annotated[str, typer.Option(help=_SAMPLER)]
Network = Annotated[str | None, typer.Option(help=_NETWORK)]
Steps = Annotated[int, typer.Option(help="Batches to train on.")]
BatchSize = Annotated[int, typer.Option(help="Samples of each domain in a batch.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate.")]
WeightDecay = Annotated[float, typer.Option(help="Weight decay.")]
Optimiser = Annotated[str, typer.Option(help="adam or sgd.")]
Penalty = Annotated[float | None, typer.Option(help="Weight of the discrepancy, same as --option penalty=...")]
Options = Annotated[list[str] | None, typer.Option("--option", help="key=value of the algorithm; repeatable.")]
SamplerOptions = Annotated[list[str] | None, typer.Option("--sampler-option", help="key=value; repeatable.")]
NetworkOptions = Annotated[list[str] | None, typer.Option("--network-option", help="key=value; repeatable.")]
Seed = Annotated[int, typer.Option(help="Determines splits, weights and batches.")]
Selection = Annotated[str, typer.Option(help="How the model is chosen: " + _SELECTION)]
RefreshEvery = Annotated[int, typer.Option(help="Steps between new strata; 0 never.")]
FeatureSource = Annotated[str, typer.Option(help="Strata from the bank of recent features, or a full pass.")]
EvalEvery = Annotated[int, typer.Option(help="Steps between evaluations.")]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints.")]
Holdout = Annotated[float, typer.Option(help="Share of each domain kept out of training.")]
Augment = Annotated[bool, typer.Option("--augment", help="Augment training images as DomainBed does.")]
Workers = Annotated[int, typer.Option(help="Processes that decode files.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Devices = Annotated[str, typer.Option(help="Devices to train on together: a number, or auto for all GPUs.")]
Precision = Annotated[str, typer.Option(help="32-true, bf16-mixed or 16-mixed.")]
TargetBatchSize = Annotated[int | None, typer.Option(help="Target samples in a batch, if not as many.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write metrics to OUT/tensorboard too.")]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]
Standardise = Annotated[
    bool, typer.Option("--standardise", help="Scale the columns of embeddings by mean and deviation of the sources.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="key=value of RunConfig, such as lr_schedule=cosine; repeatable.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
Out = Annotated[Path, typer.Option(help="Folder of the run.")]

_PAIRS = {"option": "algorithm_options", "sampler_option": "sampler_options", "network_option": "network_options"}


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a ``RunConfig`` from a command's values; ``network`` is left out where none was named."""
    from vardass.errors import InputError

    settings = dict(given)
    penalty = settings.pop("penalty")
    for name, place in _PAIRS.items():
        settings[place] = parse_pairs("--" + name.replace("_", "-"), settings.pop(name))
    if penalty is not None:
        if settings["algorithm_options"].get("penalty", penalty) != penalty:
            other = settings["algorithm_options"]["penalty"]
            raise InputError(f"--penalty {penalty} and --option penalty={other} differ; give one of them")
        settings["algorithm_options"]["penalty"] = penalty
    if settings["network"] is None:
        del settings["network"]
    if str(settings["devices"]).isdecimal():
        settings["devices"] = int(settings["devices"])
    more = parse_pairs("--set", settings.pop("settings"))
    return {"cache_embeddings": "auto", **settings, **more}


_EXAMPLES = {"--set": "refresh_every=50", "--sampler-option": "min_size=2", "--network-option": "hidden=[64]"}


def parse_pairs(option: str, texts: list[str] | None) -> dict[str, Any]:
    """Values by name from texts such as ``penalty=0.5``; what is no Python literal is a word."""
    import ast

    from vardass.errors import InputError

    found: dict[str, Any] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise InputError(
                f"{option} takes key=value, got {text!r}; for example {_EXAMPLES.get(option, 'penalty=0.5')}"
            )
        words = {"true": True, "false": False, "none": None}
        try:
            parsed = words[value.lower()] if value.lower() in words else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed = value  # a word
        found[name.strip().replace("-", "_")] = parsed
    return found
