"""Read runs for a report: losses with their source lines, and how runs compare."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from paceline.config import RunSpec
from paceline.errors import UserError
from paceline.io.arguments import option_error
from paceline.io.format import number
from paceline.measurement.run_times import RunTimes, read_run_times
from paceline.runlog.events import drop_undone_steps, extract_metrics, read_event_lines
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import Score, Summary, find_score, read_summary
from paceline.trainer.resume_guard import LENGTHS, MAY_CHANGE, MUST_STAY
from paceline.trials.check import TOLERANCE

SAME_ANSWER = tuple(key for key in MAY_CHANGE if key not in ("data.path", "data.test_path", "data.tokenizer"))
"""Keys, or how they begin, with which the losses of a run stay what they are; data that were moved may be others."""
CHECK_STEPS = 20  # that  paceline check  trains by default
MAX_STEPS = 80_000  # of a run, about; of a longer one, those with the lowest and the highest losses and the newest
T = TypeVar("T")


class LossPoint(NamedTuple):
    step: int
    loss: float
    line: int  # of the events file, from 1


class EvaluationPoint(NamedTuple):
    step: int
    metrics: dict[str, float]
    line: int


@dataclass(frozen=True)
class RunView:
    name: str
    path: Path
    spec: RunSpec
    summary: Summary | None
    start: dict[str, Any]
    points: tuple[LossPoint, ...]
    torn: int  # unreadable lines
    times: RunTimes | None
    curves: dict[str, list[float]]  # values of each point, by name of the chart
    epoch_s: list[float]  # of whole epochs
    evaluations: tuple[EvaluationPoint, ...] = ()
    usage: tuple[dict[str, Any], ...] = ()
    noticed: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        ended = self.summary.ranks if self.summary is not None else None
        return int(ended or self.start.get("ranks") or self.spec.parallel.ranks)

    @property
    def status(self) -> str:
        return self.summary.status if self.summary is not None else "not finished"

    @property
    def file(self) -> Path:
        return RunDir(self.path).events_file(0)


@dataclass(frozen=True)
class Warmup:
    """The steps or epochs at the beginning of a run that are in no speed."""

    count: int
    unit: Literal["steps", "epochs"] = "epochs"

    def count_steps(self, steps: Sequence[dict[str, Any]]) -> int:
        """Return the number of the last step that is left out."""
        if self.unit == "steps":
            return self.count
        first = next((step["epoch"] for step in steps if "epoch" in step), 0)
        return max((s["step"] for s in steps if s.get("epoch", first) < first + self.count), default=0)


def parse_warmup(text: str) -> Warmup | None:
    """Parse `1` or `1 epochs`, and `50 steps`."""
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,9})\s*(steps?|epochs?)?", text.strip())
    if found is None:
        raise option_error("--warmup", f"{text!r:.40} is not a number of epochs; use  1  or  '50 steps'")
    return Warmup(int(found[1]), "steps" if (found[2] or "").startswith("step") else "epochs")


def read_run_view(path: Path, name: str = "", warmup: Warmup | None = None) -> RunView:
    """Read a run with its losses; without its steps after the `warmup` there are no times."""
    run = RunDir.open(path)
    spec = run.recorded_spec()
    lines = list(read_event_lines(run.events_file(0), MAX_STEPS))
    events = [event | {"line": line} for line, event in lines if event is not None]
    steps = drop_undone_steps(events)
    if not steps:
        file = run.events_file(0)
        empty = "is empty" if file.is_file() else "does not exist"
        reason = "it ended before its first step" if lines else f"{file.relative_to(run.path)} {empty}"
        raise UserError(f"{path} has no step that can be read: {reason}")
    points = tuple(
        LossPoint(s["step"], math.nan if s.get("loss") is None else float(s["loss"]), s["line"]) for s in steps
    )
    start = next((event for event in events if event["kind"] == "start"), {})
    summary = read_summary(run.summary_file) if run.summary_file.is_file() else None
    times = None
    with suppress(UserError):
        skip = warmup.count_steps(steps) if warmup else 0
        times = read_run_times(run, steps, skip) if summary is not None else None
    evaluated = drop_undone_steps((e for e in events if e["kind"] in ("evaluate", "resume")), "evaluate")
    return RunView(
        name=name or run.name,
        path=path,
        spec=spec,
        summary=summary,
        start=start,
        points=points,
        torn=len(lines) - len(events),
        times=times,
        curves=_extract_curves(steps),
        epoch_s=_sum_epochs(steps, warmup.count if warmup and warmup.unit == "epochs" else 0),
        evaluations=tuple(EvaluationPoint(e["step"], extract_metrics(e), e["line"]) for e in evaluated),
        usage=tuple(event for event in events if event["kind"] == "usage"),
        noticed=tuple(str(event.get("text", "")) for event in events if event["kind"] == "notice"),
    )


def _extract_curves(steps: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    def read(name: str) -> list[float]:
        return [_to_float(step.get(name)) for step in steps]

    step_s = [math.nan if step.get("compiled") else _to_float(step.get("step_s")) or math.nan for step in steps]
    return {
        "rate": [batch / s for batch, s in zip(read("batch"), step_s, strict=True)],
        "compute": [100 * part / s for part, s in zip(read("compute_s"), step_s, strict=True)],
        "lr": read("lr"),
        "gradient": read("grad_norm"),
    }


def _sum_epochs(steps: Sequence[dict[str, Any]], skip: int) -> list[float]:
    """Return the seconds of the steps of each whole epoch; none of a run so long that not all steps were read."""
    by_epoch: dict[int, list[dict[str, Any]]] = {}
    for step in steps:
        by_epoch.setdefault(step.get("epoch") or 0, []).append(step)
    whole = max(map(len, by_epoch.values()), default=0)  # an unfinished one has fewer steps
    epochs = [some for some in list(by_epoch.values())[skip:] if len(some) == whole]
    if any(some[-1]["step"] - some[0]["step"] != whole - 1 for some in epochs):
        return []
    return [math.fsum(_to_float(step.get("step_s")) for step in some) for some in epochs]


def _to_float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def thin_points(points: Sequence[LossPoint], most: int) -> list[LossPoint]:
    """Keep about `most` points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    kept = {points[0], points[-1]}
    for stretch in split_stretches(points, most / 2):
        finite = [p for p in stretch if math.isfinite(p.loss)] or stretch[:1]
        kept |= {min(finite, key=lambda p: p.loss), max(finite, key=lambda p: p.loss)}
    return sorted(kept, key=lambda p: p.step)


def split_stretches(values: Sequence[T], most: float) -> list[Sequence[T]]:
    """Cut values into at most so many stretches of equal length."""
    width = max(1, math.ceil(len(values) / most))
    return [values[i : i + width] for i in range(0, len(values), width)]


def compute_loss_differences(reference: RunView, other: RunView) -> list[tuple[int, float]]:
    """Return (step, |other - reference| / |reference|) at common steps; inf if one is not finite, no pair if both."""
    ours = {p.step: p.loss for p in reference.points}
    pairs = [(p.step, ours[p.step], p.loss) for p in other.points if p.step in ours]
    return [
        (step, abs(b - a) / max(abs(a), 1e-30) if math.isfinite(a) and math.isfinite(b) else math.inf)
        for step, a, b in pairs
        if math.isfinite(a) or math.isfinite(b)
    ]


@dataclass(frozen=True)
class Comparison:
    runs: int
    steps: int  # common to all
    differing: tuple[str, ...]  # keys that change the training
    largest: float  # relative to the first run
    run: str
    step: int
    tolerance: float  # that of `check`
    parted: int | None = None  # first step with a larger difference

    @property
    def text(self) -> str:
        if self.differing:
            return f"The runs differ in {', '.join(self.differing[:4])}, so their losses are not expected to be equal."
        if not self.steps:
            return "The runs have no loss of the same step, so nothing is compared."
        same, other = f"All {self.runs} runs trained the same thing", "The runs did not train the same thing"
        where = f"{self.run} at step {self.step}"
        if math.isinf(self.largest):
            return f"{other}: only some losses are finite ({where})."
        if not self.largest:
            return f"{same}: the losses are equal to the last digit over {self.steps} steps."
        difference = f"the losses differ by {self.largest:.1e} at most (relative, {where})"
        if self.parted is None:
            return f"{same}: {difference}, over {self.steps} steps."
        if self.parted <= CHECK_STEPS:
            return f"{other}: {difference}, and check allows {self.tolerance:g}."
        within = f"All {self.runs} runs agree within {self.tolerance:g}, as check asks, for {self.parted - 1} steps"
        return f"{within}; then {difference}: rounding grows over the steps."


def compare_runs(runs: Sequence[RunView]) -> Comparison | None:
    if len(runs) < 2:
        return None
    first, *others = runs
    values = [_select_deciding_values(run.spec) for run in runs]
    keys = dict.fromkeys(key for found in values for key in found)
    differing = tuple(key for key in keys if any(found.get(key) != values[0].get(key) for found in values[1:]))
    found = [] if differing else [(run.name, compute_loss_differences(first, run)) for run in others]
    each = [(difference, name, at) for name, differences in found for at, difference in differences]
    largest, name, step = max(each, key=lambda one: one[0], default=(0.0, "", 0))
    tolerance = TOLERANCE[first.spec.train.precision]
    apart = [at for difference, _, at in each if difference > tolerance]
    steps = min((len(differences) for _, differences in found), default=0)
    return Comparison(len(runs), steps, differing, largest, name, step, tolerance, min(apart, default=None))


def select_work(spec: RunSpec) -> dict[str, Any]:
    """Return the values that decide how much work a sample is, so that the speeds of equal ones can be compared."""
    alike = ("workload", "model.", "data.", "train.precision", "train.optimizer")
    return {k: v for k, v in _select_deciding_values(spec).items() if k.startswith(alike)}


def _select_deciding_values(spec: RunSpec) -> dict[str, Any]:
    """Return the values of a spec that decide the losses of its steps."""
    same = (*SAME_ANSWER, *(LENGTHS if spec.train.schedule == "constant" and not spec.train.warmup else ()))
    return {k: v for k, v, *_ in spec.fields() if k in MUST_STAY or not k.startswith((*same, "cluster"))}


NOT_COMPARED = ("name", "data.cache")
MAX_KEYS = 5


@dataclass(frozen=True)
class Experiments:
    """Runs, the best first if they share a score; the keys in which they differ, and their values."""

    runs: tuple[RunView, ...]
    scores: tuple[Score | None, ...]
    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    @property
    def score(self) -> str:
        names = {score.name for score in self.scores if score is not None}
        return names.pop() if len(names) == 1 else ""

    @property
    def best(self) -> int | None:
        known = [i for i, score in enumerate(self.scores) if score is not None]
        return known[0] if self.score and len(known) > 1 else None

    @property
    def tied(self) -> bool:
        """Return whether the best two runs have the same score."""
        best = [score.value for score in self.scores if score is not None][:2]
        return self.best is not None and best[0] == best[-1]

    @property
    def caution(self) -> str:
        """Return a sentence if the scores are not of the same test set; "" if they are."""
        scored = [
            run.summary.evaluation for run, score in zip(self.runs, self.scores, strict=True) if score and run.summary
        ]
        counts = sorted({evaluation.evaluated for evaluation in scored if evaluation.evaluated})
        keys = [key for key in self.keys if key.startswith("data.") or key == "train.evaluate_on"]
        if len(scored) < 2 or not (keys or len(counts) > 1):
            return ""
        why = f"{' and '.join(f'{count:,}' for count in counts)} samples" if len(counts) > 1 else ", ".join(keys)
        return f"Caution: the runs may have other test sets ({why}), so that their scores say little of each other."

    @property
    def text(self) -> str:
        if self.best is None:
            return ""
        scored = [(run.name, score) for run, score in zip(self.runs, self.scores, strict=True) if score is not None]
        asked = ", ".join(f"{k}={v}" for k, v in zip(self.keys[:MAX_KEYS], self.values[self.best], strict=False))
        return describe_best(scored, f" of {len(scored)} runs" * (len(scored) > 2), f" with {asked}" * bool(asked))


def describe_best(scored: Sequence[tuple[str, Score]], of: str = "", more: str = "") -> str:
    """Return which of several names, the best first, has the best score, and which is next."""
    (name, score), (second, behind), *_ = scored
    if score.value == behind.value:
        return f"{name} and {second} have the same {score.name}, {number(score.value)}."
    extreme = "lowest" if score.less_is_better else "highest"
    best = f"{name} has the {extreme} {score.name}{of}, {number(score.value)}{more}"
    return f"{best}; next is {second}, {number(behind.value)}."


def compare_experiments(runs: Sequence[RunView]) -> Experiments:
    scored = [(run, find_score(run.summary)) for run in runs]
    if len({score.name for _, score in scored if score is not None}) == 1:
        scored.sort(key=lambda pair: -math.inf if pair[1] is None else pair[1].goodness, reverse=True)
    best_first, scores = zip(*scored, strict=True)
    asked = [{key: value for key, value, *_ in run.spec.fields()} for run in best_first]
    every = dict.fromkeys(key for values in asked for key in values if key not in NOT_COMPARED)
    differing = tuple(key for key in every if len({str(values.get(key)) for values in asked}) > 1)
    values = tuple(tuple(_format_value(values.get(key)) for key in differing) for values in asked)
    return Experiments(best_first, scores, differing, values)


def _format_value(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def describe_other_keys(found: Experiments) -> str:
    left = found.keys[MAX_KEYS:]
    return f"They also differ in {', '.join(left)}." if left else ""
