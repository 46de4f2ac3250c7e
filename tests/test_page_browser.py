"""The report page in a real browser."""

import csv
import io
import os
from pathlib import Path

import pytest
import torch

from page_records import EVIL, record, sweep, write
from vardass.lab.page import make_page, write_page

CHROMIUM = os.environ.get("VARDASS_CHROMIUM", "/usr/bin/chromium")
try:
    from playwright.sync_api import sync_playwright
except ModuleNotFoundError:
    sync_playwright = None

pytestmark = pytest.mark.skipif(
    sync_playwright is None or not Path(CHROMIUM).is_file(),
    reason="the page is tested in Chromium: install it with `apt-get install chromium` (or set VARDASS_CHROMIUM to its "
    "path) and `pip install playwright`",
)
SORTED_BY = {"data": 0, "accuracy": 3}


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pages of a usual sweep and of one whose names are hostile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    usual = write(tmp_path_factory.mktemp("usual"), sweep())
    hostile = tmp_path_factory.mktemp("hostile")
    names = (EVIL, '=HYPERLINK("x")', "-1+1", "plain")
    write(hostile, [record(name, name, name, name, grid={name: name}) for name in names])
    (hostile / "report.html").write_text(make_page(hostile), encoding="utf-8")
    found = {"usual": write_page(usual), "hostile": hostile / "report.html"}
    torch.set_num_threads(before)
    return found


class Opened:
    """A page and what the browser said while it was open."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.said, self.requests = [], []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = path.resolve().as_uri()
        self.page.goto(self.address)

    def column(self, place):
        """Texts of a column of the summary, of rows that are shown."""
        rows = self.page.locator("#summary-table tbody tr")
        return rows.evaluate_all(
            "(rows, place) => rows.filter((row) => row.checkVisibility()).map((row) => row.cells[place].innerText)",
            place,
        )

    def numbers(self, place):
        return [float(text.split()[0]) for text in self.column(place)]

    def sort(self, name):
        self.page.locator("#summary-table thead button", has_text=name).click()

    def direction(self, name):
        return self.page.locator("#summary-table thead th", has_text=name).get_attribute("aria-sort")

    def download(self, what):
        with self.page.expect_download() as waiting:
            self.page.locator(f'[data-download="{what}"]').click()
        text = Path(waiting.value.path()).read_text(encoding="utf-8-sig")
        return waiting.value.suggested_filename, list(csv.reader(io.StringIO(text, newline="")))


@pytest.fixture
def opened(browser, files):
    """Open pages; afterwards nothing may have been said, and nothing asked for but the pages."""
    pages = []

    def open_page(name="usual", **options):
        pages.append(Opened(browser, files[name], **options))
        return pages[-1]

    yield open_page
    for one in pages:
        asked = [url for url in one.requests if not url.startswith("blob:")]
        one.context.close()
        assert one.said == []
        assert asked == [one.address]


def test_a_header_sorts_and_sorts_back(opened):
    page = opened()
    page.sort("accuracy")
    down = page.numbers(SORTED_BY["accuracy"])
    assert down == sorted(down, reverse=True)
    assert len(set(down)) > 2
    assert page.direction("accuracy") == "descending"
    page.sort("accuracy")
    assert page.numbers(SORTED_BY["accuracy"]) == sorted(down)
    assert page.direction("accuracy") == "ascending"
    page.sort("data")
    assert page.column(SORTED_BY["data"]) == ["photos"] * 6 + ["watch"] * 6
    assert page.direction("data") == "ascending"
    assert page.direction("accuracy") == "none"


def test_unknown_numbers_stay_last_and_the_keyboard_sorts(opened):
    page = opened()
    button = page.page.locator("#summary-table thead button", has_text="gain")
    for _ in range(2):
        button.press("Enter")
        gains = page.column(4)
        assert gains[-4:] == ["–"] * 4
        assert "–" not in gains[:-4]
    assert page.direction("gain") == "ascending"


def test_filters_hide_rows(opened):
    page = opened()
    assert len(page.column(0)) == 12
    page.page.select_option("#filter-data", "photos")
    assert set(page.column(0)) == {"photos"}
    page.page.select_option("#filter-algorithm", "MMD")
    page.page.select_option("#filter-sampler", "VaRDASS")
    assert [page.column(place) for place in range(3)] == [["photos"], ["MMD"], ["VaRDASS"]]
    assert page.page.inner_text("#shown") == "1 of 12 rows"
    for name in ("data", "algorithm", "sampler"):
        page.page.select_option(f"#filter-{name}", index=0)
    page.page.fill("#filter-text", "ORDERED watch")
    assert set(page.column(2)) == {"ordered"}
    assert set(page.column(0)) == {"watch"}
    page.page.fill("#filter-text", "nothing like it")
    assert page.column(0) == []
    assert page.page.inner_text("#shown") == "0 of 12 rows"


def test_the_summary_download_has_the_rows_that_are_shown(opened):
    page = opened()
    page.page.select_option("#filter-data", "watch")
    page.sort("accuracy")
    name, (header, *rows) = page.download("summary")
    assert name == "summary.csv"
    assert header[:5] == ["data", "algorithm", "sampler", "accuracy, %", "accuracy, %, standard error"]
    assert [row[:3] for row in rows] == [list(row) for row in zip(*(page.column(place) for place in range(3)))]
    best = dict(zip(header, rows[0], strict=True))
    assert float(best["accuracy, %"]) == pytest.approx(69.5, abs=0.51)
    assert float(best["time of a run, s"]) == pytest.approx(10.0)
    assert all(len(row) == len(header) for row in rows)


def test_curves_follow_the_choice(opened):
    page = opened()
    figures = page.page.locator("#curve-panels figure")
    assert figures.count() == 3
    assert figures.first.locator("path.line").count() == 3
    page.page.select_option("#pick-data", "photos")
    page.page.select_option("#pick-task", "d->c")
    page.page.select_option("#pick-algorithm", "CORAL")
    page.page.locator("#legend button", has_text="VaRDASS").click()
    _, (header, *rows) = page.download("curves")
    assert header[-4:] == ["step", "loss/total", "source_accuracy", "mmd"]
    assert len(rows) == 2 * 2 * 5  # samplers, repeats, points
    assert {tuple(row[:4]) for row in rows} == {
        ("photos", "d->c", "CORAL", "Uniform random"),
        ("photos", "d->c", "CORAL", "ordered"),
    }
    _, (header, *rows) = page.download("variance")
    assert {row[3]: row[-2] != "" for row in rows} == {"Uniform random": False, "ordered": True}
    _, (header, *rows) = page.download("time")
    assert header[3:] == ["training", "features", "solver", "drawing", "evaluation", "saving"]
    assert {row[2]: row[3:6] for row in rows}["ordered"] == ["2", "0", "1"]


def test_gains_are_drawn_for_the_chosen_data(opened):
    page = opened()
    figures = page.page.locator("#gain-panels figure")
    assert figures.count() == 4
    assert page.page.locator("#gain-panels g.gain").count() == 4 * 2
    page.page.select_option("#filter-data", "photos")
    page.page.select_option("#filter-algorithm", "MMD")
    assert figures.count() == 1
    assert "photos, MMD" in figures.inner_text()
    ordered = page.page.locator("#gain-panels g.gain", has_text="ordered")
    assert "+4.0" in ordered.text_content()
    zero = float(page.page.locator("#gain-panels line.zero").get_attribute("x1"))
    dots = [float(one.get_attribute("cx")) for one in page.page.locator("#gain-panels circle").all()]
    assert zero < dots[0] < dots[1]  # VaRDASS is 2 points up, ordered 4
    _, (header, *rows) = page.download("gains")
    assert [row[2] for row in rows] == ["VaRDASS", "ordered"]
    assert float(dict(zip(header, rows[1], strict=True))["gain"]) == pytest.approx(4.0)


def test_a_partial_gain_is_a_ring(browser, tmp_path):
    records = [record(sampler=name, repeat=repeat) for name in ("uniform", "vardass") for repeat in range(2)]
    write(tmp_path, [*records, record(sampler="ordered")])
    (tmp_path / "report.html").write_text(make_page(tmp_path), encoding="utf-8")
    page = Opened(browser, tmp_path / "report.html")
    rings = page.page.locator("#gain-panels g.gain", has=page.page.locator("circle.ring"))
    assert rings.count() == 1
    assert "ordered" in rings.text_content()
    assert "(1/2)" in rings.text_content()
    assert rings.locator("line.interval").count() == 0
    assert page.said == []
    page.context.close()


def test_pointing_shows_the_values_of_a_step(opened):
    page = opened()
    figure = page.page.locator("#curve-panels figure").first
    chart = figure.locator("svg[role=img]")
    chart.scroll_into_view_if_needed()
    values = figure.locator(".values")
    assert "step 50" in values.inner_text()
    box = chart.bounding_box()
    page.page.mouse.move(box["x"] + 50, box["y"] + box["height"] / 2)
    assert "step 10" in values.inner_text()
    assert "0.649" in values.inner_text()  # 0.1 + exp(-0.6)
    chart.press("ArrowRight")
    assert "step 20" in values.inner_text()


def test_hostile_names_do_nothing(opened):
    page = opened("hostile")
    assert page.page.evaluate("window.hacked") is None
    assert page.page.locator("img").count() == 0
    for place in range(4):
        page.page.select_option("#pick-data", index=place)
        assert page.page.locator("#curve-panels path.line").count() > 0
    page.page.select_option("#filter-data", EVIL)
    assert page.column(0) == [EVIL]
    page.page.select_option("#filter-data", index=0)
    _, (_, *rows) = page.download("summary")
    found = [row[0] for row in rows]
    assert sorted(found) == sorted([EVIL, '\'=HYPERLINK("x")', "'-1+1", "plain"])  # no formula for a spreadsheet
    assert page.page.evaluate("window.hacked") is None


def test_a_script_that_slipped_in_would_not_run(browser, files, tmp_path):
    path = tmp_path / "changed.html"
    text = files["usual"].read_text(encoding="utf-8")
    injected = '<img src="data:," onerror="window.hacked=1"><script>window.hacked=1</script></main>'
    path.write_text(text.replace("</main>", injected), encoding="utf-8")
    page = Opened(browser, path)
    assert page.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in said for said in page.said)
    page.context.close()


@pytest.mark.parametrize("name", ["usual", "hostile"])
def test_a_phone_does_not_scroll_sideways(opened, name):
    page = opened(name, viewport={"width": 375, "height": 700})
    page.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    assert page.page.evaluate("document.querySelector('.scroll').scrollWidth > 375")  # the table does, in its box


def test_dark_and_light(opened):
    colours = {}
    for scheme in ("light", "dark"):
        page = opened(color_scheme=scheme)
        parts = page.page.evaluate(
            "['backgroundColor', 'color'].map((name) => getComputedStyle(document.body)[name].match(/[0-9]+/g))"
        )
        colours[scheme] = [sum(map(int, part[:3])) / 3 for part in parts]
        assert page.page.locator("#curve-panels path.line").count() > 0
    assert colours["light"][0] > 230 > 60 > colours["light"][1]
    assert colours["dark"][0] < 60 < 200 < colours["dark"][1]


def test_tables_without_script(opened):
    page = opened(java_script_enabled=False)
    assert len(page.column(0)) == 12
    assert page.page.locator("#failures tbody tr").count() == 1
    assert not page.page.locator("#filter-text").is_visible()
    assert not page.page.locator(".download").first.is_visible()
