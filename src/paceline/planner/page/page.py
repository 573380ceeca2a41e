"""Render a plan as one offline HTML page with sliders; every setting is planned beforehand."""

import itertools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from paceline.config import RunSpec, Train
from paceline.errors import UserError
from paceline.io.format import format_short_duration, percent, size
from paceline.io.html_page import build_content_policy, compile_template, dump_page_data
from paceline.planner.advice import describe_base
from paceline.planner.candidates import PricedLayout, RejectedFamily, format_words
from paceline.planner.formulas.simulation import LANES
from paceline.planner.plan import Plan
from paceline.planner.rows import PlanRow
from paceline.planner.search import SearchResult
from paceline.planner.show import format_cell_amount, format_multiple, format_run_time
from paceline.planner.training_cost import TrainingCostModel

ASSETS = Path(__file__).parent / "assets"
LENGTH_KEYS = ("data.sequence", "data.max_length")  # keys of a sample's length, where a workload has one
PAGE_BATCH_FACTORS = (0.25, 0.5, 1, 2, 4)
PAGE_LENGTH_FACTORS = (0.5, 1, 2)
SHOWN_PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
DEADLINES_H = (0.1, 0.25, 0.5, 1, 2, 4, 8, 12, 24, 48, 72, 168, 336, 720, 1440, 2160, 4320, 8760)
MAX_REASONS = 6
MAX_STAGES_SHOWN, MIN_GAP = 8, 0.5
MAX_LAYOUTS = 4  # beside the recommended one, on each number of devices

PlanFn = Callable[[RunSpec, Sequence[int], str], Plan]
"""Plans a spec on numbers of devices of a cluster, with the options of the command."""


def render_plan_page(plans: Sequence[Plan], make_plan: PlanFn, command: list[str]) -> str:
    """Return the plan page as HTML, a panel per cluster; call `make_plan` for every setting of the sliders (slow).

    The page shows `command`, to which each setting adds its overrides.
    """
    from markupsafe import Markup

    first, wording = plans[0], plans[0].cost_model.wording
    data: dict[str, Any] = {
        "command": shlex.join(command),
        "deadlines_h": sorted({*DEADLINES_H, *filter(None, (first.requirements.deadline_h,))}),
        "wishes": vars(first.requirements),
        "step": wording.step,
        "times": dict(wording.times),
        "clusters": [build_page_grid(plan, make_plan) for plan in plans],
    }
    html, script, style = ((ASSETS / f"plan.{kind}").read_text(encoding="utf-8") for kind in ("html.j2", "js", "css"))
    page: str = compile_template(html).render(
        plan=first,
        sources=[plan.target.whole.device for plan in plans],
        steps=[build_lanes(plan) for plan in plans if plan.timeline],
        data=Markup(dump_page_data(data)),
        script=Markup(script),
        policy=build_content_policy(script),
        style=Markup(style),
    )
    return page


class Bar(NamedTuple):
    x: float  # of 1,000, as `width`
    width: float
    name: str
    kind: str


def build_lanes(plan: Plan) -> dict[str, Any]:
    """Build the lanes of the first stages' ranks in a step of the chosen layout; work in many pieces is one bar."""
    assert plan.timeline is not None
    assert plan.chosen is not None
    bars: dict[tuple[int, str], list[Bar]] = {}
    end_s = max(span.end_s for span in plan.timeline.spans)
    for span in plan.timeline.spans:
        x, width = 1000 * span.start_s / end_s, 1000 * (span.end_s - span.start_s) / end_s
        lane = bars.setdefault((span.stage, span.lane), [])
        if lane and lane[-1].name == span.name and x - lane[-1].x - lane[-1].width < MIN_GAP:
            lane[-1] = lane[-1]._replace(width=x + width - lane[-1].x)
        elif width > MIN_GAP:
            lane.append(Bar(x, width, span.name, span.name.rstrip(" 0123456789")))
    order = sorted(bars, key=lambda key: (key[0], LANES.index(key[1])))
    shown = [(*key, bars[key]) for key in order if bars[key] and key[0] < MAX_STAGES_SHOWN]
    layout = plan.chosen.price.layout
    return {
        "name": f"{plan.target.name}, {layout.family}",
        "kinds": list(dict.fromkeys(bar.kind for *_, lane in shown for bar in lane)),
        "lanes": [(stage * (layout.ranks // layout.pipeline), lane, found) for stage, lane, found in shown],
        "time": f"{format_short_duration(end_s)} of {format_short_duration(plan.timeline.step_s)}",
        "batches": f"{plan.timeline.played:,} of {plan.timeline.passes:,}",
    }


class SliderAxis(NamedTuple):
    key: str
    name: str
    unit: str
    values: tuple[Any, ...]
    now: Any  # as the run file has it


def build_axes(plan: Plan) -> list[SliderAxis]:
    """Build the sliders of a training; a fit by passes has none."""
    if not isinstance(plan.cost_model, TrainingCostModel):
        return []
    spec, train = plan.spec, plan.spec.train
    batch = train.global_batch
    batches = tuple(sorted({max(1, round(batch * times)) for times in PAGE_BATCH_FACTORS}))
    found = [SliderAxis("train.global_batch", "batch", "samples in a step", batches, batch)]
    for key in LENGTH_KEYS:
        length = getattr(spec.data, key.partition(".")[2], None)
        if length and plan.cost_model.unit == "tokens":
            lengths = tuple(sorted({max(1, round(length * times)) for times in PAGE_LENGTH_FACTORS}))
            found.append(SliderAxis(key, "sequence", "tokens in a sample", lengths, length))
            break
    known = get_args(Train.model_fields["precision"].annotation)
    rates = plan.target.whole.device.flops_s
    kinds = [p for p in SHOWN_PRECISIONS if p in known and (p == train.precision or p in rates)]
    return [*found, SliderAxis("train.precision", "precision", "", tuple(kinds) or (train.precision,), train.precision)]


def setting_overrides(plan: Plan, axes: list[SliderAxis], values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the overrides that lead to a setting; a run with `train.steps` keeps its number of tokens."""
    changed = {axis.key: value for axis, value in zip(axes, values, strict=True) if value != axis.now}
    steps = plan.spec.train.steps
    sizes = [(a.now, v) for a, v in zip(axes, values, strict=True) if isinstance(v, int) and a.key in changed]
    if steps and sizes:
        work = float(steps)
        for now, value in sizes:
            work *= now / value
        changed["train.steps"] = max(1, round(work))
    return changed


def build_page_grid(plan: Plan, make_plan: PlanFn) -> dict[str, Any]:
    """Build the panel of one cluster: every setting of its sliders, planned."""
    axes, whole = build_axes(plan), plan.target.whole
    counts = sorted({*(r.devices for r in plan.rows), *(f.devices for f in plan.misfits)})
    return {
        "name": plan.target.name,
        "shape": f"{f'{whole.nodes} × ' * (whole.nodes > 1)}{whole.per_node} × {whole.device.name}",
        "axes": [axis._asdict() for axis in axes],
        "devices": counts,
        "price": plan.rates.usd,
        "spot": plan.rates.spot_usd,
        "take_spot": plan.rates.take_spot,
        "one_machine": plan.target.shared,
        "chosen": plan.chosen.devices if plan.chosen else counts[-1],
        "settings": [
            _plan_setting(plan, axes, values, make_plan, counts)
            for values in itertools.product(*(a.values for a in axes))
        ],
    }


def _plan_setting(
    plan: Plan, axes: list[SliderAxis], values: tuple[Any, ...], make_plan: PlanFn, counts: list[int]
) -> dict[str, Any]:
    changed = setting_overrides(plan, axes, values)
    words = [f"{key}={value}" for key, value in changed.items()]
    try:
        found = make_plan(plan.spec.replace(changed), counts, plan.target.name)
    except UserError as error:
        return {"words": words, "impossible": str(error)}
    reasons = {f.devices: _select_reasons(f.rejected) for f in (*(r.found for r in found.rows), *found.misfits)}
    return {
        "words": words,
        "headline": found.cost_model.headline(),
        "base": describe_base(found.cost_model, found.base) if found.base else "",
        "rows": {row.devices: _list_layouts(found, row) for row in found.rows},
        "reasons": reasons | {rejected.devices: [rejected.reason] for rejected in found.impossible},
        "nearest": {f.devices: _nearest_json(f) for f in found.misfits},
        "advice": list(found.advice),
        "links": found.links.describe() if found.links else "",
    }


def _list_layouts(plan: Plan, row: PlanRow) -> list[dict[str, Any]]:
    """Return a row under its recommended layout, then under the next ones, which the page can switch to."""
    others = [p for p in row.found.prices if p is not row.price][:MAX_LAYOUTS]
    pauses = plan.cost_model.pauses_s
    return [_row_json(plan, replace(row, price=p, pauses_s=pauses(p))) for p in (row.price, *others)]


def _nearest_json(found: SearchResult) -> dict[str, Any] | None:
    """Return what exceeds the memory by least, if nothing fits."""
    tried = [r.nearest for r in found.rejected if r.nearest is not None and r.nearest.over_bytes > 0]
    return _memory_json(min(tried, key=lambda p: p.over_bytes)) if tried else None


def _memory_json(price: PricedLayout) -> dict[str, Any]:
    memory, terms = price.memory, price.memory.terms.items()
    return {
        "layout": price.layout.family + ", states in host memory" * price.layout.offload,
        "memory": [[words, value, size(value)] for name, words in terms if (value := getattr(memory, name))],
        "total_bytes": memory.total_bytes,
        "capacity_bytes": price.capacity_bytes,
        "room": f"{size(memory.total_bytes)} of {size(price.capacity_bytes)}",
        "most": size(price.memory_band_bytes[1]),
    }


def _row_json(plan: Plan, row: PlanRow) -> dict[str, Any]:
    """Return the amounts of a row as they are compared, and as the tables print them."""
    price = row.price
    times = ((name, getattr(price.time, name)) for name in plan.cost_model.wording.times)
    return {
        **_memory_json(price),
        "layout": plan.cost_model.layout_name(price).replace(" *", ", states in host memory"),
        "apply": format_words(plan.cost_model.overrides(price.layout)),
        "step_s": price.step_s,
        "step": format_short_duration(price.step_s),
        "hours": row.hours,
        "long": format_run_time(row.hours),
        "run_s": row.run_s,
        "efficiency": row.efficiency,
        "speedup": format_multiple(row.speedup),
        "efficient": percent(row.efficiency),
        "kwh": format_cell_amount(row.energy_kwh),
        "tight": price.tight,
        "time": [[name, value, format_short_duration(value)] for name, value in times if value > 0],
    }


def _select_reasons(rejected: tuple[RejectedFamily, ...]) -> list[str]:
    """Return why layouts were rejected: the simplest first, one of each kind."""
    kinds: dict[tuple[object, ...], str] = {}
    for one in sorted(rejected, key=lambda r: (r.parts, r.over_bytes)):
        kinds.setdefault((*one.group, one.axes), f"{one.family}: {one.reason}")
    return list(kinds.values())[:MAX_REASONS]
