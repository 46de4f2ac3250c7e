"""Accelerate and Hugging Face's Trainer, in one process and in two: shares, strata, and resumed runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

import vardass
from conftest import refused
from vardass.integrations.checkpoints import CheckpointedSampler
from vardass.integrations.pairs import PairBatchSampler

N, K, STEPS = 44, 4, 16  # of each domain; epochs of 11 batches: an odd one is left out for two processes


class Rows(Dataset[Any]):
    def __init__(self, shift: float, seed: int) -> None:
        self.x = torch.randn(N, 5, generator=torch.Generator().manual_seed(seed)) + shift
        self.first = N * seed

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index], "labels": int(self.x[index, 0] > 0), "row": self.first + index}


class Adapted(nn.Module):
    """BatchNorm, so that the strata of two processes would differ; keeps the batches that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.seen: list[Any] = []

    def forward(self, x: Any, labels: Any, row: Any, weight: Any) -> Any:
        self.seen.append((row.tolist(), weight.tolist()))
        z = self.net(x)
        task = nn.functional.cross_entropy(self.head(z[:K]), labels[:K], reduction="none") @ weight[:K]
        return {"loss": task + vardass.mmd2(z[:K], z[K:], weights_x=weight[:K], weights_y=weight[K:])}


def parts() -> tuple[Adapted, vardass.Refresher, CheckpointedSampler, Any]:
    data = ConcatDataset([Rows(0.0, 0), Rows(1.0, 1)])
    pairs = PairBatchSampler(
        vardass.OrderedBatchSampler(N, K, endless=True, seed=0),
        vardass.StratifiedBatchSampler(N, K, endless=True, seed=1),
    )
    model = Adapted()
    refresher = vardass.Refresher(
        vardass.RefreshEvery(3), {"both": pairs}, {"both": lambda: vardass.extract_features(model.net, data, key="x")}
    )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return model, refresher, CheckpointedSampler(pairs, prepared_for=processes), data


def with_accelerate(steps: int, *, save: Path | None = None, load: Path | None = None) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, refresher, sampler, data = parts()
    loader = DataLoader(vardass.with_weights(data), batch_sampler=sampler)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    wrapped, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    accelerator.register_for_checkpointing(sampler, refresher)
    if load is None:
        refresher.step(0)
    else:
        accelerator.load_state(str(load))
        step = 7
    while step < steps:
        for batch in sampler.follow(loader):
            accelerator.backward(wrapped(**batch)["loss"])
            optimiser.step()
            optimiser.zero_grad()
            step += 1
            refresher.step(step)
            if step == steps:
                break
    if save is not None:
        accelerator.save_state(str(save))
    strata = [side.strata.labels.tolist() for side in (sampler.inner.source, sampler.inner.target)]
    return {"seen": model.seen, "strata": strata}


def with_trainer(
    steps: int, *, folder: Path, resume: bool = False, stop: bool = False, **options: Any
) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    from vardass.integrations.transformers import RefreshCallback

    model, refresher, sampler, data = parts()

    class WithStrata(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(vardass.with_weights(data), batch_sampler=sampler))

    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        save_strategy="steps" if stop else "no",
        save_steps=steps,
        use_cpu=True,
        report_to=[],
        ignore_data_skip=True,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    callback = RefreshCallback(refresher, sampler)
    trainer = WithStrata(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    strata = [side.strata.labels.tolist() for side in (sampler.inner.source, sampler.inner.target)]
    logged = [entry["step"] for entry in trainer.state.log_history if "vardass/both/seconds_solver" in entry]
    return {"seen": model.seen, "strata": strata, "logged": logged}


def resumes_on_cpus() -> bool:
    """Whether transformers loads the optimiser of a checkpoint: before 5.0 not in several processes on CPUs."""
    import transformers

    return int(transformers.__version__.partition(".")[0]) >= 5 or os.environ.get("WORLD_SIZE", "1") == "1"


def run_all(folder: Path) -> None:
    """Each library: a whole run, and one that is stopped and resumed."""
    found: dict[str, Any] = {
        "accelerate": {
            "whole": with_accelerate(STEPS),
            "begun": with_accelerate(7, save=folder / "state"),
            "resumed": with_accelerate(STEPS, load=folder / "state"),
        },
        "trainer": {
            "whole": with_trainer(STEPS, folder=folder / "whole"),
            "begun": with_trainer(7, folder=folder / "begun", stop=True),
        },
    }
    if resumes_on_cpus():
        found["trainer"]["resumed"] = with_trainer(STEPS, folder=folder / "begun", resume=True)
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("processes", [1, 2])
def test_shares_strata_and_resumed_runs(processes: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, warnings, pathlib\nwarnings.simplefilter('ignore')\n"
        "import test_integrations_huggingface as t\nt.run_all(pathlib.Path(sys.argv[1]))\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if processes == 2 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "OMP_NUM_THREADS": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    for library in ("accelerate", "trainer"):
        for rank in ranks:
            found = rank[library]
            assert len(found["whole"]["seen"]) == STEPS
            assert found["begun"]["seen"] == found["whole"]["seen"][: len(found["begun"]["seen"])], library
            if "resumed" in found:
                assert found["begun"]["seen"] + found["resumed"]["seen"] == found["whole"]["seen"], library
                assert found["resumed"]["strata"] == found["whole"]["strata"]
            assert found["whole"]["strata"] == ranks[0][library]["whole"]["strata"]
            for rows, weights in found["whole"]["seen"]:
                assert all(row < N for row in rows[:K])
                assert all(row >= N for row in rows[K:])
                assert sum(weights) == pytest.approx(2.0, abs=1e-5)
                assert len(set(weights)) > 1
        if processes == 2:
            first, second = (rank[library]["whole"]["seen"] for rank in ranks)
            assert not [place for place in range(STEPS) if first[place] == second[place]]
    assert ranks[0]["trainer"]["whole"]["logged"] == [0, 3, 6, 9, 12, 15]


def test_what_would_go_wrong_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from vardass.integrations.transformers import RefreshCallback

    _, refresher, sampler, _ = parts()
    with refused("CheckpointedSampler", "PairBatchSampler"):
        RefreshCallback(refresher, sampler.inner)
    callback = RefreshCallback(refresher, sampler)
    state, control = transformers.TrainerState(global_step=7), transformers.TrainerControl()

    class Arguments:
        ignore_data_skip = False
        output_dir = tmp_path

    with refused("step 7", "ignore_data_skip=False", "ignore_data_skip=True"):
        callback.on_train_begin(Arguments(), state, control)  # type: ignore[arg-type]
    Arguments.ignore_data_skip = True
    with refused(tmp_path / "checkpoint-7" / "vardass.pt", "resume_from"):
        callback.on_train_begin(Arguments(), state, control)  # type: ignore[arg-type]
