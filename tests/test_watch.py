from importlib.resources import files

import pytest
import torch

from vardass.data import load_watch, standardise, watch_domains


@pytest.fixture(scope="module")
def data():
    return load_watch()


def test_watch_has_the_documented_shape_and_types(data):
    n = 4677
    assert data.features.shape == (n, 78)
    assert data.features.dtype == torch.float32
    assert bool(torch.isfinite(data.features).all())
    for column in (data.labels, data.side, data.subject):
        assert column.shape == (n,)
        assert column.dtype == torch.int64
    assert data.labels.unique().tolist() == list(range(7))
    assert data.side.unique().tolist() == [0, 1]
    assert data.subject.unique().tolist() == list(range(1, 11))
    assert len(data.class_names) == 7
    assert len(set(data.feature_names)) == 78


def test_statistics_are_what_their_names_say(data):
    column = {name: data.features[:, i] for i, name in enumerate(data.feature_names)}
    for channel in ("ax", "ay", "az", "wx", "wy", "wz"):
        low, high = column[f"{channel}_min"], column[f"{channel}_max"]
        for inner in ("mean", "median"):
            value = column[f"{channel}_{inner}"]
            assert bool(((low - 1e-2 <= value) & (value <= high + 1e-2)).all())
        for positive in ("std", "iqr", "step", "crossings", "frequency"):
            assert float(column[f"{channel}_{positive}"].min()) >= 0.0
        assert float(column[f"{channel}_frequency"].max()) <= 25.0  # half the sampling rate
        assert bool((column[f"{channel}_std"] <= (high - low) / 2 + 1e-2).all())


def test_accelerations_include_gravity(data):
    column = {name: data.features[:, i] for i, name in enumerate(data.feature_names)}
    squares = sum(column[f"{a}_mean"].square() + column[f"{a}_std"].square() for a in ("ax", "ay", "az"))
    assert float(squares.sqrt().median()) == pytest.approx(1.0, abs=0.2)  # g


def test_domains_are_disjoint_and_complete(data):
    domains = watch_domains()
    assert list(domains) == ["left-A", "left-B", "right-A", "right-B"]
    assert sum(len(labels) for _, labels in domains.values()) == len(data.labels)
    for name, (features, labels) in domains.items():
        assert len(features) == len(labels)
        assert labels.unique().tolist() == list(range(7)), name
    rows = (data.side == 1) & (data.subject > 5)
    assert torch.equal(domains["right-B"][0], data.features[rows])
    assert torch.equal(domains["right-B"][1], data.labels[rows])


def test_the_shift_between_domains_is_real():
    from sklearn.linear_model import LogisticRegression

    domains = watch_domains()
    source, labels = domains["right-A"]
    model = LogisticRegression(max_iter=500).fit(standardise(source).numpy(), labels.numpy())

    def accuracy(name):
        features, truth = domains[name]
        return model.score(standardise(features, reference=source).numpy(), truth.numpy())

    assert accuracy("right-A") > 0.95
    assert accuracy("right-B") > 0.75  # other people
    assert 0.4 < accuracy("left-B") < 0.75  # other people and the other wrist


def test_licence_notice_is_shipped_beside_the_data():
    notice = (files("vardass.data") / "watch" / "LICENSE.seglearn").read_text()
    assert "Copyright (c) 2018, David M. Burns" in notice
    assert "Redistributions in binary form" in notice
