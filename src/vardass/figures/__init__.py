"""The paper's figures, recomputed: numbers, pictures, and whether what the paper says of them held."""

from vardass.figures.base import Claim, FigureResult, write_figure
from vardass.figures.registry import NUMBERS, make_figure

__all__ = ["NUMBERS", "Claim", "FigureResult", "make_figure", "write_figure"]
