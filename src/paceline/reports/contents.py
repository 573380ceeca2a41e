"""What a report says, before it is a page, a picture or an article: read once, shown in four ways."""

from __future__ import annotations

import datetime
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import UserError
from paceline.io.format import number, percent, size
from paceline.measurement.messages import Finding
from paceline.measurement.result import Measurement, read_measurement
from paceline.measurement.rows import drop_failed
from paceline.reports.run_view import Comparison, Experiments, RunView, compare_experiments, compare_runs, read_run_view
from paceline.reports.series import (
    LinkMeasurement,
    Series,
    from_measurement,
    from_runs,
    from_times_table,
    read_link_measurement,
    read_times_file,
)
from paceline.runlog.run_dir import RESULT_FILES, RunDir, list_result_folders
from paceline.runlog.summary import Summary, describe_baseline

FACTS = ("host", "cpu", "cores", "memory_bytes", "gpus", "system", "python", "torch", "numpy", "paceline", "commit")
TABLES = (".csv", ".tsv", ".txt")
MOST_NAMED = 3


@dataclass(frozen=True)
class ReportContents:
    title: str
    made: str
    verdict: tuple[str, ...]
    series: tuple[Series, ...]
    runs: tuple[RunView, ...]
    links: tuple[LinkMeasurement, ...]
    same: Comparison | None
    """Whether the runs trained the same thing; None where there is nothing to compare."""
    experiments: Experiments | None
    left_out: tuple[str, ...]
    """What was given and could not be shown, and why."""
    spec: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]

    @property
    def layouts(self) -> list[Series]:
        """The series that know the parts of a step."""
        return [s for s in self.series if s.timed]

    @property
    def findings(self) -> list[Finding]:
        return [found for s in self.series for found in s.findings]

    @property
    def notes(self) -> list[str]:
        return [note for s in self.series for note in s.notes] + [
            note for run in self.runs for note in _list_notices(run)
        ]


def gather_contents(inputs: Sequence[Path], title: str = "", price: float | None = None) -> ReportContents:
    """Read everything that was given. A damaged run is named and left out; if nothing is left, that is an error."""
    series: list[Series] = []
    runs: list[RunView] = []
    plain: list[RunView] = []
    links: list[LinkMeasurement] = []
    measured: list[Measurement] = []
    left_out: list[str] = []
    for path in (found for given in inputs for found in _expand_folder(given)):
        linked = (path / "links.json").is_file()
        if linked:
            try:
                links.append(read_link_measurement(path))
            except UserError as error:
                left_out.append(f"{error}; the links are left out")
        if path.suffix.lower() in TABLES:
            series += [from_times_table(name, rows, path, price) for name, rows in read_times_file(path).items()]
        elif (path / "measure.json").is_file():
            found = read_measurement(path)
            series.append(from_measurement(found, price))
            measured.append(found)
            for row in drop_failed(found.rows):
                for name in row.runs[:1] if not found.command else ():
                    _add_run(runs, left_out, path / name, row.label)
        elif not linked or (path / "spec.yaml").is_file():
            _check_run_folder(path)
            _add_run(plain, left_out, path)
    plain = _keep_main_workload(plain, left_out) if any(_is_folder_of_runs(path) for path in inputs) else plain
    runs += plain
    if not series and not runs and not links:
        raise UserError(f"nothing can be shown: {left_out[0]}")
    _check_one_workload(runs)
    runs = _make_names_distinct(runs)
    names = list(dict.fromkeys([*(s.name for s in series), *(r.spec.name for r in plain)]))
    if (together := from_runs(plain, price)) is not None:
        series.append(together)
    same = compare_runs(runs)
    compared_experiments = compare_experiments(runs) if same is not None and same.differing else None
    return ReportContents(
        title=title or _build_title(names or [measured.name for measured in links]),
        made=f"{datetime.datetime.now():%Y-%m-%d %H:%M}, paceline {__version__}",
        verdict=_describe_verdict(series, runs, same, compared_experiments)
        if series or runs
        else tuple(measured.verdict for measured in links),
        series=tuple(series),
        runs=tuple(runs),
        links=tuple(links),
        same=same,
        experiments=compared_experiments,
        left_out=tuple(left_out),
        spec=(*_list_commands(measured), *_list_spec(runs)),
        environment=_list_environment([run.start for run in runs] or [found.environment for found in measured]),
    )


def _list_notices(run: RunView) -> list[str]:
    """What was noticed while it ran, the first of it."""
    more = len(run.noticed) - MOST_NAMED
    told = [*run.noticed[:MOST_NAMED], *([f"{more} more are in {run.file}"] if more > 0 else [])]
    return [f"{run.name}: {text}" for text in told]


def _is_folder_of_runs(path: Path) -> bool:
    return (
        path.is_dir() and not any((path / name).is_file() for name in RESULT_FILES) and bool(list_result_folders(path))
    )


def _expand_folder(path: Path) -> list[Path]:
    """The runs and measurements of a folder of them; else the path as it is."""
    return list_result_folders(path) if _is_folder_of_runs(path) else [path]


def _keep_main_workload(runs: Sequence[RunView], left_out: list[str]) -> list[RunView]:
    """The runs of the workload that most of a folder are of; of the others, only that they are there."""
    kinds = Counter(run.spec.workload for run in runs)
    most = kinds.most_common(1)[0][0] if kinds else ""
    others = [run for run in runs if run.spec.workload != most]
    if others:
        told = ", ".join(f"{run.path.name} ({run.spec.workload})" for run in others[:MOST_NAMED])
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        left_out.append(f"runs of other workloads than {most} are left out: {told}{more}; make a report of those")
    return [run for run in runs if run.spec.workload == most]


def _build_title(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _check_run_folder(path: Path) -> None:
    """A folder that is no run at all is a mistake of the request; one that is a damaged run is not."""
    if path.is_file():
        raise UserError(f"{path} is neither a run folder nor a table; a table of times ends in .csv")
    if not (path / "spec.yaml").is_file():
        RunDir.open(path)


def _add_run(runs: list[RunView], left_out: list[str], path: Path, name: str = "") -> None:
    try:
        run = read_run_view(path, name)
    except UserError as error:
        left_out.append(" ".join(str(error).split()))
        return
    runs.append(run)
    if run.torn:
        lines = f"{run.torn} line{'s' * (run.torn > 1)}"
        left_out.append(f"{run.file}: {lines} could not be read and {'are' if run.torn > 1 else 'is'} left out")
    if run.status not in ("finished", "stopped"):
        why = f": {run.summary.why}" if run.summary is not None and run.summary.why else ""
        left_out.append(f"{path} is {run.status}{why}; what there is of it is shown")


def _check_one_workload(runs: Sequence[RunView]) -> None:
    kinds = {run.spec.workload.rpartition("/")[2]: run for run in runs}
    if len(kinds) > 1:
        told = ", ".join(f"{run.path} is {kind}" for kind, run in kinds.items())
        raise UserError(f"the runs are of different workloads and cannot be compared: {told}; make a report of each")


def _make_names_distinct(runs: Sequence[RunView]) -> list[RunView]:
    first = {run.name: run for run in reversed(runs)}
    return [r if r is first[r.name] else replace(r, name=f"{r.name} ({r.path.parent.name})") for r in runs]


def _describe_verdict(
    series: Sequence[Series], runs: Sequence[RunView], same: Comparison | None, tried: Experiments | None
) -> tuple[str, ...]:
    best = (tried.text,) if tried is not None and tried.text else ()
    if len(series) == 1:
        return (*best, *series[0].verdict)
    if series:
        lines = [f"{s.name}: {line}" for s in series for line in s.verdict[:1]]
        return (*best, *lines, *([same.text] if same is not None else []))
    ended = [(run.name, run.summary) for run in runs if run.summary is not None]
    if not ended:
        return (f"{runs[0].name} is {runs[0].status}.",)
    if best and same is not None:
        return (*best, same.text)
    lines = [line for name, told in ended[:MOST_NAMED] for line in _describe_ended(name, told)]
    if (left := len(ended) - MOST_NAMED) > 0:
        lines.append(f"{left} more run{'s are' if left > 1 else ' is'} in the table.")
    more = "To see whether more ranks pay:  paceline measure RUN.yaml --ranks 1,2"
    return (*lines, same.text if same is not None else more)


def _describe_ended(name: str, told: Summary) -> list[str]:
    lines = [
        f"{name} trained {number(told.trained.samples)} samples at {number(told.samples_per_s, 3)} samples/s and "
        f"ended with a loss of {number(told.loss_last)}."
    ]
    if poor := describe_baseline({**told.evaluation.metrics, **told.evaluation.arrays}):
        lines.append(f"{poor[0].upper()}{poor[1:]}.")
    if (compute := told.share.get("compute")) is not None:
        lines.append(
            f"Of its step, {percent(compute)} is compute, {percent(told.share['exposed'] or 0)} exposed "
            f"communication and {percent(told.share['data'] or 0)} waiting for input."
        )
    return lines


def _list_spec(runs: Sequence[RunView]) -> tuple[tuple[str, str], ...]:
    """Every value of the spec; where runs differ, each one's."""
    if not runs:
        return ()
    found = []
    all_values = [{key: value for key, value, *_ in run.spec.fields()} for run in runs]
    for key, value, unit, _ in runs[0].spec.fields():
        given = list(dict.fromkeys(str(values.get(key)) for values in all_values))
        shown = " | ".join(given[:6]) + (" | …" if len(given) > 6 else "")
        if key != "name" and value not in (None, ()):
            found.append((key, f"{shown} {unit}".strip()))
    return tuple(found)


def _list_commands(measured: Sequence[Measurement]) -> tuple[tuple[str, str], ...]:
    """What was measured from outside, where there is no spec."""
    return tuple(("command", shlex.join(found.command)) for found in measured if found.command)


def _list_environment(known: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    values = {name: [facts.get(name) for facts in known] for name in FACTS}
    shown = {
        name: list(dict.fromkeys(_format_fact(name, value) for value in given if value not in (None, [], "")))
        for name, given in values.items()
    }
    return tuple((name.removesuffix("_bytes"), " | ".join(facts[:6])) for name, facts in shown.items() if facts)


def _format_fact(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return size(float(value))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
