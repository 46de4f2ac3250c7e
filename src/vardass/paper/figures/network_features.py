"""What figures 4 and 5 share: features of a small network on the watch data, and variances of batches of them."""

from __future__ import annotations

from torch import Tensor

from vardass.adapt.config import RunConfig
from vardass.adapt.trainer import Trainer
from vardass.data import load_task, split_task
from vardass.kernels import Kernel
from vardass.refresh import extract_features

__all__ = ["Gram", "small_trainer", "source_features"]


def small_trainer(
    task: str, *, seed: int, steps: int, lr: float, sampler: str = "uniform", period: int = 100
) -> Trainer:
    """A trainer of the default small network with MMD and k = 32, in memory.

    Parameters
    ----------
    task : str
        Of the watch data, such as ``"left-A->right-B"``.
    seed : int
        Of split, weights and batches.
    steps, lr
        Length of the run and learning rate of Adam.
    sampler, period
        How batches are drawn, and T, steps between refreshes from a pass over all samples.
    """
    config = RunConfig(
        algorithm="mmd",
        sampler=sampler,
        steps=steps,
        batch_size=32,
        lr=lr,
        refresh_every=period,
        feature_source="full",
        eval_every=steps,
        device="cpu",
        seed=seed,
    )
    return Trainer(config, split_task(load_task("watch", task), seed=seed))


def source_features(trainer: Trainer) -> Tensor:
    """Features (n, d) of all source samples that the run trains on, as the network is now."""
    data = trainer.streams["source"].inputs.data
    return extract_features(trainer.algorithm, data, forward=lambda model, x: model.features(x))


class Gram:
    """The kernel matrix of all samples, from which many designs are measured without evaluating the kernel again.

    Parameters
    ----------
    features : Tensor of shape (n, d)
        All samples of one domain.
    kernel : Kernel
        Fitted.
    """

    def __init__(self, features: Tensor, kernel: Kernel) -> None:
        self.n = len(features)
        self.matrix = kernel.matrix(features).double()
        self.inner = self.matrix.mean(1)  # <φ_i, μ>

    def uniform(self, k: int) -> float:
        """Var(μ̂) of k uniform draws with replacement."""
        return float(self.matrix.diagonal().mean() - self.inner.mean()) / k

    def stratified(self, labels: Tensor) -> float:
        """Var(μ̂) = Σ_h (|S_h| Σ_{i in S_h} κ_ii - Σ_{i,j in S_h} κ_ij) / n² of one draw from each stratum (eq. 7)."""
        together = labels[:, None] == labels
        within = self.matrix[together].sum()
        return max(0.0, float(self.matrix.diagonal() @ together.sum(1).double() - within)) / self.n**2

    def drawn(self, rows: Tensor, weights: Tensor) -> Tensor:
        """|μ̂ - μ|² of each of b batches ``rows`` (b, k) with ``weights`` (k,): (b,)."""
        shares = self.matrix.new_full((len(rows), self.n), -1.0 / self.n)  # of every sample in μ̂ - μ
        shares.scatter_add_(1, rows, weights.to(shares).expand(rows.shape))
        return (shares @ self.matrix * shares).sum(1)
