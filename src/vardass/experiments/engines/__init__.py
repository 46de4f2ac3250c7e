"""Where the runs of a sweep are done: on this machine, or on a Ray cluster.

An engine is a function ``run_all(todo, work, *, jobs, on_done, tick)``. It does each `Attempt` in its own folder of
``work``, hands every `Outcome` to ``on_done`` in the calling thread, and does what ``on_done`` returns once more.

A run whose worker died goes on from its checkpoint; that is no failure of the run. So that a run which kills its
worker each time does not go on for ever, see `Crashes`.
"""

from __future__ import annotations

from vardass.experiments.engines.common import Attempt, Engine, OnDone, Outcome, Tick, count_cpus
from vardass.validate import choose

__all__ = ["ENGINES", "Attempt", "Engine", "OnDone", "Outcome", "Tick", "count_cpus", "get_engine"]

ENGINES = ("local", "ray")


def get_engine(name: str) -> Engine:
    """An engine by name; Ray is imported only if it is asked for."""
    if choose(name, "engine", ENGINES) == "ray":
        from vardass.experiments.engines import ray

        return ray.run_all
    from vardass.experiments.engines import local

    return local.run_all
