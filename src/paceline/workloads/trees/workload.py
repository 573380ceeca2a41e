"""Boosted trees as a workload of a run file."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.launch.environment import ALONE, detect
from paceline.layout import Layout
from paceline.spec import Train
from paceline.workload import PassWorkload, Say
from paceline.workloads.trees.fitted import FittedTrees
from paceline.workloads.trees.own_metric import own_metric
from paceline.workloads.trees.passes import TreePasses
from paceline.workloads.trees.rounds import Boosting, library_of
from paceline.workloads.trees.sections import TreesData, TreesModel
from paceline.workloads.trees.table import PreparedTable, table_of
from paceline.workloads.trees.targets import TreeTarget, target_of

CORES_ALONE = "this {} is made for cores alone; for devices type  pip uninstall xgboost-cpu && pip install xgboost"
OF_TREES = {"steps", "epochs", "seed", "evaluate_every", "evaluate_on", "patience", "checkpoint_every", "checkpoint"}
OF_TREES |= {"keep", "log_every", "loggers", "compile", "nonfinite"}
"""What the section `train` may say of them."""


class Trees(PassWorkload):
    """Reads a table, and adds a tree for each round (of several classes, one for each of them)."""

    Model, Data = TreesModel, TreesData

    @cached_property
    def table(self) -> PreparedTable:
        return table_of(self._data, self._say)

    @property
    def target(self) -> TreeTarget:
        return target_of(self._model.objective, self._data.label, self.table.facts)

    def prepare(self, say: Say) -> None:
        self._say = say
        library_of(self._model.library)
        train = self.spec.train
        _refuse_gradients(train)
        if not train.steps and not train.epochs:
            raise UserError("how many rounds? give their number as  train.steps=200")
        target, facts = self.target, self.table.facts
        if self.spec.parallel.ranks > facts.rows:
            raise UserError(f"parallel.ranks={self.spec.parallel.ranks}: there are {facts.rows} rows; use fewer ranks")
        given = {"train.patience": train.patience, "model.metric": self._model.metric}
        if not facts.test_rows and (asked := [key for key, value in given.items() if value]):
            raise UserError(f"{asked[0]}={given[asked[0]]} needs held-out rows; give data.test_fraction or test_path")
        own_metric(self._model.metric)
        self._check_ranking()
        if self._model.scale_pos_weight != 1 and len(target.classes) != 2:
            raise UserError(f"model.scale_pos_weight={self._model.scale_pos_weight:g} is for two classes; leave it out")

    def _check_ranking(self) -> None:
        """What XGBoost would do differently on each number of ranks: it divides by each rank's weights of queries."""
        facts, ranks = self.table.facts, self.spec.parallel.ranks
        if facts.queries and ranks > facts.queries:
            raise UserError(f"parallel.ranks={ranks}: there are {facts.queries} queries to learn from; use fewer ranks")
        if facts.queries and self._model.library == "xgboost":
            wrong = "data.weight" if facts.weighted else "model.subsample" if self._model.subsample < 1 else ""
            if wrong:
                raise UserError(
                    f"{wrong} and data.query: XGBoost weighs the queries of each rank by themselves; leave {wrong} "
                    "out, or use  model.library=lightgbm"
                )

    _say: Say = staticmethod(lambda text: None)

    def sample_count(self) -> int:
        return self.table.facts.rows

    def fingerprint(self) -> str:
        return self.table.facts.digest

    def suits(self, layout: Layout) -> None:
        if not layout.plain or self.spec.parallel.engine != "torch" or self.spec.parallel.reduce != "exact":
            raise UserError(
                "workload=trees spreads rows over ranks and nothing else; "
                "leave parallel.strategy, tensor, pipeline, engine and reduce out, and give parallel.ranks"
            )
        if layout.ranks > 1 and self._model.library == "lightgbm":
            raise UserError(
                f"parallel.ranks={layout.ranks}: on several ranks LightGBM grows other trees than on one; "
                "use  model.library=xgboost, whose trees stay the same,  or  parallel.ranks=1  and parallel.threads"
            )
        if self._model.library == "lightgbm" and self._data.memory == "disk":
            raise UserError("data.memory=disk is for model.library=xgboost; leave one of them out")

    def passes(self, device: Any) -> TreePasses:
        import torch

        spec = self.spec
        boosting = Boosting(
            model=self._model,
            data=self._data,
            table=self.table,
            target=self.target,
            seed=spec.train.seed,
            place=detect(os.environ) or ALONE,
            threads=torch.get_num_threads(),
            timeout_s=spec.parallel.timeout_s,
            device=_device(self._model.library, device, spec.parallel.device == "cuda"),
        )
        found = TreePasses(boosting, spec.train)
        if boosting.device != str(device):
            found.notes = [CORES_ALONE.format(self._model.library)]
        return found

    def fitted(self, folder: Path) -> FittedTrees:
        return FittedTrees.read(folder)

    @property
    def _data(self) -> TreesData:
        assert isinstance(self.spec.data, TreesData)
        return self.spec.data

    @property
    def _model(self) -> TreesModel:
        assert isinstance(self.spec.model, TreesModel)
        return self.spec.model


def _refuse_gradients(train: Train) -> None:
    """Values that trees would not look at."""
    given = [name for name, info in Train.model_fields.items() if getattr(train, name) != info.default]
    if others := [name for name in given if name not in OF_TREES]:
        name, value = others[0], getattr(train, others[0])
        here = f"type  model.learning_rate={value}" if name == "lr" else "leave it out"
        raise UserError(f"train.{name}={value} is for models that learn by gradients, and trees do not; {here}")


def _device(library: str, device: Any, asked: bool) -> str:
    """Where the rounds are made: there are two packages of XGBoost, and one is for cores alone."""
    if device.type == "cpu":
        return "cpu"
    if library == "xgboost":
        import xgboost

        if xgboost.build_info()["USE_CUDA"]:
            return str(device)
    if asked:
        raise UserError(f"parallel.device=cuda: {CORES_ALONE.format(library)}; or use  parallel.device=cpu")
    return "cpu"
