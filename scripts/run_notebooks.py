"""Run the notebooks of the documentation and store their outputs: `python scripts/run_notebooks.py [NOTEBOOK ...]`.

All code cells run in order in one namespace, in the style of the site. What a cell prints, the value of its last line
and the figures that it leaves open are its outputs, as in Jupyter. `tests/test_notebooks.py` runs them and compares.
"""

import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))

import matplotlib  # noqa: E402

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from pictures import PAPER, STYLE, svg  # noqa: E402

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def lines(text):
    return text.splitlines(keepends=True)


def run_cell(source, names):
    """Run one cell in the given names; its outputs in the notebook format."""
    tree, printed, value = ast.parse(source), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None and not source.rstrip().endswith(";"):
        data = {"text/plain": lines(repr(value))}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    for number in plt.get_fignums():
        picture = svg(plt.figure(number), facecolor=PAPER, bbox_inches="tight")
        data = {"image/svg+xml": lines(picture), "text/plain": ["a picture"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close(number)
    return outputs


def run_notebook(path):
    """The notebook with the outputs of a new run."""
    notebook, names = json.loads(path.read_text()), {"__name__": "__main__"}
    with matplotlib.rc_context({**STYLE, "figure.constrained_layout.use": False}):  # figures of the package have theirs
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"] = run_cell("".join(cell["source"]), names)
    return notebook


def texts(notebook):
    """What each code cell prints and returns; a picture counts as the word that stands for it."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield "".join("".join(out.get("text") or out["data"]["text/plain"]) for out in cell["outputs"])


def words_and_numbers(text):
    """A text without its numbers, and those: rounding differs between processors, words do not."""
    return NUMBER.sub("#", " ".join(text.split())), [float(number) for number in NUMBER.findall(text)]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else NOTEBOOKS:
        path.write_text(json.dumps(run_notebook(path), indent=1, ensure_ascii=False) + "\n")
        print(f"{path}: {path.stat().st_size / 1024:.0f} KB")
