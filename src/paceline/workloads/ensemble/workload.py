"""An ensemble as a workload: train the members, ask them about rows, and fit the combination.

A member predicts only rows that it was not trained on, and `train.patience` evaluates on another fold.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from paceline.config import RunSpec, load
from paceline.data.files import hash_files, invalid_data
from paceline.data.prepared_table import draw_rows
from paceline.data.tables import table_kind
from paceline.errors import PacelineError, UserError, join_names, missing_value
from paceline.io.files import hash_value
from paceline.layout import Layout
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import RunDir
from paceline.trials.runner import train_trial
from paceline.workload import FitEnd, LogFn, Passes, PassWorkload, ignore_log
from paceline.workloads.ensemble import scoring, table_rows
from paceline.workloads.ensemble.combination import Combination, fit_class_combination, fit_number_combination
from paceline.workloads.ensemble.members import (
    FittedEnsemble,
    Member,
    MemberOutputs,
    check_finished,
    compute_mean_loss,
    hash_run,
    name_members,
    write_ensemble,
)
from paceline.workloads.ensemble.sections import FEW, EnsembleData, EnsembleModel
from paceline.workloads.ensemble.table_rows import RowSet, read_labelled_rows

HELD_OUT, HELD_OUT_OF_UNSEEN = 0.2, 0.5
LEAST_ROWS = 10
SOURCES = {"csv": "csv", "tsv": "csv", "jsonl": "jsonl", "parquet": "parquet"}


@dataclass(frozen=True)
class MemberFile:
    name: str
    file: Path
    spec: RunSpec
    ignored: tuple[str, ...] = ()  # that others read as texts

    @property
    def stops_early(self) -> bool:
        return self.spec.train.patience > 0

    def on(self, learn: Path, test: Path, label: str, cache: Path | None = None) -> RunSpec:
        known = type(self.spec.data).model_fields
        values: dict[str, Any] = {"name": self.name, "data.path": str(learn), "data.test_path": str(test)}
        usual = {"label": label, "source": SOURCES[table_kind(learn)]}
        if cache is not None:
            usual["cache"] = str(cache)
        values |= {f"data.{key}": value for key, value in usual.items() if key in known}
        if "ignore" in known and self.ignored:
            data: Any = self.spec.data
            known_here = (*data.ignore, *getattr(data, "categories", ()))
            values["data.ignore"] = [*data.ignore, *(name for name in self.ignored if name not in known_here)]
        return self.spec.replace(values, "the ensemble")


def load_member_files(files: Sequence[Path], names: Sequence[str]) -> list[MemberFile]:
    """Load the run files of members; each ignores the columns that another one reads as texts."""
    specs = [load(file) for file in files]
    texts = {str(spec.data.text) for spec in specs if hasattr(spec.data, "text")}
    return [MemberFile(*member, tuple(sorted(texts))) for member in zip(names, files, specs, strict=True)]


def train_member(spec: RunSpec, out: Path) -> tuple[Path, bool]:
    """Train or resume a member; return its run folder, and whether it is finished. An error begins with its name."""
    try:
        result = train_trial(spec, out, again=True, new_process=False)
    except PacelineError as error:
        error.args = (f"member {spec.name}: {error}",)
        raise
    return result.path, result.status == RunStatus.FINISHED


FIT, TEST = "fit", "test"
PARTS = ("predictions", "tables", "folds", "members")


class MemberTask(NamedTuple):
    """Train or open one member, without a fold or on all rows, and predict."""

    member: int
    fold: int | None = None


@dataclass(frozen=True, eq=False)
class EnsembleRequest:
    model: EnsembleModel
    label: str
    names: Sequence[str]
    fit: RowSet
    test: RowSet
    files: Sequence[MemberFile]
    folds: int  # none for finished runs
    fold: np.ndarray  # of each row of `fit`
    seed: int
    log: LogFn

    def check_folds(self) -> None:
        words, known = np.array(self.fit.labels), set(self.fit.labels)
        if len(known) > max(20, len(words) // 10):
            return  # numbers
        for name in sorted(known):
            own = self.fold[words == name]
            if len(set(own)) < min(3, self.folds):
                few = f"too few rows ({len(own)}) for data.folds={self.folds}"
                raise invalid_data(f"{self.label!r} is {name!r} in {few}; leave them out", "data.folds")

    def split(self, member: MemberFile, fold: int | None) -> tuple[RowSet, RowSet]:
        """Return the rows (to learn from, to evaluate on) of a member that must not see `fold`."""
        if fold is None:
            apart = 0 if member.stops_early else None
        else:
            apart = (fold + 1) % self.folds if member.stops_early else fold
        away = [number for number in (fold, apart) if number is not None]
        learn = self.fit.select(~np.isin(self.fold, away))
        return learn, self.test if apart is None else self.fit.select(self.fold == apart)

    def truth(self, rows: RowSet, classes: Sequence[str]) -> np.ndarray:
        """Return the labels of rows as numbers of classes, or as numbers."""
        if classes:
            place = {name: number for number, name in enumerate(classes)}
            return np.array([place[word] for word in rows.labels], np.int64)
        try:
            return np.array([float(word) for word in rows.labels])
        except ValueError:
            problem = f"the members predict numbers, {self.label!r} holds words; give another data.label"
            raise invalid_data(problem) from None

    def asked(self, task: MemberTask) -> dict[str, RowSet]:
        if not self.folds:
            return {FIT: self.fit, TEST: self.test}
        if task.fold is None:
            return {TEST: self.test}
        return {f"fold-{task.fold + 1}": self.fit.select(self.fold == task.fold)}


class EnsemblePasses(Passes):
    """One task is one pass; the last pass fits the combination."""

    def __init__(self, request: EnsembleRequest, folder: Path) -> None:
        self.request, self.folder = request, folder
        folds = [*range(request.folds), None]
        self.tasks = [MemberTask(number, fold) for fold in folds for number in range(len(request.names))]
        self.samples, self.most, self.done = len(request.fit), len(self.tasks) + 1, 0
        self.combination: Combination | None = None

    @property
    def end(self) -> FitEnd | None:
        return FitEnd.MOST_PASSES if self.done >= self.most else None

    def end_words(self) -> str:
        return f"{len(self.request.names)} members are combined"

    def step(self, flag: bool) -> dict[str, Any]:
        began = perf_counter()
        loss = None
        try:
            if not flag:
                asking = self.done < len(self.tasks)
                loss = self._answer_task(self.tasks[self.done]) if asking else self._fit_combination()
        except UserError:
            if not self.done:  # the request was wrong: leave nothing of it
                for part in PARTS:
                    shutil.rmtree(self.folder / part, ignore_errors=True)
            raise
        self.done += loss is not None
        times = {"step_s": perf_counter() - began, "data_s": 0.0, "comm_s": 0.0, "exposed_s": 0.0}
        losses = {} if loss is None else {"loss": loss}
        return {**losses, **times, "flagged": loss is None, "of_samples": self.most * self.samples}

    def _answers(self, member: str, rows: str) -> Path:
        return self.folder / "predictions" / f"{member}-{rows}.npz"

    def _answer_task(self, task: MemberTask) -> float | None:
        name, asked = self.request.names[task.member], self.request.asked(task)
        if not all(self._answers(name, kind).exists() for kind in asked):
            run, finished = self._train_member(task)
            if not finished:
                return None
            member = Member.open(name, run)
            for kind, rows in asked.items():
                found = member.outputs(rows.blocks())
                self._check_outputs(kind, rows, found, task)
                found.write(self._answers(name, kind))
        if task.fold is not None:
            shutil.rmtree(self.folder / "folds", ignore_errors=True)
        kind, rows = next(iter(asked.items()))
        found = MemberOutputs.read(self._answers(name, kind))
        return compute_mean_loss(found.values, self.request.truth(rows, found.classes))

    def _train_member(self, task: MemberTask) -> tuple[Path, bool]:
        request = self.request
        if not request.folds:
            return request.model.runs[task.member], True
        member = request.files[task.member]
        learn, test = request.split(member, task.fold)
        part = "" if task.fold is None else f"-{task.fold + 1}"
        part += "-stop" if member.stops_early else ""
        tables = self.folder / "tables"
        files = learn.write_once(tables, f"learn{part}"), test.write_once(tables, f"test{part}")
        fold = "all of them" if task.fold is None else f"fold {task.fold + 1} of {request.folds}"
        request.log(f"  {member.name}: {fold}, {len(learn):,} rows to learn from")
        out = self.folder / ("members" if task.fold is None else "folds")
        cache = None if task.fold is None else out / "cache"
        return train_member(member.on(*files, request.label, cache), out)

    def _check_outputs(self, kind: str, rows: RowSet, found: MemberOutputs, task: MemberTask) -> None:
        name, first = self.request.names[task.member], self.request.names[0]
        if found.classes and (new := sorted(set(rows.labels) - set(found.classes))):
            known = f"{name} predicts {join_names(found.classes)}; leave such rows out"
            raise invalid_data(f"{rows.file}: {self.request.label!r} is {join_names(new)}, {known}", "data.label")
        if task.member:
            found.aligned(MemberOutputs.read(self._answers(first, kind)).classes, name)

    def _fit_combination(self) -> float:
        outputs, classes = self._outputs(FIT)
        model, truth = self.request.model, self.request.truth(self.request.fit, classes)
        if classes:
            self.combination = fit_class_combination(outputs, truth, model.combine, model.calibrate)
        else:
            self.combination = fit_number_combination(outputs, truth, model.combine)
        return compute_mean_loss(self.combination(outputs), truth)

    def _outputs(self, kind: str) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the predictions (members, rows, …) in the order of the rows, and the classes."""
        request, kinds, which = self.request, [kind], np.zeros(len(getattr(self.request, kind)), np.int64)
        if kind == FIT and request.folds:
            kinds, which = [f"fold-{fold + 1}" for fold in range(request.folds)], request.fold
        found = []
        classes = MemberOutputs.read(self._answers(request.names[0], kinds[0])).classes
        for name in request.names:
            parts = [MemberOutputs.read(self._answers(name, part)).aligned(classes, name) for part in kinds]
            values = np.empty((len(which), *parts[0].shape[1:]))
            for fold, part in enumerate(parts):
                values[which == fold] = part
            found.append(values)
        return np.stack(found), classes

    def evaluate(self) -> dict[str, Any]:
        if self.combination is None:
            return {}
        outputs, classes = self._outputs(TEST)
        truth, whole = self.request.truth(self.request.test, classes), self.combination(outputs)
        return scoring.score_classes(whole, truth, classes) if classes else scoring.score_regression(whole, truth)

    def tensors(self) -> dict[str, Any]:
        weights = self.combination.weights if self.combination is not None else (0.0,) * len(self.request.names)
        return {"model": {"weights": torch.tensor(weights, dtype=torch.float64)}}

    def meta(self) -> dict[str, Any]:
        return {"done": self.done}

    def allocate_state(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": {"weights": torch.zeros(len(self.request.names), dtype=torch.float64)}}

    def load_state(self, meta: Mapping[str, Any]) -> None:
        self.done = int(meta["done"])

    def equations(self, ranks: int) -> list[str]:
        request = self.request
        on = f"weights fitted on {len(request.fit):,} rows"
        if request.folds:
            on += f", each predicted by members that were trained without its fold ({request.folds} folds)"
        how = f"{request.model.combine} of {len(request.names)} members: {', '.join(request.names)}"
        return [how, on, f"evaluated on {len(request.test):,} held-out rows"]

    def conclude(self, result: Mapping[str, Any], folder: Path) -> None:
        if self.combination is None:
            self._fit_combination()
        assert self.combination is not None
        request = self.request
        outputs, classes = self._outputs(TEST)
        truth = request.truth(request.test, classes)
        by_name = {
            **dict(zip(request.names, outputs, strict=True)),
            scoring.ENSEMBLE: self.combination(outputs),
        }
        found = scoring.score_members(by_name, truth, request.seed)
        paths = request.model.runs or [self.folder / "members" / name for name in request.names]
        write_ensemble(folder, dict(zip(request.names, paths, strict=True)), classes, self.combination, found)
        for file in (folder / "tables").glob("*-[0-9]*"):
            file.unlink()
        table = scoring.build_score_table(found, dict(zip(request.names, self.combination.weights, strict=True)))
        for line in [*table.to_lines(), table.note]:
            request.log(f"  {line}")


class Ensemble(PassWorkload):
    """Train or open the members, ask them about rows that they never saw, and fit their weights."""

    Model, Data = EnsembleModel, EnsembleData
    saved_every = 1

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._model, self._data = cast(EnsembleModel, spec.model), cast(EnsembleData, spec.data)
        self._log: LogFn = ignore_log

    def prepare(self, log: LogFn) -> None:
        self._log = log
        train = self.spec.train
        if not self._model.members and not self._model.runs:
            raise UserError(f"model.members: {FEW}", code="missing-value", key="model.members")
        if train.steps or train.epochs:
            key = "train.steps" if train.steps else "train.epochs"
            raise UserError(f"{key}: set it in the run files of the members", code="not-supported", key=key)
        for path in self._model.runs:
            check_finished(path)
            label = getattr(RunDir(path).recorded_spec().data, "label", self.label)
            if label != self.label:
                message = f"data.label={self.label}: {path} predicts {label!r}; type  data.label={label}"
                raise UserError(message, code="conflict", key="data.label")
        for use, rows in (("to find weights from", self.request.fit), ("to test on", self.request.test)):
            if len(rows) < LEAST_ROWS:
                raise invalid_data(f"{rows.file}: {len(rows)} rows {use}; {LEAST_ROWS} are needed")
        if self.request.folds:
            self.request.check_folds()

    @cached_property
    def label(self) -> str:
        """The column that is predicted: `data.label`, or that of the members."""
        if self._data.label is not None:
            return self._data.label
        specs = [*map(load, self._model.members), *(RunDir(path).recorded_spec() for path in self._model.runs)]
        labels = sorted({str(label) for spec in specs if (label := getattr(spec.data, "label", None))})
        if len(labels) != 1:
            found = f"the members predict {join_names(labels)}" if labels else "no member names its label"
            raise UserError(f"data.label: {found}; type  data.label=COLUMN", code="conflict", key="data.label")
        return labels[0]

    @cached_property
    def request(self) -> EnsembleRequest:
        model, data, seed = self._model, self._data, self.spec.train.seed
        runs, given = list(model.runs), list(model.members or model.runs)
        if data.path is None:
            raise missing_value("data.path", "type  data.path=FILE  for a table that no finished run was trained on")
        rows = read_labelled_rows(data.path, self.label, "data.path")
        if runs:
            rows = table_rows.drop_seen_rows(rows, runs, self._log)
        fit, test = self._hold_out_rows(rows, data.test_fraction or (HELD_OUT_OF_UNSEEN if runs else HELD_OUT))
        names = name_members(given)
        folds, fold = 0 if runs else data.folds, table_rows.assign_folds(fit, data.folds, seed)
        files = () if runs else load_member_files(model.members, names)
        return EnsembleRequest(model, self.label, names, fit, test, files, folds, fold, seed, self._log)

    def _hold_out_rows(self, rows: RowSet, fraction: float) -> tuple[RowSet, RowSet]:
        data = self._data
        if data.test_path is None:
            chosen = draw_rows(rows.numbers, fraction, self.spec.train.seed, table_rows.HELD_OUT_ROWS)
            return rows.select(~chosen), rows.select(chosen)
        if data.test_fraction is not None:
            message = "data.test_path and data.test_fraction exclude each other; leave one out"
            raise UserError(message, code="conflict", key="data.test_fraction")
        return rows, read_labelled_rows(data.test_path, self.label, "data.test_path")

    def sample_count(self) -> int:
        return len(self.request.fit)

    def fingerprint(self) -> str:
        files = {self.request.fit.file: 0, self.request.test.file: 0}
        return hash_value([hash_files(files), *map(hash_run, self._model.runs)])

    def suits(self, layout: Layout) -> None:
        parallel = self.spec.parallel
        if not layout.plain or layout.ranks > 1 or parallel.engine != "torch" or parallel.reduce != "exact":
            message = "parallel: members have their own layouts; set it in their run files"
            raise UserError(message, code="not-supported", key="parallel")

    def passes(self, device: Any) -> EnsemblePasses:
        assert self.folder is not None
        return EnsemblePasses(self.request, self.folder)

    def fitted(self, folder: Path) -> FittedEnsemble:
        return FittedEnsemble.read(folder)
