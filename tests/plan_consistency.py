"""Check a plan against its own rows, and against plans for the same question asked in another way."""

import re
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from hypothesis import assume
from hypothesis import strategies as st

from consistency import run_files
from paceline.config import COMMAND_LINE, build_spec
from paceline.errors import UserError
from paceline.io.format import format_short_duration
from paceline.planner.candidates import constraints_of
from paceline.planner.plan import Plan, plan
from paceline.planner.rows import HourlyRates, Requirements
from paceline.planner.search import EQUAL_SPEED
from paceline.planner.show import format_cell_amount, format_multiple, render_plan
from results import render_text

CLUSTERS = ["4x4090", "8xA100", "2x8xH100", "4xV100@pcie", "1xT4", "local", "8xL40S"]
WIDE, SHORT = 100, 28  # columns, and lines without -v


@dataclass(frozen=True)
class Question:
    values: dict
    cluster: str
    parallel: dict = field(default_factory=dict)
    requirements: Requirements = field(default_factory=Requirements)
    rates: HourlyRates = field(default_factory=HourlyRates)

    def answered(self, parallel: dict | None = None, **changed) -> Plan:
        parallel = self.parallel if parallel is None else parallel
        written = {f"parallel.{name}": COMMAND_LINE for name in parallel}
        spec = build_spec({**self.values, "parallel": parallel}, written)
        tokens = {"tokens": 100.0} if self.values["workload"] == "classifier" else {}
        given = {"cluster": self.cluster, "price": self.rates, "requirements": self.requirements}
        given |= {"samples": 20_000, **tokens}
        return plan(spec, **{**given, **changed})


PARALLEL = st.fixed_dictionaries(
    {},
    optional={
        "strategy": st.sampled_from(["auto", "ddp", "zero1", "zero2", "zero3", "fsdp"]),
        "activation_checkpointing": st.sampled_from(["none", "full"]),
        "micro_batch": st.sampled_from([1, 4]),
        "tensor": st.sampled_from([1, 2]),
        "reduce": st.sampled_from(["exact", "exact", "bf16"]),
    },
)
MAYBE = st.one_of(st.none(), st.floats(-3, 3).map(lambda power: 10**power))
QUESTIONS = st.builds(
    Question,
    run_files(["gpt2", "1b", "7b", "70b"]),
    st.sampled_from(CLUSTERS),
    PARALLEL,
    st.builds(Requirements, MAYBE, st.sampled_from([None, None, 30, 5000]), st.sampled_from([None, None, 0.3, 0.9])),
    st.builds(HourlyRates, st.sampled_from([None, 0.5, 2.0]), st.sampled_from([None, 0.2])),
)


def check_plan(asked: Question) -> None:
    try:
        found = asked.answered()
    except UserError:  # an invalid run file
        assume(False)
    text = render_text(*render_plan(found, verbose=True))
    assert "…" not in re.sub(r"… and [\d,]+ more", "", text)
    assert all(len(line.rstrip()) <= WIDE for line in text.splitlines()), text
    assert len(render_text(*render_plan(found)).splitlines()) <= SHORT
    keeps_what_is_written(asked, found)
    marks_one_row(found, text)
    adds_up(found)
    ranks_rows(found)
    splits_pay(found)
    is_the_same_alone(asked, found)
    applies_as_promised(asked, found)


def keeps_what_is_written(asked: Question, found: Plan) -> None:
    said = dict(word.split("=") for word in found.cost_model.constraints.describe().split())
    for key, value in said.items():
        assert str(asked.parallel[key.removeprefix("parallel.")]).lower() == value
    assert constraints_of(found.spec.replace({"parallel": "auto"})).describe() == ""
    free = {name for name, value in asked.parallel.items() if value in ("auto", "exact")}
    assert {f"parallel.{name}" for name in asked.parallel if name not in free} == set(said)


def marks_one_row(found: Plan, text: str) -> None:
    """One choice: its mark, its verdict, the requirements and the lines to type."""
    chosen, choice = found.chosen, found.ranking
    verdicts = {row.devices: choice.verdict(row) for row in found.rows}
    marked = re.findall(r"^✓ +([\d,]+) ", text, re.MULTILINE)
    assert set(marked) == ({f"{chosen.devices:,}"} if chosen else set())  # twice where the table is too wide for a page
    if chosen is None:
        assert not found.rows
        return
    assert chosen.devices == found.as_json()["chosen"]["devices"]
    assert found.overrides()["parallel.ranks"] == chosen.devices
    said = " ".join(text.split())
    assert bool(choice.accepted) != ("No row meets" in said)
    assert said.count("✓ is the") <= 1
    assert found.rows[0].devices > 1 or found.rows[0].price.layout.offload or "too small" not in said
    longer = found.rows[-1].price.time.compute_s > found.base.time.compute_s
    assert found.target.shared or longer == ("mostly launches" in said)
    if choice.accepted:
        assert not found.requirements.violation_of(chosen)
    if found.requirements == Requirements():
        assert chosen.run_s <= 1.05 * min(row.run_s for row in found.rows)
    dear = {row.cost_usd for row in found.rows if "cheapest" in verdicts[row.devices]}
    assert not dear or min(row.cost_usd or 0 for row in found.rows) == min(cost or 0 for cost in dear)
    for row in found.rows:
        if verdicts[row.devices] in ("no advantage", "slower"):
            better = [o for o in found.rows if o.run_s <= row.run_s and (o.cost_usd or 0) <= (row.cost_usd or 0)]
            assert [o for o in better if o is not row]


def adds_up(found: Plan) -> None:
    base = found.base
    assert base is None or base.fits
    for row in found.rows:
        assert abs(row.efficiency * row.devices - row.speedup * base.devices) <= 1e-9 * base.devices
        assert row.devices >= base.devices or row.price.layout.offload
        assert abs(row.speedup * row.price.step_s - base.step_s) <= 1e-9 * base.step_s
        assert row.devices > 1 or not row.price.time.comm_s
        assert row.price.fits
        assert row.price.layout.ranks == row.devices
        if row.hours is not None and found.rates.usd is not None:
            paid = 1 if found.target.shared else row.devices
            assert abs(row.cost_usd - paid * row.hours * found.rates.usd) <= 1e-9 * row.cost_usd
        layout = row.price.layout
        gathers = layout.strategy in ("fsdp", "hsdp") and (row.devices > 1 or layout.offload)
        assert gathers or not row.price.memory.gathered_bytes
        times, memory = (asdict(of) for of in (row.price.time, row.price.memory))
        assert abs(sum(times.values()) - times["comm_s"] - row.price.step_s) <= 1e-9 * row.price.step_s
        total = row.price.memory.total_bytes
        assert abs(sum(memory.values()) - memory["host_bytes"] - total) <= 1e-9 * total


def ranks_rows(found: Plan) -> None:
    """Each best row is the best, and rows that nothing dominates are faster the more they cost."""
    rows, choice = found.rows, found.ranking
    if not rows:
        return
    assert choice.fastest.run_s == min(row.run_s for row in rows)
    assert choice.relative_cost(choice.cheapest) == 1 == min(map(choice.relative_cost, rows))
    assert choice.most_efficient.efficiency == max(row.efficiency for row in rows)
    assert choice.knee.run_s * choice.paid_s(choice.knee) == min(row.run_s * choice.paid_s(row) for row in rows)
    front = [row for row in rows if not choice.is_dominated(row)]
    assert {choice.fastest.devices, choice.cheapest.devices} <= {row.devices for row in front}
    assert all(a.run_s > b.run_s and choice.paid_s(a) < choice.paid_s(b) for a, b in pairwise(front))
    if found.requirements.deadline_h is not None and choice.accepted:
        assert choice.paid_s(found.chosen) == min(map(choice.paid_s, choice.accepted))


def splits_pay(found: Plan) -> None:
    """A layout that divides the model is faster than all that divide it less, by more than the error."""
    for row in found.rows:
        axes = len(row.price.layout.split_axes)
        plainer = [p for p in row.found.prices if len(p.layout.split_axes) < axes and (row.price.tight or not p.tight)]
        assert all(p.step_s > (1 + EQUAL_SPEED) * row.found.prices[0].step_s or p.tight for p in plainer)


def is_the_same_alone(asked: Question, found: Plan) -> None:
    if not found.rows:
        return
    row = found.rows[len(found.rows) // 2]
    alone = asked.answered(devices=[row.devices])
    (same,) = alone.rows
    assert format_multiple(row.speedup) == format_multiple(same.speedup)
    assert format_short_duration(row.price.step_s) == format_short_duration(same.price.step_s)
    assert format_cell_amount(row.cost_usd) == format_cell_amount(same.cost_usd)
    assert row.price.layout == same.price.layout


def applies_as_promised(asked: Question, found: Plan) -> None:
    if found.chosen is None:
        return
    typed = {key.removeprefix("parallel."): value for key, value in found.overrides().items()}
    again = asked.answered({**asked.parallel, **typed}, devices=[found.chosen.devices], requirements=Requirements())
    (row,) = again.rows
    assert abs(row.price.step_s - found.chosen.price.step_s) <= 1e-9 * row.price.step_s
