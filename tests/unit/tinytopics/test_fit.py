"""Fits through the interface of tinytopics."""

import re

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import paceline.tinytopics as tt
from paceline.tinytopics import data
from paceline.tinytopics.data import open_counts
from topics_fits import em

K = 3


@pytest.fixture(scope="module")
def X():
    tt.set_random_seed(1)
    return tt.generate_synthetic_data(60, 40, K, avg_doc_length=200)[0]


class Rows(Dataset):
    """A dataset as people write it; counts how often a row is read."""

    def __init__(self, X):
        self.X, self.reads = X, 0

    def __len__(self):
        return len(self.X)

    def __getitem__(self, at):
        self.reads += 1
        return self.X[at]


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.ones(3)


def fitted(X, seed=42, **options):
    tt.set_random_seed(seed)
    return tt.fit_model(X, K, **{"num_epochs": 4, **options})


def loss_of(model, X):
    return tt.poisson_nmf_loss(X.double(), model(torch.arange(len(X))).double()).item()


def same(one, other):
    np.testing.assert_allclose(one[1], other[1], rtol=1e-6)
    return all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(one[0].state_dict().values(), other[0].state_dict().values(), strict=True)
    )


@pytest.fixture(scope="module")
def four_epochs(X):
    return fitted(X)


def test_a_model_and_the_loss_of_every_epoch(X, four_epochs, capsys):
    model, losses = four_epochs
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert loss_of(model, X) / 4 < losses[-1], "60 documents are 4 batches of 16; the last pass gained something"
    for rows, shape in ((model.get_normalized_L(), (60, K)), (model.get_normalized_F(), (K, 40))):
        assert rows.shape == shape
        torch.testing.assert_close(rows.sum(1), torch.ones(shape[0]))
    fitted(X, num_epochs=1)
    assert "Training Progress: 100%" in (shown := capsys.readouterr().err)
    assert "Loss=" in shown


def test_a_fit_that_has_converged_stops_and_repeats_its_loss(X, capsys):
    model, losses = fitted(X, num_epochs=1000, batch_size=60)
    assert len(losses) == 1000
    assert losses[-1] == losses[-2] == pytest.approx(loss_of(model, X), rel=1e-6)
    assert "1000/1000" in (shown := capsys.readouterr().err)
    assert re.search(r"converged after \d+ epochs", shown)
    by_plain_em = min(em(X.numpy(), K, seed=seed)[2][-1] for seed in range(3))
    assert losses[-1] <= by_plain_em


def test_seeds_decide_what_comes_out(X, four_epochs):
    assert same(fitted(X), four_epochs)
    other = fitted(X, seed=43)
    assert not np.allclose(other[1], four_epochs[1])
    assert not torch.allclose(other[0].get_normalized_F(), four_epochs[0].get_normalized_F())
    again = tt.fit_model(X, K, num_epochs=1)[1], tt.fit_model(X, K, num_epochs=1)[1]
    assert again[0] != again[1], "a second fit continues the stream of random numbers"


@pytest.mark.parametrize(
    "kind", ["npy", "pt", "array", "chosen rows", "own", "own, streamed", "npy, streamed", "numpy"]
)
def test_every_source_of_the_same_counts_gives_the_same(kind, X, four_epochs, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", X.numpy())
    torch.save(X, tmp_path / "x.pt")
    (tmp_path / "terms.txt").write_text("of\nother\ncounts\n")
    if "streamed" in kind:
        monkeypatch.setattr(data, "SMALL_BYTES", 0)
        monkeypatch.setattr(data, "MEMORY_SHARE", 0)
    twice = torch.cat([X, X]).numpy()
    source = {
        "npy": lambda: tt.NumpyDiskDataset(tmp_path / "x.npy"),
        "pt": lambda: tt.TorchDiskDataset(tmp_path / "x.pt"),
        "array": lambda: tt.NumpyDiskDataset(X.numpy()),
        "chosen rows": lambda: tt.NumpyDiskDataset(twice, indices=range(60, 120)),
        "own": lambda: Rows(X),
        "numpy": X.numpy,
    }[kind.removesuffix(", streamed")]()
    assert same(fitted(source), four_epochs)
    if isinstance(source, Rows):
        assert (source.reads > 5 * 60) == ("streamed" in kind)


def test_counts_that_are_mostly_zero_are_fitted_as_their_nonzeros(X):
    few = X * (torch.rand(X.shape) < 0.05)
    assert (open_counts(few).sparse, open_counts(X).sparse) == (True, False)


@pytest.mark.parametrize("shape", [(60, 2), (2, 40), (1, 1)])
def test_there_may_be_more_topics_than_documents_or_terms(X, shape):
    model, losses = fitted(X[: shape[0], : shape[1]] + 1)
    assert np.isfinite(losses).all()
    assert model(torch.arange(shape[0])).shape == shape


def test_fractions_are_counts_too_and_no_epoch_leaves_the_model_as_it_began():
    model, losses = fitted(torch.rand(10, 12))
    assert losses[-1] < losses[0]
    model, losses = fitted(torch.rand(10, 12), num_epochs=0)
    assert losses == []
    assert model.F.max() <= 0.1


def test_numbers_of_an_optimiser_have_no_effect_and_a_warning_lists_them(X, four_epochs):
    with pytest.warns(UserWarning, match=r"max_lr=0.1, T_0=5"):
        assert same(fitted(X, max_lr=0.1, T_0=5), four_epochs)


BAD = (("k", 0), ("k", 513), ("max_lr", -1), ("T_0", 0), ("num_epochs", 2.5), ("batch_size", 0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({name: bad}, f"{name}={bad}") for name, bad in BAD),
        ({"X": torch.rand(3)}, r"shape \(3,\)"),
        ({"X": -torch.ones(3, 3)}, "cannot be negative"),
        ({"X": torch.zeros(3, 3)}, "counts are zero"),
        ({"X": Rows([])}, "Rows is empty"),
        ({"X": Endless()}, "Endless. has no len"),
    ],
)
def test_what_cannot_be_fitted_is_rejected(wrong, message):
    with pytest.raises(TypeError if "no len" in message else ValueError, match=message):
        tt.fit_model(**{"X": torch.rand(5, 6), "k": 2, "num_epochs": 1, **wrong})
