"""A measurement held against its own rows, for runs and plans made up at random: no part contradicts another."""

import io
import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st
from rich.console import Console

from paceline.cli.measure import render_measurement
from paceline.config import build_spec
from paceline.io.files import to_flat, write_json
from paceline.measurement import rows as limits
from paceline.measurement.result import FORMAT, build_measurement
from paceline.measurement.rows import BatchLayout, combine_repeats, drop_failed, share_cores
from paceline.measurement.run_times import read_run_times
from paceline.measurement.verdict import RankChoice, decide_ranks
from paceline.reports.charts import build_charts
from paceline.reports.contents import gather_contents
from paceline.reports.report import build_tables
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import Summary, compute_summary, read_summary
from paceline.runlog.summary import print_summary as show_summary
from results import render_text

CORES = 4
STEPS = 24
COMPILING = 50


@dataclass(frozen=True)
class Row:
    ranks: int
    over_ideal: float  # of its step
    noise: tuple[float, ...]  # of each repeat
    exposed: float
    waiting: float
    data: float
    compiled: frozenset[int]  # steps in which something was compiled, which take far longer


ROWS = st.builds(
    Row,
    ranks=st.just(0),
    over_ideal=st.one_of(st.floats(0.7, 6.0), st.sampled_from([0.01, 0.1, 0.5])),  # 200× on 2 ranks among them
    noise=st.tuples(*[st.sampled_from([1.0, 1.01, 1.1, 1.6, 4.0])] * 3),
    exposed=st.floats(0.0, 0.5),
    waiting=st.floats(0.0, 1.0),
    data=st.floats(0.0, 0.4),
    compiled=st.frozensets(st.integers(1, STEPS), max_size=4),
)


@st.composite
def run_files(draw, presets=()):
    """A run file of the classifier or of the language model, small or of a known size."""
    workload, preset = draw(st.sampled_from(["classifier", "lm"])), draw(st.sampled_from([None, *presets]))
    model = {"width": draw(st.sampled_from([64, 128, 256])), "layers": draw(st.integers(1, 4))}
    model = {"preset": preset} if workload == "lm" and preset else model
    data = {"source": "docstrings"} if workload == "classifier" else {}
    train = {"steps": draw(st.integers(10, 5000)), "global_batch": draw(st.sampled_from([16, 64, 256]))}
    train["precision"] = draw(st.sampled_from(["fp32", "bf16"]))
    parallel = {"threads": draw(st.sampled_from([0, 1])), "reduce": draw(st.sampled_from(["exact", "bf16"]))}
    return {"name": "made", "workload": workload, "model": model, "data": data, "train": train, "parallel": parallel}


@st.composite
def measurements(draw):
    """(run file, seconds of a step on one rank, rows, repeats, price)."""
    least = draw(st.sampled_from([0, 1, 1, 1]))
    counts = [1, *sorted(draw(st.sets(st.sampled_from([2, 3, 4, 8]), min_size=least, max_size=3)))]
    rows = [replace(draw(ROWS), ranks=ranks) for ranks in counts]
    step_s = 10 ** draw(st.floats(-3, 1))
    return draw(run_files()), step_s, rows, draw(st.integers(1, 3)), draw(st.sampled_from([None, 2.5]))


def events_of(row: Row, step_s: float, batch: int) -> list[list[dict]]:
    """By rank: all wait for the last one, which is slower by what they wait."""
    exposed = row.exposed * step_s if row.ranks > 1 else 0.0
    data, waiting = row.data * step_s, row.waiting * exposed
    by_rank = []
    for rank in range(row.ranks):
        lines = [{"kind": "start", "t": 1e9, "rank": rank, "ranks": row.ranks, "device": "cpu", "cores": CORES}]
        lines[0] |= {"threads": max(1, CORES // row.ranks), "launcher": "paceline"}
        for step in range(1, STEPS + 1):
            times = COMPILING if step in row.compiled else 1 + 0.01 * math.sin(step)
            waits = 0.0 if rank == row.ranks - 1 else waiting
            seconds = {"data_s": data, "exposed_s": exposed - waiting + waits, "comm_s": 1.1 * exposed}
            seconds |= {"step_s": step_s, "compute_s": step_s - data - seconds["exposed_s"]}
            lines.append(
                {"kind": "step", "t": 1e9 + step, "step": step, "samples": batch * step, "batch": batch, "lr": 1e-3,
                 "loss": 2 / step + 1e-9 * row.ranks, "grad_norm": 1.0, "skipped": False,
                 "compiled": step in row.compiled, **{name: s * times for name, s in seconds.items()}}
            )  # fmt: skip
        by_rank.append(lines)
    return by_rank


def written_run(folder: Path, name: str, spec, by_rank: list[list[dict]]) -> RunDir:
    run = RunDir.claim(folder, name, spec)
    for rank, lines in enumerate(by_rank):
        run.events_file(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [line for line in by_rank[0] if line["kind"] == "step"]
    write_json(run.summary_file, to_flat(compute_summary(spec, "", steps, "finished", 640)))
    return run


def measured(folder: Path, made):
    values, step_s, rows, repeats, price = made
    spec, batch = build_spec(values), values["train"]["global_batch"]
    made_rows, specs = [], {}
    for row in rows:
        label = f"{row.ranks} rank{'s' * (row.ranks > 1)}"
        specs[label] = spec.replace({"parallel.ranks": row.ranks, "train.steps": STEPS})
        own_s = step_s if row.ranks == 1 else step_s / row.ranks * row.over_ideal
        events = [events_of(row, own_s * row.noise[i], batch) for i in range(repeats)]
        runs = [written_run(folder, f"{row.ranks}-{i}", specs[label], by_rank) for i, by_rank in enumerate(events)]
        times, layout = [read_run_times(run) for run in runs], BatchLayout(f"{batch} global", batch)
        made_rows.append(combine_repeats(label, row.ranks, times, layout, [run.name for run in runs]))
    state = {"format": FORMAT, "name": "made", "kind": "strong", "steps": STEPS, "spec": spec.dump(), "load": 0.0}
    state |= {"environment": {"cores": CORES}, "done": {}, "failed": {}}
    found = build_measurement(folder, state, made_rows, values["train"]["steps"] * batch, price, specs)
    write_json(folder / "measure.json", {**state, **found.to_json()})
    return found


def check_measurement(folder: Path, made) -> None:
    folder = Path(tempfile.mkdtemp(dir=folder))
    found = measured(folder, made)
    contents = gather_contents([folder])
    shown = build_tables(contents)
    chosen = {table.rows[table.chosen][0] for table in shown if table.chosen is not None}
    check_choice(contents, found, chosen)
    check_costs(found)
    assert contents.same is None or (contents.same.runs, contents.same.differing) == (len(found.rows), ())
    for chart in build_charts(contents):
        if chart.name == "scaling":
            assert all(p["high"] <= chart.data["top"] for line in chart.data["lines"] for p in line["points"])
    text = render_text(*render_measurement(found))
    assert "…" not in text
    assert all(" ".join(line.split()) in " ".join(text.split()) for line in found.verdict)
    ticked = [line[1:].split() for line in text.splitlines() if line.startswith("✓")]
    assert {row.label for row in found.rows if row.label.split() in [words[:2] for words in ticked]} == chosen
    for row, made_row in zip(drop_failed(found.rows), made[2], strict=True):
        check_summary(read_summary(folder / row.runs[0] / "summary.json"), made_row)
    check_beside_others(folder, made)


def check_costs(found) -> None:
    """Money is hours times what is paid for; ranks that share cores are paid for once."""
    rows = drop_failed(found.rows)
    for row in rows:
        paid = 1 if share_cores(rows) else row.ranks
        assert math.isclose(row.cost.device_hours, paid * row.cost.hours)
        assert found.usd_per_device_hour is None or math.isclose(
            row.cost.cost_usd, found.usd_per_device_hour * row.cost.device_hours
        )
        assert row.step_s_high <= COMPILING / 2 * row.step_s, "a step that compiled is part of a median"


def check_summary(summary: Summary, made_row: Row) -> None:
    """Shares are those of the mean step, and steps that compiled are counted apart."""
    shares = [share for share in summary.share.values() if share is not None]
    assert all(0 <= share <= 1.001 for share in shares)
    assert summary.share["compute"] + summary.share["exposed"] + summary.share["data"] <= 1.001
    assert (summary.compiled_steps or 0) == len(made_row.compiled)
    terminal = io.StringIO()
    show_summary(summary, Console(file=terminal, width=100, highlight=False, markup=False))
    assert terminal.getvalue()


def check_beside_others(folder: Path, made) -> None:
    """A whole run of the file, and one of another model: neither is held against what it is not."""
    values, step_s, *_ = made
    spec, row = build_spec(values), Row(1, 1.0, (1.0,) * 3, 0.0, 0.0, 0.0, frozenset())
    by_rank = events_of(row, step_s, values["train"]["global_batch"])
    for line in by_rank[0][1:]:
        line["loss"] *= 1.3  # another schedule
    whole = written_run(folder.parent, f"whole-{folder.name}", spec, by_rank)
    same = gather_contents([folder, whole.path]).same
    assert spec.train.steps == STEPS or "train.steps" in same.differing
    wide = spec.replace({"parallel.ranks": 2, "model.layers": spec.model.layers + 1})
    other = written_run(folder.parent, f"wide-{folder.name}", wide, by_rank * 2)
    assert not gather_contents([whole.path, other.path]).series


def check_choice(contents, found, chosen: set[str]) -> None:
    """One decision: the marked row and the recommended one are the same."""
    decision, rows = decide_ranks(found.rows), {row.label: row for row in drop_failed(found.rows)}
    assert {row.label for s in contents.series if (row := s.recommended) is not None} == chosen
    worth = [row for row in rows.values() if share_cores(rows.values()) or row.efficiency >= limits.LEAST_EFFICIENCY]
    match decision.choice:
        case RankChoice.TAKE:
            row = decision.row
            assert chosen == {row.label}
            assert row in worth
            assert row.speedup >= limits.LEAST_GAIN
            assert 1 < row.scaling.speedup_low <= row.speedup <= row.scaling.speedup_high
        case RankChoice.STAY:
            assert chosen == {"1 rank"}
            assert max(row.speedup for row in worth) <= limits.LEAST_GAIN
        case RankChoice.UNDECIDED | RankChoice.IMPOSSIBLE:
            assert not chosen
    check_possible(found, decision)
    assert len(rows) > 2 or not found.laws
    for law in found.laws:
        assert law.curve[-1].ranks <= max(CORES, *(row.ranks for row in rows.values()))
        assert all(p.low <= p.speedup * 1.0001 and p.speedup <= p.high * 1.0001 for p in law.curve)
        if law.ceiling_high is not None:
            assert max(point.speedup for point in law.curve) <= law.ceiling_high * 1.001
    assert all(math.isfinite(f.share) and f.share <= 1.001 for f in found.findings)


def check_possible(found, decision) -> None:
    """No verdict is beyond the devices, nothing is told from noise, and no advice repeats what was done."""
    rows = drop_failed(found.rows)
    noise = max(row.noise for row in rows)
    beyond = max(row.efficiency for row in rows) > 1 + max(0.05, min(noise, 0.25))
    assert not beyond or decision.choice in (RankChoice.IMPOSSIBLE, RankChoice.UNDECIDED)
    assert decision.choice is not RankChoice.TAKE or decision.row.speedup <= 1.25 * min(CORES, decision.row.ranks)
    given = found.spec["parallel"]
    for finding in found.findings:
        row = next(row for row in rows if row.label == finding.label)
        assert row.noise <= 0.25 or finding.cause in ("noise", "impossible")
        assert row.efficiency <= 1.25 or finding.cause == "impossible"
        for done in [f"parallel.{key}=" for key in ("threads", "reduce") if given[key] not in (0, "exact")]:
            assert done not in finding.advice
