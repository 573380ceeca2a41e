"""A topic model, planned: its counts, the tiers they lie on, a pass, money, and refusals."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.planner.cost_model import build_cost_model
from paceline.planner.plan import plan
from paceline.planner.target import resolve_target
from paceline.workloads.topics.planning import (
    CountsShape,
    estimate_pass_memory,
    estimate_pass_time,
    estimate_pass_work_s,
)


@pytest.fixture(scope="module")
def counts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("counts") / "counts.npz"
    random = np.random.default_rng(0)
    scipy.sparse.save_npz(path, scipy.sparse.csr_matrix(random.poisson(0.05, (300, 200))))
    return path


def topics(path=None, k=20, **more):
    data = {"path": str(path)} if path else {}
    return build_spec({"workload": "topics", "model": {"k": k}, "data": data, "train": {"steps": 60}, **more})


def headline(k=20):
    return dense(100_000, k)


def dense(documents, k=20):
    numbers = documents * 1e5
    stored = {"sparse": False, "element_bytes": 1, "stored_bytes": numbers, "resident": False}
    return CountsShape(documents=documents, terms=100_000, k=k, nonzeros=numbers, **stored)


def sparse(k=20):
    n, each = 1_000_000, 122
    nonzeros = {"nonzeros": float(n * each), "sparse": True, "stored_bytes": 6e8}
    return replace(dense(n, k), **nonzeros)


def work(counts, where, devices=1):
    there = resolve_target(where).at(devices)
    return estimate_pass_work_s(counts, counts.documents, there.cluster.device, there.physics)


def test_a_pass_takes_as_long_as_it_was_measured_on_an_h200():
    assert work(headline(), "1xH200") == pytest.approx(7.5e-3, rel=0.1)
    assert work(sparse(), "1xH200") == pytest.approx(4.9e-3, rel=0.1)
    assert work(headline(100), "1xH200") > 2 * work(headline(), "1xH200")  # two reads, 128 columns instead of 32


@pytest.mark.parametrize(("k", "kind", "ns"), [(10, sparse, 12), (20, sparse, 16), (20, headline, 4)])
def test_a_core_needs_as_many_nanoseconds_per_count_as_were_measured(k, kind, ns):
    counts = kind(k)
    of_one_core = 8 * work(counts, "1x1xCPU") / counts.nonzeros  # the catalogue's CPU has eight
    assert of_one_core == pytest.approx(ns * 1e-9, rel=0.1)


def test_ranks_send_the_statistic_and_nothing_else():
    where = resolve_target("4xH100").at(4)
    there = estimate_pass_memory(headline(), 25_000, 4, where)
    time = estimate_pass_time(headline(), 25_000, 4, where, there)
    link = where.cluster.link_bytes_s * where.physics.link_efficiency
    assert time.comm_s == pytest.approx(2 * 3 / 4 * 4 * 20 * 100_000 / link, abs=2e-4)
    assert 0 < time.exposed_s <= time.comm_s


def test_counts_lie_as_high_as_they_fit():
    where = resolve_target("1xH100").at(1)
    small, large, huge = map(dense, (100_000, 1_000_000, 10_000_000))
    found = [estimate_pass_memory(c, c.documents, 1, where) for c in (small, large, huge)]
    assert [m.tier for m in found] == ["in memory", "45 % on host", "86 % on disk"]
    assert max(m.total_bytes for m in found) < where.cluster.device.memory_bytes
    times = [estimate_pass_time(c, c.documents, 1, where, m) for c, m in zip((small, large, huge), found, strict=True)]
    assert times[0].data_s == 0
    assert times[1].step_s == pytest.approx(found[1].host_bytes / 45e9, rel=0.1)
    assert times[2].data_s > 0.9 * times[2].step_s
    by_term = found[0].mixtures_bytes, found[0].topics_bytes
    assert by_term == (4 * 100_000 * 20 * 4, 5 * 100_000 * 20 * 4)


def test_nonzeros_on_a_gpu_are_kept_twice_and_sorted_once():
    counts = sparse()
    there, cores = (
        estimate_pass_memory(counts, counts.documents, 1, resolve_target(w).at(1)) for w in ("1xH200", "1x1xCPU")
    )
    assert there.counts_bytes == 1_000_000 * (8 + 5 * 122)
    assert there.by_terms_bytes == 4 * there.counts_bytes
    assert there.tier == "in memory"
    assert cores.by_terms_bytes == 0
    many = replace(counts, documents=50_000_000, nonzeros=50 * counts.nonzeros)  # 31 GB, which would fit once
    full = estimate_pass_memory(many, many.documents, 1, resolve_target("1xH200").at(1))
    assert full.counts_bytes + full.by_terms_bytes == pytest.approx(0.7 * 141e9, rel=0.01)
    assert full.tier.endswith("on host")


def test_without_counts_documents_and_words_are_enough():
    dense = build_cost_model(topics(), samples=1000, tokens=65_536).counts
    few = build_cost_model(topics(data={"max_terms": 50_000}), samples=1000, tokens=200).counts
    assert (dense.sparse, dense.terms, dense.nonzeros) == (False, 100_000, 1e8)
    assert (few.sparse, few.terms) == (True, 50_000)
    assert few.per_document == pytest.approx(200, rel=0.01)


def test_four_devices_and_their_price():
    found = plan(topics(), "4xH100", [1, 2, 4], 2.0, samples=100_000)
    one, _, four = found.rows
    assert 3 < four.speedup < 4
    assert found.chosen is four
    assert found.overrides() == {"parallel.ranks": 4}
    price = one.price
    assert one.hours == pytest.approx((price.start_s + 60 * price.step_s) / 3600)
    assert one.cost_usd == pytest.approx(2 * one.hours)
    assert json.dumps(found.as_json())
    assert "4 devices will run at" in found.advice[0]


@pytest.mark.parametrize(
    ("spec", "given", "said"),
    [
        (topics(), {}, "data.path is missing"),
        (topics("/nowhere.npz"), {}, "/nowhere.npz"),
        (topics(), {"tokens": 5.0}, "give --samples"),
        (topics(parallel={"strategy": "fsdp", "ranks": 2}), {"samples": 100}, "spreads documents over ranks"),
        (topics(), {"samples": 0}, "--samples: 0 is not possible"),
        (250, {}, "give at most 200"),
    ],
)
def test_rejected_plans(counts_file, spec, given, said):
    spec = topics(counts_file, k=spec) if isinstance(spec, int) else spec
    with pytest.raises(UserError, match=said) as caught:
        plan(spec, "2xH100", **given)
    assert "\n" not in str(caught.value)


def test_launch_files_of_engines_with_gradients_are_refused(counts_file, tmp_path):
    from paceline.planner.emit import build_launch_files

    found = plan(topics(), "2xH100", samples=100_000)
    assert "parallel.ranks=2" in build_launch_files(found, tmp_path / "run.yaml", "torchrun")["run.sh"]
    with pytest.raises(UserError, match="no gradients"):
        build_launch_files(found, tmp_path / "run.yaml", "deepspeed")


def test_counts_are_read_and_planned_without_torch(counts_file):
    code = (
        "import sys; from paceline.config import build_spec; from paceline.planner.plan import plan; "
        f"run = {{'workload': 'topics', 'model': {{'k': 5}}, 'data': {{'path': {str(counts_file)!r}}}}}; "
        "found = plan(build_spec(run), '2xH100').cost_model; counts = found.counts; "
        "assert (counts.documents, counts.terms, counts.sparse, counts.element_bytes) == (300, 200, True, 1); "
        "assert found.params == 5 * 500; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
