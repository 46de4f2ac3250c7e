"""Lines of each room of the package beside those that ARCHITECTURE.md allows.

    python scripts/room_sizes.py

Exit code 1 if a room has grown by more than a tenth over its line in the table "Sizes", or has no line there. To let it
grow, change that line and say in it what the growth bought; what you removed elsewhere may lower another one.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = "core"  # modules that are in no room
_ROW = re.compile(r"^\| ([\w/]+) \| ([\d,]+) \|", re.MULTILINE)


def counted(package: Path) -> Counter[str]:
    """Lines of code by room."""
    lines: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        parts = file.relative_to(package).parts
        lines[CORE if len(parts) == 1 else parts[0]] += len(file.read_text(encoding="utf-8").splitlines())
    return lines


def allowed(text: str) -> dict[str, int]:
    """Lines by room in the table "Sizes"."""
    section = text.partition("## Sizes")[2].partition("\n## ")[0]
    return {room: int(count.replace(",", "")) for room, count in _ROW.findall(section)}


def verdict(now: Counter[str], before: dict[str, int]) -> list[str]:
    """One complaint for each room that has outgrown its line."""
    return [
        f"{room} has {count:,} lines, more than a tenth above the {before[room]:,} of ARCHITECTURE.md"
        if room in before
        else f"{room} has {count:,} lines and no line in ARCHITECTURE.md"
        for room, count in sorted(now.items())
        if count > 1.1 * before.get(room, 0)
    ]


def main() -> None:
    now = counted(ROOT / "src" / "vardass")
    before = allowed((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    for room, count in sorted(now.items()):
        print(f"{room:14}{count:8,}{before.get(room, 0):10,}")
    print(f"{'all':14}{sum(now.values()):8,}{sum(before.values()):10,}")
    complaints = verdict(now, before)
    for line in complaints:
        print(f"{line}; remove something, or change its line under 'Sizes' and say what that bought", file=sys.stderr)
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
