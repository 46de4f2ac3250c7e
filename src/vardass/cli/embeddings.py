"""What commands on files of embeddings share: options, the kernel they name, where results go, and plain tables."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from vardass.data.embedding_files import read_embeddings
from vardass.errors import InputError
from vardass.kernels import Kernel, RBFMixture, as_kernel
from vardass.validate import as_features

__all__ = [
    "COLUMNS",
    "FILE",
    "GAMMAS",
    "KERNEL",
    "SCALE",
    "bar",
    "check_output",
    "chosen_kernel",
    "features_of",
    "finite",
    "plain_table",
    "print_line",
]

FILE = "Embeddings (n, d): .npy, .npz, .csv or .parquet."
KERNEL = "mmd (the paper's RBF mixture), rbf, coral, linear, polynomial or laplacian."
GAMMAS = "Gammas of mmd or rbf, such as 0.1,1,10."
SCALE = "Divide squared distances in mmd or rbf by a number, median or mean."
COLUMNS = "Columns to read: names, patterns (f*), numbers from 0 or ranges (2:), separated by commas."

_BAR = 28  # characters


def chosen_kernel(name: str, gammas: str | None, scale: str | None, *, default_scale: str | None = None) -> Kernel:
    """The kernel of the options; ``default_scale`` is that of an RBF mixture for which none is given."""
    kernel = as_kernel(name)
    if not isinstance(kernel, RBFMixture):
        if gammas is None and scale is None:
            return kernel
        raise InputError(f"--gammas and --scale are for --kernel mmd or rbf, got {name}; leave them out")
    scale = default_scale if scale is None else scale
    values = kernel.gammas
    if gammas is not None:
        try:
            values = tuple(float(part) for part in gammas.split(","))
        except ValueError:
            raise InputError(f"--gammas must be numbers such as 0.1,1,10, got {gammas!r}") from None
    if scale is None or scale in ("median", "mean"):
        return RBFMixture(values, scale or 1.0)
    try:
        return RBFMixture(values, float(scale))
    except ValueError:
        raise InputError(f"--scale must be a positive number, median or mean, got {scale!r}") from None


def features_of(path: Path, *, key: str | None, columns: str | None, leave_out: Collection[str] = ()) -> Tensor:
    """Features (n, d) of a file, checked, with the file named in what is wrong with them."""
    return as_features(read_embeddings(path, key=key, columns=columns, leave_out=leave_out), f"features of {path.name}")


def check_output(option: str, target: Path, source: Path) -> None:
    """Refuse an output that is the input, a folder, or cannot be written; before the work, not after it."""
    if target.exists() and source.exists() and os.path.samefile(target, source):
        raise InputError(f"{option} {target} is the input file; choose another name")
    if target.is_dir():
        raise InputError(f"{option} {target} is a folder; give a file name in it")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent} for {option} {target}; make it first")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"cannot write into {target.parent}; choose another folder with {option}")


def finite(value: Any) -> Any:
    """The same for JSON: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_line(console: Console, text: str, style: str = "") -> None:
    """One line as it is: no markup, not cut at the width of the terminal."""
    console.print(Text(text, style=style), soft_wrap=True)


def plain_table(*justify: Literal["left", "right"]) -> Table:
    """A table without lines and header."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for side in justify:
        table.add_column(justify=side, no_wrap=True)
    return table


def bar(share: float, console: Console) -> Text:
    """A bar of a share between 0 and 1."""
    mark = "#" if console.options.ascii_only else "█"
    return Text(mark * min(_BAR, max(int(share > 0), round(_BAR * share))))
