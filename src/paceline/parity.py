"""The verb `check`: proof, for a run file, that the answer does not depend on how the work is spread.

The same steps are trained under each layout from the same seed; losses, gradient norms, final weights and the final
evaluation are compared with the first layout's.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed, UserError
from paceline.layout import SPREADING, Layout, from_words, layout_of
from paceline.record.events import read_steps
from paceline.record.run_dir import RunDir
from paceline.spec import Parallel, RunSpec
from paceline.training.run import RunResult, train

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2, "fp8": 5e-2}
"""Relative. Sums taken in another order differ by rounding, and rounding is all that may differ."""
PLAIN = Parallel()


@dataclass(frozen=True)
class Row:
    """One layout against the first: the largest relative difference of each quantity."""

    layout: str
    """As it was asked for."""
    ranks: int
    accumulate: int
    loss: float
    grad_norm: float | None
    """None for a fit, which has no gradients."""
    weights: float
    evaluation: float
    metrics: dict[str, float]
    worst: str
    """Where the difference is largest."""

    def agrees(self, tolerance: float) -> bool:
        return all(d <= tolerance for d in (self.loss, self.grad_norm or 0.0, self.weights, self.evaluation))


@dataclass(frozen=True)
class Parity:
    rows: list[Row]
    tolerance: float
    steps: int

    @property
    def holds(self) -> bool:
        return all(row.agrees(self.tolerance) for row in self.rows)


def check(
    spec: RunSpec,
    ranks: Sequence[int] = (1, 2),
    accumulate: Sequence[int] = (1,),
    steps: int = 20,
    *,
    layouts: Sequence[str] = (),
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Parity:
    """Train `steps` steps on each layout and compare; the first layout is the reference.

    `layouts` are short forms such as "fsdp:2+tensor:2", in place of numbers of ranks.
    """
    wanted = [(word, from_words(word)) for word in layouts] or [
        (f"{n} rank{'s' * (n > 1)}", {"ranks": n}) for n in ranks
    ]
    variants = [
        (
            f"{name}, accumulating {passes}" if len(accumulate) > 1 else name,
            passes,
            _variant(spec, values, passes, steps),
        )
        for name, values in wanted
        for passes in accumulate
    ]
    if len(variants) < 2:
        raise UserError(
            "check compares layouts and was given one; "
            "use  --ranks 1,2  or  --accumulate 1,4  or  --layouts single,fsdp:2"
        )
    for _, passes, variant in variants:
        layout = layout_of(variant)
        if layout.global_batch < layout.data * passes:
            n = layout.data
            raise UserError(
                f"--accumulate {passes}: train.global_batch={layout.global_batch} on {n} rank{'s' * (n > 1)} cannot be "
                f"divided into {passes} passes; use {layout.global_batch // n} or less"
            )
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as scratch:
        results = []
        for name, _, variant in variants:
            say(f"training {steps} steps on {name}")
            result = train(variant, out or scratch, show=False)
            if result.status != "finished":
                raise RunFailed(f"the run on {name} was {result.status}: nothing is proved")
            results.append(result)
        rows = [
            _compare(results[0], result, name, layout_of(variant))
            for (name, _, variant), result in zip(variants, results, strict=True)
        ]
    return Parity(rows, TOLERANCE[spec.train.precision], steps)


def _variant(spec: RunSpec, parallel: dict[str, Any], accumulate: int, steps: int) -> RunSpec:
    """The run file with another layout, and all that belongs to no layout as it is."""
    spec = spec.replace(
        {
            "train.epochs": None,
            "train.steps": steps,
            "train.loggers": [],
            **{f"parallel.{name}": getattr(PLAIN, name) for name in (*SPREADING, "micro_batch", "reduce")},
            **{f"parallel.{name}": value for name, value in parallel.items()},
        }
    )
    per_rank = math.ceil(spec.train.global_batch / layout_of(spec).data)
    if spec.parallel.pipeline > 1 and accumulate == 1:  # it is filled as it is by default
        return spec
    return spec.replace({"parallel.micro_batch": math.ceil(per_rank / accumulate)})


def _compare(reference: RunResult, other: RunResult, name: str, layout: Layout) -> Row:
    ours, theirs = (read_steps(RunDir(r.path).events_file(0)) for r in (reference, other))
    if len(ours) != len(theirs):
        raise RunFailed(f"{len(theirs)} steps on {name} against {len(ours)}")
    loss, at = _furthest(ours, theirs, "loss")
    norm, norm_at = _furthest(ours, theirs, "grad_norm") if "grad_norm" in ours[0] else (None, 0)
    weights, tensor = _weights_apart(reference.weights(), other.weights())
    metrics = [(apart(reference.metrics.get(k), v), f"{k} of the evaluation") for k, v in other.metrics.items()]
    metric, at_metric = max(metrics, default=(0.0, ""))
    at_loss, at_norm = f"loss at step {at}", f"gradient norm at step {norm_at}"
    worst = max((loss, at_loss), (norm or 0.0, at_norm), (weights, tensor), (metric, at_metric))
    passes = layout.passes(layout.global_batch)
    return Row(name, layout.ranks, passes, loss, norm, weights, metric, other.metrics, worst[1])


def _furthest(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], key: str) -> tuple[float, int]:
    pairs = [(apart(a[key], b[key]), a["step"]) for a, b in zip(ours, theirs, strict=True)]
    both_skipped = {a["step"] for a, b in zip(ours, theirs, strict=True) if a["skipped"] and b["skipped"]}
    return max(pair for pair in [*pairs, (0.0, 0)] if key == "loss" or pair[1] not in both_skipped)


def apart(a: float | None, b: float | None) -> float:
    """The relative difference of two numbers; what is not finite agrees with nothing."""
    if a is None or b is None or not math.isfinite(a - b):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def _weights_apart(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, str]:
    """Per tensor |a - b| / |a|, the largest; tensors that began at zero are measured against all weights."""
    if strangers := ours.keys() ^ theirs.keys():
        return math.inf, f"{min(strangers)}, which only one of them has"
    size = math.sqrt(sum(float(a.double().norm()) ** 2 / a.numel() for a in ours.values()) / len(ours))
    found = []
    for name, a in ours.items():
        floor = size * math.sqrt(a.numel()) * 0.1
        apart = float((a.double() - theirs[name].double()).norm()) / max(float(a.double().norm()), floor)
        found.append((apart if math.isfinite(apart) else math.inf, name))
    return max(found)


def table(parity: Parity) -> Any:
    """The proof as a table for rich to print."""
    from rich.table import Table

    out = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layout", "accumulated", "loss", "gradient norm", "weights", "evaluation", ""):
        out.add_column(name, justify="left" if name in ("layout", "evaluation", "") else "right")
    for row, before in zip(parity.rows, [None, *parity.rows], strict=False):
        cells = ["reference"] * 3 if before is None else [_shown(d) for d in (row.loss, row.grad_norm, row.weights)]
        metrics = "  ".join(f"{k} {v:.6g}" for k, v in row.metrics.items())
        verdict = "" if before is None else "✓" if row.agrees(parity.tolerance) else f"✗ {row.worst}"
        out.add_row(row.layout.partition(",")[0], str(row.accumulate), *cells, metrics, verdict)
    return out


def _shown(difference: float | None) -> str:
    return "-" if difference is None else f"{difference:.1e}"
