"""``vardass adapt``: from labelled source data and unlabelled target data to a model and target predictions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vardass.cli import run_options as o

__all__ = ["adapt"]

_DOMAIN = "Folder of images or sounds{}, or file of embeddings (.npz, .npy, .csv, .parquet)."
_LABELS = "Array or column of labels in embeddings [labels]; for .npy a file beside it [{name}.labels.npy]."


def adapt(
    source: Annotated[list[Path], typer.Option(help=_DOMAIN.format(" in class folders") + " Repeatable.")],
    target: Annotated[Path, typer.Option(help=_DOMAIN.format(", with or without class folders"))],
    out: o.Out,
    kind: Annotated[str | None, typer.Option(help="images, audio or embeddings; guessed.")] = None,
    algorithm: o.Algorithm = "mmd",
    sampler: o.Sampler = "ordered",
    network: o.Network = None,
    steps: o.Steps = 3000,
    batch_size: o.BatchSize = 32,
    target_batch_size: o.TargetBatchSize = None,
    lr: o.LearningRate = 1e-3,
    weight_decay: o.WeightDecay = 0.0,
    optimiser: o.Optimiser = "adam",
    penalty: o.Penalty = None,
    option: o.Options = None,
    sampler_option: o.SamplerOptions = None,
    network_option: o.NetworkOptions = None,
    seed: o.Seed = 0,
    selection: o.Selection = "source-accuracy",
    refresh_every: o.RefreshEvery = 100,
    feature_source: o.FeatureSource = "bank",
    eval_every: o.EvalEvery = 100,
    checkpoint_every: o.CheckpointEvery = 500,
    holdout: o.Holdout = 0.2,
    augment: o.Augment = False,
    workers: o.Workers = 0,
    device: o.Device = "auto",
    devices: o.Devices = "1",
    precision: o.Precision = "32-true",
    tensorboard: o.TensorBoard = False,
    settings: o.Settings = None,
    standardise: o.Standardise = False,
    as_json: o.Json = False,
    key: Annotated[str | None, typer.Option(help="Array of features in .npz files.")] = None,
    labels: Annotated[str | None, typer.Option(help=_LABELS)] = None,
    columns: Annotated[str | None, typer.Option(help="Columns of features in .csv or .parquet files.")] = None,
    size: Annotated[int | None, typer.Option(help="Height and width of images [64 for conv, else 224].")] = None,
    channels: Annotated[int, typer.Option(help="3 for colour, 1 for grey images.")] = 3,
    cache: Annotated[bool, typer.Option("--cache", help="Keep decoded files in memory.")] = False,
    resume: o.Resume = False,
) -> None:
    """Train on labelled source data and adapt to target data without labels.

    Writes the model, a class with confidence for each target sample, metrics, and a report with plots. If the
    target has labels (class folders, or a column), they are used for one number only, after the model is chosen.
    """
    # torch is imported only now, so that --help and --version answer at once
    from vardass.adapt.config import RunConfig
    from vardass.cli.own_data import find_kind, own_task
    from vardass.cli.run_report import Summary, print_json, print_summary, write_report
    from vardass.cli.runs import (
        DEFAULT_NETWORKS,
        PREDICTIONS_FILE,
        default_size,
        go_on,
        open_run,
        predict_domain,
        run_trainer,
        write_predictions,
    )
    from vardass.data.embedding_domains import standardise_task
    from vardass.data.splits import split_task
    from vardass.errors import InputError

    given = {
        "algorithm": algorithm,
        "sampler": sampler,
        "network": network,
        "steps": steps,
        "batch_size": batch_size,
        "target_batch_size": target_batch_size,
        "lr": lr,
        "weight_decay": weight_decay,
        "optimiser": optimiser,
        "penalty": penalty,
        "option": option,
        "sampler_option": sampler_option,
        "network_option": network_option,
        "seed": seed,
        "selection": selection,
        "refresh_every": refresh_every,
        "feature_source": feature_source,
        "eval_every": eval_every,
        "checkpoint_every": checkpoint_every,
        "augment": augment,
        "workers": workers,
        "device": device,
        "devices": devices,
        "precision": precision,
        "tensorboard": tensorboard,
        "settings": settings,
    }
    chosen = o.settings_of(given)
    if chosen["selection"] == "oracle":
        raise InputError("--selection oracle reads target labels, which adapt never does; use vardass train for it")
    RunConfig.from_dict(chosen)  # before any data is read
    sources, target = [path.expanduser() for path in source], target.expanduser()
    found = find_kind([*sources, target], kind)
    config = RunConfig.from_dict({"network": DEFAULT_NETWORKS[found], **chosen})
    pixels = default_size(config.network) if size is None else size
    task = own_task(
        sources, target, found, key=key, labels=labels, columns=columns, size=pixels, channels=channels, cache=cache
    )
    data: dict[str, Any] = {
        "kind": found,
        "sources": [str(path.resolve()) for path in sources],
        "target": str(target.resolve()),
        "source_samples": [len(domain) for domain in task.sources],
        "target_samples": len(task.target),
        "classes": list(task.class_names),
        "key": key,
        "labels": labels,
        "columns": columns,
        "size": pixels if found == "image" else None,
        "holdout": holdout,
        "scale": None,
    }
    if standardise:
        task, data["scale"] = standardise_task(task)
    # all of the target is there to be adapted to and predicted: no part of it is a test set
    splits = split_task(task, seed=seed, holdout=holdout, unlabelled_fraction=1.0)
    open_run(out, data, resume=resume, domains=[*sources, target])
    result = run_trainer(config, splits, out, data, resume=resume)
    if result.interrupted:
        print(go_on(result, out), file=sys.stderr)
        raise typer.Exit(130)
    predictions = predict_domain(result.algorithm, task.target.hide_labels(), config, root=target)
    write_predictions(predictions, out / PREDICTIONS_FILE)
    accuracy = None
    if task.target.has_labels:
        accuracy = float((predictions.classes == task.target.known_labels()).double().mean())
    summary = Summary(task.name, result, predictions, accuracy, f"all {len(task.target):,} samples")
    written = write_report(summary, out, data)
    show = print_json if as_json else print_summary
    show(summary, [out / "model.safetensors", out / PREDICTIONS_FILE, out / "metrics.jsonl", *written])
