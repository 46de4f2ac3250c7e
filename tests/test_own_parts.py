"""A user's own algorithm, network, kernel and sampler: as objects and by name, saved, resumed, loaded or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from conftest import refused
from test_trainer import SPLITS, Stop, assert_same_run, config
from vardass.adapt import Algorithm, Batch, Trainer, load_model, make_algorithm, make_network, weighted_mean
from vardass.adapt.batches import Inputs
from vardass.adapt.config import RunConfig
from vardass.adapt.networks import Network
from vardass.adapt.selection import outputs
from vardass.kernels import Kernel, as_kernel
from vardass.samplers import Chunk, MinibatchSampler, UniformBatchSampler

HERE = __name__
CPU = torch.device("cpu")


class OwnAlgorithm(Algorithm):
    name: ClassVar[str] = "own"
    uses_target: ClassVar[bool] = True
    kernel = "linear"  # type: ignore[assignment]

    def __init__(self, network: Network, num_classes: int, *, strength: float = 0.5, **common: Any) -> None:
        super().__init__(network, num_classes, **common)
        self.strength = strength

    def losses(self, source: Batch, target: Batch | None, step: int) -> dict[str, Tensor]:
        z_s, z_t = self.pair_features(source, self.need_target(target))
        task = self.task_loss(z_s, source)
        gap = (weighted_mean(z_s, source.weights) - weighted_mean(z_t, target.weights)).square().sum()  # type: ignore[union-attr]
        return {"total": task + self.strength * gap, "task": task, "gap": gap}


class OwnFeaturiser(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(input_shape[0], width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class OwnKernel(Kernel):
    def _matrix(self, x: Tensor, y: Tensor | None) -> Tensor:
        return x @ (x if y is None else y).T

    def _diag(self, x: Tensor) -> Tensor:
        return x.square().sum(1)

    def __repr__(self) -> str:
        return "OwnKernel()"


class OwnSampler(MinibatchSampler):
    needs_features = False

    def __init__(self, n: int, batch_size: int, *, stride: int = 1, **options: Any) -> None:
        super().__init__(n, batch_size, **options)
        self.stride = stride

    def _make_chunk(self, rounds: int, generator: torch.Generator) -> Chunk:
        first = torch.randint(self.n, (4 * self.num_replicas, 1), generator=generator)
        return Chunk((first + self.stride * torch.arange(self.batch_size)) % self.n)


def own_featuriser() -> OwnFeaturiser:
    torch.manual_seed(3)
    return OwnFeaturiser((78,))


def objects() -> dict[str, Any]:
    rows = {"source": len(SPLITS.source_train), "target": len(SPLITS.target_unlabelled)}
    samplers = {name: OwnSampler(n, 6, stride=2, seed=1, endless=True) for name, n in rows.items()}
    return {"algorithm": OwnAlgorithm, "network": own_featuriser(), "samplers": samplers}


RUN: dict[str, Any] = {"steps": 9, "eval_every": 3, "checkpoint_every": 3, "network_options": {"bottleneck": 4}}
NAMED: dict[str, Any] = {
    **RUN,
    "algorithm": f"{HERE}:OwnAlgorithm",
    "algorithm_options": {"strength": 0.25},
    "network": f"{HERE}:OwnFeaturiser",
    "network_options": {"arguments": {"width": 5}},
    "sampler": f"{HERE}:OwnSampler",
    "sampler_options": {"stride": 3},
}


def test_parts_by_name_are_used_saved_resumed_and_loaded_from_the_folder_alone(tmp_path: Path) -> None:
    whole = Trainer(config(**NAMED), SPLITS)
    result = whole.run()
    assert isinstance(whole.algorithm, OwnAlgorithm)
    assert whole.algorithm.strength == 0.25
    assert isinstance(whole.algorithm.network.featuriser, OwnFeaturiser)
    assert [stream.sampler.stride for stream in whole.streams.values()] == [3, 3]  # type: ignore[union-attr]
    Trainer(config(**NAMED), SPLITS, tmp_path).run(progress=Stop(4))
    resumed = Trainer(config(**NAMED), SPLITS, tmp_path)
    resumed.run(resume=True)
    assert_same_run(whole, resumed)
    model, _ = load_model(tmp_path, trust_code=True)
    inputs = Inputs(SPLITS.target_test, CPU)
    assert torch.equal(outputs(model, inputs)[1], outputs(result.algorithm, inputs)[1])


def test_objects_resume_bit_for_bit_and_are_asked_for_again(tmp_path: Path) -> None:
    whole = Trainer(config(**RUN), SPLITS, **objects())
    result = whole.run()
    Trainer(config(**RUN), SPLITS, tmp_path, **objects()).run(progress=Stop(4))
    with refused("test_own_parts.OwnAlgorithm", "test_own_parts.OwnSampler", "no parts"):
        Trainer(config(**RUN), SPLITS, tmp_path).run(resume=True)
    resumed = Trainer(config(**RUN), SPLITS, tmp_path, **objects())
    resumed.run(resume=True)
    assert_same_run(whole, resumed)
    with refused(tmp_path / "model.safetensors", "test_own_parts.OwnAlgorithm", "load_model(..., algorithm=...)"):
        load_model(tmp_path)
    model, _ = load_model(tmp_path, algorithm=OwnAlgorithm, network=OwnFeaturiser((78,)))
    inputs = Inputs(SPLITS.target_test, CPU)
    assert torch.equal(outputs(model, inputs)[1], outputs(result.algorithm, inputs)[1])


def test_an_algorithm_object_brings_its_network(tmp_path: Path) -> None:
    classes = len(SPLITS.source_train.class_names)

    def make() -> Algorithm:
        return make_algorithm("coral", make_network("mlp", (78,), classes, hidden=(5,)), classes, penalty=0.1)

    trainer = Trainer(config(sampler="vardass"), SPLITS, tmp_path, algorithm=make())
    assert trainer.run().algorithm.network.feature_dim == 5
    assert load_model(tmp_path, algorithm=make())[0].network.feature_dim == 5
    with refused("CORAL", "network="):
        Trainer(config(), SPLITS, algorithm=make(), network=own_featuriser())
    with refused("ERM", "2 classes", f"has {classes}", f"num_classes={classes}"):
        Trainer(config(), SPLITS, algorithm=make_algorithm("erm", make_network("mlp", (78,), 2), 2))


def test_a_kernel_of_ones_own_is_that_of_the_loss_and_the_strata(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": "stratified", "steps": 3}
    named = Trainer(config(**options, algorithm_options={"kernel": f"{HERE}:OwnKernel"}), SPLITS, tmp_path)
    named.run()
    assert isinstance(as_kernel(named.streams["source"].sampler.kernel), OwnKernel)  # type: ignore[union-attr]
    assert isinstance(load_model(tmp_path, trust_code=True)[0].kernel, OwnKernel)
    given = Trainer(config(**options, algorithm_options={"kernel": OwnKernel()}), SPLITS)
    given.run()
    assert_same_run(named, given)
    with refused("OwnKernel", "'package.module:Name'", "out=None"):
        Trainer(config(algorithm_options={"kernel": OwnKernel()}), SPLITS, tmp_path / "other").run()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"algorithm": f"{HERE}:OwnKernel"}, (f"'{HERE}:OwnKernel'", "vardass.adapt.algorithms.base.Algorithm")),
        ({"algorithm": f"{HERE}:OwnAlgorythm"}, ("'OwnAlgorythm'", "'OwnAlgorithm'")),
        ({"algorithm": f"{HERE}:OwnAlgorithm", "algorithm_options": {"strenght": 1}}, ("'strenght'", "'strength'")),
        ({"sampler": f"{HERE}:OwnKernel"}, (f"'{HERE}:OwnKernel'", "vardass.samplers.base.MinibatchSampler")),
        ({"sampler": f"{HERE}:OwnSampler", "sampler_options": {"strides": 1}}, ("'strides'", "'stride'")),
        (
            {"network": "subprocess:Popen", "network_options": {}},
            ("network 'subprocess:Popen'", "torch.nn"),
        ),
        (
            {"algorithm_options": {"kernel": "subprocess:Popen"}},
            ("subprocess:Popen", "vardass.kernels.Kernel"),
        ),
        ({"sampler": "no.such:Sampler"}, ("sampler 'no.such:Sampler'", "'no'", "PYTHONPATH")),
        ({"network": f"{HERE}:OwnNetwork", "network_options": {}}, (f"network '{HERE}:OwnNetwork'", "'OwnNetwork'")),
    ],
)
def test_parts_that_cannot_be_found_or_used_are_named(settings: dict[str, Any], named: tuple[str, ...]) -> None:
    with refused(*named):
        Trainer(config(**settings), SPLITS)


def test_samplers_that_do_not_fit_are_refused() -> None:
    n = len(SPLITS.source_train)
    for samplers, named in (
        ({"source": UniformBatchSampler(n, 6)}, ("samplers['source']", "endless=False", "endless=True")),
        ({"source": UniformBatchSampler(5, 5, endless=True)}, ("samplers['source']", "n=5", f"n={n}")),
        (
            {"source": torch.utils.data.SequentialSampler([1])},
            ("SequentialSampler", "samplers.MinibatchSampler"),
        ),
        ({"sources": UniformBatchSampler(n, 6, endless=True)}, ("'sources'", "'mmd'", "source, target")),
    ):
        with refused(*named):
            Trainer(config(), SPLITS, samplers=samplers)  # type: ignore[arg-type]


def test_objects_do_not_reach_other_processes_but_names_do() -> None:
    with refused("network=", "devices=2", "package.module:Name"):
        Trainer(config(devices=2), SPLITS, network=own_featuriser())


def test_wrong_kinds_are_named() -> None:
    with refused("config", "{'steps': 2}", "RunConfig"):
        Trainer({"steps": 2}, SPLITS)  # type: ignore[arg-type]
    with refused("splits", None, "TaskSplits"):
        Trainer(RunConfig(), None)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with refused("'cuda'", "0 GPUs", field="device"):
            Trainer(RunConfig(device="cuda"), SPLITS)
