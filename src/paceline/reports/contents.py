"""Gather the contents of a report, before it is rendered as a page, figures or an article."""

import datetime
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.config.registry import BUILT_IN, WorkloadEntry, find_entry
from paceline.errors import UserError, join_names
from paceline.io.arguments import option_error
from paceline.io.format import number, percent, plural, size
from paceline.measurement.diagnosis import Finding
from paceline.measurement.result import Measurement, read_measurement
from paceline.measurement.rows import drop_failed
from paceline.reports.comparisons import describe_costs, describe_models, list_series_costs, list_table_costs
from paceline.reports.run_view import (
    Comparison,
    Experiments,
    RunView,
    Warmup,
    compare_experiments,
    compare_runs,
    read_run_view,
)
from paceline.reports.series import (
    Series,
    TimedSetup,
    from_measurement,
    from_runs,
    from_times_table,
    read_times_file,
)
from paceline.runlog.run_dir import RESULT_FILES, RunDir, list_result_folders
from paceline.runlog.summary import Summary, describe_result

FACTS = ("host", "cpu", "cores", "memory_bytes", "gpus", "system", "python", "torch", "numpy", "paceline", "commit")
TABLES = (".csv", ".tsv", ".txt")
MAX_NAMED = 3


@dataclass(frozen=True)
class ReportContents:
    title: str
    made: str
    verdict: tuple[str, ...]
    series: tuple[Series, ...]
    costs: tuple[TimedSetup, ...]  # of set-ups whose price is known
    runs: tuple[RunView, ...]
    same: Comparison | None  # of the losses of several runs
    experiments: Experiments | None  # runs with different requests
    left_out: tuple[str, ...]  # what could not be shown, and why
    spec: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]

    @property
    def command(self) -> str:
        return suggest_command(self.runs[0]) if len(self.runs) == 1 and not self.series else ""

    @property
    def layouts(self) -> list[Series]:
        return [s for s in self.series if s.timed]

    @property
    def findings(self) -> list[Finding]:
        return [found for s in self.series for found in s.findings]

    @property
    def notes(self) -> list[str]:
        found = [note for s in self.series for note in s.notes]
        for run in self.runs:
            more = len(run.noticed) - MAX_NAMED
            found += [f"{run.name}: {text}" for text in run.noticed[:MAX_NAMED]]
            found += [f"{run.name}: {more} more are in {run.file}"] if more > 0 else []
        return found


@dataclass
class Inputs:
    price: float | None
    warmup: Warmup | None = None
    costs: list[TimedSetup] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    measured: list[Measurement] = field(default_factory=list)
    measured_runs: list[RunView] = field(default_factory=list)
    runs: list[RunView] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def read(self, path: Path) -> None:
        if path.suffix.lower() in TABLES:
            for name, rows in read_times_file(path).items():
                self.costs += list_table_costs(name, rows)
                if any(row.devices == 1 for row in rows) and (len(rows) > 1 or rows[0].price is None):
                    self.series.append(from_times_table(name, rows, path, self.price))
        elif (path / "measure.json").is_file():
            found = read_measurement(path)
            self.series.append(from_measurement(found, self.price))
            self.measured.append(found)
            for row in drop_failed(found.rows):
                if row.runs and not found.command:
                    self._read_run(path / row.runs[0], self.measured_runs, row.label)
        elif path.is_file():
            raise UserError(f"{path} is neither a run folder nor a table; a table of times ends in .csv")
        else:
            if not (path / "spec.yaml").is_file():
                RunDir.open(path)  # not a run at all: an error of the request, unlike a damaged run
            self._read_run(path, self.runs)

    def _read_run(self, path: Path, runs: list[RunView], name: str = "") -> None:
        try:
            run = read_run_view(path, name, self.warmup)
        except UserError as error:
            self.left_out.append(" ".join(str(error).split()))
            return
        runs.append(run)
        if run.torn:
            self.left_out.append(f"{run.file}: {plural(run.torn, 'line')} could not be read")
        if run.status not in ("finished", "stopped"):
            reason = f": {run.summary.why}" if run.summary is not None and run.summary.why else ""
            self.left_out.append(f"{path} is {run.status}{reason}; what exists of it is shown")

    def list_runs(self) -> list[RunView]:
        """Return the runs of the most frequent workload; others cannot be compared with them, and are named."""
        runs = [*self.measured_runs, *self.runs]
        kinds = Counter(run.spec.workload for run in runs)
        most = kinds.most_common(1)[0][0] if kinds else ""
        others = [run for run in runs if run.spec.workload != most]
        if others:
            names = join_names([f"{run.path.name} ({run.spec.workload})" for run in others], MAX_NAMED)
            self.left_out.append(f"runs of other workloads than {most} are left out: {names}; make a report of those")
        return [run for run in runs if run.spec.workload == most]


def gather_contents(
    paths: Sequence[Path], title: str = "", price: float | None = None, warmup: Warmup | None = None, only: str = ""
) -> ReportContents:
    """Read all inputs; a damaged run is named and left out. Raise UserError if nothing is left.

    Steps or epochs of the `warmup` are in no speed; `only` selects results in folders by a pattern of their names.
    """
    found = Inputs(price, warmup)
    for path in paths:
        for folder in _list_inputs(path, only):
            found.read(folder)
    runs, series = found.list_runs(), found.series
    if not series and not runs and not found.costs:
        raise UserError(f"nothing can be shown: {found.left_out[0]}")
    runs = [replace(r, name=name) for r, name in zip(runs, _tell_apart([(r.name, r.path) for r in runs]), strict=True)]
    files = [(s.name, next((source.file for source in s.sources.values()), Path())) for s in series]
    series = [replace(s, name=name) for s, name in zip(series, _tell_apart(files), strict=True)]
    plain = [run for run in runs if run in found.runs]
    names = list(dict.fromkeys([*(s.name for s in series), *(run.spec.name for run in plain)]))
    series += from_runs(plain, price)
    names = [s.name for s in series] if len(series) > 1 else names
    costs = found.costs or [line for s in series for line in list_series_costs(s)] * (len(series) > 1)
    same = compare_runs(runs)
    experiments = compare_experiments(runs) if same is not None and same.differing else None
    commands = [("command", shlex.join(measured.command)) for measured in found.measured if measured.command]
    starts = [run.start for run in runs] or [measured.environment for measured in found.measured]
    return ReportContents(
        title=title or join_names(names or [path.stem for path in paths], MAX_NAMED),
        made=f"{datetime.datetime.now():%Y-%m-%d %H:%M}, paceline {__version__}",
        verdict=(
            *([describe_costs(costs)] if costs else []),
            *_describe_verdict(series, runs, same, experiments),
        ),
        series=tuple(series),
        costs=tuple(costs),
        runs=tuple(runs),
        same=same,
        experiments=experiments,
        left_out=tuple(found.left_out),
        spec=(*commands, *_list_spec(runs)),
        environment=_list_environment(starts),
    )


def _list_inputs(path: Path, only: str) -> list[Path]:
    """Return the results to read: those of a folder of runs, as far as their names match, or the path itself."""
    if not _is_folder_of_runs(path):
        return [path]
    found = [folder for folder in list_result_folders(path) if not only or fnmatch(folder.name, only)]
    if not found:
        names = join_names([folder.name for folder in list_result_folders(path)], MAX_NAMED)
        raise option_error("--only", f"no result in {path} matches {only!r}; there are {names}", "not-found")
    return found


def _is_folder_of_runs(path: Path) -> bool:
    is_result = any((path / name).is_file() for name in RESULT_FILES)
    return path.is_dir() and not is_result and bool(list_result_folders(path))


def _tell_apart(named: Sequence[tuple[str, Path]]) -> list[str]:
    """Return the names; those given twice with the part nearest to the end in which their paths differ."""
    found = []
    for name, path in named:
        same = [other.resolve().parts[::-1] for given, other in named if given == name]
        levels = enumerate(zip(*same, strict=False))
        at = next((level for level, parts in levels if len({*parts}) == len(parts)), 0)
        found.append(f"{name} ({path.resolve().parts[::-1][at]})" if len(same) > 1 else name)
    return found


def _describe_verdict(
    series: Sequence[Series], runs: Sequence[RunView], same: Comparison | None, tried: Experiments | None
) -> tuple[str, ...]:
    best = tuple(filter(None, (tried.text, tried.caution))) if tried is not None else ()
    if series:
        best = (models,) if (models := describe_models(series, runs)) else best
        lines = [f"{s.name}: {s.verdict[0]}" for s in series] if len(series) > 1 else series[0].verdict
        return (*best, *lines, *([same.text] if same is not None else []))
    ended = [(run.name, run.summary) for run in runs if run.summary is not None]
    if not ended:
        return tuple(f"{run.name} is {run.status}." for run in runs[:1])
    if best and same is not None:
        return (*best, same.text)
    lines = [line for run in ended[:MAX_NAMED] for line in _describe_ended(*run)]
    if (left := len(ended) - MAX_NAMED) > 0:
        lines.append(f"{left} more run{'s are' if left > 1 else ' is'} in the table.")
    return (*lines, *([same.text] if same is not None else []))


def _describe_ended(name: str, summary: Summary) -> list[str]:
    """Return the result of a run, how it was trained, and its speed, each in a sentence."""
    trained, result = summary.trained, describe_result(summary)
    lines = [f"{name}: {text}." for text in (result, summary.why) if text]
    went = f"; the loss went from {number(summary.loss_first)} to {number(summary.loss_last)}"
    loss = went if summary.loss_last else ""
    lines.append(f"{name} trained {number(trained.samples)} samples in {number(trained.steps)} steps{loss}.")
    if (compute := summary.share.get("compute")) is not None:
        exposed, data = (percent(summary.share.get(part) or 0) for part in ("exposed", "data"))
        parts = f"{percent(compute)} compute, {exposed} exposed communication and {data} waiting for input"
        lines.append(f"It trained {number(summary.samples_per_s, 3)} samples/s; a step is {parts}.")
    return lines


def suggest_command(run: RunView) -> str:
    """Return the line to type after one run: tune it, measure more ranks, or use it."""
    path = shlex.quote(str(run.path))
    entry = find_entry(run.spec.workload) if run.spec.workload in BUILT_IN else None
    if run.summary is None or run.status != "finished":
        return f"paceline train --resume {path}"
    diverged = (run.summary.loss_last or 0) > (run.summary.loss_first or math.inf)
    if (diverged or describe_result(run.summary).startswith("no better")) and entry is not None and entry.batched:
        return f"paceline sweep {path}/spec.yaml train.lr=1e-5..1e-2:log --random --trials 6"
    if entry is not None and entry.batched and run.ranks == 1:
        return f"paceline measure {path}/spec.yaml --ranks 1,2"
    use = entry.use if entry is not None else WorkloadEntry.use if ":" in run.spec.workload else ""
    return f"paceline {use.format(run=path)}" if use else ""


def _list_spec(runs: Sequence[RunView]) -> tuple[tuple[str, str], ...]:
    """Return every value of the spec; if runs differ, that of each."""
    found = []
    all_values = [{key: value for key, value, *_ in run.spec.fields()} for run in runs]
    for key, value, unit, _ in runs[0].spec.fields() if runs else ():
        if key != "name" and value not in (None, ()):
            given = list(dict.fromkeys(str(values.get(key)) for values in all_values))
            shown = " | ".join([*given[:6], *["…"] * (len(given) > 6)])
            found.append((key, f"{shown} {unit}".strip()))
    return tuple(found)


def _list_environment(known: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    found = []
    for name in FACTS:
        values = [facts[name] for facts in known if facts.get(name) not in (None, [], "")]
        if name == "memory_bytes":
            values = [size(float(value)) for value in values]
        texts = dict.fromkeys(", ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values)
        if texts:
            found.append((name.removesuffix("_bytes"), " | ".join(list(texts)[:6])))
    return tuple(found)
