"""Known vulnerabilities of the packages in constraints.txt, looked up by pip-audit.

    python scripts/audit.py

Exit code 1 if there are any. Where the service cannot be reached one line says so: lint must work offline. pip-audit
itself ends with "No known vulnerabilities found" if it could look up nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def ask() -> tuple[str, str]:
    """What pip-audit prints: JSON, and messages."""
    options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    command = [sys.executable, "-m", "pip_audit", "-r", str(CONSTRAINTS), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def verdict(out: str, messages: str) -> tuple[int, list[str]]:
    """Exit code and lines to print."""
    try:
        packages = json.loads(out)["dependencies"]
    except ValueError:
        last = (messages.strip().splitlines() or ["it printed nothing"])[-1]
        if "ConnectionError" in last or "ServiceError" in last or "Timeout" in last:
            return 0, [f"audit: skipped, the service of pip-audit cannot be reached ({last[:100]})"]
        return 1, [f"audit: pip-audit failed: {last}"]
    known = [package for package in packages if "skip_reason" not in package]
    if not known:
        return 0, [f"audit: skipped, the service of pip-audit knows none of the {len(packages)} packages from here"]
    found = [(package, flaw) for package in known for flaw in package["vulns"]]
    lines = [
        f"{package['name']} {package['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'none'}"
        for package, flaw in found
    ]
    affected = len({package["name"] for package, _ in found})
    lines.append(f"audit: {len(known)} of {len(packages)} packages looked up, {affected} with known vulnerabilities")
    return int(bool(found)), lines


if __name__ == "__main__":
    code, lines = verdict(*ask())
    print("\n".join(lines))
    sys.exit(code)
