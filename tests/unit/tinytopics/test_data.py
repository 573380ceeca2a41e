"""Datasets of rows: from files that stay on disk, and from memory."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from paceline.errors import UserError
from paceline.tinytopics.data import IndexTrackingDataset, NumpyDiskDataset, TorchDiskDataset
from results import expect_error

X = np.arange(20, dtype=np.int32).reshape(5, 4)


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "x.npy", X)
    torch.save(torch.from_numpy(X), tmp_path / "x.pt")
    return tmp_path


@pytest.fixture(params=["array", "npy", "pt"])
def dataset(request, files):
    return {
        "array": lambda **chosen: NumpyDiskDataset(X, **chosen),
        "npy": lambda **chosen: NumpyDiskDataset(str(files / "x.npy"), **chosen),
        "pt": lambda **chosen: TorchDiskDataset(files / "x.pt", **chosen),
    }[request.param]


def test_all_rows_or_some(dataset):
    whole, some = dataset(), dataset(indices=[3, 1])
    assert (len(whole), len(some)) == (5, 2)
    assert whole.shape == some.shape == (5, 4)
    assert whole.num_terms == 4
    for found, expected in ((whole[2], X[2]), (whole[-1], X[4]), (some[0], X[3]), (whole[torch.tensor(1)], X[1])):
        assert found.tolist() == expected.tolist()
    assert [row.tolist() for row in some] == X[[3, 1]].tolist()
    assert whole[0].dtype == (torch.int32 if isinstance(whole, TorchDiskDataset) else torch.float32)
    with pytest.raises(IndexError):
        whole[5]
    with pytest.raises(UserError, match="has 5 rows"):
        dataset(indices=[5])


@pytest.mark.parametrize(("kind", "name"), [(NumpyDiskDataset, "x.npy"), (TorchDiskDataset, "x.pt")])
def test_a_file_is_mapped_when_a_row_is_read_and_not_sent_to_workers(files, kind, name):
    dataset = kind(files / name)
    assert dataset.mmap_data is None
    dataset[0]
    assert dataset.mmap_data is not None
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.mmap_data is None
    assert torch.equal(copy[3], dataset[3])


def test_a_file_with_more_than_a_tensor_is_rejected(tmp_path):
    torch.save({"counts": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="holds a dict"):
        TorchDiskDataset(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(b"nothing")
    with expect_error("invalid-format"):
        TorchDiskDataset(tmp_path / "x.pt")
    for kind in (NumpyDiskDataset, TorchDiskDataset):
        with pytest.raises(FileNotFoundError, match=r"no/such\.file"):
            kind("no/such.file")


def test_rows_keep_their_numbers_when_they_are_shuffled(dataset):
    tracked = IndexTrackingDataset(dataset())
    assert (len(tracked), tracked.shape, tracked.is_tensor) == (5, (5, 4), False)
    row, number = tracked[3]
    assert (row.tolist(), number.item()) == (X[3].tolist(), 3)
    rows, numbers = next(iter(DataLoader(tracked, batch_size=5, shuffle=True)))
    assert rows.tolist() == X[numbers].tolist()
