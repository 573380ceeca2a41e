"""The verb `check`: proof, for a run file, that the answer does not depend on how the work is spread.

The same steps are trained under each layout from the same seed; losses, gradient norms, final weights and the final
evaluation are compared with the first layout's.
"""

import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.api import RunResult
from paceline.config import Parallel, RunSpec, SpecSource, resolve_spec
from paceline.config.registry import describe_error
from paceline.errors import PacelineError, RunFailed, UserError
from paceline.io.arguments import option_error
from paceline.io.format import plural
from paceline.io.table import Column, Table, Tabular
from paceline.launch.environment import detect_rank, isolate_rank
from paceline.layout import LAYOUT_FIELDS, MAX_GROUP, Layout, fix_strategy, layout_of, parse_layout
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.trials.runner import train_trial
from paceline.workload import LogFn, build_workload

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "tf32": 5e-3, "fp16": 5e-3, "bf16": 2e-2, "fp8": 5e-2}
"""Relative. Sums taken in another order differ by rounding, and rounding is all that may differ."""
SHRINKS = 1e-5  # what fp64 leaves of a difference by rounding, at most; of a mistake it leaves all
DEFAULT_PARALLEL = Parallel()
Event = dict[str, Any]


class LargestDifference(NamedTuple):
    value: float
    where: str  # step, tensor or metric


class Variant(NamedTuple):
    layout: str
    name: str  # with the accumulated passes, if they vary
    accumulate: int
    spec: RunSpec

    @property
    def alone(self) -> bool:
        return self.spec.parallel.ranks == 1


@dataclass(frozen=True)
class LayoutDifference:
    layout: str
    name: str
    ranks: int
    accumulate: int
    loss: float
    grad_norm: float | None
    weights: float
    evaluation: float
    metrics: dict[str, float]
    worst: LargestDifference

    def agrees(self, tolerance: float) -> bool:
        return self.trains_alike(tolerance) and self.evaluation <= tolerance

    def trains_alike(self, tolerance: float) -> bool:
        return all(d <= tolerance for d in (self.loss, self.grad_norm or 0.0, self.weights))


@dataclass(frozen=True, repr=False)
class Parity(Tabular):
    """Whether the answer is the same on every layout."""

    rows: list[LayoutDifference]  # empty on ranks other than the main one
    tolerance: float
    steps: int
    causes: tuple[str, ...] = ()
    in_fp64: dict[str, float] = field(default_factory=dict)
    """The largest difference of layouts that disagreed, when computed in fp64."""
    no_fp64: str = ""
    """Why they could not be computed in fp64, so that rounding cannot be distinguished from a mistake."""

    @property
    def headline(self) -> str:
        same = "the answer is the same" if self.holds else "the answer depends on the layout"
        names = ", ".join(row.name for row in self.rows)
        return f"{same} within {self.tolerance:g} over {self.steps} steps on {names}{self.verdict}"

    @property
    def verdict(self) -> str:
        """Describe what fp64 has shown, where it was needed."""
        if self.in_fp64:
            what = "are rounding" if self.holds else "stay"
            return f"; larger differences {what} (fp64: {max(self.in_fp64.values()):.1e})"
        return f"; rounding or a mistake? fp64 would tell, and fails: {self.no_fp64}" if self.no_fp64 else ""

    def rows_of_table(self) -> list[dict[str, Any]]:
        names = ("name", "ranks", "accumulate", "loss", "grad_norm", "weights", "evaluation")
        return [{n: getattr(row, n) for n in names} | {"agrees": self._agrees(row)} for row in self.rows]

    @property
    def holds(self) -> bool:
        return all(map(self._agrees, self.rows))

    def _agrees(self, row: LayoutDifference) -> bool:
        return row.agrees(self.tolerance) or self.is_rounding(row)

    def is_rounding(self, row: LayoutDifference) -> bool:
        """Return whether a difference shrinks with the precision: rounding does by nine orders of magnitude."""
        exact, found = self.in_fp64.get(row.name, math.inf), row.worst.value
        return math.isfinite(found) and exact <= max(TOLERANCE["fp64"], found * SHRINKS)


def check(
    spec: SpecSource,
    ranks: Sequence[int] = (1, 2),
    accumulate: Sequence[int] = (1,),
    steps: int = 20,
    *,
    layouts: Sequence[str] = (),
    out: Path | None = None,
    log: LogFn = lambda text: None,
) -> Parity:
    """Train `steps` steps on each layout and compare; the first layout is the reference.

    `layouts` are short forms such as "fsdp:2+tensor:2", in place of numbers of ranks.
    """
    spec = resolve_spec(spec)
    wanted = [(word, parse_layout(word)) for word in layouts] or [(plural(n, "rank"), {"ranks": n}) for n in ranks]
    variants = []
    for (layout, values), passes in product(wanted, accumulate):
        name = f"{layout}, accumulating {passes}" if len(accumulate) > 1 else layout
        variants.append(Variant(layout, name, passes, build_variant_spec(spec, values, passes, steps)))
    _check_variants(variants)
    if spec.entry.batched and spec.train.batchnorm_group == "auto":
        group = _find_common_group([layout_of(variant.spec) for variant in variants])
        variants = [v._replace(spec=v.spec.replace({"train.batchnorm_group": group})) for v in variants]
    launched = detect_rank(os.environ)
    for each in variants:
        if launched is not None and each.spec.parallel.ranks not in (1, launched.world):
            started = f"check on {each.name}: {launched.launcher} started {launched.world} ranks"
            raise UserError(f"{started}; use  --ranks 1,{launched.world}  or run check without it")
    main = launched is None or launched.rank == 0

    def compare(variants: Sequence[Variant]) -> list[LayoutDifference]:
        """Train the variants; return the differences of all to the first, on the main rank."""
        results: dict[str, RunResult] = {}
        for variant in sorted(variants, key=lambda variant: variant.alone):
            if not main and variant.alone:
                continue
            if main:
                log(f"training {steps} steps on {variant.name}")
            with isolate_rank() if launched is not None and variant.alone else nullcontext():
                result = train_trial(variant.spec, out or Path(scratch), new_process=False)
            if result.status != "finished":
                raise RunFailed(f"the run on {variant.name} was {result.status}: nothing is proved")
            results[variant.name] = result
        return [compare_results(results[variants[0].name], results[v.name], v) for v in variants] if main else []

    # Ranks of a launcher may be on several machines: they share the folder that they were started in, not /tmp.
    with tempfile.TemporaryDirectory(prefix="paceline-check-", dir=None if launched is None else ".") as scratch:
        parity = Parity(compare(variants), TOLERANCE[spec.train.precision], steps)
        apart = {row.name for row in parity.rows if _is_settled_by_fp64(row, spec.train.precision)}
        if apart and launched is None:
            again = [v for v in variants if v is variants[0] or v.name in apart]
            try:
                exact = compare([v._replace(spec=v.spec.replace({"train.precision": "fp64"})) for v in again])
                parity = replace(parity, in_fp64={row.name: row.worst.value for row in exact if row.name in apart})
            except PacelineError as error:
                parity = replace(parity, no_fp64=str(error).partition("\n")[0])
    return parity if parity.holds else replace(parity, causes=_find_causes(spec))


def _is_settled_by_fp64(row: LayoutDifference, precision: str) -> bool:
    """Return whether fp64 can show that what differs is rounding.

    In 16 bits it can for metrics alone, where training agrees: those that count decisions jump with a rounded score.
    """
    tolerance = TOLERANCE[precision]
    if row.agrees(tolerance) or precision == "fp64":
        return False
    return precision in ("fp32", "tf32") or row.trains_alike(tolerance)


def _find_common_group(layouts: Sequence[Layout]) -> int | str:
    """Return the largest group of batch norm that suits all layouts; auto if there is none."""
    shares = [layout.data * layout.passes(layout.global_batch) for layout in layouts]
    batch = layouts[0].global_batch
    fits = (
        n
        for n in range(MAX_GROUP, 1, -1)
        if all(batch // s >= n and (batch % s or batch // s % n == 0) for s in shares)
    )
    return next(fits, "auto")


def _find_causes(spec: RunSpec) -> tuple[str, ...]:
    from paceline.trials.layout_causes import find_layout_causes

    try:
        found = tuple(map(str, find_layout_causes(spec)))
    except Exception as error:  # of the user's code, which may not run here
        return (f"none was found: trying out the model in one process failed ({describe_error(error)})",)
    return found or ("none shows in the model and its data in one process",)


def _check_variants(variants: Sequence[Variant]) -> None:
    if len(variants) < 2:
        use = "use  --ranks 1,2  or  --accumulate 1,4  or  --layouts single,fsdp:2"
        raise option_error("--layouts", f"check compares layouts and was given one; {use}", "missing-value")
    for variant in variants:
        layout, passes = layout_of(variant.spec), variant.accumulate
        build_workload(variant.spec).suits(layout)
        if layout.global_batch < layout.data * passes:
            most = layout.global_batch // layout.data
            wrong = f"{passes} is more than the samples of a rank; use {most} or less"
            raise option_error("--accumulate", wrong, "conflict")


def build_variant_spec(spec: RunSpec, parallel: dict[str, Any], accumulate: int, steps: int) -> RunSpec:
    """Return the spec that trains so many steps on a layout, in so many passes."""
    layout = {name: getattr(DEFAULT_PARALLEL, name) for name in (*LAYOUT_FIELDS, "micro_batch", "reduce")} | parallel
    values: dict[str, Any] = {"train.epochs": None, "train.steps": steps, "train.loggers": []}
    spec = fix_strategy(spec.replace({**values, **{f"parallel.{name}": value for name, value in layout.items()}}))
    per_rank = math.ceil(spec.train.global_batch / layout_of(spec).data)
    if spec.parallel.pipeline > 1 and accumulate == 1:  # it is filled as it is by default
        return spec
    return spec.replace({"parallel.micro_batch": math.ceil(per_rank / accumulate)})


def compare_results(reference: RunResult, other: RunResult, variant: Variant) -> LayoutDifference:
    """Return the largest differences of two runs, of which the second is the variant."""
    ours, theirs = (read_steps(RunDir(r.path).events_file(0)) for r in (reference, other))
    if len(ours) != len(theirs):
        raise RunFailed(f"{len(theirs)} steps on {variant.name} against {len(ours)}")
    loss = _find_largest_difference(ours, theirs, "loss")
    norm = _find_largest_difference(ours, theirs, "grad_norm") if "grad_norm" in ours[0] else None
    weights = compare_weights(reference.weights(), other.weights())
    metrics = [
        LargestDifference(compute_relative_difference(reference.metrics.get(name), value), f"{name} of the evaluation")
        for name, value in other.metrics.items()
    ]
    found = [loss, weights, *metrics, *([norm] if norm is not None else [])]
    layout = layout_of(variant.spec)
    return LayoutDifference(
        layout=variant.layout,
        name=variant.name,
        ranks=layout.ranks,
        accumulate=layout.passes(layout.global_batch),
        loss=loss.value,
        grad_norm=norm.value if norm is not None else None,
        weights=weights.value,
        evaluation=max((metric.value for metric in metrics), default=0.0),
        metrics=other.metrics,
        worst=max(found),
    )


def _find_largest_difference(ours: list[Event], theirs: list[Event], key: str) -> LargestDifference:
    """Find the largest difference of any step; of steps that both skipped, only the loss counts."""
    apart = [
        (compute_relative_difference(a[key], b[key]), a["step"])
        for a, b in zip(ours, theirs, strict=True)
        if key in a  # a fit may find its loss now and then
        if key == "loss" or not (a["skipped"] and b["skipped"])
    ]
    value, step = max([*apart, (0.0, 0)])
    return LargestDifference(value, f"{key.replace('grad_', 'gradient ')} at step {step}")


def compute_relative_difference(a: float | None, b: float | None) -> float:
    """Return the relative difference; infinite if a value is not finite."""
    if a is None or b is None or not math.isfinite(a - b):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def compare_weights(ours: "dict[str, Tensor]", theirs: "dict[str, Tensor]") -> LargestDifference:
    """Return the largest |a - b| / |a| of a tensor; those that began at zero are measured against all weights.

    Whole numbers (counters, the state of random generators) are not weights: their size would hide what these do.
    """
    if strangers := ours.keys() ^ theirs.keys():
        return LargestDifference(math.inf, f"{min(strangers)}, which only one of them has")
    ours = {name: a for name, a in ours.items() if a.is_floating_point()} or ours
    size = math.sqrt(sum(float(a.double().norm()) ** 2 / a.numel() for a in ours.values()) / len(ours))
    found = []
    for name, a in ours.items():
        if a.shape != theirs[name].shape:
            return LargestDifference(math.inf, name)
        floor = size * math.sqrt(a.numel()) * 0.1
        value = float((a.double() - theirs[name].double()).norm()) / max(float(a.double().norm()), floor)
        found.append(LargestDifference(value if math.isfinite(value) else math.inf, name))
    return max(found)


def build_parity_table(parity: Parity) -> Table:
    table = Table(
        *("layout", "accumulated", "loss", "gradient norm", "weights"),
        *(Column("evaluation", "left"), Column("", "left")),
    )
    for number, row in enumerate(parity.rows):
        differences = ["-" if d is None else f"{d:.1e}" for d in (row.loss, row.grad_norm, row.weights)]
        metrics = "  ".join(f"{k} {v:.6g}" for k, v in row.metrics.items())
        rounding = f"✓ rounding in {row.worst.where}" if parity.is_rounding(row) else f"✗ {row.worst.where}"
        verdict = "✓" if row.agrees(parity.tolerance) else rounding
        cells = ["reference"] * 3 if number == 0 else differences
        table.add_row(row.layout, str(row.accumulate), *cells, metrics, verdict if number else "")
    return table
