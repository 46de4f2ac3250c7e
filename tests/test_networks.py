"""Networks by name: shapes, freezing, seeds, other libraries' backbones, the user's own modules, errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import refused
from vardass.adapt import NETWORK_NAMES, Network, make_network
from vardass.data.images import IMAGENET, ImagePreprocessing
from vardass.errors import MissingExtraError
from vardass.paper.arm import widen_input

SPECS: list[tuple[str, tuple[int, ...], dict[str, Any], int]] = [
    ("mlp", (7,), {}, 64),
    ("mlp", (2, 3, 4), {"hidden": (9,)}, 9),
    ("conv", (1, 16, 16), {}, 128),
    ("conv", (3, 28, 20), {"widths": (4, 6)}, 6),
    ("audio", (1, 64, 33), {}, 128),
    ("mlp", (7,), {"bottleneck": 5, "dropout": 0.5}, 5),
]


@pytest.mark.parametrize(("spec", "shape", "options", "width"), SPECS)
def test_shapes(spec: str, shape: tuple[int, ...], options: dict[str, Any], width: int) -> None:
    network = make_network(spec, shape, 3, **options)
    x = torch.rand(4, *shape)
    assert network.feature_dim == width
    assert network.features(x).shape == (4, width)
    assert network(x).shape == (4, 3)
    assert network.head.out_features == 3
    network(x).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_mlp_layers_by_hand() -> None:
    network = make_network("mlp", (7,), 3)
    assert [m.out_features for m in network.modules() if isinstance(m, nn.Linear)] == [128, 64, 3]


def test_a_short_loud_call_reaches_the_audio_features() -> None:
    network = make_network("audio", (1, 32, 64), 2).eval()
    quiet = torch.zeros(1, 1, 32, 64)
    call = quiet.clone()
    call[..., 30:34] = 5.0
    gap = (network.features(call) - network.features(quiet)).abs()[0]
    assert gap[64:].mean() > gap[:64].mean(), "the maximum over time sees it better than the mean"


def test_seed_decides_the_parameters_and_leaves_the_global_generator() -> None:
    state = torch.get_rng_state()
    a, b, c = (make_network("mlp", (7,), 3, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])


def test_frozen_batchnorm_keeps_its_statistics_but_learns_its_scale() -> None:
    frozen, free = (make_network("conv", (1, 16, 16), 2, freeze_bn=flag) for flag in (True, False))
    x = torch.rand(6, 1, 16, 16)
    for network in (frozen, free):
        network.train()
        network(x).sum().backward()
    assert not torch.equal(free.featuriser[1].running_mean, torch.zeros(32))
    assert torch.equal(frozen.featuriser[1].running_mean, torch.zeros(32))
    assert frozen.featuriser[1].weight.grad is not None
    assert frozen.training
    assert frozen.featuriser[0].training
    assert not frozen.featuriser[1].training


def test_frozen_backbone_can_be_cached() -> None:
    network = make_network("conv", (1, 16, 16), 2, freeze_backbone=True, bottleneck=8).train()
    x = torch.rand(6, 1, 16, 16)
    stored = network.featuriser(x).flatten(1)
    assert not stored.requires_grad
    assert not any(m.training for m in network.featuriser.modules())
    assert network.bottleneck.training
    assert torch.equal(network.head(network.bottleneck(stored)), network(x))
    trainable = {name.split(".")[0] for name, p in network.named_parameters() if p.requires_grad}
    assert trainable == {"bottleneck", "head"}


def test_dropout_acts_on_the_features() -> None:
    network = make_network("mlp", (7,), 3, dropout=0.9)
    x = torch.rand(50, 7)
    seen: list[torch.Tensor] = []
    network.head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network.train()(x)
    network.eval()(x)
    assert (seen[0] == 0).float().mean() > 0.8
    assert torch.equal(seen[1], network.train().features(x))


def test_widening_keeps_the_old_columns() -> None:
    network = make_network("mlp", (7,), 3)
    before = network.featuriser[1].weight.detach().clone()
    widen_input(network, 2)
    assert network.input_shape == (9,)
    assert network(torch.rand(2, 9)).shape == (2, 3)
    assert torch.equal(network.featuriser[1].weight[:, :7], before)
    with refused("Linear", "(3,)"):
        widen_input(Network(nn.Identity(), nn.Linear(3, 2), input_shape=(3,)), 1)


# transformers


def tiny_resnet() -> Any:
    import transformers

    return transformers.ResNetModel(
        transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic")
    )


RECIPE = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "size": 32, "resample": 3}


def test_backbone_from_a_local_folder(tmp_path: Path) -> None:
    model = tiny_resnet().eval()
    model.save_pretrained(tmp_path / "backbone")
    assert make_network(str(tmp_path / "backbone"), (3, 32, 32), 5).preprocessing == IMAGENET
    (tmp_path / "backbone" / "preprocessor_config.json").write_text(json.dumps(RECIPE))
    network = make_network(str(tmp_path / "backbone"), (3, 32, 32), 5, local_files_only=True).eval()
    assert network.preprocessing == ImagePreprocessing((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), 32, "bicubic")
    x = torch.rand(2, 3, 32, 32)
    assert network.feature_dim == 6
    assert torch.allclose(network.features(x), model(x).pooler_output.flatten(1))
    widen_input(network, 1)
    first = next(m for m in network.modules() if isinstance(m, nn.Conv2d)).weight
    assert torch.equal(first[:, 3], first[:, 0])
    assert network(torch.rand(2, 4, 32, 32)).shape == (2, 5)
    with refused(f"'{tmp_path / 'backbone'}'", "3 channels", "(1, 32, 32)"):
        make_network(str(tmp_path / "backbone"), (1, 32, 32), 5)


def test_resnet18_with_random_parameters() -> None:
    network = make_network("resnet18-random", (1, 32, 32), 4)
    assert network.feature_dim == 512
    # the 11.18 million of a ResNet-18 without its classifier, less two of three input channels, and the head
    assert sum(p.numel() for p in network.parameters()) == 11_176_512 - 2 * 64 * 49 + 513 * 4
    assert network(torch.rand(2, 1, 32, 32)).shape == (2, 4)


# the user's own


class OwnFeaturiser(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(input_shape[0], width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def own_network(num_classes: int, logits: int | None = None, feature_dim: int | None = None) -> Network:
    return Network(nn.Linear(4, 2), nn.Linear(2, logits or num_classes), feature_dim=feature_dim)


def not_a_module() -> int:
    return 3


HERE = __name__


def test_own_modules_by_import_path() -> None:
    network = make_network(f"{HERE}:OwnFeaturiser", (4,), 2, arguments={"width": 5})
    assert network.feature_dim == 5
    assert make_network(f"{HERE}:own_network", (4,), 3)(torch.rand(2, 4)).shape == (2, 3)


BAD: list[tuple[Callable[[], Any], str | None, tuple[Any, ...]]] = [
    (lambda: make_network("mpl", (4,), 2), "network", ("'mpl'", "'mlp'")),
    (lambda: make_network("resnet-18", (3, 32, 32), 2), "network", ("'resnet-18'", "'resnet18'")),
    (lambda: make_network("", (4,), 2), None, ("network", "''", "mlp")),
    (lambda: make_network("mlp", (4,), 2, hiden=(3,)), None, ("network 'mlp'", "'hiden'", "'hidden'")),
    (lambda: make_network("mlp", (4,), 2, hidden=()), None, ("hidden", "none", "hidden=(128, 64)")),
    (lambda: make_network("mlp", (4,), 2, hidden=(0,)), "a width in hidden", ("hidden", 1, 0)),
    (lambda: make_network("mlp", (4,), 1), "num_classes", ("at least 2", 1)),
    (lambda: make_network("mlp", (4,), 2, dropout=1.0), "dropout", ("0 and below 1", 1.0)),
    (lambda: make_network("mlp", (4,), 2, dropout="0.5"), "dropout", ("0 and below 1", "'0.5'")),
    (lambda: make_network("mlp", (4,), 2, freeze_backbone="no"), "freeze_backbone", ("true", "false", "'no'")),
    (lambda: make_network("conv", (1, 8, 8), 2), None, ("'conv'", "16 pixels", "(1, 8, 8)", "'mlp'")),
    (lambda: make_network("conv", (40,), 2), None, ("'conv'", "(40,)", "'mlp'")),
    (lambda: make_network("./no/such/folder", (3, 32, 32), 2), None, ("'./no/such/folder'", "save_pretrained")),
    (
        lambda: make_network("no-such-owner/none", (3, 32, 32), 2, local_files_only=True),
        None,
        ("'no-such-owner/none'", "save_pretrained"),
    ),
    (lambda: make_network("no.such.module:Net", (4,), 2), None, ("'no.such.module:Net'", "'no'", "PYTHONPATH")),
    (lambda: make_network(f"{HERE}:Missing", (4,), 2), None, (f"'{HERE}:Missing'", "'Missing'")),
    (lambda: make_network(f"{HERE}:HERE", (4,), 2), None, (f"'{HERE}:HERE'", f"'{HERE}'", "torch.nn", "function")),
    (lambda: make_network(f"{HERE}:not_a_module", (4,), 2), None, (f"'{HERE}:not_a_module'", "int", "torch.nn.Module")),
    (
        lambda: make_network(f"{HERE}:OwnFeaturiser", (4,), 2, arguments={"depth": 1}),
        None,
        (f"'{HERE}:OwnFeaturiser'", "'depth'", "arguments="),
    ),
    (lambda: make_network(f"{HERE}:OwnFeaturiser", (4, 3), 2), None, ("OwnFeaturiser", "(4, 3)")),
    (
        lambda: make_network(f"{HERE}:own_network", (4,), 3, arguments={"logits": 2}),
        None,
        (f"'{HERE}:own_network'", "2 logits", "3 classes"),
    ),
    (
        lambda: make_network(f"{HERE}:own_network", (4,), 3, arguments={"feature_dim": 9}),
        None,
        (f"'{HERE}:own_network'", "2 features", "feature_dim is 9"),
    ),
    (
        lambda: make_network(f"{HERE}:own_network", (4,), 3, dropout=0.5),
        None,
        (f"'{HERE}:own_network'", "Network", "dropout"),
    ),
    (lambda: Network(nn.Identity(), nn.ReLU()), None, ("ReLU", "feature_dim=")),
]


@pytest.mark.parametrize(("call", "field", "named"), BAD)
def test_errors_name_the_value_and_a_remedy(call: Callable[[], Any], field: str | None, named: tuple[Any, ...]) -> None:
    with refused(*named, field=field):
        call()


@pytest.mark.parametrize("spec", ["resnet18-random", "resnet18"])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vardass\[adapt\]'"):
        make_network(spec, (3, 32, 32), 2)


def test_names_are_known() -> None:
    assert set(NETWORK_NAMES) == {"mlp", "conv", "audio", "resnet18", "resnet18-random"}


def test_a_network_that_flattens_images_is_widened_by_whole_channels() -> None:
    network = make_network("mlp", (2, 3, 4), 5, seed=0)
    x = torch.rand(6, 2, 3, 4)
    before = network.featuriser[1].weight.detach().clone()
    widen_input(network, 1)
    assert network.input_shape == (3, 3, 4)
    assert network.featuriser[1].weight.shape == (before.shape[0], 36)
    assert torch.equal(network.featuriser[1].weight[:, :24], before)
    # a channel of zeros changes nothing
    plain = make_network("mlp", (2, 3, 4), 5, seed=0)
    assert torch.allclose(network(torch.cat([x, torch.zeros(6, 1, 3, 4)], 1)), plain(x), atol=1e-6)
