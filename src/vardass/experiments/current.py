"""Records of a folder that can stand in one table: where settings were changed, those of the present sweep."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

from vardass.experiments.record import Record
from vardass.experiments.store import PLAN_FILE, read_json, read_records

__all__ = ["current_records"]


def current_records(path: str | os.PathLike[str]) -> tuple[list[Record], int]:
    """Records of a sweep, and how many were left out because a run of the present sweep took their place.

    Sweeps that share a folder add up. If one was changed and run again, two runs may have the same data, task, cell,
    repeat and number of the search: then those that ``plan.json`` names count.

    Parameters
    ----------
    path : path
        See `read_records`.
    """
    records = read_records(path)
    plan = read_json(Path(path) / PLAN_FILE) if Path(path).is_dir() else None
    planned = set(plan.get("runs") or ()) if isinstance(plan, dict) else set()
    places: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        spec = record.spec
        place = [spec.data_name, spec.task, spec.cell, spec.repeat, spec.search]
        places[json.dumps(place, sort_keys=True)].append(record)
    kept = []
    for rivals in places.values():
        present = [record for record in rivals if record.run_id in planned]
        kept += present if len(rivals) > 1 and present else rivals
    return kept, len(records) - len(kept)
