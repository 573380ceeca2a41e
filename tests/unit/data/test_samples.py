# ruff: noqa: NPY002 (users draw from numpy's global generator, so it is seeded)
"""What data(split) may return: each kind becomes the same batches, and what cannot is refused in one line."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from paceline.config import RunSpec, Train
from paceline.data.order import Order
from paceline.data.samples import cost_of, count_samples, samples_of
from paceline.errors import UserError
from paceline.workload import Workload
from results import expect_error

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6)
IDS = np.array([4, 1])
KEYS = np.array([11, 22])


class Items(Dataset):
    def __init__(self, length=6, item=lambda i: (X[i], Y[i])):
        self.length, self.item = length, item

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.item(index)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Lengthy(Stream):
    def __len__(self):
        return 6

    def __iter__(self):
        for i in range(6):
            yield X[i] + np.float32(np.random.random()), i


def workload(data, **methods):
    kind = type("Own", (Workload,), {"data": lambda self, split: data, **methods})
    return kind(RunSpec())


def batch(data, **methods):
    return samples_of(workload(data, **methods)).batch(IDS, KEYS)


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (torch.from_numpy(X), torch.from_numpy(Y)),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        Items(),
        [(X[i], Y[i]) for i in range(6)],
    ],
    ids=["arrays", "tensors", "tensor data set", "data set", "list"],
)
def test_rows_are_the_samples_asked_for(data):
    x, y = batch(data)
    assert x.tolist() == X[IDS].tolist()
    assert y.tolist() == [4, 1]
    assert count_samples(workload(data)) == 6


def test_columns_by_name_alone_or_copied_for_torch():
    backwards, frozen = Y.astype(">i4"), Y.copy()
    frozen.flags.writeable = False
    found = batch({"x": X, "y": {"deep": backwards}, "z": frozen})
    assert (found["y"]["deep"].tolist(), found["z"].tolist()) == ([4, 1], [4, 1])
    assert batch(X).tolist() == X[IDS].tolist()
    assert samples_of(workload((X, Y))).resident()[1].tolist() == Y.tolist()


def test_a_hugging_face_data_set():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": X.tolist(), "word": list("abcdef"), "label": Y.tolist()})
    found = batch(rows)
    assert found["x"].dtype == torch.float32
    assert found["label"].tolist() == [4, 1]
    assert found["word"] == ["e", "b"]
    ragged = datasets.Dataset.from_dict({"ids": [[0] * (1 + i) for i in range(6)]})
    with pytest.raises(UserError, match=r"sample 4 .* sample 1"):
        batch(ragged)
    assert batch(ragged, collate=lambda self, rows: [len(row["ids"]) for row in rows]) == [5, 2]


def test_a_data_set_may_collate_and_say_what_its_samples_cost():
    data = Items()
    data.collate, data.cost = lambda samples: "the data set's", lambda ids: ids * 2
    assert batch(data) == "the data set's"
    assert batch(data, collate=lambda self, samples: len(samples)) == 2, "the workload's comes first"
    assert samples_of(workload(data)).cost(IDS).tolist() == [8, 2]
    assert samples_of(workload(Items())).cost(IDS).tolist() == [1, 1]
    data.cost = lambda ids: 3
    with pytest.raises(UserError, match=r"cost\(ids\)"):
        cost_of(samples_of(workload(data)), IDS)


OF_THE_MODULE = np.random.default_rng()


class Jitter:
    of_the_class = np.random.default_rng()

    def __init__(self):
        self.numpy, self.old, self.python = np.random.default_rng(), np.random.RandomState(), random.Random()
        self.torch = torch.Generator()

    def __call__(self, index):
        own = [self.numpy.random(), self.old.rand(), self.python.random(), float(torch.rand((), generator=self.torch))]
        return np.array([*own, self.of_the_class.random(), OF_THE_MODULE.random()])


def draw(index):
    return np.array([random.random(), np.random.rand(), float(torch.rand(()))])


def compose():
    hidden = np.random.default_rng()
    transforms = [Jitter(), partial(lambda scale, index: np.array([scale * hidden.random()]), 2.0)]
    return lambda index: np.concatenate([transform(index) for transform in transforms])


JITTERED = Items(item=Jitter())
RANDOM = {
    "of the process": Items(item=draw),
    "of a transform, its class and module": JITTERED,
    "of a subset": Subset(JITTERED, range(6)),
    "of parts": ConcatDataset([Subset(JITTERED, range(3)), Subset(JITTERED, range(3, 6))]),
    "in closures and partials": Items(item=compose()),
}


@pytest.mark.parametrize("data", RANDOM.values(), ids=RANDOM)
def test_what_a_sample_draws_follows_from_its_key_alone(data):
    samples = samples_of(workload(data))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    both = samples.batch(IDS, KEYS)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert samples.batch(IDS[::-1], KEYS[::-1]).tolist() == both.tolist()[::-1]
    assert (both[0] != both[1]).all()


REFUSED = {
    "nothing to train on": (None, "returned None"),
    "no samples": (Items(0), "data('train') is empty"),
    "no rows": ((X[:0], Y[:0]), "data('train') is empty"),
    "no columns": ((), "data('train') is empty"),
    "rows that do not match": ((X, Y[:4]), "data('train')[1] has 4 rows"),
    "words": ({"x": np.array(["a", "b"])}, "data('train')['x'] is an array of <U1"),
    "a number among columns": ((X, 3), "data('train')[1] is of type int"),
    "lists": (([[1.0]] * 6, [0] * 6), "data('train')[0] is a list"),
    "a stream": (Stream(), "a stream, Stream"),
    "a generator": ((i for i in range(3)), "a stream, generator"),
    "a loader": (DataLoader(Items()), "returned a DataLoader"),
    "a number": (7, "returned int"),
    "a text": ("train.csv", "returned str"),
}


@pytest.mark.parametrize(("data", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_samples(data, said):
    with expect_error("invalid-workload") as refused:
        count_samples(workload(data))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_stream_gives_its_samples_by_number():
    """Backwards, in parts or again: what it draws at random follows from the number alone."""
    samples = samples_of(workload(Lengthy()))
    whole, numbers = samples.batch(np.arange(6), np.zeros(6, np.int64))
    assert numbers.tolist() == [0, 1, 2, 3, 4, 5]
    assert Order.of(Train(global_batch=4), samples).global_batch(1).ids.tolist() == [4, 5]
    again = samples_of(workload(Lengthy()))
    for ids in (np.array([5, 3]), np.array([4]), np.array([1, 0])):
        assert torch.equal(again.batch(ids, ids)[0], whole[ids])

    shorter = type("Shorter", (Stream,), {"__len__": lambda self: 4})()
    with expect_error("invalid-workload"):
        samples_of(workload(shorter)).batch(np.array([3]), np.array([0]))


UNLIKE = {
    "shapes": (lambda i: X[: i + 1], "sample 4 is an array of float32 of shape [5, 2] and sample 1 an array of"),
    "parts": (lambda i: (X[i],) * (1 + i % 2), "and sample 1 [0] an array of float32 of shape [2], [1] an array"),
    "types": (lambda i: {"x": None if i == 1 else 2.0}, "['x'] of type float and sample 1 ['x'] of type NoneType"),
    "never": (lambda i: (X[i], object()), "[1] of type object"),
}


@pytest.mark.parametrize(("item", "said"), UNLIKE.values(), ids=UNLIKE)
def test_samples_that_make_no_batch(item, said):
    with pytest.raises(UserError) as refused:
        batch(Items(item=item))
    assert said in str(refused.value)
    assert "collate(self, samples)" in str(refused.value)


def test_a_data_frame_is_a_dict_of_its_columns():
    frame = pytest.importorskip("pandas").DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y})
    found = batch(frame)
    assert {name: column.tolist() for name, column in found.items()} == frame.iloc[IDS].to_dict("list")
    x, y = batch((frame[["a", "b"]], frame["y"]))
    assert (x.tolist(), y.tolist()) == (X[IDS].tolist(), Y[IDS].tolist())
    with pytest.raises(UserError, match=r"\['word'\]"):
        batch(frame.assign(word="red"))
