"""One self-contained HTML page from the folder of a sweep or of a run."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from vardass.data.embedding_files import read_embeddings
from vardass.experiments.page.content import page_content
from vardass.experiments.page.html import render
from vardass.experiments.page.reading import read_folder
from vardass.experiments.page.strata_view import strata_content, watch_features
from vardass.files import atomic_write

__all__ = ["PAGE_FILE", "make_page", "write_page"]

PAGE_FILE = "report.html"


def make_page(
    folder: Path,
    *,
    features: Path | None = None,
    key: str | None = None,
    batch_size: int = 8,
    strata: bool = True,
    seed: int = 0,
    now: datetime | None = None,
) -> str:
    """The page of a folder as text.

    Parameters
    ----------
    folder : Path
        Of a sweep (``records.jsonl``) or of a run (``metrics.jsonl``).
    features : Path, optional
        Embeddings for the picture of strata, see `read_embeddings`; by default the watch recordings that come
        with the package.
    key : str, optional
        Array of an ``.npz`` file.
    batch_size : int
        Samples of a minibatch in the picture, and strata.
    strata : bool
        False leaves the picture out.
    seed : int
        Of the picture's strata and batches.
    now : datetime, optional
        When the page is made, for a page that is the same each time.

    Raises
    ------
    InputError
        If the folder or the file of features cannot be used.
    """
    found = read_folder(folder)
    picture = None
    if strata:
        given = watch_features() if features is None else (read_embeddings(features, key=key), features.name)
        picture = strata_content(*given, batch_size=batch_size, seed=seed)
    return render(page_content(found, strata=picture, now=now))


def write_page(
    folder: Path, out: Path | None = None, *, features: Path | None = None, key: str | None = None, batch_size: int = 8
) -> Path:
    """Write the page of a folder, by default to ``report.html`` in it, and return where it is."""
    path = folder / PAGE_FILE if out is None else out
    text = make_page(folder, features=features, key=key, batch_size=batch_size)
    with atomic_write(path) as file:
        file.write(text.encode())
    return path
