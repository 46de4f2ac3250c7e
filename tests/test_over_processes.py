"""Strata of rows that lie on several processes: those of one process, whatever the shares, or one clear message."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from conftest import refused
from vardass import Refresher, RefreshEvery, StratifiedBatchSampler, mmd2, stratify
from vardass.errors import InputError, VardassError
from vardass.kernels import RBFMixture
from vardass.processes import gather_rows
from vardass.samplers import OrderedBatchSampler
from vardass.solvers.over_processes import stratify_over_processes
from vardass.variance import stratified_variance, uniform_variance

COUNTS = (130, 0, 700, 370)
N, K, SAMPLE = sum(COUNTS), 8, 400
KERNEL = RBFMixture(scale="median")


def all_rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = 2.0 * torch.randn(12, 5, generator=generator)
    return torch.randn(N, 5, generator=generator) + centres[torch.randint(12, (N,), generator=generator)]


def join(rank: int, count: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )


def refreshed(rows: torch.Tensor) -> list[list[int]]:
    sampler = StratifiedBatchSampler(N, K, kernel=KERNEL, seed=2, endless=True, num_replicas=1, rank=0)
    refresher = Refresher(RefreshEvery(2), sampler, lambda: rows, group=dist.group.WORLD)
    stream, found = iter(sampler), []
    for step in range(4):
        log = refresher.step(step)
        assert (log is None) == (step % 2 == 1)
        assert log is None or log["0/variance"] < log["0/uniform_variance"]
        found.append(list(next(stream)))
    return found


def gradient(model: nn.Module, rows: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Of MMD² between the first and second halves of each process's rows, all processes together."""
    z_s, z_t = (gather(half) for half in model(rows).chunk(2))
    weights = gather(torch.full((len(rows) // 2,), 2.0 / len(rows) / (len(z_s) / (len(rows) // 2)), dtype=rows.dtype))
    mmd2(z_s, z_t, kernel=KERNEL.fit(all_rows().double()), weights_x=weights).backward()
    return next(model.parameters()).grad.clone()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 5).double()


def message_of(kind: type[Exception], *args: object, **options: object) -> str:
    with pytest.raises(kind) as caught:
        stratify_over_processes(*args, **options)  # type: ignore[arg-type]
    return str(caught.value)


def in_process(rank: int, folder: str) -> None:
    join(rank, 4, folder)
    world, rows = dist.group.WORLD, all_rows().split(COUNTS)[rank]
    whole = stratify(rows, K, kernel=KERNEL, seed=3, group=world)
    sampled = stratify_over_processes(rows, K, world, kernel=KERNEL, seed=3, sample=SAMPLE)
    found = {
        "whole": (whole.labels, whole.variance),
        "sampled": (sampled.labels, sampled.variance, sampled.variance_stderr, sampled.uniform_variance),
        "function": stratify_over_processes(rows, 4, world, kernel=lambda x, y: x @ y.T, sample=SAMPLE).variance,
        "batches": refreshed(rows),
        "gradient": gradient(
            nn.parallel.DistributedDataParallel(linear()), all_rows().double()[20 * rank :][:20], gather_rows
        ),
    }
    damaged = torch.where(torch.arange(len(rows))[:, None] == 5, torch.nan, rows) if rank == 2 else rows
    found["damaged"] = message_of(InputError, damaged, K, world)
    found["narrow"] = message_of(InputError, rows[:, :4] if rank == 3 else rows, K, world)
    found["k"] = message_of(InputError, rows, N + 1, world)
    found["rank"] = message_of(InputError, rows, K, world, rank=-1)
    two = dist.new_group([2, 3])
    if rank >= 2:
        found["two"] = stratify_over_processes(rows, K, two).labels
    dist.barrier()
    if rank == 3:
        os._exit(0)  # spawn would end the others if this one failed
    found["lost"] = message_of(VardassError, rows, K, world)
    torch.save(found, f"{folder}/{rank}.pt")
    os._exit(0)  # the group cannot be closed without the one that is gone


def test_four_processes_agree_with_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(in_process, (str(tmp_path),), nprocs=4)
    several = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    x = all_rows()
    alone = stratify(x, K, kernel=KERNEL, seed=3)
    (tmp_path / "alone").mkdir()
    join(0, 1, str(tmp_path / "alone"))
    try:
        sampled = stratify_over_processes(x, K, dist.group.WORLD, kernel=KERNEL, seed=3, sample=SAMPLE)
        batches = refreshed(x)
    finally:
        dist.destroy_process_group()
    parts = all_rows().double()[:80].view(4, 2, 10, 5).transpose(0, 1).reshape(80, 5)  # first halves, then second ones
    whole = gradient(linear(), parts, lambda part: part)
    for rank, found in enumerate(several):
        assert torch.allclose(found["gradient"], whole, rtol=1e-10, atol=0.0)
        labels, variance = found["whole"]
        assert torch.equal(labels, alone.labels)
        assert variance == alone.variance
        labels, variance, stderr, uniform = found["sampled"]
        assert float((labels != sampled.labels).double().mean()) < 1e-3  # products of other blocks round otherwise
        assert variance == pytest.approx(sampled.variance, rel=1e-3)
        true = stratified_variance(x.double(), labels, kernel=KERNEL.fit(x))
        assert abs(variance - true) < 4 * stderr + 0.01 * true
        assert uniform == pytest.approx(uniform_variance(x.double(), K, kernel=KERNEL.fit(x)), rel=0.02)
        assert true < 1.05 * alone.variance
        assert found["function"] == several[0]["function"] > 0.0
        assert found["batches"] == batches
        assert "NaN or infinite values in 1 of 700 rows (rows 5)" in found["damaged"]
        assert ("process 2 of 4" in found["damaged"]) == (rank != 2)
        assert "columns: the first has 5, process 3 4" in found["narrow"]
        assert str(N + 1) in found["k"]
        assert "rank" in found["rank"]
        assert "start all of them again" in found["lost"]
    assert torch.equal(several[2]["two"], stratify(x[130:], K).labels)


def test_what_needs_all_features_on_one_process_is_refused(tmp_path: Path) -> None:
    join(0, 1, str(tmp_path))
    try:
        group, x = dist.group.WORLD, all_rows()
        with refused("min_size=2", "process group"):
            stratify(x, K, min_size=2, group=group)
        with refused("max_passes=3", "process group"):
            stratify(x, K, max_passes=3, group=group)
        with refused("OrderedBatchSampler", "StratifiedBatchSampler"):
            OrderedBatchSampler(N, K).refresh_over_processes(x, group)
        with refused("group=", "min_movement=0.1"):
            Refresher(RefreshEvery(1), StratifiedBatchSampler(N, K), lambda: x, group=group, min_movement=0.1)
        with refused("n=1200, k=8", "n=1201, k=8"):
            StratifiedBatchSampler(N + 1, K).refresh_over_processes(x, group)
    finally:
        dist.destroy_process_group()
