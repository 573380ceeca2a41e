"""Rows, diagnosis and cost from numbers that were chosen, so that the right answer is known."""

import json
from dataclasses import replace

import pytest

from paceline.errors import UserError
from paceline.measurement.diagnosis import diagnose, split_lost_time, suggest_workers
from paceline.measurement.measure import build_trials
from paceline.measurement.rows import (
    BatchLayout,
    FailedRow,
    MeasuredRow,
    RankLoads,
    Resources,
    add_costs,
    add_speedups,
    combine_repeats,
    dump_measured_row,
    parse_measured_row,
    recommend_row,
)
from paceline.measurement.run_times import RunTimes, StepParts, read_run_times, select_steady_steps
from paceline.measurement.scaling_laws import fit_laws
from paceline.measurement.verdict import RankChoice, collect_notes, decide_ranks, describe_verdict
from paceline.runlog.machine import MachineLoad
from paceline.runlog.run_dir import RunDir
from results import expect_error


def row(label, ranks, step_s, compute=1.0, exposed=0.0, waiting=0.0, data=0.0, batch=64, busy=(), threads=1):
    """A row by the shares of its step."""
    return MeasuredRow(
        label=label,
        ranks=ranks,
        step_s=step_s,
        step_s_low=step_s,
        step_s_high=step_s,
        samples_per_s=64 / step_s,
        batch=BatchLayout(global_batch=batch),
        parts=StepParts(*(share * step_s for share in (data, compute, exposed, exposed, waiting))),
        loads=RankLoads(busy_s_by_rank=busy),
        parameters=1_000_000,
        resources=Resources(threads),
    )


def judged(*rows, cores=64):
    found = add_speedups(rows)
    return found, {finding.label: finding for finding in diagnose(found, cores)}


def compared(one, rates, other, other_rates):
    """Two rows with the samples per second of their repeats."""
    return add_speedups([replace(one, rates=tuple(rates)), replace(other, rates=tuple(other_rates))])


ONE = row("1 rank", 1, 1.0)


TWO, ON_DEVICE = row("2 ranks", 2, 0.9), Resources(1, "H200", device_ranks=2)
SLOW = row("2 ranks", 2, 0.9, compute=0.55, exposed=0.45, waiting=0.42, busy=(0.5, 0.9))


@pytest.mark.parametrize(
    ("one", "other", "cores", "cause", "share"),
    [
        (ONE, row("2 ranks", 2, 1.25, compute=0.39, exposed=0.61), 64, "communication", 0.61),
        (ONE, SLOW, 64, "slow rank", 0.4 / 0.9),
        (ONE, row("2", 2, 4.0, compute=0.63, exposed=0.37, waiting=0.36, busy=(1.0, 4.0)), 2, "slow rank", 0.75),
        (row("1 rank", 1, 1.0, 0.6, data=0.4), row("2 ranks", 2, 0.7, compute=0.43, data=0.57), 64, "input", 0.57),
        (ONE, row("8 ranks", 8, 0.4), 64, "small passes", 0.275 / 0.4),
        (row("1 rank", 1, 1.0, batch=640), row("2 ranks", 2, 0.9, batch=640), 64, "fixed work", 0.4 / 0.9),
        (ONE, TWO, 2, "shared cores", 0.4 / 0.9),
        (ONE, replace(TWO, resources=ON_DEVICE), 64, "shared device", 0.4 / 0.9),
        (ONE, row("2 ranks", 2, 0.51, compute=0.97, exposed=0.03), 64, "none", 0.03),
    ],
)
def test_the_cause_is_named_with_its_share(one, other, cores, cause, share):
    _, found = judged(one, other, cores=cores)
    assert (found[other.label].cause, found[other.label].share) == (cause, pytest.approx(share))
    assert found["1 rank"].cause == ("input" if cause == "input" else "none")
    assert SLOW.loads.slowest == (1, pytest.approx(1.8))


@pytest.mark.parametrize(
    ("workers", "load_s", "cores", "suggested"),
    [
        (1, 1.0, 8, (2, 0.6)),
        (0, 3.0, 8, (5, 0.6)),
        (1, 3.0, 2, (2, 1.5)),
        (2, 3.0, 2, None),
        (None, 3.0, 8, None),
    ],
)
def test_waiting_for_input_is_answered_with_what_more_workers_would_bring(workers, load_s, cores, suggested):
    slow = row("1 rank", 1, 1.0, compute=0.6, data=0.4)
    slow = replace(slow, resources=Resources(1, workers=workers, load_s=load_s))
    assert suggest_workers(slow, cores) == suggested
    _, found = judged(slow, cores=cores)
    assert ("data.workers=" in found["1 rank"].advice) == (suggested is not None)


def test_parts_of_a_loss_add_up_and_the_link_rate_follows_the_ring():
    worse = row("2 ranks", 2, 0.8, compute=0.7, exposed=0.2, waiting=0.05, data=0.1)
    assert sum(split_lost_time(worse, ONE).values()) == pytest.approx(0.8 - 0.5)
    two = row("2 ranks", 2, 1.0, exposed=0.032)
    assert two.link_bits_s() == pytest.approx(8 * 4e6 / 0.032)
    assert ONE.link_bits_s() is None


def test_speedups_follow_the_rates_and_their_spread_is_of_pairs():
    found = compared(row("1 rank", 1, 1.0), [10.0, 5.0, 10.0], row("2 ranks", 2, 0.5625), [18.0, 9.0, 17.0])
    assert found[1].scaling.speedups == (1.8, 1.8, 1.7)
    assert found[1].speedup == pytest.approx(1 / 0.5625)
    assert (found[1].scaling.speedup_low, found[1].scaling.speedup_high) == (1.7, 1.8)
    assert found[1].efficiency == found[1].speedup / 2


def test_the_numbers_of_a_row_belong_together():
    """Of two repeats, one of them disturbed, the row has those of the other."""
    times = [
        RunTimes(20, step_s, StepParts(0.0, step_s, 0.0, 0.0, 0.0), 64 / step_s, None, (step_s,), (n,))
        for n, step_s in enumerate((1.5, 0.2), 1)
    ]
    found = combine_repeats("1 rank", 1, times, BatchLayout())
    assert (found.step_s, found.samples_per_s) == (0.2, pytest.approx(320))
    assert (found.step_s_low, found.step_s_high) == (0.2, 1.5)
    assert found.loads.peak_bytes_per_rank == (2,)


def test_a_failed_row_has_no_speedup_and_the_fewest_ranks_count():
    rows = [FailedRow(label="1 rank", ranks=1, failed="out of memory"), row("2 ranks", 2, 1.0), row("4 ranks", 4, 0.6)]
    failed, two, four = add_speedups(rows)
    assert failed is rows[0]
    assert (two.speedup, four.speedup) == (2.0, pytest.approx(2 / 0.6))
    assert recommend_row([failed]) is None
    assert decide_ranks([failed]) is None


def decided(rows):
    found = decide_ranks(add_costs(rows, None, None))
    return found.choice, found.row.label


@pytest.mark.parametrize(
    ("rows", "choice", "label", "why"),
    [
        ([ONE, row("2 ranks", 2, 0.55)], RankChoice.TAKE, "2 ranks", "1.82×"),
        ([ONE, row("2 ranks", 2, 1.25, compute=0.39, exposed=0.61)], RankChoice.STAY, "2 ranks", "0.8×"),
        ([ONE], RankChoice.STAY, "1 rank", "Nothing to compare"),
        ([row("2 ranks", 2, 1.0), row("4 ranks", 4, 0.55)], RankChoice.TAKE, "4 ranks", "1.82×"),
        ([ONE, row("2 ranks", 2, 0.99)], RankChoice.STAY, "2 ranks", "a gain below 10 %"),
        ([ONE, row("4 ranks", 4, 0.4), row("8 ranks", 8, 0.39)], RankChoice.TAKE, "4 ranks", "2.5×"),
        ([ONE, row("4 ranks", 4, 0.6)], RankChoice.STAY, "4 ranks", "at 2.4× the device-hours"),
        ([ONE, row("2 ranks", 2, 0.5), row("4 ranks", 4, 0.46)], RankChoice.TAKE, "2 ranks", "no more device-hours"),
        ([replace(ONE, resources=Resources(4)), row("4 ranks", 4, 0.6)], RankChoice.TAKE, "4 ranks", "the same cores"),
    ],
)
def test_verdicts(rows, choice, label, why):
    rows, found = judged(*rows)
    assert decided(rows) == (choice, label)
    first, *others = describe_verdict(rows, list(found.values()), fit_laws({2: [1.8], 4: [3.1]}))
    assert why in first
    assert len(others) >= 2


@pytest.mark.parametrize(
    ("step_s", "alone", "rates"),
    [
        (0.6, [10.0, 20.0], [17.0, 15.0]),  # repeats contradict each other
        (0.55, [64.0, 60.0, 70.0], [50.0, 116.0, 300.0]),  # they say anything
        (0.87, [64.0, 64.0], [73.0, 62.0]),  # the gain is within the spread
    ],
)
def test_repeats_that_disagree_decide_nothing(step_s, alone, rates):
    assert decided(compared(ONE, alone, row("2 ranks", 2, step_s), rates)) == (RankChoice.UNDECIDED, "2 ranks")


BUSY = MachineLoad(2, 9.0)
OUTSIDE = {"outside": True, "batch": BatchLayout()}


@pytest.mark.parametrize(
    ("one", "two", "machine", "reason"),
    [
        (ONE, row("2 ranks", 2, 1 / 62.7), MachineLoad(2, 0.1), "for a while"),
        (ONE, row("2 ranks", 2, 1 / 31.8), BUSY, "a load of 9 on 2 cores"),
        (replace(ONE, repeats=3), replace(row("2 ranks", 2, 1 / 2.2), repeats=3), None, "cache or memory"),
        (replace(ONE, repeats=2, step_s_high=1.3), row("2 ranks", 2, 1 / 2.4), None, "for a while"),
        (replace(ONE, resources=Resources(2)), row("4 ranks", 4, 1 / 3), None, "4 on 2 cores can give 2× at most"),
        (replace(ONE, **OUTSIDE), replace(row("2 ranks", 2, 1 / 4), **OUTSIDE), BUSY, "different samples"),
    ],
)
def test_no_verdict_is_beyond_the_devices(one, two, machine, reason):
    rows, found = judged(one, two)
    assert decided(rows) == (RankChoice.IMPOSSIBLE, two.label)
    (line,) = describe_verdict(rows, list(found.values()), [], machine)
    assert reason in line
    assert "can give 2× at most" in line
    assert (found[two.label].cause, found[two.label].advice) == ("impossible", "")


SENT = {"compute": 0.39, "exposed": 0.61}
ON_GPU = {"resources": Resources(1, "NVIDIA H200")}


@pytest.mark.parametrize(
    ("values", "given", "possible", "impossible"),
    [
        (SENT, {}, "parallel.reduce=bf16", ""),
        (SENT, {"parallel.reduce": "bf16"}, "global_batch", "parallel.reduce"),
        (SENT | {"batch": BatchLayout("", 64, 1, only_gradients=False)}, {}, "fewer ranks", "parallel.reduce"),
        (SENT | {"outside": True, "ddp": True}, {}, "no_sync", "bf16"),
        (SENT | {"outside": True, "ddp": True} | ON_GPU, {}, "bf16_compress_hook", "parallel."),
        (SENT | {"outside": True}, {}, "more samples", "no_sync"),
        ({"compute": 1.0}, {}, "", "parallel.threads"),
        ({"compute": 1.0, "alone": 2}, {}, "parallel.threads=1", ""),
        ({"compute": 1.0, "alone": 2}, {"parallel.threads": 2}, "own cores", "parallel.threads"),
    ],
)
def test_advice_is_possible_where_it_is_given(values, given, possible, impossible):
    alone, outside = values.get("alone", 1), values.get("outside", False)
    shares = {name: values[name] for name in ("compute", "exposed") if name in values}
    others = {name: value for name, value in values.items() if name not in ("alone", *shares)}
    one = replace(row("1 rank", 1, 1.0, threads=alone), outside=outside)
    rows = add_speedups([one, replace(row("2 ranks", 2, 1.25, **shares), **others)])
    _, two = diagnose(rows, 2, given)
    assert possible in two.advice
    assert not impossible or impossible not in two.advice


def test_notes_for_the_reader():
    """One rank had four threads and four have one each: the machine is the same, and so is what it costs."""
    rows, _ = judged(row("1 rank", 1, 1.0, threads=4), row("4 ranks", 4, 0.6, threads=1))
    one, four = add_costs(rows, 64 * 3600, 2.0)
    assert (one.cost.cost_usd, four.cost.device_hours) == (2.0, pytest.approx(0.6))
    assert one.cost.usd_per_million_samples == pytest.approx(1e6 / 64 / 3600 * 2)
    assert len(collect_notes(rows, BUSY)) == 2
    assert collect_notes([ONE], MachineLoad(2, 0.5)) == []


def test_a_row_survives_json():
    given = replace(row("2 ranks", 2, 1.0, busy=(0.1, 0.2)), resources=Resources(1, usage={"cpu_share": 0.5}))
    failed = FailedRow(label="2 ranks", ranks=2, failed="no", why="no; yes", batch=BatchLayout("64 = 2 × 32", 64, 2))
    values = [json.loads(json.dumps(dump_measured_row(each))) for each in (given, failed)]
    assert [*map(parse_measured_row, values)] == [given, failed]
    assert values[0]["slowest_rank"] == 1


def test_trials_of_a_sweep(small):
    found = build_trials(small, [1, 2], ["fsdp:2", "tensor:2+sequence"], steps=8, weak=False)
    assert [(c.label, c.ranks) for c in found] == [
        ("1 rank", 1), ("2 ranks", 2), ("fsdp:2", 2), ("tensor:2+sequence", 2)
    ]  # fmt: skip
    assert {c.spec.train.global_batch for c in found} == {24}
    assert found[3].run_name(0) == "tensor-2-sequence-1"
    weak = build_trials(small, [1, 2, 4], [], steps=8, weak=True)
    assert [c.spec.train.global_batch for c in weak] == [24, 48, 96]
    hopeless = build_trials(small, [1, 64], [], steps=8, weak=False)[1]
    assert isinstance(hopeless, FailedRow)
    assert "smaller than parallel.ranks=64" in hopeless.why
    with expect_error("missing-value", "--ranks"):
        build_trials(small, [2, 4], [], steps=8, weak=False)


def step(number, **values):
    given = {"step_s": 1.0, "data_s": 0.0, "compute_s": 0.8, "comm_s": 0.2, "exposed_s": 0.2, "batch": 8}
    return {"kind": "step", "t": 0.0, "step": number, "loss": 1.0, **given, **values}


def write_run(folder, by_rank, spec):
    run = RunDir.claim(folder, "run", spec)
    for rank, steps in enumerate(by_rank):
        lines = [{"kind": "start", "t": 0, "threads": 1}, *steps]
        run.events_file(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.summary_file.write_text(json.dumps({"status": "finished", "ranks": len(by_rank)}))
    return run


def test_waiting_is_told_from_communication(tmp_path, small):
    """Rank 1 computes longer; rank 0 waits for it inside its collective. What both see is communication."""
    fast = [step(n, compute_s=0.5, exposed_s=0.5) for n in range(1, 31)]
    slow = [step(n, compute_s=0.9, exposed_s=0.1) for n in range(1, 31)]
    found = read_run_times(write_run(tmp_path, [fast, slow], small))
    assert found.busy_s_by_rank == (0.5, 0.9)
    assert found.parts.exposed_s == pytest.approx(0.3)
    assert found.parts.waiting_s == pytest.approx(0.2)
    assert found.samples_per_s == 8.0


def test_the_first_steps_do_not_count(tmp_path, small):
    steps = [step(n, step_s=9.0 if n <= 5 else 1.0) for n in range(1, 31)]
    assert read_run_times(write_run(tmp_path, [steps], small)).step_s == 1.0
    assert len(select_steady_steps(steps)) == 25
    with pytest.raises(UserError, match="too few"):
        read_run_times(write_run(tmp_path, [steps[:1]], small))
