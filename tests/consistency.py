"""Sentences held against the tables that they speak of, for runs and plans made up at random.

A number in a sentence is found again in a table of the same page, or follows from one of its rows by a quotient that is
written down here; and what one sentence says, another does not deny.
"""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hypothesis import strategies as st
from rich.console import Console

from paceline.measuring.reading import RunTimes, StepParts
from paceline.measuring.result import FORMAT, concluded
from paceline.measuring.rows import BatchLayout, combined, done
from paceline.measuring.verb import show
from paceline.planning.plan import plan
from paceline.planning.show import show as shown_plan
from paceline.record.files import write_json
from paceline.reporting.contents import gather
from paceline.reporting.page import tiles
from paceline.reporting.tables import tables
from paceline.spec import build

CORES = 4
NUMBER = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?) ?(×|%|ms|s\b|min\b|h\b|d\b|GB|MB|kB|USD)?")


@dataclass(frozen=True)
class Row:
    ranks: int
    over_ideal: float
    """Of its step."""
    noise: tuple[float, ...]
    """Of each repeat."""
    exposed: float
    waiting: float
    data: float


ROWS = st.builds(
    Row,
    ranks=st.just(0),
    over_ideal=st.floats(0.7, 6.0),
    noise=st.tuples(*[st.sampled_from([1.0, 1.01, 1.1, 1.6, 4.0])] * 3),
    exposed=st.floats(0.0, 0.5),
    waiting=st.floats(0.0, 1.0),
    data=st.floats(0.0, 0.4),
)


@st.composite
def run_files(draw):
    """A run file of the classifier or of the language model."""
    workload = draw(st.sampled_from(["classifier", "lm"]))
    model = {"width": draw(st.sampled_from([64, 128, 256])), "layers": draw(st.integers(1, 4))}
    data = {"source": "docstrings"} if workload == "classifier" else {}
    train = {"steps": draw(st.integers(10, 5000)), "global_batch": draw(st.sampled_from([16, 64, 256]))}
    return {"name": "made", "workload": workload, "model": model, "data": data, "train": train}


@st.composite
def measurements(draw):
    """(run file, seconds of a step on one rank, rows, repeats, price)."""
    counts = [
        1,
        *sorted(draw(st.sets(st.sampled_from([2, 3, 4, 8]), min_size=draw(st.sampled_from([0, 1, 1, 1])), max_size=3))),
    ]
    rows = [Row(n, **{k: v for k, v in vars(draw(ROWS)).items() if k != "ranks"}) for n in counts]
    step_s = 10 ** draw(st.floats(-3, 1))
    return draw(run_files()), step_s, rows, draw(st.integers(1, 3)), draw(st.sampled_from([None, 2.5]))


def times_of(row: Row, alone_s: float, repeat: int, batch: int) -> RunTimes:
    ideal = alone_s if row.ranks == 1 else alone_s / row.ranks * row.over_ideal
    step_s = ideal * row.noise[repeat]
    exposed = row.exposed * step_s if row.ranks > 1 else 0.0
    data, waiting = row.data * step_s, row.waiting * exposed
    compute = step_s - exposed - data
    parts = StepParts(data, compute, exposed * 1.1, exposed, waiting)
    busy = [compute + data] * row.ranks
    busy[-1] += waiting
    rate = batch / step_s
    return RunTimes(
        20, step_s, parts, rate, None, tuple(busy), (10**9,) * row.ranks, threads=max(1, CORES // row.ranks)
    )


def measured(folder: Path, made):
    """The measurement as it is written, without runs."""
    values, step_s, rows, repeats, price = made
    spec, batch = build(values), values["train"]["global_batch"]
    label = {row.ranks: f"{row.ranks} rank{'s' * (row.ranks > 1)}" for row in rows}
    times = {row.ranks: [times_of(row, step_s, i, batch) for i in range(repeats)] for row in rows}
    made_rows = [combined(label[n], n, found, BatchLayout(f"{batch} global", batch)) for n, found in times.items()]
    rates = {label[n]: [t.samples_per_s for t in found] for n, found in times.items()}
    state = {"format": FORMAT, "name": "made", "kind": "strong", "steps": 20, "spec": spec.dump(), "load": 0.0}
    state |= {"environment": {"cores": CORES}, "done": {}, "failed": {}}
    specs = {label[n]: spec.replace({"parallel.ranks": n}) for n in times}
    found = concluded(folder, state, made_rows, rates, values["train"]["steps"] * batch, price, specs)
    write_json(folder / "measure.json", {**state, **found.to_json()})
    return found


def numbers(text: str) -> list[tuple[float, str, float]]:
    """(value, unit, half of its last digit) of each number in a text."""
    found = []
    for written, unit in NUMBER.findall(text.replace("\u00a0", " ")):
        plain = written.replace(",", "")
        decimals = len(plain.partition("e")[0].partition(".")[2])
        power = float(plain.partition("e")[2] or 0)
        found.append((float(plain), unit, 0.5 * 10 ** (power - decimals)))
    return found


def derived(found) -> str:
    """What sentences say of a row beyond its cells, from the row's own numbers."""
    rows, words = done(found.rows), []
    for row, base in product(rows, rows):
        times = row.speedup / base.ranks, row.scaling.speedup_low / base.ranks, row.scaling.speedup_high / base.ranks
        grown = row.parts.compute_s * row.ranks / (base.parts.compute_s * base.ranks)
        words += [f"{value:.6g}×" for value in (*times, row.ranks / row.speedup, grown)]
    for row in rows:
        parts = row.parts
        seconds = (parts.compute_s, parts.exposed_s, parts.waiting_s, parts.travelling_s, parts.data_s)
        words += [f"{100 * s / row.step_s:.6g} %" for s in seconds]
        words += [str(row.ranks), str(row.batch.global_batch), str(-(-row.batch.global_batch // row.ranks))]
        words += [str(row.resources.threads), str(row.link_bits_s() and row.link_bits_s() / 1e9)]
        words += [f"{row.loads.slowest.over_others:.6g}×"] if row.loads.slowest else []
        words += [str(row.loads.slowest.rank)] if row.loads.slowest else []
        words += [f"{row.scaling.speedup_low:.6g} {row.scaling.speedup_high:.6g}"]
    return " ".join([*words, str(CORES), *(str(factor * max(r.ranks for r in rows)) for factor in (1, 2, 4))])


def unfounded(sentences: list[str], tables_text: str) -> list[str]:
    """The sentences with a number that no table has: the same unit, and the same within what is shown."""
    known = numbers(tables_text)
    return [sentence for sentence in sentences if any(not _among(one, known) for one in numbers(sentence))]


def _among(one: tuple[float, str, float], known: list[tuple[float, str, float]]) -> bool:
    value, unit, half = one
    return any(
        (unit == other or "" in (unit, other)) and abs(value - there) <= (half + also) * 1.001 + 1e-9 * abs(value)
        for there, other, also in known
    )


def check_measurement(folder: Path, made) -> None:
    found = measured(folder, made)
    contents = gather([folder])
    shown = tables(contents)
    cells = " ".join(cell for table in shown for row in (table.head, *table.rows) for cell in row)
    said = [*contents.verdict, *(f.text for f in contents.findings), *contents.notes]
    notes = [table.note for table in shown]
    assert not unfounded(said, " ".join([cells, derived(found), *notes])), cells
    chosen = {table.rows[table.chosen][0] for table in shown if table.chosen is not None}
    check_choice(contents, found, chosen)
    for name, value, _ in tiles(contents):
        assert name == "recommended" or not unfounded([value], cells), (name, value)
    terminal = io.StringIO()
    console = Console(file=terminal, width=100, highlight=False, markup=False)
    for part in show(found):
        console.print(part)
    text = terminal.getvalue()
    assert "…" not in text
    assert all(line in " ".join(text.split()) for line in found.verdict)
    marked = {line[1:].strip().rsplit("  ")[0].strip() for line in text.splitlines() if line.startswith("✓")}
    assert marked == chosen


def check_choice(contents, found, chosen: set[str]) -> None:
    """One decision: the sentence, the marked row and the large number on top are of the same."""
    first = contents.verdict[0]
    assert len(chosen) <= 1
    told = {value for name, value, _ in tiles(contents) if name == "recommended"}
    assert told == chosen
    rows = {row.label: row for row in done(found.rows)}
    if first.startswith("Take"):
        (label,) = chosen
        assert first.startswith(f"Take {label}:")
        assert rows[label].speedup > 1
        assert rows[label].scaling.speedup_low <= rows[label].speedup <= rows[label].scaling.speedup_high
    elif first.startswith("Stay"):
        assert chosen == {"1 rank"}
    elif first.startswith("Not decided"):
        assert not chosen
    for law in found.laws:
        for point in law.curve:
            assert point.low <= point.speedup * 1.0001
            assert point.speedup <= point.high * 1.0001
        if law.ceiling_high is not None:
            assert max(point.speedup for point in law.curve) <= law.ceiling_high * 1.001
    assert all(math.isfinite(f.share) and f.share <= 1.001 for f in found.findings)


CLUSTERS = st.sampled_from(["4x4090", "8xA100", "2x8xH100", "4xV100@pcie", "1xT4"])


def check_plan(values, cluster: str) -> None:
    """The marked row, the advice and the lines to type are of the same layout."""
    tokens = {"tokens": 100.0} if values["workload"] == "classifier" else {}
    found = plan(build(values), cluster=cluster, samples=20_000, **tokens)
    terminal = io.StringIO()
    console = Console(file=terminal, width=100, highlight=False, markup=False)
    for part in shown_plan(found):
        console.print(part)
    text = terminal.getvalue()
    assert "…" not in re.sub(r"… \d+ slower", "", text)
    rows = {row.devices: row for row in found.rows}
    assert found.chosen is None or found.chosen in found.rows
    for devices, times in re.findall(r"on ([\d,]+) devices? will run at ([\d.,]+)×", " ".join(found.advice)):
        told, row = float(times.replace(",", "")), rows[int(devices.replace(",", ""))]
        assert abs(told - row.speedup) <= 0.051 * max(1.0, row.speedup)
    if found.chosen is not None:
        assert found.overrides()["parallel.ranks"] == found.chosen.devices
