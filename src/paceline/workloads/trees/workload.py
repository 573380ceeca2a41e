"""Boosted trees as a workload of a run file, and the rounds of one rank."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.config import RunSpec, Train
from paceline.data.prepared_table import PreparedTable, TableTarget, choose_target, prepare_table
from paceline.errors import UserError
from paceline.launch.environment import SINGLE_RANK
from paceline.layout import Layout
from paceline.trainer.explain import describe_sharing
from paceline.workload import FitEnd, LogFn, Passes, PassWorkload, ignore_log
from paceline.workloads.trees.boosting import BoostingJob, load_library
from paceline.workloads.trees.scoring import HeldOutRows, load_metric
from paceline.workloads.trees.sections import BY_NAME, TreesData, TreesModel
from paceline.workloads.trees.tree_model import FittedTrees

DEFAULT_EVALUATE_EVERY = 10
CPU_BUILD = "this {} is built for CPUs only; for devices type  pip uninstall xgboost-cpu && pip install xgboost"
USED_TRAIN_KEYS = {"steps", "epochs", "seed", "evaluate_every", "evaluate_on", "patience", "checkpoint_every"}
USED_TRAIN_KEYS |= {"checkpoint_format", "keep", "log_every", "loggers", "compile", "nonfinite"}
SAVED = ("done", "stale", "best", "best_round")


class TreePasses(Passes):
    def __init__(self, job: BoostingJob, train: Train) -> None:
        self.job, self.train, self.rank_info = job, train, job.rank_info
        self.samples = job.table.facts.rows
        self.most = train.steps or train.epochs or 0
        self.done = self.stale = self.best_round = 0
        self.best: float | None = None
        self.rounds = load_library(job.model.library)(job)
        test = job.table.split("test")
        self.held_out = HeldOutRows(test, job.target, self.rank_info.rank, self.rank_info.world)
        self.rounds.held_out = test.X[self.held_out.rows]
        self.metric = load_metric(job.model.metric)
        self.notes: list[str] = []
        self._restored = torch.empty(0, dtype=torch.uint8)

    @property
    def end(self) -> FitEnd | None:
        if self.train.patience and self.stale >= self.train.patience:
            return FitEnd.PATIENCE
        return FitEnd.AS_ASKED if self.done >= self.most else None

    def end_words(self) -> str:
        if self.end is FitEnd.PATIENCE:
            patience = f"{self.stale} evaluations without a lower loss (train.patience={self.train.patience})"
            return f"{patience}; the best was after round {self.best_round}, and no tree after it is used"
        return f"all of its {self.most} rounds"

    def begin(self) -> None:
        self.rounds.join()

    def close(self) -> None:
        self.rounds.leave()

    def step(self, flag: bool) -> dict[str, Any]:
        began, ran = perf_counter(), thread_time()
        self.rounds.train_round(self.done)
        self.done += 1
        logged = self.done in (1, self.most) or self.done % self.train.log_every == 0
        loss = {"loss": self.rounds.loss()} if logged else {}
        flagged = self.rounds.any(flag)
        step_s = perf_counter() - began
        waited_s = max(0.0, step_s - (thread_time() - ran)) if self.rank_info.world > 1 else 0.0
        times = {"step_s": step_s, "data_s": 0.0, "comm_s": waited_s, "exposed_s": waited_s}
        return {**loss, **times, "flagged": flagged, "of_samples": self.most * self.samples}

    def evaluate(self) -> dict[str, Any]:
        due = self.done == self.most or self.done % (self.train.evaluate_every or DEFAULT_EVALUATE_EVERY) == 0
        if not due or not len(self.held_out.split):
            return {}
        margins = self.rounds.margins()
        metrics = self.held_out.metrics(margins)
        if self.metric is not None:
            metrics[self.metric.name] = self.metric.evaluate(self.held_out, margins)
        if self.best is None or metrics["loss"] < self.best:
            self.best, self.best_round, self.stale = metrics["loss"], self.done, 0
        else:
            self.stale += 1
        return metrics

    def tensors(self) -> dict[str, Any]:
        raw = np.frombuffer(self.rounds.serialize(), np.uint8)
        return {"model": {"trees": torch.from_numpy(raw.copy())}}

    def meta(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in SAVED}, "bytes": len(self.rounds.serialize())}

    def allocate_state(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        self._restored = torch.empty(meta["bytes"], dtype=torch.uint8)
        return {"model": {"trees": self._restored}}

    def load_state(self, meta: Mapping[str, Any]) -> None:
        for name in SAVED:
            setattr(self, name, meta[name])
        self.rounds.load(self._restored.numpy().tobytes(), self.done)

    def equations(self, ranks: int) -> list[str]:
        job, facts, target = self.job, self.job.table.facts, self.job.target
        predicted = f"{len(target.classes)} classes" if target.classes else target.task.value
        device = "a CUDA device and " if job.device != "cpu" else ""
        lines = [
            describe_sharing(self.samples, ranks, "rows"),
            f"{len(facts.columns)} columns, {len(facts.categories)} of them categories; {predicted}",
            f"{job.model.library}, {device}{job.threads} thread{'s' * (job.threads > 1)} per rank",
        ]
        if facts.test_rows:
            every = self.train.evaluate_every or DEFAULT_EVALUATE_EVERY
            lines.append(f"evaluated on {facts.test_rows:,} held-out rows after every {every} rounds")
        return [*lines, *self.notes]

    def conclude(self, result: Mapping[str, Tensor], folder: Path) -> None:
        rounds, library = self.best_round if self.end is FitEnd.PATIENCE else self.done, self.job.model.library
        raw = result["trees"].numpy().tobytes()
        FittedTrees.cut(library, raw, rounds, self.job.table.facts, self.job.target).write(folder)


class Trees(PassWorkload):
    Model, Data = TreesModel, TreesData

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._model, self._data = cast(TreesModel, spec.model), cast(TreesData, spec.data)

    @cached_property
    def table(self) -> PreparedTable:
        return prepare_table(self._data, ignore_log, verify=False)  # `prepare` has verified it, for all ranks

    @property
    def target(self) -> TableTarget:
        objective = self._model.objective
        return choose_target(objective, BY_NAME.get(objective), self._data.label, self.table.facts)

    def prepare(self, log: LogFn) -> None:
        load_library(self._model.library)
        train = self.spec.train
        for name in (name for name in Train.model_fields if name not in USED_TRAIN_KEYS):
            if (value := getattr(train, name)) != Train.model_fields[name].default:
                hint = f"type  model.learning_rate={value}" if name == "lr" else "leave it out"
                raise _not_supported(f"train.{name}", f"={value} is for models that learn by gradients; {hint}")
        if not train.steps and not train.epochs:
            raise UserError("train.steps is missing: give the number of rounds, as  train.steps=200", key="train.steps")
        self.table = prepare_table(self._data, log)
        target, facts, ranks = self.target, self.table.facts, self.spec.parallel.ranks
        if ranks > (parts := facts.queries or facts.rows):
            what = "queries" if facts.queries else "rows"
            raise UserError(f"parallel.ranks={ranks} for {parts} {what}; use fewer ranks", key="parallel.ranks")
        tested = {"train.patience": train.patience, "model.metric": self._model.metric}
        if not facts.test_rows and (keys := [key for key, value in tested.items() if value]):
            raise UserError(f"{keys[0]} needs held-out rows; give data.test_fraction or test_path", key=keys[0])
        load_metric(self._model.metric)
        if facts.queries and self._model.library == "xgboost":  # which divides by each rank's weights of queries
            wrong = "data.weight" if facts.weighted else "model.subsample" if self._model.subsample < 1 else ""
            if wrong:
                raise _not_supported(wrong, " and data.query: XGBoost normalises per rank; use  model.library=lightgbm")
        if self._model.scale_pos_weight != 1 and len(target.classes) != 2:
            raise UserError("model.scale_pos_weight is for two classes; leave it out", key="model.scale_pos_weight")

    def sample_count(self) -> int:
        return self.table.facts.rows

    def fingerprint(self) -> str:
        return self.table.facts.digest

    def suits(self, layout: Layout) -> None:
        if not layout.plain or self.spec.parallel.engine != "torch" or self.spec.parallel.reduce != "exact":
            raise _not_supported("parallel", ": trees only spread rows over ranks; give parallel.ranks alone")
        if layout.ranks > 1 and self._model.library == "lightgbm":
            raise _not_supported("parallel.ranks", f"={layout.ranks}: LightGBM has one; use  model.library=xgboost")
        if self._model.library == "lightgbm" and self._data.memory == "disk":
            raise _not_supported("data.memory", "=disk is for model.library=xgboost; leave one of them out")

    def passes(self, device: Any) -> TreePasses:
        where = _choose_tree_device(self._model.library, device, self.spec.parallel.device == "cuda")
        job = BoostingJob(self.spec, self.table, self.target, self.rank_info or SINGLE_RANK, where)
        found = TreePasses(job, self.spec.train)
        if job.device != str(device):
            found.notes = [CPU_BUILD.format(self._model.library)]
        return found

    def fitted(self, folder: Path) -> FittedTrees:
        return FittedTrees.read(folder)


def _not_supported(key: str, reason: str) -> UserError:
    return UserError(f"{key}{reason}", code="not-supported", key=key)


def _choose_tree_device(library: str, device: Any, required: bool) -> str:
    """Return where rounds run: the package xgboost-cpu has no CUDA, nor has LightGBM as it is used here."""
    if device.type == "cpu":
        return "cpu"
    if library == "xgboost":
        import xgboost

        if xgboost.build_info()["USE_CUDA"]:
            return str(device)
    if required:
        message = f"parallel.device=cuda: {CPU_BUILD.format(library)}; or use  parallel.device=cpu"
        raise UserError(message, code="not-installed", key="parallel.device")
    return "cpu"
