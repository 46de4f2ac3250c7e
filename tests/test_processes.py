"""What processes tell each other: rows with their gradient, what the first one makes, and its errors."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from vardass import StratifiedBatchSampler, mmd2
from vardass.errors import InputError, VardassError
from vardass.kernels import RBFMixture
from vardass.processes import from_first, gather_rows, is_first_process
from vardass.refresh import Refresher, RefreshEvery

COUNT, ROWS = 3, 20


def all_rows() -> torch.Tensor:
    return torch.randn(COUNT * ROWS, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradient(model: nn.Module, rows: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Of MMD² between the first and second halves of each process's rows, all processes together."""
    z_s, z_t = (gather(half) for half in model(rows).chunk(2))
    weights = gather(torch.full((len(rows) // 2,), 2.0 / len(rows) / (len(z_s) / (len(rows) // 2)), dtype=rows.dtype))
    mmd2(z_s, z_t, kernel=RBFMixture(scale="median").fit(all_rows()), weights_x=weights).backward()
    return next(model.parameters()).grad.clone()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 5).double()


def message_of(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def in_process(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=COUNT, timeout=timedelta(seconds=120)
    )
    sampler = StratifiedBatchSampler(COUNT * ROWS, 4, num_replicas=1, rank=0)
    rows = all_rows() + rank  # the others' are not looked at
    refresher = Refresher(RefreshEvery(1), sampler, lambda: rows)
    refresher.step(0)
    own = all_rows()[ROWS * rank :][:ROWS]
    found = {
        "told": from_first(lambda: {"rank": dist.get_rank(), "rows": [torch.arange(3)]}),
        "first": is_first_process(),
        "labels": sampler.strata.labels,
        "gradient": gradient(nn.parallel.DistributedDataParallel(linear()), own, gather_rows),
    }
    rows[0] = torch.nan
    found["damaged"] = message_of(InputError, lambda: refresher.step(1))
    dist.barrier()
    if rank == 0:
        os._exit(0)  # spawn would end the others if this one failed
    found["lost"] = message_of(VardassError, lambda: from_first(lambda: 0))
    torch.save(found, f"{folder}/{rank}.pt")
    os._exit(0)  # the group cannot be closed without the one that is gone


def test_processes_know_what_the_first_one_found(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(in_process, (str(tmp_path),), nprocs=COUNT)
    halves = all_rows().view(COUNT, 2, ROWS // 2, 5).transpose(0, 1).reshape(-1, 5)  # first halves, then second ones
    expected = gradient(linear(), halves, lambda rows: rows)
    alone = StratifiedBatchSampler(COUNT * ROWS, 4)
    alone.refresh(all_rows())
    for rank in range(1, COUNT):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert (found["told"]["rank"], found["told"]["rows"][0].tolist()) == (0, [0, 1, 2])
        assert not found["first"]
        assert torch.equal(found["labels"], alone.strata.labels)
        assert torch.allclose(found["gradient"], expected, rtol=1e-10, atol=0.0)
        assert "process 0 of 3" in found["damaged"]
        assert "NaN or infinite values in 1 of 60 rows (rows 0)" in found["damaged"]
        assert "start all of them again" in found["lost"]
