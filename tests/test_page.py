import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from conftest import refused
from page_records import EVIL, record, sweep, write
from vardass.cli.lab import report
from vardass.lab.averages import collect
from vardass.lab.page import make_page, write_page
from vardass.lab.page.content import MOST_CURVES, MOST_POINTS
from vardass.lab.tables import compare_samplers


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Parsed(HTMLParser):
    """Elements, texts of tables, and the embedded data of a page, as a browser would find them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.tables, self.scripts, self.words = [], {}, [], []
        self._table = self._row = self._inside = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.elements.append((tag, given))
        if tag == "table":
            self._table = self.tables.setdefault(given.get("id", f"table {len(self.tables)}"), [])
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th"):
            self._table[-1].append("")
            self._row = self._table[-1]
        elif tag in ("script", "style"):
            self._inside = (tag, given)
            self.scripts.append([given.get("type", tag), ""])

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._row = None
        elif tag in ("script", "style"):
            self._inside = None

    def handle_data(self, text):
        if self._inside:
            self.scripts[-1][1] += text
        elif self._row is not None:
            self._row[-1] += text
        else:
            self.words.append(text)

    @property
    def data(self):
        return json.loads(next(text for kind, text in self.scripts if kind == "application/json"))

    def rows(self, table="summary-table"):
        """Rows by (data, algorithm, sampler), as dicts."""
        header, *rows = self.tables[table]
        return {tuple(row[:3]): dict(zip(header, row, strict=True)) for row in rows}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return make_page(write(tmp_path_factory.mktemp("sweep"), sweep()))


def test_the_summary_has_means_errors_and_gains(page):
    rows = Parsed(page).rows()
    assert len(rows) == 2 * 2 * 3
    # repeats differ by 0.01: deviation 0.0071 with divisor 1, over the root of 2
    ordered = rows["photos", "MMD", "ordered"]
    assert ordered["accuracy, %"] == "64.5 ± 0.5"
    assert ordered["gain"] == "+4.0 ± 0.0"
    assert rows["photos", "MMD", "Uniform random"]["gain"] == "–"
    assert ordered["source, %"] == "87.5"
    assert ordered["MMD²"] == "0.02"
    assert ordered["CORAL"] == "0.003"
    assert ordered["time of a run"] == "10 s"
    assert ordered["runs"] == "8"


def test_the_best_run_of_a_search_counts_and_failures_are_shown(page):
    parsed = Parsed(page)
    # search 1 is 10 points worse and has the lower score
    assert parsed.rows()["watch", "MMD", "VaRDASS"]["accuracy, %"].startswith("62.5")
    assert parsed.rows()["watch", "CORAL", "ordered"]["runs"] == "3 + 1 failed"
    assert parsed.tables["failures"][1:] == [
        ["watch", "a->b", "CORAL", "ordered", "1", "1", "loss is not finite at step 30 (started 3 times)"]
    ]
    words = " ".join(parsed.words)
    assert re.search(r"finished\s+71\s+failed\s+1", words)


def test_tasks_are_listed_apart(page):
    tables = [rows for name, rows in Parsed(page).tables.items() if rows[0][2:] == ["c->d", "d->c"]]
    assert len(tables) == 1
    assert ["MMD", "VaRDASS", "62.5 ± 0.5", "62.5 ± 0.5"] in tables[0]


def test_the_best_of_data_and_algorithm_is_marked(page):
    marked = [given for tag, given in Parsed(page).elements if tag == "tr" and given.get("class") == "best"]
    assert len(marked) == 4
    assert {given["data-sampler"] for given in marked} == {"ordered"}


def test_a_partial_row_is_marked(tmp_path):
    records = [record(sampler=name, repeat=repeat) for name in ("uniform", "vardass") for repeat in range(2)]
    records.append(record(sampler="ordered"))
    rows = Parsed(make_page(write(tmp_path, records))).rows()
    assert rows["watch", "MMD", "ordered"]["accuracy, %"] == "64.0 (1/2)"
    assert rows["watch", "MMD", "ordered"]["gain"] == "+4.0 (1/2)"
    assert rows["watch", "MMD", "VaRDASS"]["accuracy, %"] == "62.5 ± 0.5"


def test_curves_are_those_of_the_chosen_runs(page):
    curves = Parsed(page).data["curves"]
    assert len(curves["series"]) == 2 * 3 * 2 * 3
    assert {one["search"] for one in curves["series"]} == {0}
    assert [metric["key"] for metric in curves["metrics"]] == ["loss/total", "source_accuracy", "mmd"]
    uniform = [one for one in curves["series"] if curves["cells"][one["cell"]]["sampler"] == "Uniform random"]
    assert uniform
    assert all("source/variance" not in one["values"] for one in uniform)
    assert "36 of 72 runs" in page
    assert "Variance of source batches" in page


def test_gains_are_those_of_the_pairs_table(tmp_path):
    names = ("uniform", "uniform-replacement", "vardass")
    records = [
        replace(one, result={**one.result, "target_accuracy": 0.5 + 0.01 * (number % 5) ** 2})
        for number, one in enumerate(record(sampler=name, repeat=repeat) for name in names for repeat in range(3))
    ]
    records.append(record(sampler="ordered"))
    data = Parsed(make_page(write(tmp_path, records))).data
    compared = {one.label.row_name: one.gain for one in compare_samplers(collect(records), ["uniform"])}
    assert {row["label"] for row in data["gains"]} == {"Uniform random", "VaRDASS", "ordered"} == set(compared)
    for row in data["gains"]:
        gain = compared[row["label"]]
        assert row["reference"] == "Uniform, with replacement"
        shown = [row[name] for name in ("mean", "stderr", "low", "high")]
        exact = [gain.average.mean, gain.average.stderr, gain.result.low, gain.result.high]
        assert shown == [None if value is None else pytest.approx(value, rel=1e-3) for value in exact]
        assert row["mark"] == ("(1/3)" if row["label"] == "ordered" else "")
    colours = {cell["sampler"]: cell["colour"] for cell in data["curves"]["cells"]}
    assert len(set(colours.values())) == 4  # also the two kinds of uniform batches
    assert {row["label"]: row["colour"] for row in data["gains"]}.items() <= colours.items()


def test_accessible_tables(page):
    elements = Parsed(page).elements
    assert all("scope" in given for tag, given in elements if tag == "th")
    sortable = [given for tag, given in elements if tag == "th" and "aria-sort" in given]
    assert len(sortable) == 10
    assert all(given["aria-sort"] == "none" for given in sortable)
    assert page.count("<caption>") == page.count("<table")
    assert '<html lang="en">' in page


def outside(text):
    """Everything in a page that would be fetched, or that leads away from it."""
    found = []
    for tag, given in Parsed(text).elements:
        for name in ("src", "href", "srcset", "action", "poster", "data", "formaction", "background"):
            value = given.get(name)
            if value is not None and not value.startswith(("#", "data:")):
                found.append((tag, name, value))
        found += [(tag, name, value) for name, value in given.items() if name.startswith("on") or name == "style"]
    styles = [content for kind, content in Parsed(text).scripts if kind == "style"]
    found += [content for content in styles if "url(" in content or "@import" in content]
    return found


def test_nothing_comes_from_elsewhere(page):
    assert outside(page) == []
    assert outside('<img src="https://a.example/b.png"><p style="color:red">') != []
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody fetches
    policy = next(
        given["content"] for tag, given in Parsed(page).elements if given.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy


def test_hostile_names_stay_text(tmp_path):
    records = [
        record(EVIL, EVIL, EVIL, EVIL, grid={EVIL: EVIL}),
        record(EVIL, EVIL, EVIL, "uniform", grid={EVIL: EVIL}),
        record(EVIL, EVIL, "mmd", EVIL, grid={EVIL: EVIL}, status="failed", error=EVIL, environment={EVIL: EVIL}),
    ]
    write(tmp_path, records)
    (tmp_path / "sweep.yaml").write_text(f"name: {EVIL}\n# {EVIL}\n", encoding="utf-8")
    run = tmp_path / "runs" / "0123456789abcdef"
    run.mkdir(parents=True)
    (run / "progress.json").write_text(json.dumps({"label": EVIL, "step": 3, "steps": 10}), encoding="utf-8")
    text = make_page(tmp_path)
    parsed = Parsed(text)
    assert "<img" not in text
    embedded = next(content for kind, content in parsed.scripts if kind == "application/json")
    assert not set("<>&") & set(embedded)  # so that no name can end its script
    assert not [tag for tag, _ in parsed.elements if tag == "img"]
    assert [kind for kind, _ in parsed.scripts] == ["style", "application/json", "script"]
    assert outside(text) == []
    # and nothing was lost on the way
    assert parsed.data["curves"]["series"][0]["task"] == EVIL
    assert (EVIL, EVIL, EVIL) in parsed.rows()
    assert [EVIL, "under way or interrupted, at step 3 of 10"] in parsed.tables["failures"]
    assert any(EVIL in row[-1] for row in parsed.tables["failures"][1:])


def test_many_long_runs_make_a_small_page(tmp_path):
    curve = record(points=90).curve
    records = [
        replace(record(sampler=f"s{number}", repeat=repeat, points=1), curve=curve)
        for number in range(101)
        for repeat in range(6)
    ]
    text = make_page(write(tmp_path, records))
    series = Parsed(text).data["curves"]["series"]
    assert len(series) == MOST_CURVES < len(records)
    assert all(len(one["steps"]) == MOST_POINTS for one in series)
    assert series[0]["steps"][0] == 10
    assert series[0]["steps"][-1] == 900
    assert sum(one["repeat"] == 5 for one in series) == 95  # later repeats are left out first
    assert f"Of 606 such runs the first {MOST_CURVES}" in text
    assert f"thinned to {MOST_POINTS} points" in text
    assert len(text) < 2_000_000 < (tmp_path / "records.jsonl").stat().st_size / 2.5


def run_folder(folder, *, steps=30, done=30):
    folder.mkdir(exist_ok=True)
    config = {"algorithm": "coral", "sampler": "ordered", "steps": steps, "selection": "last", "lr": 0.00123456}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    data = {"dataset": "watch", "task": "left-A->right-B", "classes": ["PEN", "ABD"]}
    (folder / "data.json").write_text(json.dumps(data), encoding="utf-8")
    lines = [
        {
            "step": step,
            "loss/total": float("nan") if step == 10 else 1 / step,
            "source_accuracy": 0.5 + step / 100,
            "score": 0.5 + step / 100,
            "best_step": step,
            "source/variance": 0.5,
            "source/uniform_variance": 1.0,
            "seconds": {"training": step / 10, "saving": 0.25},
        }
        for step in range(10, done + 1, 10)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 40, "lo'
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_a_single_run(tmp_path):
    run_folder(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({"target_accuracy": 0.789}), encoding="utf-8")
    parsed = Parsed(make_page(tmp_path))
    row = parsed.rows()["watch", "CORAL", "ordered"]
    assert row["accuracy, %"] == "78.9"
    assert row["source, %"] == "80.0"
    assert "gain" not in row
    assert "CORAL" not in row
    assert row["time of a run"] == "3.25 s"
    series = parsed.data["curves"]["series"]
    assert series[0]["steps"] == [10, 20, 30]
    assert series[0]["values"]["loss/total"] == [None, 0.05, 0.03333]
    assert "watch: left-A->right-B" in parsed.words
    assert "finished" in parsed.words
    assert any(row == ["classes", '["PEN", "ABD"]'] for rows in parsed.tables.values() for row in rows)
    assert any(row == ["lr", "0.001235"] for rows in parsed.tables.values() for row in rows)


def test_a_run_shows_its_chosen_step_and_what_was_evaluated(tmp_path):
    run_folder(tmp_path)
    words = Parsed(make_page(tmp_path)).words
    assert words[words.index("chosen model") + 1] == "step 30, by last"
    assert any("vardass evaluate RUN --out RUN" in text for text in words)
    (tmp_path / "result.json").write_text(json.dumps({"predicted": {EVIL: 3}}), encoding="utf-8")
    text = make_page(tmp_path)
    assert EVIL not in text
    assert [EVIL, "3"] in [row for rows in Parsed(text).tables.values() for row in rows]
    (tmp_path / "scores").mkdir()
    overall = {"classes": {"cat": {}, EVIL: {}}, "confusion": [[5, 1], [0, 7]]}
    (tmp_path / "scores" / "evaluation.json").write_text(json.dumps({"overall": overall}), encoding="utf-8")
    rows = Parsed(make_page(tmp_path)).tables["confusion"]
    assert rows == [["class", "cat", EVIL], ["cat", "5", "1"], [EVIL, "0", "7"]]
    overall = {"classes": {str(name): {} for name in range(50)}, "confusion": [[0] * 50] * 50}
    (tmp_path / "scores" / "evaluation.json").write_text(json.dumps({"overall": overall}), encoding="utf-8")
    parsed = Parsed(make_page(tmp_path))
    assert "confusion" not in parsed.tables
    assert any("50 classes is too large" in text for text in parsed.words)


def test_an_oracle_is_named(tmp_path):
    run_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"selection": "oracle"}
    assert "(oracle)" not in make_page(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "chosen by target labels (oracle)" in make_page(tmp_path)


def test_a_single_run_that_is_not_finished(tmp_path):
    parsed = Parsed(make_page(run_folder(tmp_path, steps=100, done=20)))
    assert "at step 20 of 100" in parsed.words
    assert parsed.rows()["watch", "CORAL", "ordered"]["accuracy, %"] == "–"
    assert parsed.tables["failures"][1][1] == "under way or interrupted, at step 20 of 100"


def test_only_failed_runs(tmp_path):
    write(tmp_path, [record(status="failed", error="no data", repeat=repeat) for repeat in range(3)])
    parsed = Parsed(make_page(tmp_path))
    assert parsed.rows()["watch", "MMD", "Uniform random"]["accuracy, %"] == "–"
    assert [row[-1] for row in parsed.tables["failures"][1:]] == ["no data"] * 3


def test_a_sweep_that_has_just_begun(tmp_path):
    (tmp_path / "sweep.yaml").write_text('name: "mine"  # a note\n', encoding="utf-8")
    (tmp_path / "plan.json").write_text(json.dumps({"jobs": 1, "runs": [c * 16 for c in "abc"]}), encoding="utf-8")
    folder = tmp_path / "runs" / ("a" * 16)
    folder.mkdir(parents=True)
    (folder / "progress.json").write_text(json.dumps({"label": "run a", "step": 0, "steps": 9}))
    parsed = Parsed(make_page(tmp_path))
    assert parsed.tables["failures"][1:] == [["run a", "under way or interrupted, at step 0 of 9"]]
    assert "mine" in parsed.words
    assert parsed.words[parsed.words.index("planned") + 1] == "3"
    assert "summary-table" not in parsed.tables


def test_failures_beyond_the_list_are_counted(tmp_path):
    write(tmp_path, [record(status="failed", error="no data", repeat=repeat) for repeat in range(210)])
    text = make_page(tmp_path)
    assert len(Parsed(text).tables["failures"]) == 201
    assert "10 more are not listed" in text


def test_settings_of_the_grid_are_columns(tmp_path):
    values = [record(sampler="vardass", grid={"gain": every}) for every in (10, 100)]
    header, *rows = Parsed(make_page(write(tmp_path, values))).tables["summary-table"]
    assert header[3] == "gain"  # a setting may have the name of a column
    assert [row[3] for row in rows] == ["10", "100"]
    assert all(len(row) == len(header) for row in rows)


def test_bad_folders_are_refused(tmp_path):
    with refused(tmp_path, "neither records.jsonl nor metrics.jsonl"):
        make_page(tmp_path)
    with refused(tmp_path / "absent", "no folder"):
        make_page(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with refused(f"{tmp_path / 'file'} is a file", "records.jsonl", "metrics.jsonl"):
        make_page(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "records.jsonl").write_text("")
    with refused(tmp_path / "empty", "no record of a run"):
        make_page(tmp_path / "empty")
    (tmp_path / "metrics.jsonl").write_text("")
    with refused(tmp_path / "config.json", "missing or damaged"):
        make_page(tmp_path)
    (tmp_path / "config.json").write_text('{"steps": 5}')
    with refused(tmp_path / "metrics.jsonl", "no evaluation"):
        make_page(tmp_path)


def test_a_refused_page_leaves_the_old_one(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    with refused(tmp_path / "absent", "no folder"):
        write_page(tmp_path / "absent", path)
    assert path.read_text() == "old"


def test_the_command_says_where_the_page_is(tmp_path, capsys):
    write(tmp_path, sweep(repeats=1, searches=1))
    report(tmp_path, out=tmp_path / "page.html")
    assert "page.html" in capsys.readouterr().out
    assert Parsed((tmp_path / "page.html").read_text(encoding="utf-8")).rows()
