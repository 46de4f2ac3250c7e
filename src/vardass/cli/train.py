"""``vardass train`` and ``vardass tasks``: benchmarks on the data sets that the package knows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vardass.cli import run_options as o

__all__ = ["tasks", "train"]

_DATASET = "watch, digits, camelyon17, humpbacks, spawrious, office-home, images, audio or embeddings."


def train(
    dataset: Annotated[str, typer.Option(help=_DATASET)],
    task: Annotated[str, typer.Option(help="Task, as listed by vardass tasks.")],
    out: o.Out,
    root: Annotated[Path | None, typer.Option(help="Folder of the data set.")] = None,
    data_option: Annotated[list[str] | None, typer.Option(help="key=value of the loader; repeatable.")] = None,
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
    unlabelled_fraction: Annotated[
        float, typer.Option(help="Share of the rest of the target that is adapted to; the other part is the test.")
    ] = 0.5,
    augment: o.Augment = False,
    workers: o.Workers = 0,
    device: o.Device = "auto",
    devices: o.Devices = "1",
    precision: o.Precision = "32-true",
    tensorboard: o.TensorBoard = False,
    settings: o.Settings = None,
    standardise: o.Standardise = False,
    as_json: o.Json = False,
    resume: o.Resume = False,
) -> None:
    """Train on a benchmark task and measure the chosen model on target samples that were not trained on."""
    # torch is imported only now, so that --help and --version answer at once
    from vardass.adapt.config import RunConfig
    from vardass.adapt.model import final_report
    from vardass.cli.run_report import Summary, print_json, print_summary, write_report
    from vardass.cli.runs import (
        DEFAULT_NETWORKS,
        PREDICTIONS_FILE,
        go_on,
        open_run,
        predict_domain,
        run_trainer,
        write_predictions,
    )
    from vardass.data.embedding_domains import standardise_task
    from vardass.data.registry import load_task
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
    RunConfig.from_dict(chosen)  # before any data is read
    loader_options = o.parse_pairs("--data-option", data_option)
    try:
        loaded = load_task(dataset, task, root, **loader_options)
    except InputError as error:
        raise InputError(str(error).replace("root is None", "--root is not given")) from error
    config = RunConfig.from_dict({"network": DEFAULT_NETWORKS[loaded.target.kind], **chosen})
    data: dict[str, Any] = {
        "kind": loaded.target.kind,
        "dataset": dataset,
        "task": task,
        "root": None if root is None else str(root.expanduser().resolve()),
        "options": {name: str(value) for name, value in loader_options.items()},
        "source_samples": [len(domain) for domain in loaded.sources],
        "target_samples": len(loaded.target),
        "classes": list(loaded.class_names),
        "holdout": holdout,
        "scale": None,
        "unlabelled_fraction": unlabelled_fraction,
    }
    if standardise:
        loaded, data["scale"] = standardise_task(loaded)
    splits = split_task(loaded, seed=seed, holdout=holdout, unlabelled_fraction=unlabelled_fraction)
    if config.selection == "oracle":
        splits.target_val.reveal()
    open_run(out, data, resume=resume)
    result = run_trainer(config, splits, out, data, resume=resume)
    if result.interrupted:
        print(go_on(result, out), file=sys.stderr)
        raise typer.Exit(130)
    measured = splits.target_test if len(splits.target_test) else splits.target_unlabelled
    predictions = predict_domain(result.algorithm, measured, config, root=root)
    write_predictions(predictions, out / PREDICTIONS_FILE)
    final = final_report(result, splits)
    tested = f"{final['target_samples']:,} samples that were not trained on"
    summary = Summary(f"{dataset} {task}", result, predictions, final["target_accuracy"], tested)
    written = write_report(summary, out, data)
    show = print_json if as_json else print_summary
    show(summary, [out / "model.safetensors", out / PREDICTIONS_FILE, out / "metrics.jsonl", *written])


def tasks(
    dataset: Annotated[str | None, typer.Option(help=_DATASET)] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of your own data.")] = None,
) -> None:
    """List the data sets, or the tasks of one."""
    from vardass.data.registry import DATASETS, task_names
    from vardass.errors import InputError

    if dataset is None:
        if root is not None:
            raise InputError(f"--root {root} needs --dataset images, audio or embeddings; name one")
        for entry in DATASETS.values():
            print(f"{entry.name:12} {entry.summary}; {entry.origin}")
        return
    names = task_names(dataset, root)
    if not names:
        raise InputError(f"the tasks of {dataset!r} depend on your files; say where they are with --root DIR")
    print("\n".join(names))
