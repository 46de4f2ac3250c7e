"""Twenty kills at random moments: of sweeps, of workers, and of nodes of a Ray cluster."""

import random
import time

import pytest

from sweeping import descendants, kill, make_runs, numbers, run_with_kills, start_sweep, wait_for_progress
from vardass.files import HOLDER_FILE, is_locked, read_json
from vardass.lab.store import read_records
from vardass.lab.sweep import run_sweep

pytestmark = pytest.mark.slow
COUNT, STEPS = 12, 800


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_sweep(make_runs(COUNT, STEPS), folder, jobs=2)
    return numbers(read_records(folder))


def test_twenty_kills_of_sweep_and_worker(undisturbed, tmp_path):
    done = run_with_kills(tmp_path, count=COUNT, steps=STEPS, jobs=2, targets="wp" * 10, seed=0)
    print("kills", done)
    assert done == {"p": 10, "w": 10}
    assert numbers(read_records(tmp_path)) == undisturbed


def test_twenty_kills_of_sweep_worker_and_node(undisturbed, tmp_path):
    from ray.cluster_utils import Cluster

    draw = random.Random(0)
    done = {"p": 0, "w": 0, "n": 0}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    node = cluster.add_node(num_cpus=2)

    def start():
        return start_sweep(tmp_path, count=COUNT, steps=STEPS, jobs=2, engine="ray", RAY_ADDRESS=cluster.address)

    process = start()
    try:
        for target in ("wnp" * 7)[:20]:
            wait_for_progress(process, tmp_path)
            time.sleep(draw.uniform(0.0, 0.3))
            assert process.poll() is None, "the sweep ended before all kills: give it more runs"
            if target == "w":
                active = [folder for folder in tmp_path.glob("runs/*") if is_locked(folder)]
                done["w"] += bool(active) and kill(read_json(draw.choice(active) / HOLDER_FILE)["pid"])
            elif target == "n":
                cluster.remove_node(node, allow_graceful=False)
                node = cluster.add_node(num_cpus=2)
                done["n"] += 1
            else:
                done["p"] += kill(process.pid)
                process.communicate()
                process = start()
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, out
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            kill(pid)
        process.communicate()
        cluster.shutdown()
    print("kills", done)
    assert done["p"] + done["n"] == 13
    assert done["w"] >= 5
    assert numbers(read_records(tmp_path)) == undisturbed
