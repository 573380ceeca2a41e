"""The verbs that read what a fit of topics leaves: measure, report, check, export, watch."""

import re

import numpy as np
import pytest
import scipy.sparse

from paceline import open as open_model
from paceline import topics, train
from paceline.config import build_spec
from paceline.errors import UserError
from paceline.inference.export import export
from paceline.inference.sample import sample
from paceline.measurement.measure import measure
from paceline.reports.report import report
from paceline.reports.watch import watch
from paceline.trials.check import build_parity_table, check
from results import expect_error

pytestmark = pytest.mark.usefixtures("warm_ranks")
DOCUMENTS, TERMS, K = 90, 60, 3


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("counts") / "counts.npz"
    random = np.random.default_rng(1)
    scipy.sparse.save_npz(path, scipy.sparse.csr_matrix(random.poisson(0.4, (DOCUMENTS, TERMS))))
    model = {"k": K, "start": "random", "tolerance": 0}
    parallel = {"threads": 1, "device": "cpu"}
    run = {"name": "tiny", "workload": "topics", "model": model, "data": {"path": str(path)}, "parallel": parallel}
    return build_spec({**run, "train": {"steps": 12}})


def test_a_fit_is_measured_and_reported_in_its_own_words(spec, tmp_path):
    found = measure(spec, (1, 2), repeats=1, steps=12, price=2.0, out=tmp_path / "sweep")
    one, two = found.rows
    assert (one.fits, one.batch.global_batch, one.resources.mfu) == (True, DOCUMENTS, None)
    assert two.batch.layout == "90 samples = 45 per rank × 2 ranks"
    assert found.total_samples == 12 * DOCUMENTS
    assert one.cost.cost_usd == pytest.approx(2 * 12 * DOCUMENTS / one.samples_per_s / 3600)
    assert [row.label for row in found.planned] == ["1 rank", "2 ranks"]
    made = report([tmp_path / "sweep"], tmp_path / "report")
    text = made.page.with_name("report.md").read_text()
    assert "Each step is a pass over all samples." in text
    assert "All 2 runs trained the same thing" in text
    assert not any(word in text for word in ("gradient_norm", "MFU", "global_batch, a larger"))


def test_two_ranks_fit_the_same_topics_as_one(spec):
    found = check(spec, (1, 2), steps=6)
    assert found.holds
    assert found.rows[1].loss < 1e-6
    assert found.rows[1].grad_norm is None
    assert len(build_parity_table(found).rows) == 2


def test_a_run_is_exported_watched_and_does_not_write_text(spec, tmp_path, capsys):
    from safetensors.numpy import load_file

    path = train(spec, tmp_path, show=False).path
    tensors = load_file(export(path, tmp_path / "fit.safetensors"))
    assert {name: t.shape for name, t in tensors.items()} == {"L": (DOCUMENTS, K), "F": (K, TERMS)}
    for tensor in tensors.values():
        np.testing.assert_allclose(tensor.sum(1), 1, rtol=1e-5)
    assert watch(path, once=True) == 0
    assert "step 12 of 12" in capsys.readouterr().out
    with expect_error("not-supported"):
        sample(path, "a")
    with expect_error("not-supported") as rejected:
        open_model(path)
    typed = re.search(r"paceline\.(topics\.TopicFit\.load\(.*?\))", str(rejected.value))[1]
    assert eval(typed, {"topics": topics}).F.shape == (K, TERMS)


def test_weak_scaling_of_a_fit_is_refused(spec, tmp_path):
    with pytest.raises(UserError, match="weak"):
        measure(spec, (1, 2), weak=True, out=tmp_path)
