"""What tables call algorithms, samplers and settings, and in which order they list them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vardass.experiments.record import RunSpec

__all__ = ["ALGORITHMS", "OURS", "SAMPLERS", "UNIFORM", "Label", "algorithm_name", "sampler_name"]

ALGORITHMS = {
    "erm": "ERM",
    "dann": "DANN",
    "cdan": "CDAN",
    "cdan+sdat": "CDAN + SDAT",
    "cdan+els": "CDAN + ELS",
    "arm": "ARM",
    "mcc": "MCC",
    "coral": "CORAL",
    "mmd": "MMD",
}
SAMPLERS = {
    "uniform": "Uniform random",
    "uniform-replacement": "Uniform, with replacement",
    "kmeans++": "k-means++",
    "dpp": "DPP",
    "kmeans-inputs": "k-means (inputs)",
    "kmeans-features": "k-means (features)",
    "vardass": "VaRDASS",
    "stratified": "min-sum strata",
    "ordered": "ordered",
    "balanced": "balanced",
}
UNIFORM = ("uniform", "uniform-replacement")
OURS = ("vardass", "stratified", "ordered", "balanced")  # the samplers that Table 2 sets against other methods

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Label:
    """What is compared: an algorithm, a sampler, and the settings of the sweep's grid.

    Attributes
    ----------
    algorithm, sampler : str
        Names as in ``RunSpec.cell``; labels of the user's own are kept as they are.
    grid : tuple of (str, value)
        Further settings, by name.
    """

    algorithm: str
    sampler: str
    grid: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def of(cls, spec: RunSpec) -> Label:
        """The label of a run."""
        cell, config = spec.cell, spec.config
        algorithm = cell.get("algorithm", config.get("algorithm", "unknown"))
        sampler = cell.get("sampler", config.get("sampler", "unknown"))
        grid = sorted((name, _scalar(value)) for name, value in cell.items() if name not in ("algorithm", "sampler"))
        return cls(_known(str(algorithm), ALGORITHMS), _known(str(sampler), SAMPLERS), tuple(grid))

    @property
    def algorithm_name(self) -> str:
        """The algorithm, as tables call it."""
        return algorithm_name(self.algorithm)

    @property
    def row_name(self) -> str:
        """Sampler and settings, as tables call them."""
        return _join(sampler_name(self.sampler), self.grid)

    @property
    def method_name(self) -> str:
        """Algorithm, then the sampler unless it is uniform, then settings."""
        base = self.algorithm_name
        return _join(base if self.sampler == "uniform" else f"{base} + {sampler_name(self.sampler)}", self.grid)

    @property
    def order(self) -> tuple[Any, ...]:
        """Key that sorts labels as the paper's tables do; unknown names come last, by name."""
        grid = tuple((name, *_sortable(value)) for name, value in self.grid)
        return (*_place(self.algorithm, ALGORITHMS), *_place(self.sampler, SAMPLERS), grid)

    @property
    def row_order(self) -> tuple[Any, ...]:
        """The same for rows of samplers."""
        return self.order[2:]

    def setting(self, name: str) -> Scalar:
        """Value of a setting of the grid; None if it is not part of it."""
        return dict(self.grid).get(name)

    def without(self, name: str) -> Label:
        """The label without one setting of the grid."""
        return Label(self.algorithm, self.sampler, tuple(pair for pair in self.grid if pair[0] != name))


def algorithm_name(name: str) -> str:
    """What tables call an algorithm."""
    return ALGORITHMS.get(name, name)


def sampler_name(name: str) -> str:
    """What tables call a sampler."""
    return SAMPLERS.get(name, name)


def _known(given: str, names: Mapping[str, str]) -> str:
    # a label such as "MMD" means the algorithm of that name
    lowered = given.strip().lower()
    if lowered in names:
        return lowered
    return next((name for name, shown in names.items() if shown.lower() == lowered), given)


def _scalar(value: Any) -> Scalar:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value, sort_keys=True)


def _sortable(value: Scalar) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return (0, float(value), "")
    return (1, 0.0, str(value))


def _place(name: str, names: Mapping[str, str]) -> tuple[int, str]:
    return (list(names).index(name) if name in names else len(names), name)


def _join(name: str, grid: tuple[tuple[str, Scalar], ...]) -> str:
    return ", ".join([name, *(f"{setting}={value}" for setting, value in grid)])
