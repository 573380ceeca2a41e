"""The numbers of a summary, on steps made by hand."""

import io
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from paceline.config import build_spec
from paceline.io.files import to_flat, write_json
from paceline.runlog.summary import (
    TrainingTotals,
    build_evaluation,
    compute_summary,
    print_summary,
    read_summary,
)

SPEC = build_spec({"name": "agnews", "parallel": {"ranks": 4}, "train": {"steps": 100}})
EQUATION = "128 global = 16 per pass × 4 ranks × 2 accumulated"


def steps(count, slow=5):
    same = {"epoch": 0, "data_s": 0.001, "comm_s": 0.04, "exposed_s": 0.008, "batch": 128, "tokens": 1280}
    found = []
    for i in range(1, count + 1):
        times = {"step_s": 2.0, "compute_s": 1.9} if i <= slow else {"step_s": 0.1, "compute_s": 0.091}
        found.append({"step": i, "samples": i * 128, "loss": 5.0 - 0.01 * i, "skipped": False, **same, **times})
    return found


def whole_summary(last, seconds, peaks):
    evaluation = build_evaluation(last, {"step": 20, "accuracy": 0.92})
    found = compute_summary(SPEC, EQUATION, steps(40), "finished", epoch_samples=2560)
    return replace(found, seconds=seconds, parameters=3_412_345, peak_bytes_per_rank=peaks, evaluation=evaluation)


def test_numbers():
    last = {"kind": "evaluate", "t": 1.0, "step": 40, "n": 7600, "loss": 0.3, "accuracy": 0.91}
    summary = whole_summary(last, 20.0, (10, 20, 30, 40))
    assert summary.trained == TrainingTotals(5120, 40, 0, 2.0)
    assert summary.samples_per_s == pytest.approx(1280)
    assert summary.tokens_per_s == pytest.approx(12800)
    assert summary.in_steps_s == pytest.approx(5 * 2 + 35 * 0.1)
    assert summary.loss_first == pytest.approx(4.99)
    assert (summary.loss_last, summary.loss_last_steps) == (pytest.approx(5 - 0.01 * 36.5), 8)
    assert summary.evaluation.metrics == {"loss": 0.3, "accuracy": 0.91}
    assert summary.median == pytest.approx(
        {"step_s": 0.1, "data_s": 0.001, "compute_s": 0.091, "comm_s": 0.04, "exposed_s": 0.008}
    )
    assert summary.share == pytest.approx(
        {"compute": 0.91, "data": 0.01, "exposed": 0.08, "comm": 0.4, "other": 0.0}, abs=1e-9
    )


def test_warm_up_is_a_tenth_of_a_long_run_and_at_most_half_of_a_short_one():
    assert compute_summary(SPEC, EQUATION, steps(100, slow=10), "finished").share["compute"] == pytest.approx(0.91)
    for few in (steps(4, slow=2), steps(1, slow=0)):
        assert compute_summary(SPEC, EQUATION, few, "finished").samples_per_s == pytest.approx(1280)
    none = compute_summary(SPEC, EQUATION, [], "stopped")
    assert (none.trained, none.samples_per_s, none.loss_last) == (TrainingTotals(0, 0), None, None)
    assert "stopped" in shown(none, 80)


def test_steps_that_are_not_finite_do_not_spoil_the_rest(tmp_path):
    some = steps(20, slow=0)
    some[0]["loss"] = None
    some[15] |= {"loss": math.nan, "skipped": True}
    some[19] |= {"loss": 1e9, "skipped": True, "step_s": None}
    summary = replace(
        compute_summary(SPEC, EQUATION, some, "failed"),
        why="loss is not finite",
        evaluation=build_evaluation({"loss": math.nan}),
    )
    assert summary.trained.skipped_steps == 2
    assert summary.loss_first == pytest.approx(4.98)
    assert summary.loss_last == pytest.approx(sum(5 - 0.01 * i for i in (17, 18, 19)) / 3)
    write_json(tmp_path / "summary.json", to_flat(summary))
    again = read_summary(tmp_path / "summary.json")
    assert again.evaluation.metrics == {"loss": None}
    assert "loss nan" in shown(again, 100)
    assert "failed after 1.9 s: loss is not finite" in shown(again, 100)


def shown(summary, width, encoding="utf-8"):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_summary(summary, Console(file=out, width=width, force_terminal=False))
    out.seek(0)
    return out.read()


times = st.floats(1e-5, 0.2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(times, times, times, st.floats(0, 9)), min_size=1, max_size=60))
def test_every_share_is_that_of_the_time_beside_it(found):
    some = steps(len(found))
    for step, (compute, data, exposed, loss) in zip(some, found, strict=True):
        took = {"compute_s": compute, "data_s": data, "exposed_s": exposed, "comm_s": 2 * exposed, "loss": loss}
        step |= {**took, "step_s": compute + data + exposed}
    summary = compute_summary(SPEC, EQUATION, some, "finished")
    text = shown(summary, 100)
    printed = re.findall(r"(\d+) % (compute|data|exposed)", " ".join(text.split()))
    for part, name in printed:  # rounded
        assert int(part) / 100 == pytest.approx(summary.share[name], abs=0.006)
    assert sum(int(part) for part, _ in printed) == pytest.approx(100, abs=2)
    averaged = re.search(r"on average of the last (\d+)", text)
    last = [loss for *_, loss in found][-int(averaged[1] if averaged else 1) :]
    assert summary.loss_last == pytest.approx(sum(last) / len(last))
    assert 5 * len(last) <= max(5, len(found)), "the end of a run is a small part of it"


@pytest.mark.parametrize("width", [60, 200])
def test_table_fits_and_has_units(width):
    last = {"n": 7600, **{f"metric_{i}": i / 7 for i in range(12)}}
    text = shown(whole_summary(last, 754.0, (812_000_000,) * 4), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= min(width, 100)
    words = " ".join(text.split())
    for part in (
        "agnews finished after 12 min 34 s",
        "3,412,345 parameters",
        "1,280 samples/s, 12,800 tokens/s",
        "4.99 in the first step, 4.635 on average of the last 8",
        "91 % compute, 1 % data, 8 % exposed, 80 % of communication hidden",
        "best at step 20)",
    ):
        assert part in words


def test_table_in_ascii_and_on_one_rank():
    alone = [step | {"comm_s": 0.0, "exposed_s": 0.0, "compute_s": 0.05} for step in steps(40)]
    text = shown(compute_summary(SPEC, EQUATION, alone, "finished"), 100, "ascii")
    assert "16 per pass x 4 ranks" in text
    assert "exposed" not in text
    assert "other" in text
