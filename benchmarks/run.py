"""Run all benchmarks; each writes its results file. `make bench` calls this.

At the end all ratios stand in one table, beside those of the results that are committed. ``--only table`` prints it for
the files as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = ("solvers", "sceptic", "scale", "sampler_variance", "refresh", "first_use", "overhead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=SCRIPTS, choices=[*SCRIPTS, "table"])
    for script in parser.parse_args().only:
        if script != "table":
            subprocess.run([sys.executable, str(HERE / f"{script}.py")], check=True)
    from common import markdown

    rows = []
    for path in sorted((HERE / "results").glob("*.json")):
        now, committed = ratios(json.loads(path.read_text())), ratios(as_committed(path))
        rows += [[path.stem, name, f"{now[name]:.2f}", f"{committed.get(name, float('nan')):.2f}"] for name in now]
    print(markdown(["benchmark", "ratio", "now", "committed"], rows))


def as_committed(path: Path) -> Any:
    """The results file of the last commit."""
    name = f"HEAD:./results/{path.name}"
    found = subprocess.run(["git", "show", name], cwd=HERE, capture_output=True, check=False)
    return json.loads(found.stdout) if found.returncode == 0 else {}


def ratios(data: Any) -> dict[str, float]:
    """What a results file compares, by name: entries with a ratio, and medians over lists of them."""
    found: dict[str, float] = {}
    for name, value in data.items() if isinstance(data, dict) else ():
        if isinstance(value, dict) and "ratio" in value:
            found[f"{name}: time / uniform"] = value["ratio"]
        for key in ("speed", "variance_ratio"):
            entries = (
                [one[key] for one in value if isinstance(one, dict) and key in one] if isinstance(value, list) else []
            )
            if entries:
                found[f"{name}: {key}, median of {len(entries)}"] = median(entries)
    return found


if __name__ == "__main__":
    main()
