"""Pictures of the pages and of the gallery: every program below `docs/` but the hooks is run, its figures become SVG.

A figure is named by its label (`plt.figure("ordered")`), or after its program, and lies beside it in the site, in
colours for light and for dark pages; `![](ordered.svg)` in a page shows the fitting one. Programs of the gallery get
a page each. A picture is taken from `.cache/docs` as long as its program, the modules of the package that the program
imports, directly or by others, and the measured results that it names are unchanged; an error in a program ends the
build.
"""

import ast
import hashlib
import io
import re
import runpy
from pathlib import Path

from cycler import cycler
from mkdocs.structure.files import File

import vardass

# colours of the report's page, `lab/page/page.css`; the order is that of matplotlib's C0 to C9
LIGHT = ("#5b6169", "#0072b2", "#d55e00", "#009e73", "#b5528f", "#b97f00", "#3f9fd6", "#7a5c3e", "#882255", "#6b7f00")
DARK = ("#a7adb5", "#4ba3dd", "#f08a4b", "#2fc49a", "#df8fc0", "#e6b450", "#8fd0f5", "#c5a27f", "#e07aa8", "#b9c94a")
INK, SOFT, LINE, PAPER = "#1c1f23", "#565c64", "#d9dad6", "#fefefe"
NIGHT = dict(zip((*LIGHT, INK, SOFT, LINE, PAPER), (*DARK, "#e8e8e5", "#a4a9b0", "#44484e", "#1e2129")))
STYLE = {
    "axes.edgecolor": SOFT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
    "axes.prop_cycle": cycler(color=LIGHT),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.edgecolor": PAPER,
    "figure.facecolor": PAPER,
    "font.size": 10,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "savefig.facecolor": "none",
    "savefig.edgecolor": "none",
    "svg.fonttype": "path",
    "svg.hashsalt": "vardass",
    "text.color": INK,
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.color": SOFT,
    "ytick.labelcolor": INK,
}
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\.svg\)")


def on_files(files, config):
    """Add the pictures, a page for each program of the gallery, and their list."""
    root, docs = Path(config.config_file_path).parent, Path(config.docs_dir)
    shown = []
    for script in sorted(path for path in docs.rglob("*.py") if path.parent.name != "hooks"):
        folder = script.parent.relative_to(docs)
        made = _pictures(script, root)
        for name, picture in made.items():
            for file in in_both_colours(config, (folder / name).as_posix(), picture):
                files.append(file)
        if folder.name == "gallery":
            code = script.read_text()
            title, _, text = ast.get_docstring(ast.parse(code)).partition("\n")
            title = title.rstrip(".")
            body = code.split('"""', 2)[2].strip()
            pictures = "\n\n".join(f"![{title}]({name}.svg)" for name in made)
            program = f'```python title="docs/gallery/{script.name}"\n{body}\n```'
            page = f"# {title}\n\n{text.strip()}\n\n{pictures}\n\n{program}\n"
            files.append(File.generated(config, f"gallery/{script.stem}.md", content=page))
            shown.append((script.stem, title, next(iter(made))))
    config.extra["gallery"] = shown
    return files


def on_page_markdown(markdown, page, config, files):
    """Fill the list of the gallery; show each picture in the colours of the page."""
    cards = "\n".join(
        f"-   [![{title}]({picture}.svg)]({stem}.md)\n\n    [{title}]({stem}.md)\n"
        for stem, title, picture in config.extra["gallery"]
    )
    markdown = markdown.replace("<!-- gallery -->", f'<div class="grid cards" markdown>\n\n{cards}\n</div>')
    folder = Path(page.file.src_uri).parent

    def both(match):
        if not files.get_file_from_path((folder / f"{match[2]}-dark.svg").as_posix()):
            return match[0]
        return f"![{match[1]}]({match[2]}.svg#only-light)![{match[1]}]({match[2]}-dark.svg#only-dark)"

    return PICTURE.sub(both, markdown)


def in_both_colours(config, name, picture):
    """Files of the site for one SVG picture, on light and on dark pages."""
    yield File.generated(config, f"{name}.svg", content=picture)
    night = re.sub(r"#[0-9a-f]{6}", lambda colour: NIGHT.get(colour[0], colour[0]), picture)
    yield File.generated(config, f"{name}-dark.svg", content=night)


def _pictures(script, root):
    """SVG text of each figure of a program, by name."""
    code = script.read_text()
    results = [path for path in sorted((root / "benchmarks" / "results").iterdir()) if path.name in code]
    parts = [path.read_bytes() for path in (Path(__file__), script, *_modules_of(script, root / "src"), *results)]
    kept = root / ".cache" / "docs" / script.stem / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    if not kept.is_dir():
        made = _run(script)
        kept.mkdir(parents=True)
        for name, text in made.items():
            (kept / f"{name}.svg").write_text(text)
    return {path.stem: path.read_text() for path in sorted(kept.glob("*.svg"))}


def _modules_of(script, source):
    """Files of the package that a program imports, directly or by others, sorted."""
    found, waiting = set(), [script]
    while waiting:
        for name in _imports(ast.parse(waiting.pop().read_text())):
            parts = name.split(".")
            for end in range(1, len(parts) + 1):  # the packages that it is in, too; the last part may be no module
                place = source.joinpath(*parts[:end])
                for file in (place / "__init__.py", place.with_suffix(".py")):
                    if file.is_file() and file not in found:
                        found.add(file)
                        waiting.append(file)
    return sorted(found)


def _imports(tree):
    """Names in the package that a module imports, or takes from `vardass` when they are first used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("vardass"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vardass"):
            yield from (f"{node.module}.{each.name}" for each in node.names)
            names = [each.name for each in node.names] if node.module == "vardass" else []
            yield from (f"vardass.{vardass._HOME_OF[name]}" for name in names if name in vardass._HOME_OF)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vardass":
            yield f"vardass.{vardass._HOME_OF.get(node.attr, node.attr)}"


def _run(script):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with matplotlib.rc_context(STYLE):
        runpy.run_path(str(script), run_name="__main__")
        made = {}
        for number in plt.get_fignums():
            figure = plt.figure(number)
            made[figure.get_label() or script.stem] = svg(figure)
            plt.close(figure)
    if not made:
        raise ValueError(f"{script} makes no figure")
    return made


def svg(figure, **options):
    """A figure as text, the same each time."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, **options)
    return out.getvalue()
