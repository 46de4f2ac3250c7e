"""Numbers to predict instead of classes: their scale while a network learns them, its error, and its scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vardass.errors import InputError
from vardass.validate import as_numbers, check_count, check_flag

__all__ = ["Units", "check_outputs", "regression_scores", "squared_error"]

_LEAST_DEVIATION = 1e-5  # in parts of the mean; what varies less is lost in single precision


def check_outputs(count: int, *, regression: bool) -> None:
    """Refuse fewer outputs of a network than a classifier, or a regression, can have."""
    if check_flag(regression, "regression"):
        check_count(count, "num_classes", remedy="a regression predicts at least one number")
    else:
        check_count(count, "num_classes", low=2, remedy="a classifier needs two classes")


class Units(nn.Module):
    """Mean and deviation of the ``count`` numbers to predict: a network learns them with mean 0 and deviation 1.

    Both are buffers, so that a saved model predicts in the original units.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("deviation", torch.ones(count))

    def fit(self, y: Tensor, names: Sequence[str]) -> None:
        """Take mean and deviation from the source's numbers ``y`` (n, m)."""
        mean, deviation = y.double().mean(0), y.double().std(0, correction=0)
        for name, centre, spread in zip(names, mean.tolist(), deviation.tolist(), strict=True):
            if spread <= _LEAST_DEVIATION * abs(centre):
                raise InputError(
                    f"the numbers {name!r} of {len(y)} samples to learn from have mean {centre:g} and deviation "
                    f"{spread:g}, so there is nothing to learn; give numbers that differ, or subtract a constant"
                )
        self.mean.copy_(mean)
        self.deviation.copy_(deviation)

    def scaled(self, y: Tensor) -> Tensor:
        """Numbers (n, m) as a network learns them, in single precision."""
        return ((y.double() - self.mean.to(y.device).double()) / self.deviation.to(y.device).double()).float()

    def forward(self, scaled: Tensor) -> Tensor:
        """Outputs (b, m) of a network in the original units."""
        return scaled * self.deviation + self.mean


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Squared error of each row of ``outputs`` (b, m), the mean over its m numbers: (b,)."""
    if outputs.shape != y.shape:
        raise InputError(
            f"outputs have shape {tuple(outputs.shape)}, the numbers to predict {tuple(y.shape)}; both must be (b, m)"
        )
    return (outputs - y).square().mean(1)  # numbers in single precision keep half outputs from rounding the error


def regression_scores(predicted: Tensor, truth: Tensor) -> dict[str, float]:
    """Root of the mean squared error, mean absolute error and R² of predictions (n, m), each a mean over m columns.

    R² = 1 - Σ (y - ŷ)² / Σ (y - ȳ)²: 1 is perfect, 0 is as good as predicting the mean. If y is constant, R² is 1 for
    exact predictions and else 0, as in scikit-learn.

    Returns
    -------
    dict
        ``"rmse"``, ``"mae"`` and ``"r2"``.
    """
    y = as_numbers(truth, len(truth), "truth")
    error = as_numbers(predicted, len(y), "predictions").to(y.device) - y
    if error.shape != y.shape or not len(y):
        raise InputError(
            f"predictions have {error.shape[1]} columns for {len(y)} samples, the truth {y.shape[1]}; give as many, of "
            "at least one sample"
        )
    squares, spread = error.square().sum(0), (y - y.mean(0)).square().sum(0)
    r2 = torch.where(spread > 0, 1.0 - squares / spread.where(spread > 0, 1.0), (squares == 0).double())
    return {"rmse": float((squares / len(y)).sqrt().mean()), "mae": float(error.abs().mean()), "r2": float(r2.mean())}
