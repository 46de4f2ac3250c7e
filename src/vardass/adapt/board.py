"""Metrics of a run as TensorBoard reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vardass.errors import InputError

__all__ = ["BOARD_FOLDER", "Board"]

BOARD_FOLDER = "tensorboard"
_NO_SCALARS = ("step", "best_step")


class Board:
    """Scalars of each evaluation in ``RUN/tensorboard``.

    Parameters
    ----------
    folder : Path or None
        Of the run.

    Raises
    ------
    InputError
        If there is no folder, or TensorBoard is not installed.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            raise InputError("tensorboard=True needs a folder to write to, got out=None; give the run one")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except (ImportError, AttributeError) as error:
            raise InputError(
                f"tensorboard=True needs TensorBoard, which cannot be imported ({error}); pip install tensorboard"
            ) from None
        self._make: Any = SummaryWriter
        self._folder = folder / BOARD_FOLDER
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Open a file; a resumed run hides what an earlier one wrote after ``step``."""
        self.close()
        self._writer = self._make(str(self._folder), purge_step=step + 1 if step else None)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write one evaluation, as it is in ``metrics.jsonl``; seconds by part."""
        if self._writer is None:
            return
        scalars = {name: value for name, value in line.items() if name not in _NO_SCALARS and name != "seconds"}
        scalars |= {f"seconds/{part}": value for part, value in line["seconds"].items()}
        for name, value in scalars.items():
            self._writer.add_scalar(name if "/" in name else f"score/{name}", value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
