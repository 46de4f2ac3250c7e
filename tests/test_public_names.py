"""Every public name is on a page of the API, and those of `vardass` itself have an example, run as a doctest."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from vardass.analysis.doctor import Limits

DOCS = Path(__file__).parent.parent / "docs"
PUBLIC = [
    "vardass",
    *(
        f"vardass.{name}"
        for name in (
            "adapt",
            "adapt.algorithms",
            "adapt.networks",
            "bounds",
            "analysis.comparison",
            "analysis.coresets",
            "analysis.sums",
            "data",
            "analysis.doctor",
            "errors",
            "lab.record",
            "lab.spec",
            "lab.averages",
            "lab.sweep",
            "lab.tables",
            "paper.adversarial",
            "paper.arm",
            "paper.diverse_samplers",
            "paper.paired_sampler",
            "paper.figures",
            "integrations.checkpoints",
            "integrations.lightning",
            "integrations.pairs",
            "integrations.sklearn",
            "integrations.transformers",
            "kernels",
            "losses",
            "lowrank",
            "plots",
            "refresh",
            "analysis.sampler_noise",
            "samplers",
            "shards",
            "solvers",
            "strata",
            "paper.theory",
            "variance",
            "view",
        )
    ),
]
NEEDS = {
    "vardass.integrations.lightning": "lightning",
    "vardass.integrations.sklearn": "sklearn",
    "vardass.integrations.transformers": "accelerate",
}


def load(module: str) -> Any:
    if module in NEEDS:
        pytest.importorskip(NEEDS[module])
    return import_module(module)


def functions_and_classes(module: str) -> dict[str, Any]:
    """Those of ``__all__``, by name."""
    found = {name: getattr(load(module), name) for name in load(module).__all__}
    return {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)}


def test_every_name_of_the_package_has_an_example() -> None:
    def own_text(value: Any) -> str:  # not that of a parent class
        return inspect.cleandoc(vars(value).get("__doc__") or "" if inspect.isclass(value) else value.__doc__ or "")

    names = functions_and_classes("vardass")
    lacking = [name for name, value in names.items() if not re.search(r"^Examples\n-+\n>>> ", own_text(value), re.M)]
    assert not lacking, f"no Examples section in the docstrings of {', '.join(lacking)}"


def shown() -> set[str]:
    """Where each object on the pages of the API is defined, as mkdocstrings finds them: without importing."""
    griffe = pytest.importorskip("griffe")
    package = griffe.load("vardass", search_paths=[str(DOCS.parent / "src")], resolve_aliases=True)
    found = set()
    for page in (DOCS / "api").glob("*.md"):
        for path in re.findall(r"^::: vardass\.?(\S*)", page.read_text(), re.M):
            item = package[path] if path else package
            parts = [item[name] for name in item.exports or ()] if item.is_module else [item]
            # a submodule of the same name hides what is imported from it
            found |= {part.canonical_path for part in parts if not part.is_module}
    return found


@pytest.fixture(scope="module")
def on_pages() -> set[str]:
    return shown()


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_on_a_page(module: str, on_pages: set[str]) -> None:
    names = functions_and_classes(module)
    lacking = [name for name, value in names.items() if f"{value.__module__}.{value.__qualname__}" not in on_pages]
    assert not lacking, f"{module}: not on a page of docs/api: {', '.join(lacking)}"


def test_the_doctors_book_has_the_thresholds() -> None:
    text = (DOCS / "doctor.md").read_text()
    for name, value in Limits()._asdict().items():
        assert f"| `{name}` | {value:g} |" in text
