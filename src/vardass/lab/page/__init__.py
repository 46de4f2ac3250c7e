"""One self-contained HTML page from the folder of a sweep or of a run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from vardass.data.embedding_files import read_embeddings
from vardass.files import atomic_write
from vardass.lab.page.content import duration, page_content
from vardass.lab.page.folder import read_folder
from vardass.lab.page.strata_view import strata_content, watch_features

__all__ = ["PAGE_FILE", "make_page", "write_page"]

PAGE_FILE = "report.html"
_SCRIPTS = ("page.js", "charts.js", "gains.js", "strata.js")


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
    """The page of a folder as text; its strata are of ``features``, or of the watch data where runs have these."""
    found = read_folder(folder)
    picture = None
    if strata and features is not None:
        picture = strata_content(read_embeddings(features, key=key), features.name, batch_size=batch_size, seed=seed)
    elif strata and any(record.spec.dataset == "watch" for record in found.records):
        picture = strata_content(*watch_features(), batch_size=batch_size, seed=seed)
    return _render(page_content(found, strata=picture, now=now))


def write_page(
    folder: Path, out: Path | None = None, *, features: Path | None = None, key: str | None = None, batch_size: int = 8
) -> Path:
    """Write the page of a folder, by default to ``report.html`` in it, and return where it is."""
    path = folder / PAGE_FILE if out is None else out
    text = make_page(folder, features=features, key=key, batch_size=batch_size)
    with atomic_write(path) as file:
        file.write(text.encode())
    return path


def _render(content: Mapping[str, Any]) -> str:
    """Fill in the template. What came from files is escaped, and nothing is loaded from elsewhere."""
    style = _asset("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_asset, _SCRIPTS)) + "\n})();"
    # hashes, not 'unsafe-inline': a script that slipped in through a name would still not run
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {
        "exact": lambda value: "" if value is None else repr(float(value)),
        "points": _points,
        "digits": lambda value: f"{value:.3g}" if value is not None else "",
        "duration": lambda value: duration(value) if value is not None else "",
    }
    return environment.from_string(_asset("page.html")).render(content, style=style, script=script, policy=policy)


def _points(value: float | None, signed: bool = False) -> str:
    shown = "" if value is None else f"{value:+.1f}" if signed else f"{value:.1f}"
    return "0.0" if shown in ("+0.0", "-0.0") else shown.replace("-", "−")


def _asset(name: str) -> str:
    return files("vardass.lab.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
