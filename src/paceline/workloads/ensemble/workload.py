"""An ensemble as a workload of a run file."""

from functools import cached_property
from pathlib import Path
from typing import Any, cast

from paceline.config import RunSpec, load
from paceline.data.files import hash_files
from paceline.errors import UserError, join_names
from paceline.io.files import hash_value
from paceline.layout import Layout
from paceline.runlog.run_dir import RunDir
from paceline.workload import LogFn, PassWorkload, ignore_log
from paceline.workloads.ensemble.members import FittedEnsemble, check_finished, hash_run, name_members
from paceline.workloads.ensemble.passes import EnsemblePasses, EnsembleRequest, Folds, check_folds, load_member_files
from paceline.workloads.ensemble.sections import FEW, EnsembleData, EnsembleModel
from paceline.workloads.ensemble.table_rows import (
    RowSet,
    assign_folds,
    drop_seen_rows,
    find_test_table,
    read_labelled_rows,
    split_held_out,
)

HELD_OUT, HELD_OUT_OF_UNSEEN = 0.2, 0.5
LEAST_ROWS = 10


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
        for name, rows in (("to find weights from", self.request.fit), ("to test on", self.request.test)):
            if len(rows) < LEAST_ROWS:
                raise UserError(f"{rows.file}: {len(rows)} rows {name}; {LEAST_ROWS} are needed", code="invalid-data")
        if self.request.folds is not None:
            check_folds(self.request.folds, self.label)

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
        if data.path is None and not runs:
            raise UserError("no table to learn from; type  data.path=FILE.csv", code="missing-value", key="data.path")
        rows = read_labelled_rows(data.path or find_test_table(runs), self.label, "data.path")
        if runs:
            rows = drop_seen_rows(rows, runs, self._log)
        fit, test = self._held_out(rows, data.test_fraction or (HELD_OUT_OF_UNSEEN if runs else HELD_OUT))
        names = name_members(given)
        folds = None if runs else Folds(fit, assign_folds(fit, data.folds, seed), data.folds, test)
        files = () if runs else load_member_files(model.members, names)
        return EnsembleRequest(model, self.label, names, fit, test, files, folds, seed, self._log)

    def _held_out(self, rows: RowSet, fraction: float) -> tuple[RowSet, RowSet]:
        data = self._data
        if data.test_path is None:
            return split_held_out(rows, fraction, self.spec.train.seed)
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
