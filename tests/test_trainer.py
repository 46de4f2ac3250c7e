"""Training runs: all combinations, exact resumption, hidden labels, and what is left on disk."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from conftest import refused
from vardass.adapt import ALGORITHM_NAMES, Batch
from vardass.adapt.batches import Inputs, in_memory
from vardass.adapt.config import RunConfig
from vardass.adapt.model import RunResult, build_algorithm, final_report, load_model, outputs
from vardass.adapt.optimisation import make_optimisers
from vardass.adapt.selection import SELECTION_NAMES, label_scores
from vardass.adapt.trainer import Trainer
from vardass.data import Domain, LabelsHidden, Task, TaskSplits, TensorInputs, load_task, split_task
from vardass.errors import VardassError, VardassWarning
from vardass.kernels import CoralKernel, RBFMixture, as_kernel
from vardass.paper.arm import _support
from vardass.samplers.registry import SAMPLER_NAMES, make_sampler

SMALL: dict[str, Any] = {"network_options": {"hidden": [8, 6]}, "batch_size": 6, "device": "cpu", "sampler": "vardass"}


def watch_splits(rows: int = 100, *, seed: int = 0) -> TaskSplits:
    task = load_task("watch", "left-A->right-B")
    generator = torch.Generator().manual_seed(seed)
    small = [d.subset(torch.randperm(len(d), generator=generator)[:rows]) for d in (*task.sources, task.target)]
    return split_task(Task("small", (small[0],), small[1]), seed=seed)


SPLITS = watch_splits()


def config(**changes: Any) -> RunConfig:
    if changes.get("algorithm") == "arm":  # batches are smaller here than DomainBed's support sets
        changes = {"algorithm_options": {"support_size": 6}, **changes}
    return RunConfig(**{**SMALL, "steps": 5, "eval_every": 5, "refresh_every": 2, **changes})


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """All tensors and values of a state by path, without the seconds that the run took."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        path = f"{prefix}/{key}"
        if "seconds" in path or "timer" in path:
            continue
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        found.update(flat(value, path) if isinstance(value, dict) else {path: value})
    return found


def assert_same_run(a: Trainer, b: Trainer) -> None:
    left, right = flat(a.state_dict()), flat(b.state_dict())
    assert left.keys() == right.keys()
    for path, value in left.items():
        other = right[path]
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, path


class Stop:
    """Interrupt a run after some steps."""

    def __init__(self, step: int) -> None:
        self.message = f"step {step} of"

    def __call__(self, share: float, message: str) -> None:
        if message.startswith(self.message):
            raise KeyboardInterrupt


DROPOUT: dict[str, Any] = {"hidden": [8, 6], "dropout": 0.3}


def resumable(**changes: Any) -> RunConfig:
    steps = {"steps": 15, "refresh_every": 4, "eval_every": 5, "checkpoint_every": 4}
    return config(network_options=DROPOUT, **{**steps, **changes})


class Slow(Dataset[Tensor]):
    """Samples that are not in memory, as far as the trainer can see."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: int) -> Tensor:
        return self.tensor[index]


def on_disk(domain: Domain) -> Domain:
    tensor = in_memory(domain.dataset)
    assert tensor is not None
    return domain.with_inputs(Slow(tensor))


def named_part(domain: Domain, rows: Tensor, name: str) -> Domain:
    part = domain.subset(rows)
    part.name = name
    return part


def loaded_splits() -> TaskSplits:
    return TaskSplits(**{name: on_disk(domain) for name, domain in vars(SPLITS).items()})


# --- all combinations -------------------------------------------------------------------------------------


# each algorithm with three or four samplers, each sampler with three algorithms
PAIRS = [
    (algorithm, sampler)
    for i, algorithm in enumerate(ALGORITHM_NAMES)
    for j, sampler in enumerate(SAMPLER_NAMES)
    if (i + j) % 3 == 0
]


@pytest.mark.parametrize(("algorithm", "sampler"), PAIRS)
def test_algorithms_run_with_samplers(algorithm: str, sampler: str) -> None:
    trainer = Trainer(config(algorithm=algorithm, sampler=sampler), SPLITS)
    before = {name: value.clone() for name, value in trainer.algorithm.named_parameters()}
    result = trainer.run()
    assert result.step == 5
    assert not result.interrupted
    assert all(torch.isfinite(value).all() for value in result.algorithm.state_dict().values())
    moved = [name for name, value in trainer.algorithm.named_parameters() if not torch.equal(value, before[name])]
    assert any(name.startswith("network.") for name in moved)
    assert {"source_accuracy", "target_entropy", "loss/total"} <= result.metrics[0].keys()


@pytest.mark.parametrize("source", ["bank", "full"])
@pytest.mark.parametrize(("sampler", "refreshes"), [("kmeans-inputs", 1), ("kmeans-features", 3), ("uniform", 0)])
def test_strata_are_refreshed_every_t_steps_and_those_of_inputs_once(sampler: str, refreshes: int, source: str) -> None:
    trainer = Trainer(config(sampler=sampler, feature_source=source), SPLITS)
    trainer.run()
    assert [stream.sampler._refreshes for stream in trainer.streams.values()] == [refreshes] * 2


def test_weights_of_the_strata_reach_the_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(config(sampler="vardass", steps=3), SPLITS)
    seen: list[tuple[Batch, Tensor]] = []
    update = trainer.algorithm.update

    def spy(source: Batch, target: Batch, step: int, **options: Any) -> Any:
        for batch, stream in zip((source, target), trainer.streams.values(), strict=True):
            strata = stream.sampler.strata  # type: ignore[attr-defined]
            assert batch.weights is not None
            torch.testing.assert_close(batch.weights, strata.sizes.float() / strata.n)
            seen.append((batch, strata.sizes))
        assert source.y is not None
        assert target.y is None
        return update(source, target, step, **options)

    monkeypatch.setattr(trainer.algorithm, "update", spy)
    trainer.run()
    assert len(seen) == 6
    assert any(len(set(sizes.tolist())) > 1 for _, sizes in seen)


@pytest.mark.parametrize("name", ["erm", "mmd", "coral", "dann", "cdan", "cdan+sdat", "arm", "mcc"])
def test_a_step_leaves_the_features_of_its_batches(name: str) -> None:
    options: dict[str, Any] = {"sharpness": 1e-7} if "sdat" in name else {"support_size": 6} if name == "arm" else {}
    algorithm = build_algorithm(RunConfig(algorithm=name, algorithm_options=options, **SMALL), (5,), 3)
    generator = torch.Generator().manual_seed(0)
    source = Batch(torch.randn(6, 5, generator=generator), torch.arange(6) % 3)
    target = Batch(torch.randn(6, 5, generator=generator)) if algorithm.uses_target else None
    expected = {"source": algorithm.features(source.x).detach()}
    if target is not None:
        expected["target"] = algorithm.features(target.x).detach()
    optimisers = make_optimisers(config(algorithm=name), algorithm)
    algorithm.update(source, target, 0, optimisers=optimisers, backward=torch.Tensor.backward)
    assert algorithm.computed.keys() == expected.keys()
    for key, z in algorithm.computed.items():
        torch.testing.assert_close(z, expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"network_options": {"hidden": [8, 6], "dropout": 0.5}},
        {"algorithm": "cdan+sdat", "algorithm_options": {"sharpness": 5.0}},
        {"algorithm_options": {"penalty": 0.0}},
    ],
    ids=["plain", "dropout", "ascent", "target that the step does not look at"],
)
def test_the_bank_holds_what_evaluation_sees(changes: dict[str, Any]) -> None:
    trainer = Trainer(config(sampler="stratified", steps=4, refresh_every=2, lr=1e-12, **changes), SPLITS)
    trainer.run()
    # with weights that stand still, all rows are those of one full pass, in the right order
    for name in ("source", "target"):
        features = trainer.strata.banks[name].features()
        torch.testing.assert_close(features, trainer.strata.all_features(name), rtol=1e-5, atol=1e-6)


def test_contexts_of_arm_are_of_one_domain_and_one_size_in_training_and_evaluation() -> None:
    task = load_task("watch", "left-A->right-B")
    shuffled = torch.randperm(len(task.sources[0]), generator=torch.Generator().manual_seed(0))
    parts = [named_part(task.sources[0], shuffled[start : start + 40], f"s{start}") for start in (0, 40)]
    splits = split_task(Task("two", tuple(parts), task.target.subset(torch.arange(40))), seed=0)
    options = {"algorithm_options": {"support_size": 3}, "sampler": "uniform", "batch_size": 12}
    trainer = Trainer(config(algorithm="arm", steps=2, **options), splits)
    seen: list[Batch] = []
    update = trainer.algorithm.update

    def spy(source: Batch, *given: Any, **options: Any) -> Any:
        seen.append(source)
        return update(source, *given, **options)

    trainer.algorithm.update = spy  # type: ignore[method-assign]
    trainer.run()
    ids = splits.source_train.domain_ids
    assert all(batch.domains is not None and len(set(batch.domains.tolist())) == 2 for batch in seen)
    inputs = Inputs(splits.source_train, torch.device("cpu"))
    assert isinstance(inputs.data, Tensor)
    algorithm = trainer.algorithm.eval()
    for batch_size in (256, 9, 7):  # of 64 samples, 32 of each domain: 32 = 3 · 9 + 5 = 4 · 7 + 4
        _, logits = outputs(algorithm, inputs, batch_size=batch_size)
        for domain in (0, 1):
            x = inputs.data[ids == domain]
            pieces = []
            for start in range(0, len(x), batch_size):
                context = algorithm.context(x[start : start + batch_size])  # type: ignore[operator]
                for i in range(len(context)):
                    first = min(i // 3 * 3, len(context) - 3)
                    pieces.append(context[first : first + 3].mean(0))
            expected = algorithm.network(torch.cat([x, torch.stack(pieces)], 1))
            torch.testing.assert_close(logits[ids == domain], expected.detach(), rtol=1e-4, atol=1e-5)
    # batches whose last one would be smaller than a support set are made smaller: 32 = 1 + 31
    assert torch.equal(outputs(algorithm, inputs, batch_size=31)[1], outputs(algorithm, inputs, batch_size=29)[1])


def test_domainbeds_batches_give_arm_contexts_of_evaluations_size() -> None:
    task = load_task("watch", "left-A->right-B")
    shuffled = torch.randperm(len(task.sources[0]), generator=torch.Generator().manual_seed(0))
    pieces = shuffled.split([20, 40, 60, len(shuffled) - 120])[:3]
    parts = tuple(named_part(task.sources[0], rows, f"s{len(rows)}") for rows in pieces)
    splits = split_task(Task("three", parts, task.target.subset(torch.arange(40))), seed=0)
    options = {"sampler": "uniform-replacement", "batch_size": 8, "algorithm_options": {"support_size": 8}}
    trainer = Trainer(config(algorithm="arm", steps=3, batch_per_source=True, **options), splits)
    for _ in range(20):
        rows, batch = trainer.streams["source"].draw()
        assert batch.domains is not None
        assert batch.domains.tolist() == splits.source_train.domain_ids[rows].tolist()
        assert batch.domains.bincount().tolist() == [8, 8, 8]
        assert batch.weights is None
        order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
        sizes = _support(24, 8, batch.domains, order).sum(1)
        assert set(sizes.tolist()) == {trainer.algorithm.seen_together} == {8}
    trainer.run()
    # one source: the same batches with and without it
    one, other = (Trainer(config(algorithm="arm", batch_per_source=each, **options), SPLITS) for each in (True, False))
    assert torch.equal(one.streams["source"].draw().rows, other.streams["source"].draw().rows)
    # other samplers draw as many from the union
    union = Trainer(config(algorithm="arm", batch_per_source=True, **{**options, "sampler": "uniform"}), splits)
    assert union.streams["source"].draw().batch.size == 24


class Counted(Dataset[Tensor]):
    """Images that are made when they are asked for; it counts those that are alive."""

    def __init__(self, pixels: int) -> None:
        self.pixels, self.alive, self.most = pixels, 0, 0

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Tensor:
        image = torch.rand(3, self.pixels, self.pixels, generator=torch.Generator().manual_seed(index))
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(image, self.forget)
        return image

    def forget(self) -> None:
        self.alive -= 1


def test_inputs_for_kmeans_are_projected_a_few_at_a_time() -> None:
    data = Counted(40)
    inputs = Inputs(Domain("s", data, None, ("a", "b"), kind="image"), torch.device("cpu"))
    with pytest.warns(VardassWarning, match=r"sees 4,800 columns through 256 random directions, .* about 9%") as told:
        found = inputs.flat()
    assert len(told) == 1
    assert found.shape == (300, 256)
    assert data.most <= 66  # of 300: those of a batch
    plain = torch.stack([data[i] for i in range(300)]).flatten(1)
    exact, near = (torch.pdist(z).square() for z in (plain, found))
    assert float(((near - exact) / exact).square().mean().sqrt()) < 1.2 * math.sqrt(2 / 256)
    small = torch.rand(20, 5)
    assert torch.equal(Inputs(Domain("s", TensorInputs(small), None, ("a", "b")), torch.device("cpu")).flat(), small)


# --- learning ---------------------------------------------------------------------------------------------


def blobs(*, shift: float, seed: int = 0) -> TaskSplits:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(60) % 3
    centres = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-4.0, -4.0]])

    def domain(name: str, by: float) -> Domain:
        x = centres[labels] + 0.4 * torch.randn(60, 2, generator=generator) + by
        return Domain(name, TensorInputs(x), labels, ("a", "b", "c"))

    return split_task(Task("blobs", (domain("s", 0.0),), domain("t", shift)), seed=0)


@pytest.mark.parametrize("algorithm", ["erm", "mmd", "coral", "dann", "cdan", "mcc", "arm"])
def test_a_tiny_task_is_learnt(algorithm: str) -> None:
    splits = blobs(shift=0.3)
    settings = config(algorithm=algorithm, sampler="stratified", steps=120, eval_every=40, refresh_every=40, lr=0.02)
    result = Trainer(settings, splits).run()
    inputs = Inputs(splits.source_train, torch.device("cpu"))
    scores = label_scores(outputs(result.algorithm, inputs)[1], splits.source_train.known_labels())
    assert scores == {"accuracy": 1.0}
    assert final_report(result, splits)["target_accuracy"] >= 0.95
    assert result.metrics[-1]["loss/task"] < 0.5 * result.metrics[0]["loss/task"]


# --- labels and selection ---------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", [name for name in SELECTION_NAMES if name != "oracle"])
def test_no_target_label_is_read_before_the_final_report(selection: str) -> None:
    splits = watch_splits()
    result = Trainer(config(selection=selection), splits).run()
    for part in (splits.target_unlabelled, splits.target_val, splits.target_test):
        with pytest.raises(LabelsHidden):
            _ = part.labels
    report = final_report(result, splits)
    assert 0.0 <= report["target_accuracy"] <= 1.0
    with pytest.raises(LabelsHidden):
        _ = splits.target_test.labels


def test_target_labels_have_no_influence() -> None:
    splits, other = watch_splits(), watch_splits()
    for part in (other.target_unlabelled, other.target_val, other.target_test):
        assert part._labels is not None
        part._labels = part._labels.neg() + 6
    runs = [Trainer(resumable(), part) for part in (splits, other)]
    results = [run.run() for run in runs]
    assert_same_run(*runs)
    reports = [final_report(result, part) for result, part in zip(results, (splits, other), strict=True)]
    assert reports[0]["target_accuracy"] != reports[1]["target_accuracy"]


def test_the_oracle_needs_labels_that_were_revealed() -> None:
    splits = watch_splits()
    with refused("'oracle'", "splits.target_val.reveal()", "'source-accuracy'"):
        Trainer(config(selection="oracle"), splits)
    splits.target_val.reveal()
    result = Trainer(config(selection="oracle"), splits).run()
    _, logits = outputs(result.algorithm, Inputs(splits.target_val, torch.device("cpu")))
    assert result.score == label_scores(logits, splits.target_val.known_labels())["accuracy"]


def run_with(selection: str, out: Path | None = None) -> RunResult:
    return Trainer(config(selection=selection, steps=24, eval_every=2, lr=0.05), SPLITS, out).run()


def test_the_chosen_weights_are_kept(tmp_path: Path) -> None:
    result = run_with("domainbed", tmp_path)
    scores = {line["step"]: line["source_accuracy"] for line in result.metrics}
    assert result.score == max(scores.values())
    assert result.selected_step == min(step for step, value in scores.items() if value == result.score)
    assert final_report(result, SPLITS)["source_accuracy"] == result.score
    model, about = load_model(tmp_path)
    x = Inputs(SPLITS.target_test, torch.device("cpu"))
    assert torch.equal(outputs(model, x)[1], outputs(result.algorithm, x)[1])
    assert about["class_names"] == list(SPLITS.source_train.class_names)
    assert run_with("last").selected_step == 24
    latest = run_with("source-accuracy")
    assert latest.selected_step == max(latest.equal_steps)
    assert latest.score == next(line["score"] for line in latest.metrics if line["step"] == latest.selected_step)
    assert latest.competing == 12


def test_models_from_before_the_full_penalty_do_not_compete() -> None:
    options = {"delay": 6, "ramp": 5}
    settings = config(selection="source-accuracy", steps=24, eval_every=2, lr=0.05, algorithm_options=options)
    result = Trainer(settings, SPLITS).run()
    assert result.competing == 7  # steps 12 to 24
    assert min(result.equal_steps) >= 12
    short = Trainer(settings.changed(steps=10), SPLITS).run()
    assert (short.competing, short.selected_step) == (0, 10)


def test_an_observed_domain_is_measured_and_changes_nothing() -> None:
    splits = watch_splits()
    known = splits.target_test.subset(torch.arange(len(splits.target_test))).reveal()
    plain, watched = Trainer(resumable(), splits), Trainer(resumable(), splits, observed=known)
    plain.run()
    result = watched.run()
    assert all("target_accuracy" not in line for line in plain.history.metrics)
    noted = {line["step"]: line.pop("target_accuracy") for line in watched.history.metrics}
    assert_same_run(plain, watched)
    assert noted[result.selected_step] == final_report(result, splits)["target_accuracy"]
    with pytest.raises(LabelsHidden):
        _ = splits.target_test.labels


def test_a_models_file_is_not_a_runs_file(tmp_path: Path) -> None:
    Trainer(config(algorithm="arm", steps=1), SPLITS, tmp_path).run()
    assert load_model(tmp_path / "model.safetensors")[0].name == "arm"
    with refused(tmp_path / "checkpoint.pt", "model.safetensors"):
        load_model(tmp_path / "checkpoint.pt")


def test_without_held_out_samples_only_some_selections_work() -> None:
    task = load_task("watch", "left-A->right-B")
    splits = split_task(task, seed=0, holdout=0.0, unlabelled_fraction=1.0)
    with refused("'source-accuracy'", 0, "holdout", "'information-maximisation'"):
        Trainer(config(selection="source-accuracy"), splits)
    result = Trainer(config(selection="last", sampler="uniform"), splits).run()
    report = final_report(result, splits)
    assert report["source_accuracy"] is None
    assert report["target_accuracy"] is None


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    with pytest.raises(VardassError, match=r"not finite at step.*lower lr"):
        Trainer(config(sampler="uniform", optimiser="sgd", lr=1e30), SPLITS).run()


# --- settings ---------------------------------------------------------------------------------------------


def test_settings_come_back_and_wrong_ones_are_named() -> None:
    settings = resumable(algorithm="coral")
    assert RunConfig(**settings.to_dict()) == settings
    for wrong, named in (
        ({"batchsize": 3}, ("setting", "'batchsize'", "'batch_size'")),
        ({"algorithm": "corall"}, ("algorithm", "'corall'", "'coral'")),
        ({"sampler": "vardas"}, ("sampler", "'vardas'", "'vardass'")),
        ({"optimiser": "adamw"}, ("optimiser", "'adamw'", "'adam'")),
        ({"steps": 0}, ("steps", 1, 0)),
        ({"lr": 0.0}, ("lr", "greater than 0", 0.0)),
        ({"selection": "target-accuracy"}, ("selection", "'target-accuracy'", "'source-accuracy'")),
        ({"sampler_options": 3}, ("sampler_options", "dictionary", 3)),
    ):
        with refused(*named, field="setting" if "batchsize" in wrong else next(iter(wrong))):
            RunConfig(**wrong)


def test_samplers_follow_the_algorithm_and_check_their_options() -> None:
    kernels = {
        name: as_kernel(build_algorithm(RunConfig(algorithm=name, **SMALL), (5,), 3).kernel) for name in ALGORITHM_NAMES
    }
    assert isinstance(kernels.pop("coral"), CoralKernel)
    assert all(isinstance(kernel, RBFMixture) for kernel in kernels.values())
    assert make_sampler("vardass", 50, 5, trials=3).solver == "dynamic-kmeans"  # type: ignore[attr-defined]
    with refused("sampler 'balanced'", "'plan_ranc'", "'plan_rank'"):
        make_sampler("balanced", 50, 5, plan_ranc=3)
    with refused("batch_size=60", "n=50"):
        make_sampler("uniform", 50, 60)


def test_coral_as_the_paper_prints_it() -> None:
    options = {"algorithm": "coral", "algorithm_options": {"preset": "paper"}, "feature_source": "full"}
    trainer = Trainer(config(steps=4, **options), SPLITS)
    trainer.algorithm.double()
    for stream in trainer.streams.values():
        stream.inputs.data = stream.inputs.data.double()  # type: ignore[union-attr]
    seen = []
    discrepancy = trainer.algorithm.loss.of_rows  # type: ignore[operator,union-attr]

    def spy(source: Tensor, target: Tensor, *weights: Tensor) -> Tensor:
        value = discrepancy(source, target, *weights)
        sizes = [trainer.streams[name].sampler.strata.sizes for name in ("source", "target")]  # type: ignore[attr-defined]
        seen.append((float(value.detach()), [(source.detach(), sizes[0]), (target.detach(), sizes[1])]))
        return value

    trainer.algorithm.loss.of_rows = spy  # type: ignore[union-attr]
    trainer.run()
    counts = (len(SPLITS.source_train), len(SPLITS.target_unlabelled))
    for value, sides in seen:
        covariances = []
        for n, (z, sizes) in zip(counts, sides, strict=True):
            assert int(sizes.sum()) == n
            mean = sum(int(size) * row for size, row in zip(sizes, z, strict=True)) / n
            parts = [int(size) * torch.outer(row - mean, row - mean) for size, row in zip(sizes, z, strict=True)]
            covariances.append(torch.stack(parts).sum(0) / (n - 1))
        # weights travel in single precision
        assert value == pytest.approx(float((covariances[0] - covariances[1]).square().sum()), rel=1e-5)
    assert len(seen) == 4
    # strata: those of κ_c, whose variance is that of R' with the known mean, by its matrices
    sampler = trainer.streams["source"].sampler
    z = trainer.strata.all_features("source").double()
    sampler.refresh(z)
    strata = sampler.strata  # type: ignore[attr-defined]
    phi = torch.stack([torch.outer(row, row).flatten() for row in z - z.mean(0)])
    spread = 0.0
    for h in range(strata.k):
        mine = phi[strata.labels == h]
        spread += len(mine) * float((mine - mine.mean(0)).square().sum())
    assert strata.variance == pytest.approx(spread / len(z) ** 2, rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "mmd", "sampler": "stratified"},
        {"algorithm": "erm", "sampler": "stratified", "feature_source": "full"},
        {"algorithm": "coral", "sampler": "balanced", "refresh_every": 1},
    ],
    ids=["bank", "full", "after one step"],
)
def test_training_that_diverged_is_called_so(changes: dict[str, Any]) -> None:
    settings = config(**{"steps": 40, "eval_every": 40, "refresh_every": 3, "lr": 1e30, **changes})
    with pytest.raises(VardassError, match=r"^training diverged: after step \d+ .*; lower lr=1e\+30 or the penalty$"):
        Trainer(settings, SPLITS).run()
