"""What is released: the files in it, what they say of themselves, and that it runs with torch and numpy alone."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from datetime import date
from email import message_from_bytes
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vardass

ROOT = Path(__file__).parents[1]
LIMIT = 1_200_000  # bytes of a wheel; 480,000 of them are the embedded data
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def command(*arguments, cwd=None, code=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(argument) for argument in arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def build(source, folder, *targets):
    options = [option for target in targets for option in ("--target", target)]
    command(sys.executable, "-m", "hatchling", "build", "--directory", folder, *options, cwd=source)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The sdist, and the wheel that is built from nothing but the sdist."""
    folder = tmp_path_factory.mktemp("released")
    build(ROOT, folder, "sdist")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    build(source, folder, "wheel")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_wheel_holds_the_whole_package_and_is_small(released):
    _, wheel = released
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = {Path(name).name for name in archive.namelist() if ".dist-info/licenses/" in name}
    package = ROOT / "src"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {path.relative_to(package).as_posix() for path in files}
    assert licences == {"LICENSE", "LICENSE.seglearn"}
    for name in ("py.typed", "data/watch/watch.npz.xz", "data/watch/LICENSE.seglearn", "paper/numbers.json"):
        assert f"vardass/{name}" in packed
    assert {Path(name).suffix for name in packed if "lab/page/" in name} >= {".html", ".css", ".js"}
    assert sum(name.endswith(".yaml") for name in packed if "presets/" in name) >= 4
    assert wheel.stat().st_size < LIMIT


def test_sdist_has_what_tests_need_and_no_evidence(released):
    sdist, _ = released
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {"docs", "examples", "scripts", "src", "tests"}  # neither results nor benchmarks
    assert names >= {"Makefile", "constraints.txt", "README.md", "SECURITY.md", "LICENSE", "tests/test_wheel.py"}
    assert sdist.stat().st_size < 2 * LIMIT


def test_the_version_has_one_home(released):
    _, wheel = released
    assert metadata(wheel)["Version"] == vardass.__version__
    assert "version" not in PROJECT
    newest = re.search(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())[1]
    assert newest == ("Unreleased" if ".dev" in vardass.__version__ else vardass.__version__)


def test_metadata_says_what_an_index_shows(released):
    told = metadata(released[1])
    for name in ("Name", "Summary", "Author", "Keywords", "Requires-Python", "License-Expression"):
        assert told[name], name
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text().strip()
    assert len(told["Summary"]) < 120
    assert told.get_all("License-File") == PROJECT["license-files"]
    classifiers = set(told.get_all("Classifier"))
    assert {"Development Status :: 4 - Beta", "Operating System :: OS Independent", "Typing :: Typed"} <= classifiers
    needed = {Requirement(line) for line in told.get_all("Requires-Dist") if "extra" not in line}
    assert needed == {Requirement(line) for line in PROJECT["dependencies"]}
    assert set(told.get_all("Provides-Extra")) == EXTRAS.keys()
    addresses = dict(line.split(", ") for line in told.get_all("Project-URL"))
    assert addresses == PROJECT["urls"]
    assert all(address.startswith("https://") for address in addresses.values())
    with tarfile.open(released[0]) as archive:
        (name,) = (name for name in archive.getnames() if name.endswith("/PKG-INFO"))
        assert message_from_bytes(archive.extractfile(name).read()).items() == told.items()


def test_the_conda_recipe_agrees():
    path = ROOT / "conda" / "meta.yaml"
    if not path.exists():
        pytest.skip("the recipe is not part of the sdist")
    recipe = yaml.safe_load(path.read_text())
    assert recipe["package"] == {"name": PROJECT["name"], "version": vardass.__version__.partition(".dev")[0]}
    needed = {Requirement(line.replace("torch", "pytorch")) for line in PROJECT["dependencies"] + EXTRAS["cli"]}
    python = Requirement("python" + PROJECT["requires-python"])
    assert {Requirement(line) for line in recipe["requirements"]["run"]} == needed | {python}
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["license_file"] == PROJECT["license-files"]
    assert recipe["about"]["summary"] == PROJECT["description"]
    (command_of,) = PROJECT["scripts"].items()
    assert recipe["build"]["entry_points"] == [" = ".join(command_of)]


def test_only_the_upload_may_sign_and_it_waits_for_tests():
    path = ROOT / ".github" / "workflows" / "release.yml"
    if not path.exists():
        pytest.skip("the workflow is not part of the sdist")
    workflow = yaml.load(path.read_text(), yaml.BaseLoader)
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items()} == {
        "test": {"contents": "read"},
        "build": {"contents": "read"},
        "publish": {"id-token": "write"},
    }
    assert set(jobs["publish"]["needs"]) == {"test", "build"}
    used = [step["uses"] for job in jobs.values() for step in job.get("steps", ()) if "uses" in step]
    assert all(re.search(r"@(v\d|release/v\d)", action) for action in used), used


def test_classifiers_name_the_versions_of_python_that_are_tested(released):
    named = set(re.findall(r"Python :: (\d+\.\d+)", "\n".join(metadata(released[1]).get_all("Classifier"))))
    workflow = ROOT / ".github" / "workflows" / "test.yml"
    if not workflow.exists():
        pytest.skip("the workflow is not part of the sdist")
    assert named == set(re.findall(r"\b3\.\d+\b", workflow.read_text()))


def test_citation_is_whole_and_agrees():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"authors", "cff-version", "message", "title"} <= citation.keys()  # what the format requires
    assert (citation["title"], citation["license"]) == (PROJECT["name"], PROJECT["license"].partition(" AND ")[0])
    if ".dev" not in vardass.__version__:  # else it names the last release
        assert citation["version"] == vardass.__version__
    assert isinstance(citation["date-released"], date)
    assert citation["preferred-citation"]["url"] == PROJECT["urls"]["Paper"]


def test_all_means_all():
    (named,) = EXTRAS["all"]
    assert set(re.fullmatch(r"vardass\[(.*)\]", named)[1].split(",")) == {*EXTRAS} - {"all", "dev", "docs"}


def closure(*names):
    """Distributions that pip would install for these."""
    found, wanted = {}, list(names)
    while wanted:
        package = distribution(wanted.pop())
        if package.name in found:
            continue
        found[package.name] = package
        for requirement in map(Requirement, package.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return found


def modules_of_extras():
    """Modules that only extras bring: torch itself requires some of the same packages."""
    wanted = {canonicalize_name(Requirement(line).name) for lines in EXTRAS.values() for line in lines}
    wanted -= {canonicalize_name(name) for name in closure("torch", "numpy")} | {"vardass"}
    found = packages_distributions().items()
    return sorted(module for module, names in found if wanted & {canonicalize_name(name) for name in names})


@pytest.fixture(scope="module")
def alone(released, tmp_path_factory):
    """The bin folder of an environment that holds the wheel, torch, numpy and what these two require."""
    environment = tmp_path_factory.mktemp("alone")
    command(sys.executable, "-m", "venv", "--without-pip", environment)
    (packages,) = environment.glob("lib/python3*/site-packages")
    wanted = ((package, file.parts[0]) for package in closure("torch", "numpy").values() for file in package.files)
    for top in {Path(package.locate_file(name)) for package, name in wanted if name not in ("..", "__pycache__")}:
        (packages / top.name).symlink_to(top)
    python = environment / "bin" / "python"
    command(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", released[1])
    return environment / "bin"


def test_three_lines_run_with_torch_and_numpy_alone(alone):
    done = command(alone / "python", "-I", ROOT / "examples" / "three_lines.py", "--steps", 120)
    assert done.stderr == ""
    assert 0.35 < float(re.fullmatch(r"target accuracy after 120 steps: (0\.\d+)\n", done.stdout)[1]) < 1.0


WITHOUT = {
    "from vardass.adapt import Trainer": "adapt",
    "from vardass.data.audio import AudioDataset; AudioDataset(['a.wav'])": "audio",
    "import vardass.lab.tables": "lab",
    "from vardass.integrations.transformers import RefreshCallback": "huggingface",
    "from vardass.integrations.lightning import RefreshCallback": "lightning",
    "from vardass.data.embedding_files import read_embeddings; read_embeddings('z.parquet')": "cli",
    "from vardass.plots import new_figure; new_figure(4, 3)": "plot",
    "from vardass.integrations.sklearn import Stratifier": "sklearn",
}
TRY = """
import json, sys, importlib.util, vardass
said = {}
for code in json.loads(sys.argv[1]):
    try:
        exec(code)
    except vardass.VardassError as error:
        said[code] = str(error)
found = [name for name in json.loads(sys.argv[2]) if importlib.util.find_spec(name)]
print(json.dumps({"file": vardass.__file__, "said": said, "found": found}))
"""


def test_what_needs_an_extra_says_which(alone, tmp_path):
    (tmp_path / "z.parquet").write_bytes(b"PAR1")
    codes, modules = json.dumps(list(WITHOUT)), json.dumps(modules_of_extras())
    told = json.loads(command(alone / "python", "-I", "-c", TRY, codes, modules, cwd=tmp_path).stdout)
    assert Path(told["file"]).is_relative_to(alone.parent)
    assert told["found"] == []
    assert told["said"].keys() == WITHOUT.keys()
    for code, extra in WITHOUT.items():
        assert f"pip install 'vardass[{extra}]'" in told["said"][code]
        assert "\n" not in told["said"][code]


def test_without_its_extra_the_command_says_which(alone):
    assert command(alone / "vardass", "--version").stdout == f"vardass {vardass.__version__}\n"
    done = command(alone / "vardass", "demo", code=2)
    assert done.stdout == ""
    assert done.stderr == "error: the command line needs typer; install it with pip install 'vardass[cli]'\n"


def test_importing_vardass_imports_no_extra_that_is_there():
    modules = modules_of_extras()
    assert {"lightning", "matplotlib", "numba", "pandas", "ray", "sklearn", "transformers", "typer"} <= {*modules}
    code = "import json, sys, vardass; print([name for name in json.loads(sys.argv[1]) if name in sys.modules])"
    assert command(sys.executable, "-c", code, json.dumps(modules)).stdout == "[]\n"
