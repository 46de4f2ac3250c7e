"""One self-contained HTML page from the folder of a sweep or of a run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from vardass.files import write_output
from vardass.lab.page.content import duration, page_content
from vardass.lab.page.folder import read_folder

__all__ = ["PAGE_FILE", "make_page", "write_page"]

PAGE_FILE = "report.html"
_SCRIPTS = ("page.js", "charts.js", "gains.js")


def make_page(folder: Path) -> str:
    """The page of a folder as text."""
    return _render(page_content(read_folder(folder)))


def write_page(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a folder, by default to ``report.html`` in it, and return where it is."""
    path = folder / PAGE_FILE if out is None else out
    write_output(path, make_page(folder), "report")
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
