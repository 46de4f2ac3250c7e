"""Checks of user input, and the types that signatures share.

Every public function calls these first; private code assumes they passed.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from vardass.errors import InputError, VardassError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ArrayLike: TypeAlias = "Tensor | NDArray[Any]"

Progress: TypeAlias = Callable[[float, str], object]
"""Called with the fraction done and a message."""

_HALF = (torch.float16, torch.bfloat16)
_LARGEST = torch.finfo(torch.float32).max  # nothing can be computed with larger numbers


def silent(fraction: float, message: str) -> None:
    """A `Progress` that does nothing."""


def _unusable(name: str, why: str) -> InputError:
    return InputError(f"{name} {why}", field=name)


def as_tensor(values: Any, name: str, what: str = "real numbers") -> Tensor:
    """Convert a tensor, array or list of numbers to a dense tensor without gradient, keeping its dtype and device.

    Byte orders, negative strides, long doubles and unsigned numbers that torch does not know are converted.
    """
    if isinstance(values, Tensor):
        require_dense(values, name)
        if values.is_quantized:
            raise _unusable(name, f"must be {what}, got dtype {values.dtype}; convert it with .dequantize()")
        if values.is_meta:
            raise _unusable(name, f"must be {what}, got a tensor on the device meta, which holds none")
        # float8 has no arithmetic
        return values.detach().float() if values.is_floating_point() and values.itemsize < 2 else values.detach()
    if masked := int(np.sum(values.mask)) if isinstance(values, np.ma.MaskedArray) else 0:
        raise _unusable(name, f"have {masked} masked values; use .filled(...), or drop these rows")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # rows of unequal length, tensors on another device
        raise _unusable(
            name,
            f"must be {what} in rows of one length, got type {type(values).__name__} that numpy cannot read; "
            "pad or cut the rows, and move tensors to the CPU",
        ) from None
    if array.dtype.kind not in "biufc":
        got = type(values).__name__ if array.ndim == 0 else f"dtype {array.dtype}"
        raise _unusable(name, f"must be {what}, got {got}; pass a tensor or an array of them")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        beyond = array.size > 0 and int(array.max()) >= 2**63
        array = array.astype(np.float64 if beyond else np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # a memory-mapped file is read-only, which torch.from_numpy warns about
    plain = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if plain else np.array(array, order="C"))


def is_readable(x: Tensor) -> bool:
    """Whether values may be read on the host: on a GPU the training loop would wait, and torch cannot compile it."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def require_dense(x: Tensor, name: str) -> None:
    """Refuse sparse and nested tensors."""
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else str(x.layout)
        raise _unusable(name, f"must be a dense tensor, got a {kind} one; convert it with .to_dense()")


def as_features(x: ArrayLike, name: str = "features", *, check_finite: bool = True) -> Tensor:
    """Return ``x`` as a detached (n, d) float32 or float64 tensor on its own device.

    Half precision and integers become float32, a vector of n numbers becomes (n, 1).
    """
    x = as_tensor(x, name)
    if x.is_complex() or x.dtype == torch.bool:
        raise _unusable(name, f"must be real numbers, got dtype {x.dtype}; convert it with x.float()")
    if x.ndim == 1:
        x = x[:, None]
    if x.ndim != 2:
        raise _unusable(name, f"must have shape (n, d), got {tuple(x.shape)}; flatten each sample with x.flatten(1)")
    if x.shape[0] == 0 or x.shape[1] == 0:
        raise _unusable(name, f"must have at least one row and one column, got shape {tuple(x.shape)}")
    if not x.is_floating_point() or x.dtype in _HALF:
        x = x.float()
    if check_finite:
        _require_finite(x, name)
    return x


def _require_finite(x: Tensor, name: str, remedy: str = "drop these rows or fix the feature extractor") -> None:
    # the sum is finite unless an entry is not, or finite entries overflow: then look closer
    if bool(torch.isfinite(x.sum())):
        return
    bad = (~torch.isfinite(x)).any(1).nonzero().flatten()
    if len(bad):
        shown = ", ".join(str(int(i)) for i in bad[:5]) + (", ..." if len(bad) > 5 else "")
        raise _unusable(
            name, f"have NaN or infinite values in {len(bad)} of {x.shape[0]} rows (rows {shown}); {remedy}"
        )


def as_weights(
    weights: ArrayLike | None, n: int, like: Tensor, name: str = "weights", *, read: bool = True
) -> Tensor | None:
    """Return ``weights`` as an (n,) tensor of ``like``'s dtype and device, or None for None.

    Values are checked where they may be read, see `is_readable`, and not with ``read=False``, which is for weights that
    were checked on their way into a training loop.
    """
    if weights is None:
        return None
    w = as_tensor(weights, name)
    if w.is_complex() or w.dtype == torch.bool:
        raise _unusable(name, f"must be real numbers, got dtype {w.dtype}; use stratum size / n")
    if w.ndim != 1 or len(w) != n:
        raise _unusable(
            name, f"must have shape ({n},), one for each row, got {tuple(w.shape)}; pass the weights of this batch"
        )
    if read and is_readable(w):
        total = float(w.sum(dtype=torch.float64))
        if not math.isfinite(total) or (n > 0 and float(w.min()) < 0):
            raise _unusable(name, f"must be finite and not negative, got {w.tolist()[:8]}; use stratum size / n")
        # each weight is off by half a unit of its own rounding: in bfloat16 the sum by up to 0.004
        rounding = torch.finfo(w.dtype).eps if w.is_floating_point() else 0.0
        if abs(total - 1.0) > max(1e-3, rounding):
            part = (
                ", or, where these are a part of a batch that was split between processes (split_batches=True of "
                "Accelerate), let the sampler shard whole batches (split_batches=False)"
            )
            why = f"must sum to 1, got {total:.6g}; divide them by their sum"
            raise _unusable(name, why + (part if 0.0 < total < 1.0 else ""))
    return w.to(device=like.device, dtype=like.dtype)


def as_labels(labels: ArrayLike | Sequence[int], n: int, name: str = "labels") -> Tensor:
    """Return ``labels``, any whole numbers, as an int64 tensor of shape (n,) on its own device."""
    labels = as_tensor(labels, name, "whole numbers")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise _unusable(name, f"must be whole numbers, got dtype {labels.dtype}; number the groups 0..k-1")
    if labels.shape != (n,):
        raise _unusable(
            name,
            f"must have shape ({n},), one for each row, got {tuple(labels.shape)}; pass the {name} of these samples",
        )
    return labels.long()


def as_numbers(values: ArrayLike, n: int, name: str = "labels") -> Tensor:
    """Return ``values`` (n,) or (n, m), finite real numbers, as a float64 tensor (n, m) on its own device."""
    values = as_tensor(values, name)
    if values.is_complex() or values.dtype == torch.bool:
        raise _unusable(name, f"must be real numbers, got dtype {values.dtype}; convert them to floats")
    found = values[:, None] if values.ndim == 1 else values
    if found.ndim != 2 or len(found) != n or not found.shape[1]:
        raise _unusable(
            name,
            f"must have shape ({n},) or ({n}, m), a number or m of them for each row, got "
            f"{tuple(values.shape)}; pass those of these samples",
        )
    found = found.double()
    _require_finite(found, name, "drop these rows or fill them in")
    return found


def check_count(value: Any, name: str, *, low: int = 1, high: int | None = None, remedy: str = "") -> int:
    """Return ``value`` as an int within ``[low, high]`` or raise an InputError that names both."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _unusable(name, f"must be a whole number, got {value!r}")
    number = int(value)
    most = 2**63 - 1 if high is None else high
    if not low <= number <= most:
        bounds = f"at least {low}" if high is None and number < low else f"between {low} and {most}"
        raise _unusable(name, f"must be {bounds}, got {number}" + (f"; {remedy}" if remedy else ""))
    return number


def check_number(
    value: Any, name: str, *, low: float, below: float = math.inf, high: float = math.inf, remedy: str = ""
) -> float:
    """Return ``value`` as a float within ``[low, high]`` and below ``below`` or raise an InputError that names both."""
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if number > _LARGEST:
        high = min(high, _LARGEST)
    if not low <= number < below or number > high:
        bounds = f"a number of at least {low:g}" + ("" if below == math.inf else f" and below {below:g}")
        bounds += "" if high == math.inf else f" and at most {high:.3g}"
        raise _unusable(name, f"must be {bounds}, got {value!r}" + (f"; {remedy}" if remedy else ""))
    return float(value)


def check_flag(value: Any, name: str) -> bool:
    """Return ``value`` if it is True or False; texts such as "no" would count as true."""
    if not isinstance(value, bool):
        raise _unusable(name, f"must be true or false, got {value!r}")
    return value


def as_generator(seed: int | torch.Generator | None, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator on ``device``: the given one, or a new one seeded with ``seed`` (None means 0)."""
    if isinstance(seed, torch.Generator):
        if seed.device.type == torch.device(device).type:
            return seed
        seed = int(torch.randint(2**62, (1,), generator=seed, device=seed.device))
    return torch.Generator(device=device).manual_seed(0 if seed is None else check_seed(seed))


def check_seed(seed: Any) -> int:
    """Return ``seed`` as a whole number that torch takes."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise _unusable("seed", f"must be a whole number, got {seed!r}; use seed=0")
    if not -(2**63) <= seed < 2**64:
        raise _unusable("seed", f"must be between -2**63 and 2**64 - 1, got {seed}; use a smaller one")
    return int(seed)


def check_state(state: Any, owner: object, keys: Iterable[str] = ()) -> None:
    """Refuse a state that is not a dictionary or lacks ``keys`` of the ``state_dict()`` of ``owner``."""
    remedy = f"pass what {type(owner).__name__}.state_dict() gave"
    if not isinstance(state, Mapping):
        raise InputError(f"a state must be a dictionary, got {type(state).__name__}; {remedy}")
    if missing := [key for key in keys if key not in state]:
        raise InputError(f"the state has the keys {sorted(state)}, but not {missing}; {remedy}")


@contextmanager
def reading(source: object, remedy: str) -> Iterator[None]:
    """Take apart what a file holds, which a stranger may have written: whatever does not fit is one InputError.

    Errors of the system pass: they say nothing of the content.
    """
    try:
        yield
    except (VardassError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise InputError(f"{source} is damaged, or of another version of vardass ({why}); {remedy}") from error


def check_tensor(
    value: Any, name: str, shape: Sequence[int | None], *, low: float | None = None, high: float | None = None
) -> Tensor:
    """Return ``value`` from a state if it is a tensor of ``shape`` (None: any size) with entries that can be used.

    With bounds that are whole numbers it holds int64 within them, else finite floats, none below ``low``.
    """
    whole = isinstance(high, int)
    sizes = tuple("any" if size is None else size for size in shape)
    if (
        not isinstance(value, Tensor)
        or value.layout != torch.strided
        or (value.dtype != torch.int64 if whole else not value.is_floating_point())
        or value.ndim != len(shape)
        or any(size not in (None, actual) for size, actual in zip(shape, value.shape))
    ):
        what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise _unusable(name, f"must be {'int64' if whole else 'floats'} of shape {sizes}, got {what}")
    if value.numel():
        least, most = value.min().item(), value.max().item()
        fits = -math.inf < least <= most < math.inf and (low is None or least >= low)
        if not fits or (high is not None and most > high):
            bounds = f"{low} to {high}" if whole else "finite" + ("" if low is None else f" and at least {low}")
            raise _unusable(name, f"must be {bounds}, got {least} to {most}")
    return value


def some_rows(x: Tensor, most: int = 1000) -> Tensor:
    """At most ``most`` rows, evenly spaced: the same ones of every data set of one size."""
    return x[:: -(-len(x) // most)]


def row_blocks(n: int, rows: int) -> Iterator[slice]:
    """Cut ``range(n)`` into slices of at most ``rows`` rows."""
    rows = max(1, rows)
    for start in range(0, n, rows):
        yield slice(start, min(start + rows, n))


Value = TypeVar("Value", bound=str)

_ALIASES = {  # what other libraries and papers call a setting
    "penalty": "lambda lamda lambd trade_off tradeoff",
    "lr": "learning_rate rate",
    "steps": "iterations iters max_steps epochs",
    "batch_size": "bs batchsize",
    "network": "backbone encoder architecture",
    "algorithm": "method",
    "seed": "random_state random_seed",
}
_LONGEST_LIST = 240  # characters of names in a message


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``given`` is another word for, or else the most like it, if there is any."""
    by_lower = {name.lower(): name for name in known}
    word = str(given).lower()
    named = [name for name in by_lower if word.replace("-", "_") in _ALIASES.get(name, "").split()]
    near = named or difflib.get_close_matches(word, by_lower, n=1)
    return by_lower[near[0]] if near else None


def unknown(kind: str, given: str, known: Iterable[str]) -> InputError:
    """Return an error for a name that is not among ``known``, with the nearest one as the remedy."""
    names = list(known)
    near = nearest(given, names)
    hint = f"did you mean {near!r}? known: " if near else "choose one of "
    text = ", ".join(names) or "none"
    if near and len(text) > _LONGEST_LIST:
        text = text[:_LONGEST_LIST].rpartition(", ")[0] + f", ... ({len(names)} in all)"
    return InputError(f"unknown {kind} {given!r}; {hint}{text}", field=kind if kind.isidentifier() else None)


def choose(value: Value, kind: str, choices: Iterable[str], *, any_case: bool = False) -> Value:
    """Return ``value`` if it is one of ``choices``, else raise the error of ``unknown``.

    With ``any_case`` capitals do not matter, and the result is spelt as in ``choices``.
    """
    known = list(choices)
    if any_case and isinstance(value, str):
        value = cast(Value, {name.lower(): name for name in known}.get(value.lower(), value))
    if value not in known:
        raise unknown(kind, value, known)
    return value


def shorten(names: Sequence[str]) -> str:
    """Names for a message, at most six of them."""
    return ", ".join(map(repr, names[:6])) + (f", ... ({len(names)} in all)" if len(names) > 6 else "") or "none"


def import_by_name(name: str, kind: str) -> Any:
    """Return the object that ``"package.module:Name"`` names.

    The current folder is not added to the import path. ``Name`` may have dots, for an attribute of a class.
    """
    parts = _module_and_name(str(name))
    if parts is None:
        raise InputError(
            f"{kind} {name!r} is not a name of the form package.module:Name; give one, such as mine.parts:My"
        )
    module_name, attribute = parts
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, but it imports one that is not
        raise InputError(
            f"{kind} {name!r}: there is no module {error.name!r} on the import path; install it, or put its folder on "
            "the path, for example with PYTHONPATH=. before the command"
        ) from None
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [each for each in vars(found) if not each.startswith("_")] if hasattr(found, "__dict__") else []
            near = difflib.get_close_matches(part, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "check the spelling"
            place = getattr(module, "__file__", None) or "built in"
            raise InputError(f"{kind} {name!r}: {module_name} ({place}) has no {attribute!r}; {hint}")
        found = getattr(found, part)
    return found


def refuse_code(content: Any, source: object, *, trust_code: bool) -> None:
    """Refuse what was read from a file if it names code that `import_by_name` would import.

    Importing a module runs it, which a user who opens a file may not expect.
    """
    if trust_code:
        return
    if isinstance(content, Mapping):
        content = list(content.values())
    if isinstance(content, list | tuple):
        for entry in content:
            refuse_code(entry, source, trust_code=False)
    # additions to an algorithm's name follow a plus
    elif isinstance(content, str) and _module_and_name(content.partition("+")[0]) is not None:
        raise InputError(
            f"{source} names code to be imported and run, {content!r}; if you trust that code, allow it with "
            "trust_code=True"
        )


def _module_and_name(text: str) -> tuple[str, str] | None:
    """The two parts of ``"package.module:Name"``; None for any other text."""
    module, colon, name = text.partition(":")
    parts = [*module.split("."), *name.split(".")]
    return (module, name) if colon and all(part.isidentifier() for part in parts) else None
