"""What the tests of sweeps share; as a program, it runs a sweep that can be killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from vardass.adapt.config import RunConfig
from vardass.adapt.run_folder import CHECKPOINT_FILE
from vardass.lab.record import Record, RunSpec


def make_runs(count=4, steps=20, **settings):
    runs = []
    for number in range(count):
        sampler = ("uniform", "vardass")[number % 2]
        config = RunConfig(
            **{
                "steps": steps,
                "sampler": sampler,
                "seed": number,
                "eval_every": 100,
                "checkpoint_every": 20,
                "refresh_every": 200,
                **settings,
            }
        )
        cell = {"algorithm": config.algorithm, "sampler": config.sampler}
        runs.append(
            RunSpec("watch", "left-A->right-B", "watch", config.to_dict(), cell, repeat=number, split_seed=number)
        )
    return runs


def finished(spec, **result):
    return Record(spec=spec, status="finished", result={"score": 0.5, **result}, wall=2.0)


def numbers(records: list[Record]) -> dict[str, object]:
    """All that must not depend on where, when and how often a run was begun."""
    return {
        record.run_id: (
            record.status,
            record.attempts,
            record.result,
            [{name: value for name, value in line.items() if name != "seconds"} for line in record.curve],
        )
        for record in records
    }


def start_sweep(folder: Path, *, count: int, steps: int, jobs: int, engine: str = "local", **environment: str):
    """The sweep in a process of its own."""
    command = [sys.executable, __file__, str(folder), str(count), str(steps), str(jobs), engine]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def descendants(pid: int) -> dict[int, str]:
    """Processes below one, with their command lines."""
    parents, found = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    below, layer = {}, {pid}
    while layer:
        layer = {child for child, parent in parents.items() if parent in layer}
        below |= {child: found[child] for child in layer if child in found}
    return below


def workers_of(pid: int, mark: str = "--multiprocessing-fork") -> list[int]:
    return sorted(child for child, command in descendants(pid).items() if mark in command)


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def run_with_kills(
    folder: Path, *, count: int, steps: int, jobs: int, targets: str, seed: int, longest: float = 0.3
) -> dict[str, int]:
    """Do a sweep; for each letter of ``targets`` kill its parent (p) or a worker (w) at a random moment."""
    draw = random.Random(seed)
    done = {"p": 0, "w": 0}
    process = start_sweep(folder, count=count, steps=steps, jobs=jobs)
    try:
        for target in targets:
            wait_for_progress(process, folder)
            time.sleep(draw.uniform(0.0, longest))
            if process.poll() is not None:
                break
            if target == "w":
                workers = workers_of(process.pid)
                done["w"] += bool(workers) and kill(draw.choice(workers))
            else:
                done["p"] += kill(process.pid)
                process.communicate()
                process = start_sweep(folder, count=count, steps=steps, jobs=jobs)
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, out
    finally:
        process.kill()
        process.communicate()
    return done


def wait_for_progress(process, folder: Path) -> None:
    """Until a run of the sweep writes a checkpoint, or the sweep has ended."""
    begin = time.time()

    def is_newer(file: Path) -> bool:
        try:
            return file.stat().st_mtime > begin
        except OSError:
            return False  # the run has just finished

    wait_for(lambda: process.poll() is not None or any(map(is_newer, folder.glob(f"runs/*/{CHECKPOINT_FILE}"))))


def wait_for(condition, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


if __name__ == "__main__":
    from vardass.lab.sweep import run_sweep

    place, count, steps, jobs, engine = sys.argv[1:]
    summary = run_sweep(make_runs(int(count), int(steps)), place, jobs=int(jobs), engine=engine)
    print(summary)
    sys.exit(130 if summary.interrupted else 0)
