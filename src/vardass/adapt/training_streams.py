"""The streams of a run: its sampler on the source and, if the algorithm looks at it, on the target."""

from __future__ import annotations

from torch import Tensor

from vardass.adapt.algorithms import Algorithm
from vardass.adapt.config import RunConfig
from vardass.adapt.processes import Processes
from vardass.adapt.samplers_by_name import algorithm_kernel, make_sampler
from vardass.adapt.streams import Inputs, Stream
from vardass.data.splits import TaskSplits, derived_seed
from vardass.errors import InputError
from vardass.samplers import BackgroundSampler, MinibatchSampler

__all__ = ["training_streams"]


def training_streams(
    config: RunConfig, splits: TaskSplits, source: Inputs, algorithm: Algorithm, processes: Processes
) -> dict[str, Stream]:
    """Endless batches by domain, ``"source"`` and ``"target"``.

    Parameters
    ----------
    config : RunConfig
        Its sampler, batch sizes and seed.
    splits : TaskSplits
        Samples to train on.
    source : Inputs
        Those of ``splits.source_train``, on the device of the run.
    algorithm : Algorithm
        Gives the samplers their kernel.
    processes : Processes
        Those that share each batch.
    """

    def stream(name: str, inputs: Inputs, labels: Tensor | None, batch_size: int) -> Stream:
        options = dict(config.sampler_options)
        if config.groups == "classes" and labels is not None:
            options["groups"] = labels
        processes.part(batch_size)  # says so if it cannot be shared
        sampler = make_sampler(
            config.sampler,
            len(inputs),
            batch_size,
            kernel=algorithm_kernel(algorithm),
            seed=derived_seed("sampler", name, config.seed),
            **options,
        )
        if config.background and sampler.needs_features:
            return Stream(inputs, labels, _in_background(sampler, config, processes), workers=config.workers)
        return Stream(inputs, labels, sampler, workers=config.workers, processes=processes)

    found = {"source": stream("source", source, splits.source_train.known_labels(), config.batch_size)}
    if algorithm.uses_target:
        target = Inputs(splits.target_unlabelled, source.device)
        size = config.batch_size if config.target_batch_size is None else config.target_batch_size
        found["target"] = stream("target", target, None, size)
    return found


def _in_background(sampler: MinibatchSampler, config: RunConfig, processes: Processes) -> BackgroundSampler:
    if processes.count > 1:
        raise InputError(
            f"background=True is for one process, got {processes.count}; use devices=1 or background=False"
        )
    return BackgroundSampler(sampler, ahead=min(_MOST_AHEAD, max(1, config.refresh_every // 4)))


_MOST_AHEAD = 32  # batches asked for at a time
