"""Features of a whole data set by a forward pass without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from vardass.errors import InputError
from vardass.processes import iterate
from vardass.validate import Progress, check_count, row_blocks


def extract_features(
    model: Any,
    data: Any,
    *,
    out_device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    num_workers: int = 0,
    autocast_dtype: torch.dtype | None = None,
    forward: Callable[[Any, Any], Tensor] | None = None,
    key: str | int | None = None,
) -> Tensor:
    """Compute the features of every sample in evaluation mode, in the order of the data set: (n, d).

    Pass a data set **without augmentation**: strata made from randomly cropped or noisy samples describe
    the noise too. The global random state and the training flags of modules are left alone.

    Parameters
    ----------
    model : nn.Module or callable
        The feature extractor, on the device it should run on.
    data : Dataset, Tensor of shape (n, ...), DataLoader or iterable of batches
        A data set, also one wrapped by ``with_weights``. A DataLoader, for samples that need a ``collate_fn``, must
        keep the order and drop nothing.
    out_device : device
        Device of the result, filled batch by batch.
    dtype : torch.dtype
        Precision of the result.
    progress : callable, optional
        ``progress(share_done, message)`` after each batch.
    batch_size : int
        Samples in a forward pass.
    device : device, optional
        Device of the inputs, by default that of the model's first parameter. Float inputs get the precision of a
        model in half or double precision.
    num_workers : int
        Worker processes that load samples.
    autocast_dtype : torch.dtype, optional
        Run the forward pass in mixed precision, for example ``torch.bfloat16``; None means full precision,
        also inside an autocast region.
    forward : callable, optional
        ``forward(model, inputs) -> (batch, d)``, used instead of ``model(inputs)``.
    key : str or int, optional
        The input's key in a mapping or index in a tuple; by default the sample itself, or the first element of a tuple.

    Examples
    --------
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.ones(5, 3), torch.arange(5))
    >>> extract_features(torch.nn.Flatten(), data, batch_size=2).shape
    torch.Size([5, 3])
    """
    batch_size = check_count(batch_size, "batch_size")
    num_workers = check_count(num_workers, "num_workers", low=0)
    place = _device_of(model) if device is None else as_device(device)
    precision = _precision_of(model) if autocast_dtype is None else None
    n = _row_count(data)
    pieces: list[Tensor] = []
    done, width = 0, None
    loading = {"num_workers": num_workers, "pin_memory": place.type == "cuda"}
    with evaluation_mode(model):
        for batch in iterate(_batches(data, batch_size, **loading)):
            inputs = _placed(_inputs(batch, key), place, precision)
            # no cache: weights cast here have no graph, a surrounding autocast region must not reuse them
            autocast = torch.autocast(
                place.type, dtype=autocast_dtype, enabled=autocast_dtype is not None, cache_enabled=False
            )
            with torch.no_grad(), autocast:
                z = model(inputs) if forward is None else forward(model, inputs)
            _check_output(z, len(inputs) if isinstance(inputs, Tensor) else None, width)
            pieces.append(z.detach().to(device=out_device, dtype=dtype))
            done, width = done + len(z), z.shape[1]
            if progress is not None and n is not None:
                progress(done / n, f"features of {done} of {n} samples")
    if done == 0:
        raise InputError("there are no samples to compute features of, got 0; pass a data set with samples")
    if n not in (None, done):
        raise InputError(
            f"got features of {done} of {n} samples; pass the data set itself, not a loader that drops some"
        )
    return torch.cat(pieces)


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Put a module in evaluation mode and give every submodule its own training flag back at the end."""
    if not isinstance(model, nn.Module):
        yield
        return
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _row_count(data: Any) -> int | None:
    if isinstance(data, DataLoader):
        return None if data.batch_size is None else _row_count(data.dataset)
    has_rows = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return len(data) if has_rows and not isinstance(data, IterableDataset) else None


def _batches(data: Any, batch_size: int, **loading: Any) -> Iterable[Any]:
    if isinstance(data, Tensor):
        return (data[block] for block in row_blocks(len(data), batch_size))
    if isinstance(data, DataLoader):
        _check_order(data)
        return data
    while getattr(data, "weights_attached", False):
        data = data.dataset
    if isinstance(data, IterableDataset) or _row_count(data) is not None:
        # without a generator of its own each pass would move the global random state
        return DataLoader(data, batch_size, generator=torch.Generator(), **loading)
    if isinstance(data, Iterable):
        return data
    raise InputError(f"data must be a data set, a loader or a tensor, got {type(data).__name__}")


def _check_order(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        return
    sampler: Any = loader.batch_sampler
    plain = sampler is None or type(sampler) is BatchSampler
    order = loader.sampler if sampler is None else getattr(sampler, "sampler", None)
    if not (plain and isinstance(order, SequentialSampler)):
        raise InputError(
            f"features must be in the order of the data set, but the loader draws with "
            f"{type(order if plain else sampler).__name__}; pass the data set itself or a loader with shuffle=False"
        )


def _inputs(part: Any, key: str | int | None) -> Any:
    if isinstance(part, tuple | list) and part and not isinstance(part[0], str):
        place = key if isinstance(key, int) else 0
        if not -len(part) <= place < len(part):
            raise InputError(f"a sample has {len(part)} parts, got key={key}; count from 0")
        part = part[place]
    if isinstance(part, Mapping):
        if key not in part:
            raise InputError(
                f"a sample is a mapping with the keys {sorted(map(str, part))}, got key={key!r}; "
                "choose the input with key=..."
            )
        part = part[key]
    elif isinstance(key, str):
        raise InputError(f"key={key!r} needs samples that are mappings, got {type(part).__name__}; leave it out")
    return part


def _device_of(model: Any) -> torch.device:
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else iter(())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _precision_of(model: Any) -> torch.dtype | None:
    """Precision of the inputs of a model in half or double precision; None for others."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    kinds = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 and torch.float32 not in kinds else None


def as_device(device: torch.device | str) -> torch.device:
    """Return ``device``, checked to be usable."""
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"device {device!r} cannot be used ({reason}); use 'cpu', or 'cuda' where there is one"
        ) from None
    return place


def _placed(inputs: Any, device: torch.device, precision: torch.dtype | None) -> Any:
    """``inputs`` on the device, their floating-point parts in the given precision unless that is None."""
    if isinstance(inputs, Tensor):
        dtype = precision if inputs.is_floating_point() else None
        return inputs.to(device, dtype=dtype, non_blocking=device.type != "cpu")
    if isinstance(inputs, Mapping):
        return {name: _placed(value, device, precision) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        moved = [_placed(value, device, precision) for value in inputs]
        return moved if isinstance(inputs, list) else tuple(moved)
    return inputs


def _check_output(z: Any, rows: int | None, width: int | None) -> None:
    if not isinstance(z, Tensor):
        raise InputError(
            f"the model must give a tensor of shape (batch, d), got {type(z).__name__}; pick one with "
            "forward=lambda model, x: model(x)[0]"
        )
    if z.ndim != 2:
        raise InputError(
            f"features must have shape (batch, d), got {tuple(z.shape)}; flatten them with "
            "forward=lambda model, x: model(x).flatten(1)"
        )
    if rows is not None and len(z) != rows:
        raise InputError(f"the model gave {len(z)} rows of features for {rows} samples; it must give one each")
    if width is not None and z.shape[1] != width:
        raise InputError(f"the model gave {z.shape[1]} features after {width} for earlier samples")
