import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from conftest import refused
from vardass.adapt.batches import in_memory
from vardass.data import Domain, LabelsHidden, Task, TensorInputs, named_seed, split_task, unite
from vardass.data.domains import find_sample, parts_of
from vardass.errors import VardassError

CLASSES = ("a", "b", "c")


def domain(name, n, start=0, labels=True, classes=CLASSES):
    x = torch.arange(start, start + n, dtype=torch.float32)[:, None]
    y = torch.arange(n) % len(classes) if labels else None
    return Domain(name, TensorInputs(x), y, classes)


def task(n_source=50, n_target=100, **options):
    return Task("t", [domain("s1", n_source), domain("s2", 30, 1000)], domain("t", n_target, 5000, **options))


def values(part):
    return [int(part.dataset[i]) for i in range(len(part))]


def test_hidden_labels_raise_until_revealed():
    open_domain = domain("d", 9)
    hidden = open_domain.hide_labels()
    with pytest.raises(LabelsHidden, match="'d' are hidden"):
        _ = hidden.labels
    with pytest.raises(LabelsHidden):
        hidden.known_labels()
    assert issubclass(LabelsHidden, VardassError)
    assert hidden.has_labels
    assert "hidden" in repr(hidden)
    assert open_domain.labels.tolist() == [0, 1, 2] * 3  # hiding makes another domain
    assert hidden.reveal() is hidden
    assert torch.equal(hidden.labels, open_domain.labels)


def test_what_is_cut_from_a_hidden_domain_stays_hidden():
    hidden = domain("d", 9).hide_labels()
    part = hidden.subset(torch.tensor([4, 2]))
    hidden.reveal()
    with pytest.raises(LabelsHidden):
        _ = part.labels
    with pytest.raises(LabelsHidden):
        _ = unite([part, domain("e", 3)]).labels
    copy = pickle.loads(pickle.dumps(part))  # as for a worker process
    with pytest.raises(LabelsHidden):
        _ = copy.labels
    assert part.reveal().labels.tolist() == [1, 2]


def test_subset_of_subset_keeps_order_and_labels():
    part = domain("d", 20).subset(torch.tensor([9, 3, 7])).subset(torch.tensor([2, 0]))
    assert values(part) == [7, 9]
    assert part.labels.tolist() == [1, 0]
    assert part.dataset.dataset.tensor.shape == (20, 1)  # not a chain


def test_unite_keeps_domain_ids_and_order():
    united = unite([domain("p", 3), domain("q", 2, 10)])
    assert united.name == "p+q"
    assert values(united) == [0, 1, 2, 10, 11]
    assert united.domain_ids.tolist() == [0, 0, 0, 1, 1]
    assert united.labels.tolist() == [0, 1, 2, 0, 1]
    assert int(united.dataset[-1]) == 11
    with pytest.raises(IndexError):
        united.dataset[5]
    assert unite([domain("p", 3), domain("q", 2, labels=False)]).labels is None
    batch = next(iter(DataLoader(united.dataset, batch_size=5)))
    assert batch.shape == (5, 1)


def test_a_sample_is_found_however_often_its_data_set_was_cut_and_united():
    first, second, third = domain("p", 9), domain("q", 5, 10), domain("r", 4, 20)
    inner = unite([first.subset(torch.tensor([8, 2, 4])), second]).subset(torch.tensor([7, 0, 3]))
    united = unite([inner, third.subset(torch.tensor([1]))])
    assert parts_of(united.dataset) == [first.dataset, second.dataset, third.dataset]
    found = [find_sample(united.dataset, index) for index in range(4)]
    assert found == [(second.dataset, 4), (first.dataset, 8), (second.dataset, 0), (third.dataset, 1)]
    assert values(united) == [int(part[row]) for part, row in found]
    assert torch.equal(in_memory(united.dataset).flatten(), torch.tensor([14.0, 8.0, 10.0, 21.0]))


class Pairs(Dataset):
    """As a user writes it: items (input, label)."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_a_domain_of_a_labelled_data_set():
    x, y = torch.arange(4.0)[:, None], torch.tensor([2, 0, 1, 0])
    in_memory = Domain.from_dataset("d", TensorDataset(x, y), CLASSES)
    read = Domain.from_dataset("d", Pairs(list(zip(x, y.tolist()))), CLASSES, kind="image")
    for made in (in_memory, read):
        assert made.labels.tolist() == [2, 0, 1, 0]
        assert values(made.subset(torch.tensor([3, 1]))) == [3, 1]
    assert torch.equal(in_memory.dataset.tensor, x)
    assert read.kind == "image"

    class Folder(Pairs):  # as in torchvision: no item is read for its label
        classes = CLASSES
        targets = (1, 1)

    lazy = Domain.from_dataset("d", Folder([None, None]))
    assert lazy.labels.tolist() == [1, 1]
    assert lazy.class_names == CLASSES


def test_bad_labelled_data_sets():
    with refused("Pairs", "'d'", "classes", "class_names"):
        Domain.from_dataset("d", Pairs([]))
    with refused("item 0", "Pairs", "Tensor", "(input, label)"):
        Domain.from_dataset("d", Pairs([torch.zeros(3)]), CLASSES)
    with refused("item 0", "TensorDataset", "tuple", "(input, label)"):
        Domain.from_dataset("d", TensorDataset(torch.zeros(2, 3)), CLASSES)
    text = Domain.from_dataset("d", Pairs([("text", 1)]), CLASSES)
    with refused("item 0", "Pairs", "str", "ToTensor"):
        text.dataset[0]


def test_default_split_sizes():
    parts = split_task(task(), seed=0)
    assert len(parts.source_train) == 40 + 24
    assert len(parts.source_val) == 10 + 6
    assert (len(parts.target_val), len(parts.target_unlabelled), len(parts.target_test)) == (20, 40, 40)
    assert parts.source_train.domain_ids.bincount().tolist() == [40, 24]
    assert parts.source_val.domain_ids.bincount().tolist() == [10, 6]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(10, 60),
    st.integers(10, 90),
    st.integers(0, 5),
    st.floats(0.1, 0.6),
    st.floats(0.3, 1.0),
)
def test_splits_are_disjoint_complete_and_sized_as_in_domainbed(n_source, n_target, seed, holdout, fraction):
    parts = split_task(task(n_source, n_target), seed=seed, holdout=holdout, unlabelled_fraction=fraction)
    source = values(parts.source_train) + values(parts.source_val)
    assert sorted(source) == [*range(n_source), *range(1000, 1030)]
    target = values(parts.target_unlabelled) + values(parts.target_test) + values(parts.target_val)
    assert sorted(target) == list(range(5000, 5000 + n_target))
    out = int(n_target * holdout)
    assert len(parts.target_val) == out
    assert len(parts.target_unlabelled) == int((n_target - out) * fraction)
    assert len(parts.source_val) == int(n_source * holdout) + int(30 * holdout)


def test_labels_follow_their_samples():
    parts = split_task(task(), seed=3)
    wanted = [(v if v < 1000 else v - 1000) % 3 for v in values(parts.source_train)]
    assert parts.source_train.labels.tolist() == wanted
    assert parts.target_test.reveal().labels.tolist() == [(v - 5000) % 3 for v in values(parts.target_test)]


def test_splits_depend_on_seed_and_role_only():
    first, again, other = (split_task(task(), seed=seed) for seed in (1, 1, 2))
    assert values(first.source_train) == values(again.source_train)
    assert values(first.target_unlabelled) == values(again.target_unlabelled)
    assert values(first.source_train) != values(other.source_train)
    assert values(first.target_unlabelled) != values(other.target_unlabelled)
    renamed = split_task(Task("u", [domain("t", 50), domain("é", 30, 1000)], domain("s1", 100, 5000)), seed=1)
    for part in ("source_train", "source_val", "target_unlabelled", "target_test", "target_val"):
        assert values(getattr(renamed, part)) == values(getattr(first, part))
    assert values(split_task(task(), seed=np.int64(1)).source_train) == values(first.source_train)
    with refused(None, field="seed"):
        split_task(task(), seed=None)
    # two domains of one size are shuffled differently
    parts = split_task(Task("v", [domain("p", 30), domain("q", 30)], domain("r", 30)), seed=0)
    train = values(parts.source_train)
    assert train[:24] != train[24:]
    assert values(parts.source_val)[:6] != values(parts.target_val)


def test_split_is_fixed_across_versions():
    assert named_seed("split", 0, "x") == 3700860353066038030
    assert named_seed("split", 1, "x") != named_seed("split", 0, "x")


def test_split_never_reads_target_labels():
    class Alarm(Domain):
        @property
        def labels(self):
            _ = super().labels  # hidden ones raise
            raise AssertionError("target labels were read")

    target = Alarm("t", TensorInputs(torch.zeros(40, 1)), torch.arange(40) % 3, CLASSES)
    parts = split_task(Task("t", [domain("s", 30)], target), seed=0)
    for part in (parts.target_unlabelled, parts.target_test, parts.target_val):
        with pytest.raises(LabelsHidden):
            _ = part.labels
    assert split_task(Task("t", [domain("s", 30)], domain("t", 40).hide_labels()), seed=0).target_test.has_labels


def test_all_of_an_unlabelled_target_can_be_trained_on():
    parts = split_task(task(labels=False), seed=0, holdout=0.0, unlabelled_fraction=1.0)
    assert len(parts.target_unlabelled) == 100
    assert len(parts.target_test) == len(parts.source_val) == 0
    assert not parts.target_unlabelled.has_labels
    assert parts.target_unlabelled.reveal().labels is None


@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({"holdout": 1.0}, "holdout", ("0 and below 1", 1.0)),
        ({"unlabelled_fraction": 0.0}, None, ("unlabelled_fraction 0.0", 80, "holdout 0.2", "0 samples")),
        ({"unlabelled_fraction": 0.001}, None, ("unlabelled_fraction 0.001", 80, "holdout 0.2", "0 samples")),
        ({"holdout": 0.001}, None, ("'s1'", "50 samples", "holdout 0.001", 0)),
        ({"holdout": "a"}, "holdout", ("0 and below 1", "'a'")),
        ({"unlabelled_fraction": None}, "unlabelled_fraction", ("0 and at most 1", None)),
    ],
)
def test_bad_fractions(options, field, named):
    with refused(*named, field=field):
        split_task(task(), seed=0, **options)


def test_bad_domains_and_tasks():
    x = TensorInputs(torch.zeros(3, 1))
    with refused("'d'", "0 to 3", "3 class names", "class_names"):
        Domain("d", x, torch.tensor([0, 1, 3]), CLASSES)
    with refused("(3,)", "(2,)", field="labels of domain 'd'"):
        Domain("d", x, torch.tensor([0, 1]), CLASSES)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    with refused("Stream", "__len__"):
        Domain("d", Stream(), None, CLASSES)
    with refused("'t'", "0 sources"):
        Task("t", [], domain("t", 3))
    with refused("['t', 't']"):
        Task("t", [domain("t", 3)], domain("t", 3))
    with refused("'t'", "0 samples"):
        Task("t", [domain("s", 3)], domain("t", 0))
    with refused("'s'", "no labels"):
        Task("t", [domain("s", 3, labels=False)], domain("t", 3))
    with refused("'t'", "the classes 'd'", "'a', 'b', 'c'"):
        Task("t", [domain("s", 4)], domain("t", 4, classes=("a", "b", "d")))
    with refused("'t'", "'b', 'a', 'c'", "'a', 'b', 'c'", "order"):
        Task("t", [domain("s", 4)], domain("t", 4, classes=("b", "a", "c")))
    with refused("classes 'c' of 3", "'t'"):
        Task("t", [domain("s", 2)], domain("t", 4))
    with refused("'s'", "'t'", "'a', 'b', 'c'", "'b', 'a'"):
        unite([domain("s", 4), domain("t", 4, classes=("b", "a"))])
    with refused("0 domains"):
        unite([])


@pytest.mark.parametrize(
    ("make", "field", "named"),
    [
        (lambda: Domain("d", None, None, CLASSES), None, ("NoneType", "__len__")),
        (lambda: Domain(None, torch.zeros(3, 1), None, CLASSES), None, ("the name of a domain", None)),
        (lambda: Domain("d", torch.zeros(3, 1), None, "abc"), None, ("class_names", "'d'", "'abc'")),
        (lambda: Domain("d", torch.zeros(3, 1), None, CLASSES, kind="images"), "kind", ("'images'", "'image'")),
        (lambda: Task("t", None, domain("t", 3)), None, ("'t'", "0 sources")),
        (lambda: Task("t", [domain("s", 3)], None), None, ("'t'", "domains", None)),
        (lambda: unite([None]), None, ("only domains", None)),
        (lambda: split_task(None, seed=0), None, ("Task", None)),
    ],
)
def test_what_is_no_domain_or_task_is_refused(make, field, named):
    with refused(*named, field=field):
        make()


def test_a_tensor_is_a_data_set_and_one_source_needs_no_list():
    made = Domain("s", torch.arange(4.0)[:, None], torch.tensor([0, 1, 2, 0]), CLASSES)
    assert isinstance(made.dataset, TensorInputs)
    assert values(made.subset([2, 0])) == [2, 0]
    assert Task("t", made, domain("t", 3)).sources == (made,)
