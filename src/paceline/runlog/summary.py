"""The summary of a run: computed from its step events, written as summary.json and printed when the run ends."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.config import RunSpec
from paceline.errors import UserError
from paceline.io.files import from_flat, read_json
from paceline.io.format import duration, format_metrics, number, percent, plural, size, to_encodable
from paceline.io.terminal import COLUMNS
from paceline.runlog.events import extract_metrics
from paceline.runlog.timers import TIMES

if TYPE_CHECKING:
    from rich.console import Console


FEW = 12  # with more classes, only those with the lowest F1 are shown
EACH = ("precision", "recall", "f1", "support")
Event = Mapping[str, Any]


@dataclass(frozen=True)
class ClassResult:
    """Results of one class, with `support` samples; None where there was nothing to divide by."""

    name: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int

    def cells(self) -> tuple[str, ...]:
        shown = ("–" if value is None else f"{value:.3f}" for value in (self.precision, self.recall, self.f1))
        return (self.name, *shown, number(self.support))


def read_class_results(event: Event) -> list[ClassResult]:
    """Read the results of an evaluation by class; none where it was not one of classes."""
    columns: list[Any] = [event.get(name) for name in EACH]
    if not all(isinstance(column, list | tuple) for column in columns):
        return []
    rows, names = list(zip(*columns, strict=False)), event.get("classes") or ()
    if len(names) != len(rows):  # of a workload that names none, or not all of them
        names = range(len(rows))
    return [ClassResult(str(name), *values) for name, values in zip(names, rows, strict=True)]


def select_class_results(event: Event) -> tuple[Sequence[ClassResult], int]:
    """Return the classes to show, and how many are left out."""
    results = read_class_results(event)
    if len(results) <= FEW:
        return results, 0
    worst = sorted(results, key=lambda result: 1.0 if result.f1 is None else result.f1)
    return worst[:FEW], len(results) - FEW


def describe_baseline(event: Event) -> str:
    """Return a sentence if always predicting one class would be as accurate, else an empty string."""
    accuracy, majority = event.get("accuracy"), event.get("majority")
    if accuracy is None or majority is None or accuracy > majority:
        return ""
    return f"accuracy no better than always predicting {_most_frequent_class(event)} ({majority:.3f})"


def _most_frequent_class(event: Mapping[str, Any]) -> str:
    results = read_class_results(event)
    return max(results, key=lambda result: result.support).name if results else "the most frequent class"


LAST = 10  # steps whose losses are averaged; a fifth of a run of fewer than 50
AVERAGED = (*TIMES, "load_s", "batch", "tokens")
FEW_STEPS = 5
SHARES = ("compute", "data", "exposed", "other")  # parts of a step


@dataclass(frozen=True)
class TrainingTotals:
    """How much was trained."""

    samples: int = 0
    steps: int = 0
    skipped_steps: int = 0
    epochs: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """The last evaluation, of `evaluated` of the `held_out` samples, and the event of the best one."""

    metrics: dict[str, float] = field(default_factory=dict)
    evaluated: int | None = None
    held_out: int | None = None
    arrays: dict[str, Any] = field(default_factory=dict)  # per-class results and the confusion matrix
    best: dict[str, Any] | None = None
    score: str = ""  # metric that decides which evaluation is best; with a minus, lower is better


@dataclass(frozen=True)
class Summary:
    """Results of a run; None where unknown or not measured."""

    name: str = ""
    status: str = "not finished"
    why: str = ""
    layout: str = ""  # as an equation of the global batch
    ranks: int | None = None
    parameters: int | None = None
    trained: TrainingTotals = TrainingTotals()
    seconds: float = 0.0  # of the whole run, with its start, evaluations and checkpoints
    in_steps_s: float = 0.0
    compiled_steps: int = 0  # excluded from speed and medians
    compiled_s: float = 0.0
    samples_per_s: float | None = None  # speed and times are medians after the warm-up
    tokens_per_s: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None  # mean of the last `loss_last_steps` steps
    loss_last_steps: int = 1
    evaluation: Evaluation = field(default_factory=Evaluation)
    differs_from: dict[str, Any] | None = None  # from plain data parallelism: why, and by how much
    median: dict[str, float | None] = field(default_factory=dict)  # by the names in TIMES
    mean: dict[str, float | None] = field(default_factory=dict)
    share: dict[str, float | None] = field(default_factory=dict)  # parts of the mean step, see `_shares`
    peak_bytes_per_rank: tuple[int, ...] = ()


def read_summary(file: Path) -> Summary:
    """Read summary.json; raise UserError if it is missing or damaged."""
    values = {name: value for name, value in read_json(file).items() if value is not None}
    try:
        return from_flat(Summary, values)
    except (TypeError, ValueError):
        raise UserError(f"{file} is damaged: its values are not those of a summary") from None


def compute_summary(
    spec: RunSpec,
    layout_equation: str,
    steps: Sequence[Event],
    status: str,
    epoch_samples: int | None = None,
    workers: int = 1,
) -> Summary:
    """Compute a summary from "step" events; the caller adds the rest with `dataclasses.replace`."""
    apart = spec.parallel.reduce in ("local_sgd", "diloco")
    compiled = [step for step in steps if step.get("compiled")]
    steady = average_rounds(drop_warmup_steps(steps), max(workers, spec.parallel.local_steps if apart else 1))
    losses = _list_numbers([step for step in steps if not step.get("skipped")], "loss")
    last = losses[-max(1, min(LAST, len(losses) // 5)) :]
    newest = steps[-1] if steps else {"samples": 0, "step": 0}
    samples = int(newest["samples"])
    in_steps_s = math.fsum(_list_numbers(steps, "step_s"))
    numbers = {name: _list_numbers(steady, name) for name in TIMES}
    return Summary(
        name=spec.name,
        status=status,
        layout=layout_equation,
        ranks=spec.parallel.ranks,
        trained=TrainingTotals(
            samples=samples,
            steps=int(newest["step"]),
            skipped_steps=sum(bool(step.get("skipped")) for step in steps),
            epochs=round(samples / epoch_samples, 6) if epoch_samples else None,
        ),
        seconds=in_steps_s,
        in_steps_s=in_steps_s,
        compiled_steps=len(compiled),
        compiled_s=math.fsum(_list_numbers(compiled, "step_s")),
        samples_per_s=compute_median_rate(steady, "batch"),
        tokens_per_s=compute_median_rate(steady, "tokens"),
        loss_first=losses[0] if losses else None,
        loss_last=statistics.fmean(last) if last else None,
        loss_last_steps=max(1, len(last)),
        median={name: _compute_median(known) for name, known in numbers.items()},
        mean={name: statistics.fmean(known) if known else None for name, known in numbers.items()},
        share=_shares(steady),
    )


def build_evaluation(last: Mapping[str, Any], best: Mapping[str, Any] | None = None, score: str = "") -> Evaluation:
    """Build an evaluation from the last and the best "evaluate" event."""
    arrays = {name: value for name, value in last.items() if isinstance(value, list | tuple)}
    numbers = {name: value for name, value in (best or {}).items() if not isinstance(value, list | tuple)}
    return Evaluation(extract_metrics(last), last.get("n"), last.get("of"), arrays, numbers or None, score)


USUAL_SCORES = ("accuracy", "dice", "-loss")  # first of these that was measured


@dataclass(frozen=True)
class Score:
    """The metric that runs are compared by, at its best evaluation."""

    name: str
    value: float
    step: int | None
    less_is_better: bool

    @property
    def goodness(self) -> float:
        return -self.value if self.less_is_better else self.value

    @property
    def title(self) -> str:
        """Return the name with an arrow in the direction that is better."""
        return f"{self.name} {'↓' if self.less_is_better else '↑'}"


def find_score(summary: Summary | None) -> Score | None:
    """Return the score of a run, or None if it was not evaluated."""
    if summary is None:
        return None
    evaluation = summary.evaluation
    metrics: Mapping[str, Any] = evaluation.best or evaluation.metrics
    wanted = evaluation.score or next((name for name in USUAL_SCORES if name.removeprefix("-") in metrics), "")
    name = wanted.removeprefix("-")
    if not _is_number(metrics.get(name)):
        return None
    step = metrics.get("step") if evaluation.best else summary.trained.steps
    return Score(name, float(metrics[name]), step, name != wanted)


def describe_result(summary: Summary) -> str:
    """Return the score of a run against guessing, in one sentence; "" if it was not evaluated."""
    score = find_score(summary)
    if score is None:
        return ""
    event = {**summary.evaluation.metrics, **summary.evaluation.arrays, score.name: score.value}
    text = f"{score.name} {number(score.value)} ({'lower' if score.less_is_better else 'higher'} is better)"
    accuracy, majority = event.get("accuracy"), event.get("majority")
    if accuracy is None or majority is None:
        return text
    guess = f"always predicting {_most_frequent_class(event)}"
    if accuracy <= majority:
        return f"no better than guessing: accuracy {number(accuracy)}, and {guess} gives {number(majority)}"
    before = "" if score.name == "accuracy" else f"{text}, "
    return f"{before}accuracy {number(accuracy)}, against {number(majority)} for {guess}"


Show = bool | Literal["progress"]
"""What a run prints: all, nothing, or all but the summary at its end."""


def print_summary(summary: Summary, console: "Console") -> None:
    """Print the result of a run, then how it was trained and how fast, in at most 100 columns."""
    from rich.table import Table
    from rich.text import Text

    style = {"finished": "bold green", "failed": "bold red"}.get(summary.status, "bold yellow")
    title = Text.assemble((summary.name, "bold"), " ", (summary.status, style), f" after {duration(summary.seconds)}")
    result = describe_result(summary) if summary.status == "finished" else ""
    if outcome := "; ".join(filter(None, (result, summary.why))):
        title.append(to_encodable(f": {outcome}", console.encoding))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _iter_rows(summary):
        table.add_row(label, Text(to_encodable(value, console.encoding)))
    console.print()
    console.print(title, width=min(COLUMNS, console.width), highlight=False)
    console.print(table, width=min(COLUMNS, console.width), highlight=False)


def _iter_rows(summary: Summary) -> Iterable[tuple[str, str]]:
    evaluation = summary.evaluation
    if evaluation.metrics:
        yield "evaluation", _describe_evaluation(evaluation, find_score(summary))
    classes = [result for result in read_class_results(evaluation.arrays) if result.f1 is not None]
    if len(classes) > 1:
        low, *_, high = sorted(classes, key=lambda result: result.f1 or 0)
        yield "classes", f"F1 from {low.f1:.3f} ({low.name}) to {high.f1:.3f} ({high.name}), of {len(classes)}"
    if summary.loss_first is not None:
        first, last = number(summary.loss_first), number(summary.loss_last)
        of = f"on average of the last {summary.loss_last_steps}" if summary.loss_last_steps > 1 else "in the last"
        yield "loss", f"{first} in the first step, {last} {of}"
    yield "trained", _describe_trained(summary.trained, summary.parameters)
    yield "layout", summary.layout
    if summary.differs_from:
        yield "answer", _describe_difference(summary.differs_from)
    if speed := _describe_speed(summary):
        yield "speed", speed
    if summary.compiled_steps:
        steps, took = plural(summary.compiled_steps, "step"), duration(summary.compiled_s)
        yield "compiling", f"{steps} took {took}, excluded from speed and medians"
    if peaks := summary.peak_bytes_per_rank:
        of = f", the most of {len(peaks)} ranks" if len(peaks) > 1 else ""
        yield "memory", f"{size(max(peaks))} at its peak{of}"


def _describe_trained(trained: TrainingTotals, parameters: int | None) -> str:
    epochs = f", {number(trained.epochs)} epoch{'s' * (trained.epochs != 1)}" if trained.epochs is not None else ""
    skipped = f", {trained.skipped_steps:,} steps skipped, not finite" if trained.skipped_steps else ""
    model = f"; {parameters:,} parameters" if parameters is not None else ""
    return f"{trained.samples:,} samples, {trained.steps:,} steps{epochs}{skipped}{model}"


def _describe_evaluation(evaluation: Evaluation, score: Score | None) -> str:
    """Return the metrics beside the score, of how many samples they are, and when the score was best."""
    shown, about = dict(evaluation.metrics), []
    shown.pop("majority", None)
    count, held_out = evaluation.evaluated, evaluation.held_out
    if count:
        of = f" of {held_out:,}" if held_out and held_out > count else ""
        about.append(f"{count:,}{of} samples")
    if score is not None and score.value == evaluation.metrics.get(score.name):
        del shown[score.name]
    elif score is not None and score.step is not None:
        about.append(f"best at step {score.step:,}")
    return "  ".join(filter(None, (format_metrics(shown), f"({'; '.join(about)})" if about else "")))


def _describe_speed(summary: Summary) -> str:
    """Return the median rates and step, and the parts of the mean step, which add up."""
    rates = {"samples": summary.samples_per_s, "tokens": summary.tokens_per_s}
    text = ", ".join(f"{number(rate, 3)} {unit}/s" for unit, rate in rates.items() if rate)
    if (step_s := summary.median.get("step_s")) is None:
        return text
    share = {name: summary.share.get(name) or 0.0 for name in (*SHARES, "comm")}
    parts = [f"{percent(share[name])} {name}" for name in SHARES if share[name] >= 0.005]
    if share["comm"] and (hidden := 1 - share["exposed"] / share["comm"]) >= 0.005:
        parts.append(f"{percent(hidden)} of communication hidden")
    return f"{text}; {duration(step_s)} per step" + (f": {', '.join(parts)}" if parts else "")


def _describe_difference(differs: Mapping[str, Any]) -> str:
    try:
        test = differs["on_test_task"]
        every = f" with local_steps={test['local_steps']}" if test["local_steps"] else ""
        return (
            f"reduce={differs['reduce']}: not the answer of plain DDP; on the docstrings task{every} the loss differed "
            f"by {test['loss']:+.2%} (at most {test['most']:.2%}), accuracy by {100 * test['accuracy']:+.1f} points"
        )
    except (KeyError, TypeError, ValueError):  # a damaged file
        return "not the answer of plain DDP"


def average_rounds(steps: Sequence[Event], length: int) -> Sequence[Event]:
    """Average groups of `length` steps, where one step of each group waits for all of it, as under local SGD."""
    if length <= 1 or not steps:
        return steps
    begin = len(steps) % length if len(steps) >= length else 0
    groups = [steps[i : i + length] for i in range(begin, len(steps), length)]
    means = [{name: statistics.fmean(n) for name in AVERAGED if (n := _list_numbers(group, name))} for group in groups]
    return [{**group[-1], **mean} for group, mean in zip(groups, means, strict=True)]


def drop_warmup_steps(steps: Sequence[Event]) -> list[Event]:
    """Return the steps after the warm-up (5, or a tenth, but at most half) in which nothing was compiled."""
    warmup = min(max(FEW_STEPS, len(steps) // 10), len(steps) // 2)
    return [step for step in steps[warmup:] if not step.get("compiled")]


def _shares(steps: Sequence[Event]) -> dict[str, float | None]:
    """Return shares of the total step time: compute + data + exposed + other is 1; comm overlaps them."""
    total = math.fsum(_list_numbers(steps, "step_s"))
    names = ("compute", "data", "exposed", "comm")
    if total <= 0:
        return dict.fromkeys((*names, "other"))
    share = {name: math.fsum(_list_numbers(steps, f"{name}_s")) / total for name in names}
    return {**share, "other": max(0.0, 1 - share["compute"] - share["data"] - share["exposed"])}


def compute_median_rate(steps: Sequence[Event], what: str) -> float | None:
    """Return the median of something per second; None if no step has it."""
    known = [step for step in steps if _is_number(step.get(what)) and _is_number(step.get("step_s"))]
    return _compute_median([step[what] / step["step_s"] for step in known if step["step_s"] > 0])


def _list_numbers(steps: Sequence[Event], name: str) -> list[float]:
    return [step[name] for step in steps if _is_number(step.get(name))]


def _compute_median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
