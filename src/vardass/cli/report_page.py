"""``vardass report DIR``: one HTML page from a sweep or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a sweep or of a run.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; default: DIR/report.html.")] = None,
    features: Annotated[
        Path | None, typer.Option(help="Embeddings for the picture of strata; default: watch recordings.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Array of an .npz file.")] = None,
    batch_size: Annotated[int, typer.Option(help="Samples of a minibatch in the picture.")] = 8,
) -> None:
    """Write one self-contained HTML page: tables, curves, variance, time, strata, settings.

    The page needs no network and no other file, so it can be sent or kept.
    """
    # torch is imported only now, so that --help and --version answer at once
    from vardass.experiments.page import write_page

    path = write_page(folder, out, features=features, key=key, batch_size=batch_size)
    print(f"written: {path} ({path.stat().st_size / 1e6:.2f} MB); open it in a browser")
