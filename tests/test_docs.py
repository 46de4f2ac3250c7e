"""The site is built without a warning, has no stubs, and every link on it leads somewhere."""

import ast
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest
import yaml

ROOT = Path(__file__).parent.parent
DEMO_SAMPLERS = ("vardass", "stratified", "ordered", "balanced", "recommended")  # beside uniform
WORDS = 100  # a page with less text is a stub


class Page(HTMLParser):
    """Links, anchors and the words of the article."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.words, self.inside = [], set(), 0, 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.inside += tag == "article"
        self.anchors.update(value for name in ("id", "name") if (value := values.get(name)))
        self.links += [value for name in ("href", "src") if (value := values.get(name))]

    def handle_endtag(self, tag):
        self.inside -= tag == "article"

    def handle_data(self, text):
        self.words += len(text.split()) if self.inside else 0


def sources(nav):
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from sources(value) if isinstance(value, list) else [value]


def broken(pages, site):
    """Each link of the site that leads to no file or to no anchor of its page."""
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            aim = aim / "index.html" if aim.is_dir() else aim
            anchor = unquote(parts.fragment)
            if not aim.is_file():
                yield f"{path.relative_to(site)} -> {link}"
            elif aim in pages and anchor and not anchor.startswith("__") and anchor not in pages[aim].anchors:
                yield f"{path.relative_to(site)} -> {link}: no such place on that page"


def test_the_site_is_built_without_a_warning_has_no_stub_and_no_dead_link(tmp_path):
    """One test, because the build is one: workers would each make it again."""
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    # the page of a sweep is a program of its own, tested in test_page; links of 404 are those of the served site
    files = [path for path in site.rglob("*.html") if path.name not in ("404.html", "report.html")]
    pages = {path.resolve(): Page(path.read_text()) for path in files}
    assert list(broken(pages, site.resolve())) == []

    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]  # which knows no tags
    named = [(site / source).with_suffix(".html").resolve() for source in sources(nav)]
    assert set(named) <= pages.keys()
    stubs = [path.relative_to(site.resolve()).as_posix() for path in named if pages[path].words < WORDS]
    assert stubs == []


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_are_read_in_the_repository_link_to_files_that_are_there(name):
    text = (ROOT / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert links


def test_the_readme_is_short_and_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert all(command in text for command in ("make test", "make demo", ".ci/run"))


def test_tables_of_accuracy_say_what_the_records_say():
    """Rows as they must stand on the page of evidence, made from what `make demo` and the sweeps left."""
    evidence, readme = (ROOT / "docs/evidence.md").read_text(), (ROOT / "README.md").read_text()
    peers = (ROOT / "benchmarks/results/peers.md").read_text()
    choosing, small = evidence.partition("### Choosing a model")[2].split("## Small batches")
    small = small.partition("\n## ")[0]
    runs = pd.read_csv(ROOT / "benchmarks/results/demo_training.csv")
    means = 100 * runs.groupby(["algorithm", "sampler", "repeat"])["target_accuracy"].mean()
    noise = runs.groupby(["algorithm", "sampler"])["relative_loss_variance"].first()
    assert f"source only has {means['erm', 'uniform'].mean():.1f} %" in evidence
    for loss in ("mmd", "coral"):
        others = {name: means[loss, name] - means[loss, "uniform"] for name in DEMO_SAMPLERS}
        gains = {name: f"{gain.mean():+.1f} ± {gain.sem():.1f}" for name, gain in others.items()}
        uniform = f"{means[loss, 'uniform'].mean():.1f} %"
        assert f"| {loss.upper()} | {uniform} | {' | '.join(gains.values())} |" in small
        left = [f"{noise[loss, name]:.3f}" for name in DEMO_SAMPLERS]
        assert f"| variance of the loss, {loss.upper()} | 1 | {' | '.join(left)} |" in evidence
    adaptation = (ROOT / "benchmarks/results/adaptation.md").read_text()
    found = re.findall(r"^\| (?:MMD|CORAL), .*$", adaptation, re.MULTILINE)
    assert len(found) == 12
    assert [row for row in found if row not in evidence] == []
    for row in re.findall(r"^\| .* \d+\.\d.*\|$", readme, re.MULTILINE):  # method, and means over data sets
        method, *means = (cell.strip(" *") for cell in row.strip("| ").split("|"))
        names = {"a network on the source alone": "network, source only"}
        names["the same with MMD of uniform batches (DAN)"] = "network, DAN: MMD of uniform batches"
        title = names.get(method, method.partition(":")[0])
        for mean, heading in zip(means, ("that nothing was chosen on", "Other data sets"), strict=True):
            table = peers.partition(heading)[2].partition("\n## ")[0]
            assert any(
                line.startswith(f"| {title} |") and mean in line.rsplit("|", 2)[1] for line in table.splitlines()
            )
    regrets = re.findall(r"^\| .*\d \|$", choosing, re.MULTILINE)
    assert len(regrets) >= 8
    assert all(row in adaptation for row in regrets)


def test_programs_of_the_gallery_are_short():
    """The build runs them; their pages show the whole of them."""
    programs = sorted((ROOT / "docs/gallery").glob("*.py"))
    assert len(programs) >= 6
    assert [path.name for path in programs if len(path.read_text().splitlines()) >= 100] == []


def test_python_in_the_pages_can_be_read():
    """Pieces of programs, so they are parsed, not run; recipes and the gallery are run elsewhere."""
    pieces = [
        (path, piece)
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for piece in re.findall(r"^```python[^\n]*\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert len(pieces) > 10
    for path, piece in pieces:
        ast.parse(piece, filename=str(path))


def test_dead_links_are_seen(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#here"></a><a href="b.html#there"></a><img src="c.svg">')
    (tmp_path / "b.html").write_text('<p id="here"><a href="https://example.org/none"></a><a href="#top"></a></p>')
    pages = {path.resolve(): Page(path.read_text()) for path in tmp_path.glob("*.html")}
    found = sorted(broken(pages, tmp_path.resolve()))
    assert [line.split(" -> ")[1].split(":")[0] for line in found] == ["b.html#there", "c.svg", "#top"]
