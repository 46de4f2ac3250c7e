"""A sweep on a real local Ray gives the numbers of one without it, also when a worker is killed."""

import sys
import threading

import pytest
import ray

from sweeping import kill, make_runs, numbers, wait_for
from vardass.adapt.run_folder import CHECKPOINT_FILE
from vardass.errors import MissingExtraError
from vardass.files import HOLDER_FILE, is_locked, read_json
from vardass.lab.engines import ENGINES, Attempt
from vardass.lab.store import read_records
from vardass.lab.sweep import run_sweep

COUNT, STEPS = 2, 600


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    run_sweep(make_runs(COUNT, STEPS), folder, jobs=1)
    return numbers(read_records(folder))


@pytest.fixture(scope="module")
def _cluster():
    # Ray's workers give way to everything else; on a busy machine that would be for ever
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.mark.usefixtures("_cluster")
def test_worker_killed_in_mid_run_changes_nothing(local, tmp_path):
    killed = []

    def kill_one():
        wait_for(lambda: list(tmp_path.glob(f"runs/*/{CHECKPOINT_FILE}")))
        folder = next(tmp_path.glob(f"runs/*/{CHECKPOINT_FILE}")).parent
        assert is_locked(folder)
        pid = read_json(folder / HOLDER_FILE)["pid"]
        killed.append((kill(pid), pid, folder.name))

    thread = threading.Thread(target=kill_one)
    thread.start()
    summary = run_sweep(make_runs(COUNT, STEPS), tmp_path, engine="ray", jobs=2)
    thread.join()
    assert [was_there for was_there, *_ in killed] == [True]
    assert (summary.finished, summary.failed) == (COUNT, 0)
    assert numbers(read_records(tmp_path)) == local
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.usefixtures("_cluster")
def test_records_come_back_without_a_shared_folder(tmp_path):
    (spec,) = make_runs(1)
    ended = []
    work = tmp_path / "on another machine"
    ENGINES["ray"]([Attempt(spec)], work, jobs=None, on_done=lambda _, outcome: ended.append(outcome), tick=int)
    assert [outcome.kind for outcome in ended] == ["finished"]
    assert ended[0].record.spec == spec
    assert not work.exists()


def test_without_ray_the_message_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vardass\[ray\]'"):
        run_sweep(make_runs(1), tmp_path, engine="ray")
