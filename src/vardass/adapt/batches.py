"""From a domain to batches: its samples, and endless, resumable streams of batches."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from vardass.adapt.algorithms import Algorithm, Batch
from vardass.adapt.devices import Processes
from vardass.adapt.networks import Network
from vardass.data.domains import Domain, TensorInputs
from vardass.data.images import ImagePreprocessing, augment, may_crop, normalise, random_crops
from vardass.data.splits import TaskSplits, named_seed
from vardass.errors import InputError, VardassWarning
from vardass.processes import iterate
from vardass.refresh import extract_features
from vardass.samplers import MinibatchSampler, RowBatch
from vardass.samplers.registry import find_sampler, make_sampler
from vardass.validate import Progress

if TYPE_CHECKING:
    from vardass.adapt.config import RunConfig


# --- samples of a domain ------------------------------------------------------------------------------

_IMAGE_CHANNELS = (1, 3)
_WIDEST = 256  # columns of inputs that k-means sees
_PROJECTED = 64  # samples at a time


def in_memory(dataset: Dataset[Tensor]) -> Tensor | None:
    """All inputs (n, *shape) if they are in memory, also of subsets and concatenations; else None."""
    if isinstance(dataset, TensorInputs):
        return dataset.tensor
    if isinstance(dataset, Subset):
        rows = in_memory(dataset.dataset)
        return None if rows is None else rows[torch.tensor(dataset.indices, dtype=torch.int64, device=rows.device)]
    if isinstance(dataset, ConcatDataset):
        parts = [part for part in map(in_memory, dataset.datasets) if part is not None]
        return torch.cat(parts) if len(parts) == len(dataset.datasets) else None
    return None


class Inputs:
    """The samples of a domain on their way to a network."""

    def __init__(self, domain: Domain, device: torch.device) -> None:
        tensor = in_memory(domain.dataset)
        self.data: Tensor | Dataset[Tensor] = domain.dataset if tensor is None else tensor.to(device)
        self.device = device
        self.count = len(domain)
        self.shape: tuple[int, ...] = tuple(self.data[0].shape) if self.count else ()
        self.is_image = domain.kind == "image" and len(self.shape) == 3 and self.shape[0] in _IMAGE_CHANNELS
        self.may_crop = may_crop(domain.dataset)
        self.is_embedded = False
        self.domain_ids = domain.domain_ids if len(set(domain.domain_ids.tolist())) > 1 else None
        self._samples = self.data

    def __len__(self) -> int:
        return self.count

    def replace(self, embeddings: Tensor) -> None:
        """Let embeddings (n, m) stand for the samples."""
        self.data, self.shape, self.is_image = embeddings, tuple(embeddings.shape[1:]), False
        self.is_embedded = True

    def flat(self, *, workers: int = 0) -> Tensor:
        """All samples as vectors (n, d), a few samples in memory at a time.

        Those wider than 256 are projected on 256 random directions, the same for all data of one width. The relative
        error of squared distances then has a deviation of at most √(2 / 256) (Johnson and Lindenstrauss).
        """
        width, directions = math.prod(self._samples[0].shape), None
        if width > _WIDEST:
            warnings.warn(  # of the same words for both domains, so that it is shown once
                f"k-means on inputs sees {width:,} columns through {_WIDEST} random directions, which keep squared "
                f"distances to within about {(2 / _WIDEST) ** 0.5:.0%}; give inputs of at most {_WIDEST} columns, such "
                "as embeddings, for exact ones",
                VardassWarning,
                stacklevel=2,
            )
            generator = torch.Generator().manual_seed(named_seed("projection", width))
            directions = torch.randn(width, _WIDEST, generator=generator).div_(_WIDEST**0.5).to(self.device)

        def project(_: Any, x: Tensor) -> Tensor:
            rows = x.flatten(1).float()
            return rows if directions is None else rows @ directions

        return extract_features(
            None, self._samples, forward=project, device=self.device, batch_size=_PROJECTED, num_workers=workers
        )

    def prepare(
        self, x: Tensor, preprocessing: ImagePreprocessing, *, augment_seed: int | None = None, crop: bool = True
    ) -> Tensor:
        """Normalise a batch of images, augmented if there is a seed; return other samples unchanged."""
        if not self.is_image:
            return x
        if augment_seed is None:
            return normalise(x, preprocessing)
        return augment(x, seed=augment_seed, crop=crop, preprocessing=preprocessing)


def pass_over(algorithm: Algorithm, inputs: Inputs, forward: Callable[[Any, Tensor], Tensor], **options: Any) -> Tensor:
    """``forward(algorithm, x)`` of all samples x of a domain, prepared for the network, in evaluation mode: (n, d).

    ``options`` are those of ``extract_features``. Where samples must be seen together, see
    ``Algorithm.seen_together``, each of several united domains has a pass of its own.
    """

    def prepared(model: Algorithm, x: Tensor) -> Tensor:
        return forward(model, inputs.prepare(x, model.network.preprocessing))

    def part(data: Tensor | Dataset[Tensor], count: int) -> Tensor:
        size = options.get("batch_size", 256)
        while size > algorithm.seen_together and 0 < count % size < algorithm.seen_together:
            size -= 1  # the last batch has enough of them then
        given = {**options, "batch_size": size}
        return extract_features(algorithm, data, forward=prepared, device=inputs.device, **given)

    data, ids = inputs.data, inputs.domain_ids
    if ids is None or algorithm.seen_together == 1:
        return part(data, len(inputs))
    order = ids.argsort(stable=True)
    found = []
    for rows in torch.split(order, torch.unique(ids, return_counts=True)[1].tolist()):
        chosen = data[rows.to(data.device)] if isinstance(data, Tensor) else Subset(data, rows.tolist())
        found.append(part(chosen, len(rows)))
    whole = torch.cat(found)
    return whole[order.argsort().to(whole.device)]


# --- batches of a domain ------------------------------------------------------------------------------


class Draw(NamedTuple):
    """One batch and where its samples are in the domain, as a tensor (b,)."""

    rows: Tensor
    batch: Batch


class _PendingBatches:
    """Batches of a sampler for a loader: lists of rows, and the batches that it has asked for but not delivered.

    A loader gets the rows of this process only; with ``crop_seed`` each comes with a seed, which depends on the number
    of the batch and the place in it.
    """

    def __init__(self, sampler: MinibatchSampler, processes: Processes, crop_seed: int | None) -> None:
        self.sampler = sampler
        self.processes = processes
        self.crop_seed = crop_seed
        self.batches: deque[RowBatch] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        delivered = self.sampler.position - len(self.batches)
        for number, batch in enumerate(list(self.batches), delivered):  # of an earlier process, whose loader was ahead
            yield self._share(batch, number)
        while True:
            self.batches.append(self.sampler.draw())
            yield self._share(self.batches[-1], self.sampler.position - 1)

    def _share(self, batch: RowBatch, number: int) -> list[Any]:
        share = self.processes.part(len(batch.rows))
        rows = batch.rows[share].tolist()
        if self.crop_seed is None:
            return rows
        places = enumerate(rows, share.start)
        return [(row, named_seed("crop", self.crop_seed, number, place)) for place, row in places]


class Stream:
    """An endless stream of batches of one domain, drawn by a sampler.

    A loader with workers asks its sampler for batches ahead of time. Those under way are part of the state, so
    that a restored stream continues with the very next batch.
    """

    def __init__(
        self,
        inputs: Inputs,
        labels: Tensor | None,
        sampler: MinibatchSampler,
        algorithm: Algorithm,
        *,
        workers: int,
        crop_seed: int | None,
    ) -> None:
        self.inputs = inputs
        self.preprocessing = algorithm.network.preprocessing
        self._crops = None
        if crop_seed is not None and inputs.is_image and not isinstance(inputs.data, Tensor):
            self._crops = random_crops(inputs.data)
        self.labels = None if labels is None else labels.to(inputs.device)
        self.sampler = sampler
        self.workers = workers
        self.processes = algorithm.processes
        self._pending = _PendingBatches(sampler, self.processes, None if self._crops is None else crop_seed)
        self._batches: Iterator[Any] | None = None
        self._weights: tuple[Tensor | None, Tensor | None] = None, None  # of the sampler, and the same on the device

    def draw(self, *, augment_seed: int | None = None) -> Draw:
        """The next batch, on the device: the samples of this process, labels and weights of all."""
        inputs = self.inputs
        if isinstance(inputs.data, Tensor):
            drawn = self.sampler.draw()
            rows = drawn.rows.to(inputs.device)
            x = inputs.data.index_select(0, rows if self.processes.count == 1 else rows[self.processes.part(len(rows))])
        else:
            if self._batches is None:
                self._batches = iterate(self._loader(inputs.data if self._crops is None else self._crops))
            x = next(self._batches).to(inputs.device)
            drawn = self._pending.batches.popleft()
            rows = drawn.rows.to(inputs.device)
        y = None if self.labels is None else self.labels.index_select(0, rows)
        x = inputs.prepare(
            x, self.preprocessing, augment_seed=augment_seed, crop=self._crops is None and inputs.may_crop
        )
        ids = inputs.domain_ids
        domains = None if ids is None else ids.index_select(0, rows.to(ids.device))
        return Draw(rows, Batch(x, y, self._weights_of(drawn), domains=domains, rows=len(rows)))

    def _weights_of(self, drawn: RowBatch) -> Tensor | None:
        if drawn.weights is not self._weights[0]:  # a sampler has one tensor of them between refreshes
            on_device = None if drawn.weights is None else drawn.weights.to(self.inputs.device, torch.float32)
            self._weights = drawn.weights, on_device
        return self._weights[1]

    def close(self) -> None:
        """Stop the workers; the next draw continues with the batches under way."""
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state and the batches under way."""
        pending = [batch.as_list().state() for batch in self._pending.batches]
        return {"sampler": self.sampler.state_dict(), "pending": pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sampler.load_state_dict(state["sampler"])
        self._batches = None
        self._pending.batches = deque(RowBatch.from_list(saved, self.sampler.n) for saved in state["pending"])

    def _loader(self, dataset: Dataset[Tensor]) -> DataLoader[Tensor]:
        return DataLoader(
            dataset,
            batch_sampler=self._pending,
            num_workers=self.workers,
            pin_memory=self.inputs.device.type == "cuda",
            generator=torch.Generator(),  # otherwise its seed would come from the global generator
        )


def training_streams(
    config: RunConfig,
    splits: TaskSplits,
    source: Inputs,
    algorithm: Algorithm,
    *,
    samplers: Mapping[str, MinibatchSampler] | None = None,
) -> dict[str, Stream]:
    """Endless batches by domain, ``"source"`` and ``"target"``."""
    given = dict(samplers or {})
    found: dict[str, Stream] = {}
    sizes = {"source": config.batch_size, "target": config.target_batch_size or config.batch_size}
    sources = source.domain_ids if config.batch_per_source else None
    if sources is not None:
        sizes["source"] *= len(set(sources.tolist()))

    def add(name: str, inputs: Inputs, labels: Tensor | None, batch_size: int) -> None:
        sampler: Any
        if name in given:
            sampler = _checked_sampler(given.pop(name), name, inputs)
        else:
            options = {"kernel": algorithm.kernel, **config.sampler_options}
            if config.class_shares == "source" and labels is not None:
                options["groups"] = labels
            entry = find_sampler(config.sampler)
            if sources is not None and name == "source" and entry.preset.get("replacement"):
                options["from_each"] = sources
            together = entry.kind.plans_both_domains  # two that do have one seed
            if together:
                options |= {"role": name, "other_batch_size": sizes["target" if name == "source" else "source"]}
            seed = named_seed("sampler", "pair" if together else name, config.seed)
            if batch_size > len(inputs):
                raise InputError(
                    f"batches of {batch_size} are larger than the {name}, which has {len(inputs)} samples to train on "
                    "(without those held out); lower batch_size",
                    field="batch_size",
                )
            sampler = make_sampler(config.sampler, len(inputs), batch_size, seed=seed, **options)
        algorithm.processes.part(sampler.batch_size)  # refuses a size that cannot be shared
        augmented = config.augment in (name, "both")
        found[name] = Stream(
            inputs,
            labels,
            sampler,
            algorithm,
            workers=config.pass_options["num_workers"],
            crop_seed=named_seed("crops", name, config.seed) if augmented else None,
        )

    labels = splits.source_train.known_labels()
    add("source", source, labels if algorithm.units is None else algorithm.units.scaled(labels), sizes["source"])
    if algorithm.uses_target:
        add("target", Inputs(splits.target_unlabelled, source.device), None, sizes["target"])
    if given:
        raise InputError(
            f"samplers has entries {sorted(given)} that this run has no use for; {algorithm.name!r} draws from "
            f"{', '.join(found)}"
        )
    return found


def _checked_sampler(sampler: Any, name: str, inputs: Inputs) -> MinibatchSampler:
    if not isinstance(sampler, MinibatchSampler):
        raise InputError(
            f"samplers[{name!r}] must be a MinibatchSampler, got type {type(sampler).__name__}; derive yours from "
            "vardass.samplers.MinibatchSampler"
        )
    if sampler.n != len(inputs) or not sampler.endless:
        raise InputError(
            f"samplers[{name!r}] has n={sampler.n} and endless={sampler.endless}, but the run draws endlessly from "
            f"{len(inputs)} samples; make it with n={len(inputs)} and endless=True"
        )
    sampler.shard(1, 0)  # every process of a run draws the whole batch, and takes its rows
    return sampler


# --- a frozen backbone computes the same outputs in every step ----------------------------------------


def take_out_backbone(config: RunConfig, algorithm: Algorithm) -> nn.Module | None:
    """Take the backbone out if ``config.cache_embeddings`` asks for it: the algorithm then takes embeddings (b, m)."""
    reason = _why_not(config, algorithm)
    if config.cache_embeddings is True and reason is not None:
        raise InputError(f"cache_embeddings=True needs outputs that stay the same, but {reason}; use 'auto' or False")
    if not config.cache_embeddings or reason is not None:
        return None
    backbone: nn.Module = algorithm.network.featuriser.eval()
    algorithm.network.featuriser = nn.Identity()
    return backbone


def embed(
    inputs: Sequence[Inputs],
    backbone: nn.Module,
    preprocessing: ImagePreprocessing,
    config: RunConfig,
    *,
    progress: Progress | None = None,
) -> None:
    """Replace samples by their embeddings, in memory, unless they are embedded already."""
    waiting = [part for part in inputs if not part.is_embedded]
    total, done = sum(len(part) for part in waiting), 0
    for part in waiting:

        def forward(model: nn.Module, x: Tensor, part: Inputs = part) -> Tensor:
            z: Tensor = model(part.prepare(x, preprocessing))
            return z.flatten(1)

        embeddings = extract_features(
            backbone,
            part.data,
            forward=forward,
            out_device=part.device,
            device=part.device,
            **config.pass_options,
            progress=counted(progress, "embeddings", done, len(part), total),
        )
        part.replace(embeddings)
        done += len(part)


def _why_not(config: RunConfig, algorithm: Algorithm) -> str | None:
    network = algorithm.network
    if not network.freeze_backbone:
        return "the backbone is trained (network_options freeze_backbone=True would freeze it)"
    if config.augment != "none":
        return "images are augmented at random"
    if type(algorithm).features is not Algorithm.features:
        return f"{type(algorithm).__name__} computes features in its own way, such as with a context that is trained"
    if type(network).features is not Network.features:
        return f"{type(network).__name__} computes features in its own way"
    return None


def counted(progress: Progress | None, what: str, done: int, count: int, total: int) -> Progress | None:
    """``progress`` for a pass over ``count`` samples after ``done`` of ``total``, before the first step of a run."""
    if progress is None:
        return None
    return lambda share, message: progress(0.0, f"{what} of {done + round(share * count):,} of {total:,} samples")
