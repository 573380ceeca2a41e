"""Run folders and measurements made up for the tests of reports: the files are as training writes them."""

import json
import math
import random
from dataclasses import replace

from paceline.config import build_spec
from paceline.io.files import to_flat, write_json
from paceline.measurement.result import FORMAT, build_measurement
from paceline.measurement.rows import BatchLayout, FailedRow, combine_repeats
from paceline.measurement.run_times import read_run_times
from paceline.runlog.machine import describe_environment
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import build_evaluation, compute_summary


def spec_of(name="made", ranks=1, **changed):
    values = {
        "name": name,
        "model": {"width": 64},
        "data": {"source": "docstrings", "limit": 640},
        "train": {"steps": 200, "global_batch": 64},
        "parallel": {"ranks": ranks},
    }
    return build_spec(values).replace(changed)


def make_run(out, name="made", ranks=1, steps=60, step_s=0.1, comm=0.1, seed=0, **changed):
    """A run whose loss falls the same on any number of ranks, but for rounding."""
    spec = spec_of(name, ranks, **changed)
    run = RunDir.claim(out, name, spec)
    dice = random.Random(seed)
    events = []
    for number in range(1, steps + 1):
        took = step_s * (1 + 0.05 * dice.random())
        exposed = comm * took if ranks > 1 else 0.0
        loss = 1.4 * math.exp(-number / 40) + 0.2 + 0.03 * math.sin(number) * (1 + 1e-7 * ranks)
        events.append(
            {"kind": "step", "t": 1e9 + number * took, "step": number, "epoch": 0, "samples": 64 * number, "batch": 64,
             "lr": 1e-3, "data_s": 0.01 * took, "tokens": 3000, "comm_s": 1.2 * exposed, "exposed_s": exposed,
             "step_s": took, "compute_s": 0.99 * took - exposed, "loss": loss, "grad_norm": 1.0, "skipped": False}
        )  # fmt: skip
    start = {"kind": "start", "t": 1e9, **describe_environment()}
    start |= {"rank": 0, "ranks": ranks, "device": "cpu", "threads": 1}
    for rank in range(ranks):
        lines = [start, *events, {"kind": "end", "t": 2e9, "status": "finished"}]
        run.events_file(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = replace(
        compute_summary(
            spec, f"64 global = {64 // ranks} per pass × {ranks} ranks × 1 accumulated", events, "finished", 640
        ),
        seconds=9.0,
        parameters=500_000,
        evaluation=build_evaluation({"loss": 0.3, "n": 64}),
        peak_bytes_per_rank=(int(6e8 / ranks**0.3),) * ranks,
    )
    write_json(run.summary_file, to_flat(summary))
    return run.path


def change_events(path, change):
    """Replace each event of the main rank by what `change` makes of it, an event or several; return the run."""
    file = path / "events" / "rank0.jsonl"
    found = [change(event) for event in map(json.loads, file.read_text().splitlines())]
    events = [event for some in found for event in (some if isinstance(some, list) else [some])]
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def make_measurement(folder, steps_s=None, repeats=3, kind="strong", price=2.5):
    """As `paceline measure` leaves it, with one row that failed."""
    steps_s = steps_s or {1: 0.100, 2: 0.058, 4: 0.037}
    rows = []
    for ranks, step_s in steps_s.items():
        label = f"{ranks} rank{'s' * (ranks > 1)}"
        comm = 0.0 if ranks == 1 else 1 - (0.100 / ranks) / step_s
        names = [f"{ranks}-rank{'s' * (ranks > 1)}-{r + 1}" for r in range(repeats)]
        times = [
            read_run_times(RunDir(make_run(folder, name, ranks, 24, step_s * (1 + 0.02 * r), comm, seed=r)))
            for r, name in enumerate(names)
        ]
        rows.append(combine_repeats(label, ranks, times, BatchLayout(f"64 global = {64 // ranks} per pass", 64), names))
    why = "no room for 8 stages; use fewer"
    rows.append(FailedRow(label="pipeline:8", ranks=8, failed="no room for 8 stages", why=why))
    spec = spec_of("docstrings")
    state = {"format": FORMAT, "name": "docstrings", "kind": kind, "steps": 24, "spec": spec.dump()}
    state |= {"environment": describe_environment(), "load": 0.0, "done": {}, "failed": {}}
    specs = {f"{n} rank{'s' * (n > 1)}": spec.replace({"parallel.ranks": n}) for n in steps_s}
    found = build_measurement(folder, state, rows, 12_800_000, price, specs)
    write_json(folder / "measure.json", {**state, **found.to_json()})
    return folder
