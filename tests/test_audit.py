"""The audit fails on a finding, and says in one line when nothing could be looked up."""

import importlib.util
import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def verdict():
    path = Path(__file__).parents[1] / "scripts" / "audit.py"
    spec = importlib.util.spec_from_file_location("audit", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.verdict


def report(*packages):
    """As pip-audit prints it."""
    return json.dumps({"dependencies": list(packages), "fixes": []})


SOUND = {"name": "numpy", "version": "2.4.6", "vulns": []}
FLAWED = {"name": "jinja2", "version": "2.10", "vulns": [{"id": "PYSEC-2019-217", "fix_versions": ["2.10.1"]}]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)"}


def test_a_finding_fails_and_is_named(verdict):
    code, lines = verdict(report(SOUND, FLAWED, UNKNOWN), "Found 1 known vulnerability in 1 package")
    assert code == 1
    assert lines[0] == "jinja2 2.10: PYSEC-2019-217, fixed in 2.10.1"
    assert lines[1] == "audit: 2 of 3 packages looked up, 1 with known vulnerabilities"


def test_sound_packages_pass(verdict):
    code, lines = verdict(report(SOUND, UNKNOWN), "No known vulnerabilities found")
    assert (code, lines) == (0, ["audit: 1 of 2 packages looked up, 0 with known vulnerabilities"])


@pytest.mark.parametrize(
    ("out", "messages"),
    [
        (report(UNKNOWN, UNKNOWN), "No known vulnerabilities found"),
        ("", "Traceback ...\nrequests.exceptions.ConnectionError: Failed to resolve 'pypi.org'"),
    ],
)
def test_nothing_looked_up_is_said_in_one_line(verdict, out, messages):
    code, (line,) = verdict(out, messages)
    assert code == 0
    assert line.startswith("audit: skipped, the service of pip-audit ")


def test_a_pip_audit_that_breaks_is_no_pass(verdict):
    code, (line,) = verdict("", "No module named pip_audit")
    assert code == 1
    assert "No module named pip_audit" in line
