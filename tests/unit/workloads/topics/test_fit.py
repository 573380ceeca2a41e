"""`fit` and the command as people call them."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from numpy.testing import assert_allclose, assert_array_equal
from synthetic_counts import exact_loss, generate_synthetic_data

import paceline.topics as pt
from paceline.errors import UserError
from paceline.workloads.topics.fitting.problem import SampleSize
from topics_fits import page_data


@pytest.fixture(scope="module")
def made():
    return generate_synthetic_data(n=120, m=80, k=3, avg_doc_length=400, seed=1, sparse=False)


def test_the_page_of_the_issue(made, tmp_path):
    X, L, F = made
    model = pt.fit(X, k=3)
    assert (model.L.shape, model.F.shape) == ((120, 3), (3, 80))
    assert_allclose(model.L.sum(1), 1, rtol=1e-5)
    assert_allclose(model.F.sum(1), 1, rtol=1e-5)
    assert model.converged
    assert model.loss <= exact_loss(X, L, F)  # no worse than what made the data
    _, similar = pt.align_topics(model.F, F)
    assert min(similar) > 0.95
    again = pt.fit(X, k=3)
    assert again.losses == model.losses
    assert_array_equal(again.L, model.L)
    model.save(tmp_path / "fit.safetensors")
    assert np.array_equal(pt.TopicFit.load(tmp_path / "fit.safetensors").F, model.F)
    assert np.abs(model.transform(X) - model.L).mean() < 0.01


def test_empty_documents_and_terms():
    X = np.zeros((30, 20), np.uint8)
    X[:25, :15] = np.random.default_rng(0).poisson(2.0, (25, 15))
    for source in (X, sp.csr_array(X)):
        model = pt.fit(source, k=3, passes=50)
        assert_allclose(model.L.sum(1), 1, rtol=1e-5)
        assert_allclose(model.F.sum(1), 1, rtol=1e-5)
        assert model.F[:, 15:].max() < 1e-6


def test_many_documents_are_added_up_without_loss():
    """One topic is the shares of the terms."""
    rng = np.random.default_rng(0)
    often = rng.integers(1, 4, 400_000).astype(np.uint8)
    X = sp.csr_array((often, rng.integers(0, 2, 400_000), np.arange(400_001)), shape=(400_000, 2))
    model = pt.fit(X, k=1, passes=3)
    assert_allclose(model.F[0], X.sum(0) / X.sum(), rtol=2e-6)


def test_a_sample_has_more_documents_than_topics(made, monkeypatch):
    monkeypatch.setattr("paceline.workloads.topics.fitting.problem.FOR_CPU", SampleSize(300_000, 500, counts=400))
    assert pt.fit(made[0], k=30, passes=5).k == 30


def test_small_and_huge_numbers():
    X = sp.random_array((60, 40), density=0.3, rng=np.random.default_rng(0)).tocsr()
    for factor in (1e-6, 1.0, 1e6):
        model = pt.fit(X * factor, k=3, fractional=True, passes=20)
        assert np.isfinite(model.L).all()
        assert model.F.sum() == pytest.approx(3, rel=1e-5)
    with pytest.raises(UserError, match="add up to"):
        pt.fit(X * 1e36, k=3, fractional=True)


def test_the_best_of_several_starts(made):
    X, _, _ = made
    losses = [pt.fit(X, k=5, seed=seed, start="random", passes=40).loss for seed in range(3)]
    assert pt.fit(X, k=5, seed=0, starts=3, start="random", passes=40).loss == min(losses)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        *(({"k": 0}, "k"), ({"k": 81}, "k"), ({"k": 2.5}, "k"), ({"k": True}, "k")),
        *(({"start": "best"}, "start"), ({"starts": 0}, "starts")),
        *(({"passes": 0}, "passes"), ({"passes": 2.5}, "passes"), ({"seed": -1}, "seed"), ({"device": "x"}, "device")),
        *(({"tolerance": wrong}, "tolerance") for wrong in ("a", -1.0, float("nan"))),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "device")]),
    ],
)
def test_a_wrong_request_is_one_line(made, options, key):
    with pytest.raises(UserError) as error:
        pt.fit(made[0], **{"k": 3, **options})
    assert (error.value.key, "\n" in str(error.value)) == (key, False)


def test_the_command(made, tmp_path, ask):
    np.save(tmp_path / "x.npy", made[0])
    (tmp_path / "terms.txt").write_text("".join(f"word{i}\n" for i in range(80)))
    done = ask("topics", tmp_path / "x.npy", "-k", 3, "--out", tmp_path / "fit", "--passes", 40)
    assert done.code == 0
    lines = done.out.splitlines()
    verdict = next(at for at, line in enumerate(lines) if line.startswith("3 topics in x.npy: "))
    page = (tmp_path / "fit" / "topics.html").read_text(encoding="utf-8")
    assert "<h1>3 topics in x.npy</h1>" in page
    names = page_data(page)["labels"]
    assert sorted(line.split("%")[1].strip() for line in lines[verdict + 3 : verdict + 6]) == sorted(names)
    for name in ("structure.png", "top_terms.png", "loss.png", "summary.json"):
        assert (tmp_path / "fit" / name).stat().st_size > 100
    model = pt.TopicFit.load(tmp_path / "fit" / "model.safetensors")
    assert model.passes <= 40
    assert model.terms[:2] == ["word0", "word1"]
    assert model.loss == pytest.approx(pt.fit(tmp_path / "x.npy", k=3, passes=40).loss, rel=1e-9)
    assert ask("topics", tmp_path / "x.npy", "--shards", tmp_path / "shards", "--quiet").code == 0
    assert pt.read_counts(tmp_path / "shards").documents == 120


def test_texts(tmp_path, ask):
    words = ("cat dog fur paw", "sun moon star orbit", "flour oven bread yeast")
    rows = [f'{i},"{(words[i % 3] + " ") * 4}"' for i in range(60)]
    (tmp_path / "texts.csv").write_text("\n".join(["id,body", *rows]))
    words_of_fit = ("topics", tmp_path / "texts.csv", "-k", 3, "--out", tmp_path / "fit")
    wrong = ask(*words_of_fit)
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "body" in wrong.err
    assert not (tmp_path / "fit").exists()
    assert ask(*words_of_fit, "--text", "body", "--quiet").code == 0
    model = pt.TopicFit.load(tmp_path / "fit" / "model.safetensors")
    assert {frozenset(terms[:4]) for terms in model.top_terms(4)} == {frozenset(w.split()) for w in words}
    for limit in (21, 0.4):
        few = ask(*words_of_fit[:-1], tmp_path / "few", "--text", "body", "--min-df", limit)
        assert (few.code, "lower min_df" in few.err) == (2, True)
    assert model.transform(["the cat has fur"]).max() > 0.8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(("nothing.npy -k 3", "nothing.npy"), ("x.npy", "-k 20"), ("x.npy -k 1000", "512"), ("x.npy -k 11", "to 10")),
        *(("x.npy -k 3 --passes 0", "train.steps"), ("x.npy -k 3 --seed -1", "train.seed")),
        *(("x.npy -k 3 --out 'my fit'", "--out"), ("x.npy -k 3 --tolerance -1", "model.tolerance")),
        *(("negative.npy -k 3", "-1"), ("zero.npy -k 3", "counts are zero"), ("cut.npy -k 3", "cut.npy")),
    ],
)
def test_a_wrong_command_is_one_line(tmp_path, ask, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    for name, X in (("x", np.ones((10, 10))), ("negative", -np.ones((10, 10))), ("zero", np.zeros((10, 10)))):
        np.save(f"{name}.npy", X.astype(np.int8))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-30])
    wrong = ask(f"topics --out fit {words}")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert said in wrong.err
    assert not (tmp_path / "fit").exists()


def test_other_layouts_are_refused(tmp_path):
    from paceline import train
    from paceline.config import build_spec

    np.save(tmp_path / "x.npy", np.ones((10, 10), np.uint8))
    values = {"workload": "topics", "model": {"k": 2}, "data": {"path": str(tmp_path / "x.npy")}}
    for parallel in ({"ranks": 2, "strategy": "fsdp"}, {"ranks": 2, "tensor": 2}, {"reduce": "bf16", "ranks": 2}):
        with pytest.raises(UserError, match="parallel"):
            train(build_spec({**values, "parallel": parallel}), tmp_path / "runs", show=False)
    with pytest.raises(UserError, match=r"data\.path"):
        train(build_spec({"workload": "topics"}), tmp_path / "runs", show=False)
