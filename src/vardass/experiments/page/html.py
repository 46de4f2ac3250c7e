"""The page as text: everything that came from files is escaped, and nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from vardass.experiments.page.content import PageContent, Setting
from vardass.experiments.page.curves import PARTS
from vardass.experiments.page.elements import as_json, cell, download, head, number_cell, scroller, table
from vardass.experiments.page.summary_html import summary_section

__all__ = ["render"]

_SCRIPTS = ("page.js", "charts.js", "strata.js")


def render(content: PageContent) -> str:
    """Write the page: one HTML file with its style, its script and its data."""
    style = _asset("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();"
    # hashes, not 'unsafe-inline': a script that slipped in through a name would still not run
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    sections = [
        ("summary", "Summary", summary_section(content)),
        ("curves", "Training", _training(content)),
        ("strata", "Strata and minibatches", _strata(content)),
        ("settings", "Settings and environment", _surroundings(content)),
    ]
    shown = [(name, title, body) for name, title, body in sections if body]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in shown)
    parts = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{body}</section>'
        for name, title, body in shown
    )
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in content.facts)
    data = {"curves": content.curves, "seconds": content.seconds, "parts": PARTS, "strata": content.strata}
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<title>{escape(content.title)} · vardass</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        f'<header><p class="kicker">vardass report</p><h1>{escape(content.title)}</h1>'
        f'<p class="lead">{escape(content.subtitle)}</p><dl class="facts">{facts}</dl>'
        f'<nav aria-label="Sections">{links}</nav></header>\n<main>\n{parts}\n</main>\n'
        f'<script type="application/json" id="data">{as_json(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (files("vardass.experiments.page") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _training(content: PageContent) -> str:
    if not content.curves["series"] and not content.seconds:
        return ""
    parts = [
        f'<p class="note">{escape(content.notes["curves"])}</p>',
        '<noscript><p class="note">The curves need JavaScript; the tables do not.</p></noscript>',
        '<div class="needs-script" hidden>',
        '<div class="bar sticky"><label>Data<select id="pick-data"></select></label>'
        '<label>Task<select id="pick-task"></select></label>'
        '<label>Algorithm<select id="pick-algorithm"></select></label>'
        '<div id="legend" class="legend" role="group" aria-label="Cells shown"></div></div>',
        f'<h3>Curves</h3><div id="curve-panels" class="panels"></div>{download("curves", "curves.csv")}',
        '<h3>Variance of source batches</h3><p class="note">Variance of the mean embedding of a batch, at each refresh '
        "of the strata, against uniform draws from the same features. Samplers without strata have none.</p>"
        f'<div id="variance-panels" class="panels"></div>{download("variance", "variance.csv")}',
        '<h3>Where the time goes</h3><p class="note">Mean seconds of a chosen run, all tasks together.</p>'
        f'<div id="time-bars"></div>{download("time", "seconds.csv")}</div>',
    ]
    if content.seconds:
        parts.append(f"<details><summary>Seconds as a table</summary>{_seconds_table(content)}</details>")
    return "".join(parts)


def _seconds_table(content: PageContent) -> str:
    rows = []
    for entry in content.seconds:
        cells = [
            f'<th scope="row">{escape(entry["data"])}</th>',
            cell(entry["algorithm"]),
            cell(entry["label"], "tight"),
        ]
        cells += [number_cell(value, f"{value:.3g}") for value in (*entry["parts"], sum(entry["parts"]))]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    names = head(("data", "algorithm", "sampler", *PARTS, "all"), numbers_from=3)
    return scroller(table("Mean seconds of a run.", names, "".join(rows)), "Seconds of each part")


def _strata(content: PageContent) -> str:
    strata = content.strata
    if strata is None:
        return ""
    n, size = len(strata["points"]), strata["batch_size"]
    drawn = f"{n:,} of {strata['total']:,} samples" if strata["total"] > n else f"{n:,} samples"
    share = f"{100 * strata['share']:.0f} %"
    note = (
        f"{drawn} ({strata['about']}) on their first two principal components, which show {share} of the variance. "
        f"Colours are {size} strata for the MMD kernel: those of the sampler, or min-sum strata for "
        f"samplers without. Strata that overlap here are apart in other directions. Circles are one minibatch of "
        f"{size}, as large as their weights.{' Colours repeat after 8 strata.' if size > 8 else ''}"
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(one["name"])}</th>{number_cell(one["relative"], _ratio(one))}'
        f"{cell(one['what'], 'wide')}</tr>"
        for one in strata["samplers"]
    )
    caption = "Squared error of a batch’s mean embedding here, relative to uniform batches, ± its standard error."
    names = head(("sampler", "relative variance", "what it does"))
    picture = (
        '<div class="needs-script" hidden><div id="strata-tabs" class="legend" role="group" aria-label="Sampler"></div>'
        '<div id="strata-picture"></div><div class="bar"><button type="button" id="next-batch">Another batch</button>'
        f'<p id="strata-status" role="status"></p>{download("strata", "strata.csv")}</div></div>'
    )
    samplers = scroller(table(caption, names, rows, name="sampler-table"), "Samplers")
    return f'<p class="note">{escape(note)}</p>{picture}{samplers}'


def _surroundings(content: PageContent) -> str:
    single = all(one.same for one in content.settings)
    parts = [
        _settings_table("Settings that differ", [one for one in content.settings if not one.same], opened=True),
        _settings_table("Settings of all runs", [one for one in content.settings if one.same], opened=single),
        _settings_table("Data", content.data, opened=False),
        _settings_table("Environment", content.environment, opened=False),
    ]
    if content.specification is not None:
        parts.append(
            '<details><summary>Specification (sweep.yaml)</summary><pre tabindex="0">'
            f"{escape(content.specification)}</pre></details>"
        )
    return "".join(parts)


def _settings_table(title: str, settings: Sequence[Setting], *, opened: bool) -> str:
    known = [setting for setting in settings if setting.values not in ("", "null")]
    if not known:
        return ""
    rows = "".join(f'<tr><th scope="row">{escape(one.name)}</th>{cell(one.values)}</tr>' for one in known)
    body = table("Values in the runs.", head(("name", "value")), rows)
    state = " open" if opened else ""
    return f"<details{state}><summary>{title}</summary>{scroller(body, title)}</details>"


def _ratio(one: dict[str, Any]) -> str:
    if one["relative"] is None:
        return "–"
    return f"{one['relative']:.2f}" + (f' <span class="error">± {one["error"]:.2f}</span>' if one["error"] else "")
