"""``vardass adapt``, ``vardass train`` and ``vardass tasks``: one run, on a user's data or on a known data set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

from vardass.adapt.adaptation import REFERENCE_FOLDER, Adaptation
from vardass.adapt.config import RunConfig
from vardass.adapt.devices import pick_device
from vardass.adapt.model import MODEL_FILE, RunResult, final_report
from vardass.adapt.networks import preprocessing_of
from vardass.adapt.run_folder import (
    CONFIG_FILE,
    DATA_FILE,
    METRICS_FILE,
    RUN,
    TENSORBOARD_FOLDER,
    RunFolder,
    read_data_file,
)
from vardass.adapt.selection import SCORE_NAMES
from vardass.adapt.trainer import Trainer, seconds_needed
from vardass.backend import one_thread
from vardass.cli.doctor import NETWORKS, short_form
from vardass.cli.embeddings import check_folder, make_folder
from vardass.cli.models import PREDICTIONS_FILE, predict_domain
from vardass.cli.run_options import DATA_PANEL, parse_pairs, settings_of, with_run_options
from vardass.cli.run_summary import REPORT_FILE, RESULT_FILE, Summary, print_summary, write_report
from vardass.cli.terminal import note, print_json, print_lines, progress_bar, tell_if_long, tell_time, time_text
from vardass.data.domains import Domain, Kind, Task
from vardass.data.embedding_tasks import standardise_task
from vardass.data.from_paths import KINDS, columns_text, find_kind, preparation, task_from_paths
from vardass.data.images import IMAGENET, small_size
from vardass.data.registry import DATASETS, find_dataset, image_options, load_task, task_names
from vardass.data.splits import SPLITS, TaskSplits, learn_from_target, split_task
from vardass.errors import InputError, VardassError
from vardass.files import (
    HOLDER_FILE,
    LOCK_FILE,
    OUTPUTS_FILE,
    is_temporary,
    locked,
    plain,
    read_json,
    remove_temporary,
    write_output,
)
from vardass.validate import shorten

_LEFT_BY_A_RUN = (
    CONFIG_FILE,
    METRICS_FILE,
    DATA_FILE,
    TENSORBOARD_FOLDER,
    REFERENCE_FOLDER,
    LOCK_FILE,
    HOLDER_FILE,
    OUTPUTS_FILE,
)

Runs = TypeVar("Runs", Adaptation, Trainer)

_DOMAIN = "Folder of images or sounds{}, or file of embeddings (.npz, .npy, .csv, .parquet)."
_LABELS = r"Array or column of labels in embeddings \[labels]; for .npy a file beside it \[{name}.labels.npy]."
_TARGET_LABELS = "Train on the labels of the target too, where its label column has any."
_DATASET = f"One of {', '.join(DATASETS)}."


def _data(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=DATA_PANEL)


Out = Annotated[Path, _data(text="Folder for the run.")]
Holdout = Annotated[float, _data(text="Share of each domain held out of training.")]
Resume = Annotated[bool, _data("--resume", text="Resume the run in --out.")]
Json = Annotated[bool, _data("--json", text="Print the summary as JSON.")]
Standardise = Annotated[
    bool | None,
    _data(
        "--standardise/--no-standardise",
        text=r"Standardise columns of embeddings with source statistics, robustly and with clipping \[yes].",
    ),
]


@with_run_options
def adapt(
    source: Annotated[list[Path], _data(text=_DOMAIN.format(" in class folders") + " Repeatable.")],
    target: Annotated[Path, _data(text=_DOMAIN.format(", with or without class folders"))],
    out: Out,
    kind: Annotated[str | None, _data(text="images, audio or embeddings; detected by default.")] = None,
    key: Annotated[str | None, _data(text="Array of features in .npz files.")] = None,
    labels: Annotated[str | None, _data(text=_LABELS)] = None,
    columns: Annotated[str | None, _data(text="Columns of features in .csv or .parquet files.")] = None,
    target_labels: Annotated[bool, _data("--target-labels", text=_TARGET_LABELS)] = False,
    size: Annotated[int | None, _data(text=r"Height and width of images \[32 to 64 for conv, else native].")] = None,
    channels: Annotated[int | None, _data(text=r"3 for colour, 1 for grey images \[3].")] = None,
    cache: Annotated[bool, _data("--cache", text="Keep decoded files in memory.")] = False,
    standardise: Standardise = None,
    holdout: Holdout = 0.2,
    resume: Resume = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Train on labelled source data and adapt to target data without labels.

    A model of the source alone is trained too, and kept where nothing shows that adaptation helps.

    Writes the model, a predicted class with confidence (or numbers) for each target sample, metrics, and a report.
    If the target has labels (class folders, or a column that may be blank in places), they are only used for the
    final score, after the model is chosen; with --target-labels they are trained on, and nothing is scored.
    """
    chosen = settings_of(given)
    if chosen.get("selection") == "oracle":
        raise InputError("--selection oracle reads target labels, which adapt never does; use vardass train")
    early = RunConfig(**chosen)  # before any data is read
    sources, target = [path.expanduser() for path in source], target.expanduser()
    found = find_kind([*sources, target], kind)
    _check_options_of_kind(
        found,
        image={"--size": size, "--channels": channels},
        features={"--key": key, "--labels": labels, "--columns": columns, "--standardise": standardise}
        | {"--target-labels": target_labels or None},
    )
    if cache and found == "features":
        raise InputError("--cache is for images and sounds, embeddings are always in memory; leave it out")
    settings: dict[str, Any] = {"network": NETWORKS[found], **chosen}
    wanted = preprocessing_of(settings["network"], early.network_options) or IMAGENET
    pixels: Any = size
    if size is None and found == "image":
        pixels = small_size([*sources, target]) if settings["network"] == "conv" else plain(wanted.size)
    task = task_from_paths(
        sources,
        target,
        found,
        key=key,
        labels=labels,
        columns=columns,
        standardise=standardise is not False,
        regression=early.regression,
        size=pixels,
        channels=channels or 3,
        cache=cache,
        interpolation=wanted.interpolation,
    )
    config = recommended_for(task, settings, out, resume=resume)
    hint = ""
    if found == "image" and "network" not in chosen:
        hint = f"; conv at {pixels} pixels learns from scratch; a pretrained --network FOLDER does better"
    data = {
        "kind": found,
        "sources": [str(path.resolve()) for path in sources],
        "target": str(target.resolve()),
        **_facts(task),
        "key": key,
        "labels": labels,
        "columns": columns,
        "size": pixels if found == "image" else None,
        "holdout": holdout,
        "target_labels": len(task.target.labelled()) if target_labels and task.target.has_labels else None,
    }
    # all of the target is there to be adapted to and predicted: no part of it is a test set
    splits = split_task(task, seed=config.seed, holdout=holdout, unlabelled_fraction=1.0)
    splits = learn_from_target(splits, task.target) if target_labels else splits
    with _run(config, splits, out, data, resume=resume, domains=[*sources, target], hint=hint) as result:
        predictions = predict_domain(result.algorithm, task.target.hide_labels(), config, root=target)
        unseen = task.target.has_labels and not target_labels
        scores = predictions.scores(task.target.known_labels()) if unseen else None
        measured_on, doctor = _measured_on(task.target), short_form(result, splits)
        learnt = splits.source_train.known_labels()
        columns = columns_text(task.target)
        _show(Summary(task.name, result, predictions, scores, measured_on, learnt, doctor, columns), out, data, as_json)


@with_run_options
def train(
    dataset: Annotated[str, _data(text=_DATASET)],
    task: Annotated[str, _data(text="Task, as listed by vardass tasks.")],
    out: Out,
    root: Annotated[Path | None, _data(text="Folder of the data set.")] = None,
    data_option: Annotated[list[str] | None, _data(text="key=value of the loader; repeatable.")] = None,
    standardise: Standardise = None,
    holdout: Holdout = 0.2,
    unlabelled_fraction: Annotated[
        float, _data(text="Share of the remaining target samples used for adaptation; the others are the test set.")
    ] = 0.5,
    resume: Resume = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Train on a benchmark task and test the chosen model on target samples that were not trained on."""
    info = find_dataset(dataset)
    chosen = {**info.settings, **settings_of(given)}
    early = RunConfig(**chosen)  # before any data is read
    root = None if root is None else root.expanduser()
    switches = {"standardise": standardise, "standardised": standardise, "regression": early.regression or None}
    switches = {name: value for name, value in switches.items() if value is not None and name in info.options}
    loader_options = {**switches, **parse_pairs("--data-option", data_option)}
    if root is not None and dataset in DATASETS and not info.layout:
        raise InputError(f"--root {root} is given, but {dataset} is not read from a folder; leave it out")
    if root is None and info.layout:
        raise InputError(f"--root is not given, and {dataset} is read from a folder; it should hold\n{info.layout}")
    # only images in a folder need what the network wants, which a hub may have to be asked
    wanted = {} if root is None else image_options(dataset, preprocessing_of(early.network, early.network_options))
    loaded = load_task(dataset, task, root, **{**wanted, **loader_options})
    config = RunConfig(**{"network": NETWORKS[loaded.target.kind], **chosen})
    if standardise and not getattr(loaded.target.dataset, "scale", None):
        loaded = standardise_task(loaded)
    data = {
        "kind": loaded.target.kind,
        "dataset": dataset,
        "task": task,
        "root": None if root is None else str(root.resolve()),
        "options": {name: str(value) for name, value in loader_options.items()},
        **_facts(loaded),
        "holdout": holdout,
        "unlabelled_fraction": unlabelled_fraction,
    }
    splits = split_task(loaded, seed=config.seed, holdout=holdout, unlabelled_fraction=unlabelled_fraction)
    if config.selection == "oracle":
        splits.target_val.reveal()
    with _run(config, splits, out, data, resume=resume) as result:
        measured = splits.target_test if len(splits.target_test) else splits.target_unlabelled
        predictions = predict_domain(result.algorithm, measured, config, root=root)
        final = final_report(result, splits)
        tested = f"{final['target_samples']:,} samples that were not trained on"
        scores = {name: final[f"target_{name}"] for name in SCORE_NAMES[config.regression]}
        known = None if None in scores.values() else scores
        doctor, labels = short_form(result, splits), splits.source_train.known_labels()
        _show(Summary(f"{dataset} {task}", result, predictions, known, tested, labels, doctor), out, data, as_json)


def tasks(
    dataset: Annotated[str | None, typer.Option(help=_DATASET)] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of your own data.")] = None,
) -> None:
    """List the data sets, or the tasks of one."""
    if dataset is None:
        if root is not None:
            raise InputError(f"--root {root} needs --dataset images, audio or embeddings; name one")
        for entry in DATASETS.values():
            print(f"{entry.name:12} {entry.summary}; {entry.origin}")
        return
    names = task_names(dataset, root)
    if not names:
        raise InputError(f"the tasks of {dataset!r} depend on your files; give their folder with --root DIR")
    print_lines("\n".join(names))


_EPOCHS, _LEAST_STEPS = 60, 600
_BOTTLENECK = 256  # as in TLlib
_SAME_TIME = 1.5  # factor between two estimates of which the second is not told


def recommended_for(task: Task, settings: dict[str, Any], out: Path, *, resume: bool) -> RunConfig:
    """The recommended settings; of a resumed run those for the steps it was begun with, however many it has now.

    When the penalty rises and classes are aligned depends on the steps, and cannot change in the middle of a run. Where
    a step takes long, files on a CPU, few samples get fewer of them: 60 epochs, but at least 600 steps.
    """
    begun = read_json(out / CONFIG_FILE, lenient=True).get("steps") if resume else None
    begun = begun if isinstance(begun, int) and begun >= 1 else None
    options = settings.get("network_options", {})
    if options.get("freeze_backbone"):  # without a layer that learns no discrepancy could move the features
        settings = {**settings, "network_options": {"bottleneck": _BOTTLENECK, **options}}
    config = RunConfig.recommended(**settings)
    frozen = config.cache_embeddings and config.network_options.get("freeze_backbone")
    is_slow = task.target.kind != "features" and pick_device(config.device).type == "cpu" and not frozen
    if is_slow and "steps" not in settings:
        largest = max(len(task.target), sum(map(len, task.sources)))
        steps = max(_LEAST_STEPS, _EPOCHS * -(-largest // config.batch_size))
        config = RunConfig.recommended(**settings, steps=begun or min(steps, config.steps))
    if begun is None:
        return config
    return RunConfig.recommended(**{**settings, "steps": begun}).changed(steps=config.steps)


def _check_options_of_kind(found: Kind, **options: Mapping[str, Any]) -> None:
    """Refuse options that only another kind of data has a use for."""
    names: dict[str, str] = {kind: name for name, kind in KINDS.items()}
    for kind, option, value in ((kind, *item) for kind, given in options.items() for item in given.items()):
        if value is not None and kind != found:
            raise InputError(f"{option} is for {names[kind]}, the data are {names[found]}; leave it out")


def _measured_on(target: Domain) -> str:
    """Which samples of a target are scored, and which classes of the source are not among them."""
    if not target.has_labels:
        return f"all {len(target):,} samples"
    labels = target.labelled().known_labels()
    text = f"all {len(target):,} samples"
    if len(labels) < len(target):
        text = f"the {len(labels):,} of {len(target):,} samples with a known label"
    if not target.regression:
        counts = torch.bincount(labels, minlength=len(target.class_names)).tolist()
        if absent := [name for name, count in zip(target.class_names, counts, strict=True) if not count]:
            text += f"; classes of the source that none of them has: {shorten(absent)}"
    return text


def _facts(task: Task) -> dict[str, Any]:
    return {
        "source_samples": [len(domain) for domain in task.sources],
        "target_samples": len(task.target),
        "numbers" if task.target.regression else "classes": list(task.class_names),
        "splits": SPLITS,
        **preparation(task.target),
    }


@contextmanager
def _run(
    config: RunConfig,
    splits: TaskSplits,
    out: Path,
    data: Mapping[str, Any],
    *,
    resume: bool,
    domains: Sequence[Path] = (),
    hint: str = "",
) -> Iterator[RunResult]:
    """Train, and keep the folder locked until all is written; exit with code 130 if it was interrupted."""
    check = partial(_check_folder, out, data, resume=resume, domains=domains)
    check()
    pick_device(config.device)  # before the folder is made
    # data of one's own may be worse off adapted: a source-only model is trained beside it
    adaptation = _made(Adaptation, config, splits, out) if domains else None
    trainer = _made(Trainer, config, splits, out) if adaptation is None else adaptation.trainer
    make_folder(out)

    told = 0.0

    def tell(seconds: float) -> None:
        nonlocal told
        if told / _SAME_TIME < seconds < told * _SAME_TIME:
            return
        told = seconds
        shorter = f"; --steps {config.steps // 4} takes a quarter of that" if seconds > 120.0 else ""
        note(f"about {time_text(seconds)} for {config.steps:,} steps on {trainer.device}{shorter}{hint}")

    has_stepped = False

    def report(share: float, message: str) -> None:
        nonlocal has_stepped
        has_stepped |= share > 0.0
        timed(share, message)

    # under torchrun each process runs the whole command
    with locked(out, work="run") if trainer.processes.is_first else nullcontext():
        if trainer.processes.is_first:
            check()  # once more: another run may have been here
            remove_temporary(out)
            if not RunFolder(out).has_checkpoint:  # else it was compared
                write_output(out / DATA_FILE, json.dumps(data, indent=2) + "\n", RUN)
        # networks on embeddings are small: one thread is as fast, and several times faster where others work too
        with one_thread() if data["kind"] == "features" else nullcontext(), progress_bar() as progress:
            if data["kind"] != "features" and not RunFolder(out).has_checkpoint:
                with suppress(VardassError):  # the run itself will say so
                    reference = None if adaptation is None else adaptation.reference
                    beside = 0.0 if reference is None else 0.5 * reference.config.steps / config.steps  # one domain
                    tell_if_long((1.0 + beside) * seconds_needed(config, splits), tell)
            timed = tell_time(progress, tell)
            result = (adaptation or trainer).run(resume=resume, progress=report)
        if result.interrupted:  # the trainer has said where
            note("the same command with --resume continues")
            raise typer.Exit(130)
        if not has_stepped:
            note(f"nothing left to do: the run in {out} has done all of its {config.steps:,} steps")
        yield result


def _check_folder(out: Path, data: Mapping[str, Any], *, resume: bool, domains: Sequence[Path]) -> None:
    """Refuse a folder inside the data, with a run that nobody asked to resume, one on other data, or other things."""
    check_folder(out, domains, (PREDICTIONS_FILE, REPORT_FILE, RESULT_FILE), RUN)
    if not RunFolder(out).has_checkpoint:
        # files of a run that stopped before its first checkpoint may be replaced, nothing else
        check_folder(out, names=(CONFIG_FILE, DATA_FILE), command=RUN)
        entries = [entry for entry in out.iterdir() if not is_temporary(entry)] if out.is_dir() else []
        if other := sorted(entry.name for entry in entries if entry.name not in _LEFT_BY_A_RUN):
            raise InputError(f"{out} holds {other[0]!r} but no run; choose an empty or new folder with --out")
        return
    if not resume:
        raise InputError(f"{out} already holds a run; resume it with --resume, or choose another folder with --out")
    before = read_data_file(out)
    for name, value in data.items():
        if name in before and before[name] != value:
            was, now = (_shown(name, entry) for entry in (before[name], value))
            raise InputError(
                f"the run in {out} has {name} {was}, this one {now}; resume with the same data, or "
                "choose another folder with --out"
            )


def _shown(name: str, value: Any) -> str:
    if name != "scale":
        return repr(value)
    # hundreds of numbers
    return "none (--no-standardise)" if value is None else f"of columns with mean {value['mean'][0]:.6g}, ..."


def _made(kind: type[Runs], config: RunConfig, splits: TaskSplits, out: Path) -> Runs:
    options = {**config.algorithm_options, **config.sampler_options, **config.network_options}
    try:
        return kind(config, splits, out)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError) or not options:
            raise
        # values of options are not checked before they are used
        raise InputError(f"one of the options {options} has a value of the wrong type: {error}; change it") from error


def _show(summary: Summary, out: Path, data: Mapping[str, Any], as_json: bool) -> None:
    write_output(out / PREDICTIONS_FILE, summary.predictions.to_csv(), RUN)
    report = write_report(summary, out, data)
    if summary.one_class is not None:
        note(f"warning: {summary.one_class}")
    written = [out / MODEL_FILE, out / PREDICTIONS_FILE, out / METRICS_FILE, report]
    if as_json:
        print_json({**summary.as_dict(), "written": written}, indent=2)
    else:
        print_summary(summary, written)
