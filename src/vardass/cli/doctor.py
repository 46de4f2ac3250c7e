"""``vardass doctor SOURCE TARGET``: what a sampler can and cannot help on these data; and its short form for a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.batches import Inputs
from vardass.adapt.class_structure import MIN_SEPARATION, class_separation
from vardass.adapt.config import RunConfig
from vardass.adapt.model import RunResult
from vardass.adapt.networks import pretrained_source
from vardass.adapt.selection import outputs
from vardass.adapt.trainer import Trainer
from vardass.analysis.doctor import Diagnosis, diagnose
from vardass.cli.embeddings import check_folder, make_folder
from vardass.cli.models import load_run
from vardass.cli.run_options import TrustCode
from vardass.cli.terminal import print_json, print_lines, progress_bar, save_picture
from vardass.data.domains import Domain, Kind, Task, TensorInputs
from vardass.data.from_paths import domain_from_path, find_kind, task_from_paths
from vardass.data.images import small_size
from vardass.data.splits import TaskSplits, split_task
from vardass.errors import InputError
from vardass.files import write_output
from vardass.losses import CORALLoss, MMDLoss
from vardass.plots import diagnosis_figure
from vardass.scaling import CLIP
from vardass.validate import check_count, choose

NETWORKS: dict[Kind, str] = {"features": "mlp", "image": "conv", "audio": "audio"}
_SHORT_ROWS, _SHORT_SHARE = 512, 0.005  # of the samples that went through the network in training, thrice each
_SHORT_LEAST = 64

_MODEL = "Folder of a run; use its network, loss and penalty."
_WARM_UP = "Without --model: steps to train a small network on the source first; 0 uses embeddings as they are."


def doctor(
    source: Annotated[Path, typer.Argument(help="Folder of class folders, or file of embeddings with labels.")],
    target: Annotated[Path, typer.Argument(help="Folder, or file of embeddings; its labels are not read.")],
    model: Annotated[Path | None, typer.Option(help=_MODEL)] = None,
    warm_up: Annotated[int, typer.Option(help=_WARM_UP)] = 200,
    loss: Annotated[str | None, typer.Option(help=r"mmd or coral \[mmd, or that of --model].")] = None,
    penalty: Annotated[float | None, typer.Option(help=r"Weight of the loss \[1, or that of --model].")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples of each domain in a batch.")] = 32,
    rows: Annotated[int, typer.Option(help="Samples of each domain to measure on.")] = 1000,
    kind: Annotated[str | None, typer.Option(help="images, audio or embeddings; detected by default.")] = None,
    key: Annotated[str | None, typer.Option(help="Array of features in .npz files.")] = None,
    labels: Annotated[str | None, typer.Option(help=r"Array or column of labels in embeddings \[labels].")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns of features in .csv or .parquet files.")] = None,
    standardise: Annotated[
        bool, typer.Option("--standardise/--no-standardise", help="Scale the columns of embeddings, as adapt does.")
    ] = True,
    regression: Annotated[bool, typer.Option("--regression", help="Labels are numbers, not classes.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for doctor.json and the figure.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Measure whether a sampler can help on your data, and advise in five lines what to use and why."""
    source, target = source.expanduser(), target.expanduser()
    check_count(warm_up, "--warm-up", low=0)
    given: dict[str, Any] = {} if loss is None else {"loss": choose(loss, "--loss", ("mmd", "coral"))}
    given |= {} if penalty is None else {"penalty": penalty}
    found_kind = find_kind([source, target], kind)
    if out is not None:
        check_folder(out, [source, target], [f"doctor.{ending}" for ending in ("json", "png", "svg")], "doctor")
    reading: dict[str, Any] = {"key": key, "labels": labels, "columns": columns}
    algorithm: Algorithm | None = None
    if model is not None:
        algorithm, task = _of_run(model, source, target, reading, trust_code)
    else:
        reading |= {"standardise": standardise, "regression": regression}
        if found_kind == "image":
            reading["size"] = small_size([source, target])
        task = task_from_paths([source], target, found_kind, **reading)
        if warm_up:
            algorithm = _warmed_up(task, found_kind, warm_up, batch_size, seed)
        elif found_kind != "features":
            raise InputError(f"{source} holds no embeddings, and --warm-up is 0; give --model RUN, or raise --warm-up")
    measured = _measure(task.sources[0], task.target, algorithm, rows=rows, batch_size=batch_size, seed=seed, **given)
    found = {**measured.to_dict(), "adapt": (outlook := _outlook(task, measured.loss, batch_size, seed))}
    written: list[Path] = []
    if out is not None:
        make_folder(out)
        write_output(out / "doctor.json", json.dumps(found, indent=2) + "\n", "doctor")
        title = f"{source.stem} and {target.stem}"
        pictures = save_picture(lambda: diagnosis_figure(measured, title=title), out / "doctor", "doctor")
        written = [out / "doctor.json", *pictures]
    if as_json:
        print_json({**found, "written": written}, indent=2)
        return
    print_lines(str(measured))
    dataset = task.target.dataset
    if isinstance(dataset, TensorInputs) and dataset.scale is not None:
        share = float((dataset.tensor.abs() >= CLIP).double().mean())
        print(f"  inputs: scaled robustly ({100 * share:.2g} % of the target's values were cut at {CLIP:g} deviations)")
    print_lines(f"\nvardass adapt\n  settings: {outlook['settings']}\n  adaptation: {outlook['expected']}")
    if written:
        print(f"written: {', '.join(map(str, written))}")


def _outlook(task: Task, loss: str, batch_size: int, seed: int) -> dict[str, Any]:
    """What ``vardass adapt`` uses, and whether it is expected to help, from the source's labels alone."""
    config = RunConfig.recommended(algorithm=loss, batch_size=batch_size, regression=task.target.regression)
    aligned = f", same classes in both from step {config.class_options['start']} on" if config.class_options else ""
    settings = (
        f"{config.sampler} batches of {batch_size}{aligned}, penalty {config.algorithm_options['penalty']:.3g}; chosen "
        "for accuracy on several data sets, not for the least noise on these"
    )
    separation, expected = None, "not known before a run"
    with suppress(InputError):  # too few samples to hold any out
        splits = split_task(task, seed=seed, unlabelled_fraction=1.0)
        separation = _separation(splits.source_train, splits.source_val)
    if separation is not None:
        overlap = not separation >= MIN_SEPARATION
        expected = f"classes {'overlap' if overlap else 'are apart'} in the source (separation {separation:.2f}"
        if overlap:
            expected += f", {MIN_SEPARATION:g} needed): not expected to help; adapt will keep the source-only model"
        else:
            expected += "): it may help"
    if separation is None or not overlap:
        expected += "; adapt trains a source-only model too, and keeps it where nothing shows a gain"
    return {"settings": settings, "separation": separation, "expected": expected}


def _separation(train: Domain, held_out: Domain) -> float | None:
    """`class_separation` of embeddings by their classes, as ``adapt`` measures it; None for files and numbers."""
    if train.kind != "features" or train.regression:
        return None
    parts: Any = (Inputs(part, torch.device("cpu")).data for part in (train, held_out))
    x, v = (part.flatten(1) for part in parts)
    return class_separation(x, train.known_labels(), v, held_out.known_labels(), len(train.class_names))


def short_form(result: RunResult, splits: TaskSplits) -> str | None:
    """The doctor's short form for the chosen model of a run; None where it would take more than 2% of the run.

    A step passes both batches forward and back, three times the work of a forward pass. Forward passes here take half a
    per cent of that work, on at least 64 samples; the rest takes about as long with a small network.
    """
    config, loss = result.config, getattr(result.algorithm, "loss", None)
    if not isinstance(loss, MMDLoss | CORALLoss) or (config.cache_embeddings and pretrained_source(config.network)):
        return None
    rows = min(_SHORT_ROWS, int(_SHORT_SHARE * 3 * config.steps * config.batch_size))
    domains = splits.source_train, splits.target_unlabelled
    if min(rows, *map(len, domains)) < max(_SHORT_LEAST, 2 * config.batch_size):
        return None
    return _measure(
        *domains,
        result.algorithm,
        rows=rows,
        batch_size=config.batch_size,
        seed=config.seed,
        samplers=("stratified",),
        gradient=False,
        bandwidths=False,
        batches=2,
        passing=config.pass_options,
    ).short()


def _measure(
    source: Domain,
    target: Domain,
    algorithm: Algorithm | None,
    *,
    rows: int,
    seed: int,
    passing: Mapping[str, Any] | None = None,
    **options: Any,
) -> Diagnosis:
    """Diagnose the features of at most ``rows`` samples of each domain: the algorithm's, or the samples themselves."""
    rows = check_count(rows, "--rows", low=2)
    generator = torch.Generator().manual_seed(seed)
    parts = [domain.subset(torch.randperm(len(domain), generator=generator)[:rows]) for domain in (source, target)]
    settings: dict[str, Any] = {"seed": seed, "max_rows": rows, "sizes": (len(source), len(target))}
    if not source.regression:  # numbers say nothing of class shares
        settings |= {"labels": parts[0].known_labels(), "class_names": source.class_names}
    if algorithm is None:
        vectors: Any = (Inputs(part, torch.device("cpu")).data for part in parts)
        return diagnose(*vectors, **{**settings, **options})
    device = next(algorithm.parameters()).device
    features = [outputs(algorithm, Inputs(part, device), **(passing or {}))[0].float().to(device) for part in parts]
    loss = getattr(algorithm, "loss", None)
    if isinstance(loss, MMDLoss | CORALLoss):
        settings |= {"loss": loss, "penalty": getattr(algorithm, "penalty", 1.0)}
    return diagnose(*features, head=algorithm.network.head, **{**settings, **options})


def _warmed_up(task: Task, kind: Kind, steps: int, batch_size: int, seed: int) -> Algorithm:
    """A small network after some steps on the source alone: what the loss would see soon after the start."""
    config = RunConfig(
        algorithm="erm",
        regression=task.target.regression,
        sampler="uniform",
        network=NETWORKS[kind],
        steps=steps,
        batch_size=batch_size,
        selection="last",
        seed=seed,
        eval_every=steps,
        checkpoint_every=steps,
    )
    splits = split_task(task, seed=seed, holdout=0.0, unlabelled_fraction=1.0)
    with progress_bar() as progress:
        return Trainer(config, splits).run(progress=progress).algorithm


def _of_run(run: Path, source: Path, target: Path, given: dict[str, Any], trust_code: bool) -> tuple[Algorithm, Task]:
    """The chosen model of a run, and the two domains read as it read its own."""
    algorithm, about, how = load_run(run, trust_code=trust_code)
    how |= {name: value for name, value in given.items() if value is not None}
    labelled = domain_from_path(source, about, how, labelled=True)
    return algorithm, Task(f"{source.stem}->{target.stem}", (labelled,), domain_from_path(target, about, how))
