"""What MMD² and CORAL share: the module of a loss of two batches of features, and the checks at its door.

A batch is a tensor of features (n, d) and the weights (n,) of its rows. `DiscrepancyLoss.forward` checks both;
`DiscrepancyLoss.of_rows` is the same loss for a caller that has checked them already, such as the trainer, and reads no
value on the host, so that a GPU need not wait. Nothing is checked while torch compiles.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.validate import ArrayLike, as_weights, require_dense


class DiscrepancyLoss(nn.Module):
    """A loss of two batches: options in the constructor, batches in ``forward``."""

    def forward(
        self, x: Tensor, y: Tensor, weights_x: ArrayLike | None = None, weights_y: ArrayLike | None = None
    ) -> Tensor:
        """Return the loss of features ``x`` (n_x, d) and ``y`` (n_y, d) with the weights of their rows."""
        if not torch.compiler.is_compiling():
            _check_pair(x, y)
            like = x.new_empty(0, dtype=_full_dtype(x, y))
            weights_x = as_weights(weights_x, len(x), like, "weights_x")
            weights_y = as_weights(weights_y, len(y), like, "weights_y")
            self._check(x, y, weights_x, weights_y)
        return self.of_rows(x, y, weights_x, weights_y)

    def of_rows(
        self, x: Tensor, y: Tensor, weights_x: ArrayLike | None = None, weights_y: ArrayLike | None = None
    ) -> Tensor:
        """Return what ``forward`` does, without checks."""
        dtype = _full_dtype(x, y)
        x, y = x.to(dtype), y.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return self._loss(x, y, _unit_weights(weights_x, x), _unit_weights(weights_y, y))

    def _check(self, x: Tensor, y: Tensor, weights_x: Tensor | None, weights_y: Tensor | None) -> None:
        """Refuse checked batches that this loss cannot take."""

    def _loss(self, x: Tensor, y: Tensor, w_x: Tensor, w_y: Tensor) -> Tensor:
        """The loss of batches of one dtype, float32 or float64, whose weights sum to 1."""
        raise NotImplementedError


def _full_dtype(x: Tensor, y: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)


def _unit_weights(weights: ArrayLike | None, z: Tensor) -> Tensor:
    """Weights (n,) of the rows ``z``, uniform for None; their sum is 1 up to rounding.

    Sums that are further off would be multiplied by the features' distance from the origin.
    """
    if weights is None:
        return z.new_full((len(z),), 1.0 / len(z))
    w = torch.as_tensor(weights, dtype=z.dtype, device=z.device)
    return w / w.sum()


def _check_pair(x: Tensor, y: Tensor) -> None:
    for batch, name in ((x, "x"), (y, "y")):
        if not isinstance(batch, Tensor) or not batch.is_floating_point():
            kind = batch.dtype if isinstance(batch, Tensor) else type(batch).__name__
            raise InputError(f"{name} must be a tensor of floats, got {kind}; use torch.as_tensor(...).float()")
        require_dense(batch, name)
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or 0 in (*x.shape, *y.shape):
        raise InputError(
            "x and y must have shapes (n_x, d) and (n_y, d) with the same d and at least one row, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}; flatten each sample with .flatten(1)"
        )
    if x.device != y.device:
        raise InputError(f"x is on {x.device} and y on {y.device}; move one with .to(device)")
