"""Rounds of XGBoost whose trees are the same on any number of ranks, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xgboost

from paceline.data.order import derive_key, mix
from paceline.launch.environment import LOCALHOST, RankInfo, pin_cores
from paceline.launch.network import find_local_address
from paceline.launch.process_group import broadcast_from_main, gather_objects
from paceline.workloads.trees.boosting import BoostingJob
from paceline.workloads.trees.scoring import sum_losses
from paceline.workloads.trees.sections import Task, TreesModel
from paceline.workloads.trees.table import Coding


class XGBoostNetwork:
    """Up from `join` to `leave`. While it is up even making a matrix is work for all ranks: leave before one rank does
    something alone."""

    def __init__(self, place: RankInfo, timeout_s: float) -> None:
        self.place, self.timeout_s = place, timeout_s
        self._up = ExitStack()
        self._tracker: Any = None

    def join(self) -> None:
        """Join XGBoost's own network, whose sockets listen on all interfaces for the failure of another rank."""
        if self.place.world == 1:
            return
        from xgboost import collective

        meeting = broadcast_from_main(self._meeting)
        own = {"dmlc_task_id": f"{self.place.rank:08d}", "dmlc_timeout": max(1, round(self.timeout_s))}
        with _mute_stdout(), self.failures():
            self._up.enter_context(collective.CommunicatorContext(**meeting, **own))
        assert collective.get_rank() == self.place.rank

    def _meeting(self) -> dict[str, Any]:
        """Where the ranks meet: on the loopback, or at an address of the main rank's host that the others can reach."""
        from xgboost.tracker import RabitTracker

        several = self.place.local_world < self.place.world
        host = find_local_address(self.place.address) if several else LOCALHOST
        self._tracker = RabitTracker(host_ip=host, n_workers=self.place.world, sortby="task")
        self._tracker.start()
        return dict(self._tracker.worker_args())

    def any(self, flag: bool) -> bool:
        """Whether a rank says so."""
        if self.place.world == 1:
            return flag
        from xgboost import collective

        with self.failures():
            return bool(collective.allreduce(np.array([flag], np.int32), collective.Op.MAX)[0])

    def leave(self) -> None:
        self._up.close()
        if self._tracker is not None:
            self._tracker.wait_for()
            self._tracker = None

    @contextmanager
    def failures(self) -> Iterator[None]:
        """What XGBoost reports of a peer that is gone is an error of the connection, and said as such."""
        from xgboost.core import XGBoostError

        try:
            yield
        except XGBoostError as error:
            if self.place.world == 1:
                raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            said = next((line for line in lines if "timed out" in line), lines[0] if lines else "")
            raise RuntimeError(f"connection closed by peer: {said}") from None


@contextmanager
def _mute_stdout() -> Iterator[None]:
    """Who was given which rank, XGBoost's thread tells standard output, however quiet it is asked to be."""
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)


PAGE_BYTES = 1 << 27
"""Of numbers that are binned at a time, where the binned table stays on disk."""
ASKED_ROWS = 1 << 14
ROWS, COLUMNS = 11, 12
"""Streams of random numbers."""


def build_xgboost_parameters(model: TreesModel, device: str = "cpu") -> dict[str, Any]:
    """As XGBoost calls them; what is not given is left to it."""
    names = ("learning_rate", "max_depth", "max_leaves", "min_child_weight", "reg_lambda", "max_bin")
    given = {name: getattr(model, name) for name in names if getattr(model, name) is not None}
    always = ("gamma", "reg_alpha", "max_delta_step", "colsample_bytree", "grow_policy")
    if model.scale_pos_weight != 1:
        given["scale_pos_weight"] = model.scale_pos_weight
    return {"tree_method": "hist", "device": device, **given, **{name: getattr(model, name) for name in always}}


def rounds(boosting: BoostingJob) -> XGBoostRounds:
    return XGBoostRounds(boosting)


class XGBoostRounds:
    def __init__(self, boosting: BoostingJob) -> None:
        self.boosting = boosting
        self.network = XGBoostNetwork(boosting.place, boosting.timeout_s)
        target, facts = boosting.target, boosting.table.facts
        self.parameters = {
            **build_xgboost_parameters(boosting.model, boosting.device),
            "objective": target.objective.xgboost,
            "eval_metric": target.objective.xgboost_loss,
            "nthread": boosting.threads,
            "seed": boosting.seed,
            **({"num_class": target.outputs} if target.objective.task is Task.CLASSES else {}),
        }
        self.names, self.kinds = describe_columns(facts)
        self.parameters["base_score"] = self._first_guess()
        split = boosting.table.split("train")
        self.weights = None if split.weights is None else split.weights[boosting.rows]
        self.labels = target.labels(split.y[boosting.rows])
        self.asked, self.loaded = np.empty((0, 1), np.float32), b""
        self.matrix: Any = None
        self.booster: Any = None
        self.held: list[Any] = []
        self.folder: Path | None = None
        self.until_left = ExitStack()

    def hold(self, X: np.ndarray) -> None:
        self.asked = X

    def load(self, raw: bytes, done: int) -> None:
        self.loaded = raw

    def join(self) -> None:
        """In memory, what trees said of the rows that are asked about is remembered, and new ones add to it."""
        if self.boosting.device == "cpu":
            self.until_left.enter_context(pin_cores(self.boosting.place, self.boosting.threads))
        self.matrix = self._binned()
        if len(self.asked) and self.boosting.data.memory == "ram":
            self.held = [build_dmatrix(self.asked, self.boosting.table.facts, self.boosting.threads)]
        self.booster = xgboost.Booster(self.parameters, cache=[self.matrix, *self.held])
        if self.loaded:
            self.booster.load_model(bytearray(self.loaded))
            self.booster.set_param(self.parameters)
        self.network.join()

    def leave(self) -> None:
        self.network.leave()
        self.until_left.close()
        self.booster = self.matrix = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def make(self, number: int) -> None:
        self._draw(number)
        with self.network.failures():
            self.booster.update(self.matrix, number)

    def loss(self) -> float:
        """The margins are there already; summing their losses takes a tenth of the time that XGBoost takes for it."""
        target = self.boosting.target
        if target.objective.task is Task.RANKING:
            with self.network.failures():
                told = str(self.booster.eval_set([(self.matrix, "train")]))
            return 1 - float(told.rpartition(":")[2])
        margins = self.booster.predict(self.matrix, output_margin=True).reshape(-1, target.outputs)
        sums = gather_objects(sum_losses(margins, self.labels, self.weights, target))
        return fsum(loss for loss, _ in sums) / fsum(weight for _, weight in sums)

    def any(self, flag: bool) -> bool:
        return self.network.any(flag)

    def margins(self) -> np.ndarray:
        found = [self.booster.predict(matrix, output_margin=True) for matrix in self.held]
        for first in range(0, 0 if found else len(self.asked), ASKED_ROWS):
            some = np.array(self.asked[first : first + ASKED_ROWS])
            found.append(self.booster.inplace_predict(some, predict_type="margin", validate_features=False))
        return np.concatenate([np.empty(0), *(part.ravel() for part in found)]).reshape(
            -1, self.boosting.target.outputs
        )

    def raw(self) -> bytes:
        return bytes(self.booster.save_raw("ubj"))

    def _draw(self, number: int) -> None:
        """The rows and columns of a round, where it does not see all of them; a row of weight 0 is not seen."""
        model, seed = self.boosting.model, self.boosting.seed
        if model.subsample < 1:
            first = self.boosting.rows.start
            ids = np.arange(first, first + self.matrix.num_row(), dtype=np.uint64)
            kept = mix(ids + derive_key(seed, number, ROWS)) < np.uint64(model.subsample * (2**64 - 2**11))
            self.matrix.set_weight(kept.astype(np.float32) if self.weights is None else self.weights * kept)
        if model.colsample_bytree < 1:
            columns = len(self.kinds)
            order = np.argsort(mix(np.arange(columns, dtype=np.uint64) + derive_key(seed, number, COLUMNS)))
            chosen = np.zeros(columns, np.float32)
            chosen[order[: max(1, int(model.colsample_bytree * columns))]] = 1  # as many as the library will draw
            self.matrix.set_info(feature_weights=chosen)

    def _first_guess(self) -> str:
        """What XGBoost would begin with on one rank: from a row for each class, or one for the mean of all labels.
        A ranking is the same with any, and XGBoost's is the rounding error of a sum over ranks."""
        target, totals = self.boosting.target, self.boosting.table.facts.totals
        if target.objective.task is Task.RANKING:
            return "0"
        labels = np.arange(len(target.classes)) if target.classes else [totals["mean"]]
        weights = totals["weights"] if target.classes else [1.0]
        rows = xgboost.DMatrix(np.zeros((len(labels), 1), np.float32), label=labels, weight=weights)
        told = ("objective", "num_class", "scale_pos_weight")
        own = {name: value for name, value in self.parameters.items() if name in told}
        booster = xgboost.Booster({**own, "max_depth": 1, "nthread": 1}, cache=[rows])
        booster.update(rows, 0)
        return str(json.loads(booster.save_config())["learner"]["learner_model_param"]["base_score"])

    def _binned(self) -> Any:
        boosting = self.boosting
        options = {
            "enable_categorical": True,
            "nthread": boosting.threads,
            **({"max_bin": boosting.model.max_bin} if boosting.model.max_bin else {}),
        }
        columns = {"feature_types": self.kinds, "feature_names": self.names}
        few, weights = boosting.table.bin_rows()
        facts = boosting.table.facts
        if boosting.place.world == 1 and len(few) == facts.rows and boosting.data.memory == "ram":
            return xgboost.QuantileDMatrix(**boosting.some(boosting.rows), **columns, **options)
        if len(few) < facts.rows:  # a name that is in none of them has a bin all the same
            last = [len(facts.categories[name]) - 1 if name in facts.categories else np.nan for name in facts.columns]
            few = np.concatenate([few, np.array([last], np.float32)])
            weights = None if weights is None else np.append(weights, np.float32(1))
        bins = xgboost.QuantileDMatrix(few, weight=weights, **columns, **options)
        if boosting.data.memory == "ram":
            return xgboost.QuantileDMatrix(**boosting.some(boosting.rows), ref=bins, **columns, **options)
        self.folder = _scratch(boosting.table.folder)
        return xgboost.ExtMemQuantileDMatrix(Pages(boosting, columns, self.folder), ref=bins, **options)


def _scratch(folder: Path) -> Path:
    """A new folder for this process; those of processes of this host that were killed are removed."""
    prefix = f"pages-{socket.gethostname()}-"
    for left in folder.glob(f"{prefix}*"):
        if not psutil.pid_exists(int(left.name.removeprefix(prefix).partition("-")[0])):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=folder))


def describe_columns(coding: Coding) -> tuple[list[str], list[str]]:
    """The names of columns as XGBoost takes them, which has signs of its own for some signs, and their types."""
    names = [re.sub(r"[\[\]<]", "_", name) for name in coding.columns]
    return names, ["c" if name in coding.categories else "q" for name in coding.columns]


def build_dmatrix(X: np.ndarray, coding: Coding, threads: int) -> Any:
    names, kinds = describe_columns(coding)
    return xgboost.DMatrix(X, feature_names=names, feature_types=kinds, enable_categorical=True, nthread=threads)


class Pages(xgboost.DataIter):
    """A rank's rows a page at a time; XGBoost keeps its own form of them in the folder."""

    def __init__(self, boosting: BoostingJob, columns: Mapping[str, Any], folder: Path) -> None:
        self.boosting, self.columns = boosting, columns
        self.rows = max(1, PAGE_BYTES // (4 * len(boosting.table.facts.columns)))
        self.first = boosting.rows.start
        starts = boosting.table.split("train").queries
        self.starts = None if starts is None else np.append(starts, boosting.table.facts.rows)
        super().__init__(cache_prefix=str(folder / "rows"))

    def reset(self) -> None:
        self.first = self.boosting.rows.start

    def next(self, input_data: Callable[..., None]) -> bool:
        last = min(self.first + self.rows, self.boosting.rows.stop)
        if self.starts is not None and self.first < last < self.boosting.rows.stop:
            last = int(self.starts[np.searchsorted(self.starts, last)])  # a query is in one page
        if self.first >= last:
            return False
        some = self.boosting.some(slice(self.first, last))
        input_data(**{**some, "data": np.array(some["data"])}, **self.columns)
        self.first = last
        return True
