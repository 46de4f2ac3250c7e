"""Sweeps of many runs, the tables and figures made from them, and a report to look at."""

from importlib.util import find_spec

from vardass.errors import needs_extra

with needs_extra("lab"):
    for _name in ("filelock", "jinja2", "pandas", "pydantic", "scipy", "yaml"):
        if find_spec(_name) is None:  # not imported here: a worker needs no pandas
            raise ModuleNotFoundError(name=_name)
