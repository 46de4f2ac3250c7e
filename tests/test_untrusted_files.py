"""A value read from a file is not a path, not a shape and not a number until it was checked."""

import copy
import dataclasses
import gzip
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import refused
from page_records import record, write
from sampler_cases import MAKERS, K, N, cloud, taken
from sweeping import descendants, finished, make_runs
from test_several_devices import SPLITS
from vardass.adapt.config import RunConfig
from vardass.adapt.run_folder import CHECKPOINT_FILE, load_checkpoint, save_checkpoint
from vardass.adapt.trainer import Trainer
from vardass.errors import InputError, VardassError
from vardass.files import inside, parse_json, read_json
from vardass.lab import store
from vardass.lab.page import make_page
from vardass.lab.record import Record
from vardass.lab.run import execute
from vardass.lab.store import SweepStore, read_records
from vardass.lab.sweep import status
from vardass.paper.diverse_samplers import DPPBatchSampler, KMeansPlusPlusBatchSampler
from vardass.processes import count_cpus, count_workers
from vardass.shards import ShardStrata, stratify_shards
from vardass.strata import Strata

NAN = float("nan")


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refusal(action, *given, **named) -> str | None:
    """What an error of ours says, if there is one."""
    try:
        action(*given, **named)
    except VardassError as error:
        return str(error)
    return None


# --- JSON -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[" * 100_000, "nested"),
        ('{"a":' * 100_000, "nested"),
        ("[" * 150 + "]" * 150, "nested"),
        ('{"a": ' + "9" * 5000 + "}", "5,000 digits"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' twice"),
        ('{"a": "\\ud800"}', "Unicode"),
        ('{"\\udfff": 1}', "Unicode"),
        (b"\xff", "Unicode"),
        ("", "not JSON"),
        ('{"a": 1', "not JSON"),
    ],
)
def test_json_that_cannot_be_worked_with_is_one_error(tmp_path, text, named):
    with refused(named):
        parse_json(text)
    file = tmp_path / "x.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused(file, named):
        read_json(file)


def test_json_of_ours_is_read_as_ever(tmp_path):
    whole = {"a": [1, 2.5, None, True, "ä", {"b": {}}], "seed": 2**64 - 1}
    assert parse_json(json.dumps(whole)) == whole
    assert read_json(tmp_path / "absent") == {}


# --- paths ----------------------------------------------------------------------------------------------


def test_nothing_leads_out_of_a_folder(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "out").symlink_to(tmp_path)
    (tmp_path / "in" / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("in")
    for name in ("..", "../x", "deep/../../x", str(tmp_path), "out", "out/x", "a\0b"):
        with refused("leads out of"):
            inside(tmp_path / "in", name)
    for name in ("deep", "deep/../new", "."):
        assert inside(tmp_path / "link", name) == tmp_path / "link" / name


OTHER_IDS = ["../../victim", "..", ".", "", "/victim", "./0123456789abcdef", "0123456789ABCDEF", "٠" * 16, "f" * 17,
             "0123456789abcdef\n", "0123456789abcdef/", "0123456789abcde\0", 5, None, ["a"], {}]  # fmt: skip


@pytest.mark.parametrize("name", OTHER_IDS, ids=repr)
@pytest.mark.parametrize("status", ["finished", "failed"])
def test_a_run_has_a_name_of_16_hex_digits_and_nothing_else_changes_a_file(tmp_path, name, status):
    folder, victim = tmp_path / "sweep", tmp_path / "victim"
    victim.mkdir()
    (victim / "mine").write_text("x")
    (folder / "runs" / "r").mkdir(parents=True)
    name = str(victim) if name == "/victim" else name
    line = json.dumps({**json.loads(record(status=status, error="x").to_json()), "id": name})
    for file in (folder / "runs" / "r" / "record.json", folder / "records.jsonl"):
        file.write_text(line)
        before = content(tmp_path)
        with refused("nothing was changed"), SweepStore.open(folder):
            pass
        assert {**content(tmp_path), "sweep/lock": None} == {**before, "sweep/lock": None}
        file.unlink()


@pytest.mark.parametrize("kind", ["run", "runs", "records.jsonl", "holder.json", "lock", "plan.json", "sweep.yaml"])
def test_links_in_a_sweeps_folder_are_not_followed(tmp_path, kind):
    folder, victim = tmp_path / "sweep", tmp_path / "victim"
    first, second = (finished(spec) for spec in make_runs(2))
    folder.mkdir()
    (victim / first.run_id).mkdir(parents=True)
    (victim / first.run_id / "mine").write_text("x")
    (victim / "record.json").write_text(dataclasses.replace(first, status="failed", error="x").to_json())
    (victim / "empty").touch()
    if kind == "run":
        (folder / "runs").mkdir()
        (folder / "runs" / first.run_id).symlink_to(victim)
    elif kind == "runs":
        (folder / "records.jsonl").write_text(first.to_json() + "\n")
        (folder / "runs").symlink_to(victim)
    else:
        (folder / kind).symlink_to(victim / "empty")
    before = content(victim)
    with refused("leads out of"), SweepStore.open(folder) as opened:
        opened.add(second)
    assert content(victim) == before


@pytest.mark.parametrize(
    "name", ["record.json", "config.json", "metrics.jsonl", "log.txt", "progress.tmp", "holder.json"]
)
def test_links_in_a_runs_folder_are_not_followed(tmp_path, name):
    folder, victim = tmp_path / "run", tmp_path / "victim"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    with refused(folder / name, "leads out of"):
        execute(make_runs(1)[0], folder)
    assert not victim.exists()


def test_strata_of_files_go_below_their_folder_and_no_row_counts_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("d/a.npy", "e/b.npy"):
        Path(name).parent.mkdir()
        np.save(name, np.random.default_rng(0).normal(size=(30, 2)))
    os.link("d/a.npy", "d/hard.npy")
    Path("d/soft.npy").symlink_to("a.npy")
    Path("f").symlink_to("d")
    for other in ("d/../d/a.npy", "./d/a.npy", "d/hard.npy", "d/soft.npy", "f/a.npy", tmp_path / "d" / "a.npy"):
        with refused("d/a.npy", "twice"):
            stratify_shards(["d/a.npy", other], 2, out="out")
    strata = stratify_shards(["d/../e/b.npy", "f/a.npy"], 2, out="out")
    assert [str(file.relative_to(tmp_path)) for file in strata.labels_files] == [
        "out/labels/e/b.npy",
        "out/labels/d/a.npy",
    ]
    assert len(strata.labels) == 60
    assert stratify_shards(["e/b.npy", "d/a.npy"], 2, out="out").n == 60
    file = tmp_path / "out" / "strata.json"
    good = json.loads(file.read_text())
    wrong = [(name, value) for name in good for value in (None, -1, "x", [1], {}, NAN)]
    for name, value in [*wrong, ("files", [str(tmp_path / "d/../../../e/b.npy"), good["files"][1]])]:
        if not (name == "info" and value == {}) and (name, value) not in (("solver", "x"), ("kernel", "x")):
            file.write_text(json.dumps({**good, name: value}))
            with pytest.raises(InputError):
                ShardStrata.load("out")
    file.write_text(json.dumps(good))
    for labels in (np.zeros(30), np.full(30, 2, np.int32), np.full(30, -1, np.int32), np.zeros((30, 1), np.int32)):
        np.save(strata.labels_files[0], labels)
        with refused("out/labels/e/b.npy"):
            _ = ShardStrata.load("out").labels


# --- folders of sweeps ----------------------------------------------------------------------------------


def places(value, path=()):
    yield path
    for key, entry in value.items() if isinstance(value, dict) else ():
        yield from places(entry, (*path, key))


def changed(value, path, new):
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


def test_every_field_of_a_sweeps_folder_can_be_wrong(tmp_path):
    """Each is read as what it should be or refused in one line; nothing else is raised."""
    write(tmp_path, [record(points=1), record(sampler="vardass", points=1)])
    run = tmp_path / "runs" / ("a" * 16)
    run.mkdir(parents=True)
    (run / "progress.json").write_text(json.dumps({"label": "a", "step": 1, "steps": 2, "wall": 1.0, "seconds": {}}))
    (tmp_path / "plan.json").write_text(json.dumps({"jobs": 1, "runs": ["a" * 16]}))
    for name in ("records.jsonl", "plan.json", "runs/" + "a" * 16 + "/progress.json"):
        file = tmp_path / name
        text = file.read_text()
        first, *rest = text.splitlines()
        for path in [path for path in places(json.loads(first)) if path and "config" not in path[:-1]]:
            for value in (None, -1, "x", [[]], {"a": []}, NAN, 10**18):
                file.write_text("\n".join([json.dumps(changed(json.loads(first), path, value)), *rest]) + "\n")
                for action in (read_records, status, make_page) if value in (None, "x") else (read_records, status):
                    assert len(refusal(action, tmp_path) or "") <= 400
        file.write_text(text)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_record_that_could_not_be_written_again_is_refused(number):
    line = record(points=1).to_json().replace('"mmd2":0.02', f'"mmd2":{number}')
    with refused("not a whole record"):
        Record.from_json(line)


def test_compressed_records_are_not_inflated_beyond_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_MOST_BYTES", 10_000)
    file = tmp_path / "records.jsonl.gz"
    file.write_bytes(gzip.compress(b" " * 10_001))
    with refused(file, "10,000", "gunzip"):
        read_records(tmp_path)


# --- states ---------------------------------------------------------------------------------------------

SAMPLERS = {
    **MAKERS,
    "k-means++": lambda **o: KMeansPlusPlusBatchSampler(N, K, **o),
    "k-means++, low rank": lambda **o: KMeansPlusPlusBatchSampler(N, K, kernel_rank=8, **o),
    "k-DPP": lambda **o: DPPBatchSampler(N, K, **o),
}


def damaged(value):
    """Values of other kinds in place of ``value``."""
    yield from ("text", [1], {}, -1, NAN, object)
    if isinstance(value, torch.Tensor):
        yield from (value[:-1], value[..., None], value.tolist(), value - 100, -value - 1, value.to_sparse())
        yield value.float() if value.dtype == torch.int64 else value.long()
        yield value + 10**6 if value.dtype == torch.int64 else value * NAN
    if isinstance(value, list):
        yield from ([-1.0] * len(value), value + value, [NAN] * len(value))


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_damaged_state_is_drawn_from(name):
    """It is refused, which changes nothing, or batches are as they have to be."""
    sampler = SAMPLERS[name](seed=0)
    sampler.refresh(cloud())
    taken(iter(sampler), 2)
    state = sampler.state_dict()
    again = SAMPLERS[name](seed=0)
    again.load_state_dict(copy.deepcopy(state))
    expected = taken(iter(again), 3)
    for path in [path for path in places(state) if path and path[-1] != "settings"]:
        value = state
        for key in path:
            value = value[key]
        for number, wrong in enumerate(damaged(value)):
            sampler = SAMPLERS[name](seed=0)
            sampler.load_state_dict(copy.deepcopy(state))
            message = refusal(sampler.load_state_dict, changed(state, path, wrong))
            if message is not None:
                assert len(message) <= 400
                assert number % 5 or taken(iter(sampler), 3) == expected
            else:
                for batch, weights in taken(iter(sampler), 8):
                    assert all(0 <= index < N for index in batch)
                    assert weights is None or (min(weights) >= 0 and sum(weights) == pytest.approx(1, abs=1e-3))


@pytest.mark.parametrize("shares", [[NAN, 1.0], [-0.5, 1.5], [0.5, 0.6], [0.0, 0.0], [1.0], ["a", "b"], [1e400, 0.0]])
def test_strata_have_shares_that_are_weights(shares):
    labels = torch.tensor([0, 0, 1])
    good = Strata(labels, 2, 0.1, 0.2, shares=[0.25, 0.75]).to_dict()
    assert Strata.from_dict(good).weights.tolist() == [0.25, 0.75]
    with pytest.raises(InputError):
        Strata.from_dict({**good, "shares": shares})


# --- runs -----------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_one_line(tmp_path):
    config = RunConfig(steps=4, eval_every=2, checkpoint_every=3, sampler="ordered", refresh_every=2)
    Trainer(config, SPLITS, tmp_path).run()
    file = tmp_path / CHECKPOINT_FILE
    good = load_checkpoint(file)
    other = config.changed(steps=5)
    moments = [("state", "optimisers", "network", "state", 0, name) for name in ("step", "exp_avg")]
    parts = [("state", name) for name in good["state"] if name != "algorithm_extra"]
    for path in [("state",), ("config",), *parts, *moments, ("state", "choice", "seen")]:
        for value in (None, "x", -1, [1], {"a": 1}):
            if (path[-1], value) in (("kept", None),):
                continue
            save_checkpoint(file, changed(good, path, value))
            message = refusal(Trainer(other, SPLITS, tmp_path).run, resume=True)
            assert message is not None or path[-1] in ("banks", "scaler", "strata_log", "counts"), (path, value)
            assert len(message or "") <= 400
    save_checkpoint(file, good)
    assert Trainer(other, SPLITS, tmp_path).run(resume=True).step == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"network_options": {"hidden": [10**18]}},
        {"network_options": {"hidden": [10**400]}},
        {"network_options": {"bottleneck": 10**18}},
        {"lr": 1e300},
        {"lr": 10**400},
        {"weight_decay": 1e300},
        {"lr": 1e30, "optimiser_options": {"lr_multipliers": {"head": 1e30}}},
        {"steps": 10**400},
    ],
    ids=str,
)
def test_numbers_beyond_what_can_be_computed_with(settings):
    with pytest.raises(InputError) as caught:
        Trainer(RunConfig(**settings), SPLITS)
    assert len(str(caught.value)) <= 400


def test_no_more_processes_than_cpus():
    for asked in (1, count_cpus(), 100_000):
        assert count_workers(asked) == min(asked, count_cpus())
        assert RunConfig(workers=asked).pass_options["num_workers"] == min(asked, count_cpus())
    with refused("devices=100000", count_cpus(), field="devices"):
        Trainer(RunConfig(devices=100_000, device="cpu", batch_size=100_000), SPLITS)


def test_a_killed_process_of_several_is_named_with_the_remedy(tmp_path):
    before = set(descendants(os.getpid()))

    def kill_one() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (tmp_path / CHECKPOINT_FILE).exists():
            time.sleep(0.05)
        spawned = [pid for pid, line in descendants(os.getpid()).items() if pid not in before and "spawn_main" in line]
        os.kill(max(spawned), signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    config = RunConfig(devices=2, device="cpu", steps=100_000, checkpoint_every=5, sampler="uniform")
    with pytest.raises(VardassError, match=r"process 1 of 2 died \(exit code -9\).*--resume"):
        Trainer(config, SPLITS, tmp_path).run()
    thread.join()
    assert load_checkpoint(tmp_path / CHECKPOINT_FILE)["state"]["step"] >= 5
