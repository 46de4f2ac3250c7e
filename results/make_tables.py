"""Write the tables and the page of this folder anew, from its records: ``python results/make_tables.py``."""

from __future__ import annotations

from pathlib import Path

from vardass.experiments.averages import collect, current_records
from vardass.experiments.page import write_page
from vardass.experiments.render import render
from vardass.experiments.tables import make_tables
from vardass.files import atomic_write

HERE = Path(__file__).parent


def table_files() -> list[Path]:
    """Tables of the sweeps, each named after what ``vardass tables --table`` calls it."""
    return sorted(HERE.glob("*/table-*.md"))


def pages() -> list[Path]:
    """Pages of the sweeps."""
    return sorted(HERE.glob("*/report.html"))


def table_text(file: Path) -> str:
    """What a file of tables should say, by the records beside it."""
    records, _ = current_records(file.parent)
    return render(make_tables(collect(records), file.stem.removeprefix("table-")), "markdown")


def main() -> None:
    """Write all files."""
    for file in table_files():
        with atomic_write(file) as opened:
            opened.write(table_text(file).encode())
    for page in pages():
        write_page(page.parent)


if __name__ == "__main__":
    main()
