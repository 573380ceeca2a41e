"""Rounds of XGBoost whose trees are the same on any number of ranks, bit for bit.

Every rank finds the bins in the same rows, of a long table those that a hash of their numbers chooses, and bins its
own rows by them (`ref`). Histograms are summed over ranks in double precision. Rows and columns are drawn by number.
"""

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
from xgboost import collective
from xgboost.core import XGBoostError
from xgboost.tracker import RabitTracker

from paceline.data.order import derive_key, mix
from paceline.data.prepared_table import Coding, Task, draw_rows
from paceline.launch.environment import LOCALHOST, RankInfo, pin_cores
from paceline.launch.network import find_local_address
from paceline.launch.process_group import broadcast_from_main, gather_objects
from paceline.workloads.trees.boosting import BoostingJob
from paceline.workloads.trees.scoring import sum_losses
from paceline.workloads.trees.sections import OBJECTIVES

PAGE_BYTES = 1 << 27
PREDICTED_ROWS = 1 << 14
BASE_PARAMETERS = ("objective", "num_class", "scale_pos_weight")
ROWS, COLUMNS = 11, 12


class XGBoostNetwork:
    """XGBoost's own network, over which it sums histograms. While it is up, even building a matrix is a collective."""

    def __init__(self, rank_info: RankInfo, timeout_s: float) -> None:
        self.rank_info, self.timeout_s = rank_info, timeout_s
        self._tracker: Any = None
        self._open = ExitStack()

    def join(self) -> None:
        """Connect the ranks; XGBoost's workers listen on all interfaces for the failure of another."""
        if self.rank_info.world == 1:
            return
        address = broadcast_from_main(self._start_tracker)
        own = {"dmlc_task_id": f"{self.rank_info.rank:08d}", "dmlc_timeout": max(1, round(self.timeout_s))}
        with _mute_stdout(), self.translate_errors():
            self._open.enter_context(collective.CommunicatorContext(**address, **own))
        assert collective.get_rank() == self.rank_info.rank

    def _start_tracker(self) -> dict[str, Any]:
        """Start the tracker on the loopback or, for several nodes, a reachable address; return workers' arguments."""
        several = self.rank_info.local_world < self.rank_info.world
        host = find_local_address(self.rank_info.address) if several else LOCALHOST
        self._tracker = RabitTracker(host_ip=host, n_workers=self.rank_info.world, sortby="task")
        self._tracker.start()
        return dict(self._tracker.worker_args())

    def any(self, flag: bool) -> bool:
        if self.rank_info.world == 1:
            return flag
        with self.translate_errors():
            return bool(collective.allreduce(np.array([flag], np.int32), collective.Op.MAX)[0])

    def leave(self) -> None:
        self._open.close()
        if self._tracker is not None:
            self._tracker.wait_for()
            self._tracker = None

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Raise what XGBoost reports of a lost peer as the connection error that the launcher knows."""
        try:
            yield
        except XGBoostError as error:
            if self.rank_info.world == 1:
                raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
            reason = next((line for line in lines if "timed out" in line), lines[0])
            raise RuntimeError(f"connection closed by peer: {reason}") from None


@contextmanager
def _mute_stdout() -> Iterator[None]:
    """Silence standard output: a thread of XGBoost prints which rank is which there, whatever its verbosity."""
    with Path(os.devnull).open("w") as devnull:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(devnull.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)


class XGBoostRounds:
    def __init__(self, job: BoostingJob) -> None:
        self.job = job
        self.network = XGBoostNetwork(job.rank_info, job.timeout_s)
        target, facts = job.target, job.table.facts
        self.parameters = {
            "tree_method": "hist",
            "device": job.device,
            **job.translate_parameters("xgboost"),
            "objective": OBJECTIVES[target.task]["xgboost"],
            "eval_metric": OBJECTIVES[target.task]["xgboost_loss"],
            "nthread": job.threads,
        }
        self.names, self.kinds = describe_columns(facts)
        self.parameters["base_score"] = self._compute_base_score()
        split = job.table.split("train")
        self.weights = None if split.weights is None else split.weights[job.rows]
        self.labels = target.labels(split.y[job.rows])
        self.held_out, self.loaded = np.empty((0, 1), np.float32), b""
        self.matrix: Any = None
        self.booster: Any = None
        self.cached: list[Any] = []
        self.until_leave = ExitStack()

    def load(self, raw: bytes, done: int) -> None:
        self.loaded = raw

    def join(self) -> None:
        if self.job.device == "cpu":
            self.until_leave.enter_context(pin_cores(self.job.rank_info, self.job.threads))
        self.matrix = self._build_matrix()
        if len(self.held_out) and self.job.data.memory == "ram":
            # XGBoost caches the margins of these rows, so that a new tree only adds to them
            self.cached = [build_dmatrix(self.held_out, self.job.table.facts, self.job.threads)]
        self.booster = xgboost.Booster(self.parameters, cache=[self.matrix, *self.cached])
        if self.loaded:
            self.booster.load_model(bytearray(self.loaded))
            self.booster.set_param(self.parameters)
        self.network.join()

    def leave(self) -> None:
        self.network.leave()
        self.booster = self.matrix = None
        self.until_leave.close()

    def train_round(self, number: int) -> None:
        self._draw_rows_and_columns(number)
        with self.network.translate_errors():
            self.booster.update(self.matrix, number)

    def loss(self) -> float:
        """Return the weighted mean training loss over all ranks, from cached margins; for ranking, 1 - the metric."""
        target = self.job.target
        if target.task is Task.RANKING:
            with self.network.translate_errors():
                line = str(self.booster.eval_set([(self.matrix, "train")]))
            return 1 - float(line.rpartition(":")[2])
        margins = self.booster.predict(self.matrix, output_margin=True).reshape(-1, target.outputs)
        sums = gather_objects(sum_losses(margins, self.labels, self.weights, target))
        return fsum(loss for loss, _ in sums) / fsum(weight for _, weight in sums)

    def any(self, flag: bool) -> bool:
        return self.network.any(flag)

    def margins(self) -> np.ndarray:
        found = [self.booster.predict(matrix, output_margin=True) for matrix in self.cached]
        for first in range(0, 0 if found else len(self.held_out), PREDICTED_ROWS):
            some = np.array(self.held_out[first : first + PREDICTED_ROWS])
            found.append(self.booster.inplace_predict(some, predict_type="margin", validate_features=False))
        return np.concatenate([[], *map(np.ravel, found)]).reshape(-1, self.job.target.outputs)

    def serialize(self) -> bytes:
        return bytes(self.booster.save_raw("ubj"))

    def _draw_rows_and_columns(self, number: int) -> None:
        """Draw the rows and columns of a round; a row of weight 0 is not seen."""
        model, seed = self.job.model, self.job.seed
        if model.subsample < 1:
            first = self.job.rows.start
            kept = draw_rows(np.arange(first, first + self.matrix.num_row()), model.subsample, seed, number, ROWS)
            self.matrix.set_weight(kept.astype(np.float32) if self.weights is None else self.weights * kept)
        if model.colsample_bytree < 1:
            columns = len(self.kinds)
            order = np.argsort(mix(np.arange(columns, dtype=np.uint64) + derive_key(seed, number, COLUMNS)))
            chosen = np.zeros(columns, np.float32)
            chosen[order[: max(1, int(model.colsample_bytree * columns))]] = 1  # as many as the library will draw
            self.matrix.set_info(feature_weights=chosen)

    def _compute_base_score(self) -> str:
        """Return XGBoost's base score on one rank, from a row for each class or one with the mean label."""
        target, totals = self.job.target, self.job.table.facts.totals
        if target.task is Task.RANKING:
            return "0"
        labels = np.arange(len(target.classes)) if target.classes else [totals["mean"]]
        weights = totals["weights"] if target.classes else [1.0]
        rows = xgboost.DMatrix(np.zeros((len(labels), 1), np.float32), label=labels, weight=weights)
        own = {name: self.parameters[name] for name in BASE_PARAMETERS if name in self.parameters}
        booster = xgboost.Booster({**own, "max_depth": 1, "nthread": 1}, cache=[rows])
        booster.update(rows, 0)
        return str(json.loads(booster.save_config())["learner"]["learner_model_param"]["base_score"])

    def _build_matrix(self) -> Any:
        """Return this rank's rows as a QuantileDMatrix, its bins those of all ranks; or on disk until `leave`."""
        job, facts = self.job, self.job.table.facts
        options = {"enable_categorical": True, "nthread": job.threads}
        options |= {"max_bin": job.model.max_bin} if job.model.max_bin else {}
        columns = {"feature_types": self.kinds, "feature_names": self.names}
        few, weights = job.table.bin_rows()
        if job.rank_info.world == 1 and len(few) == facts.rows and job.data.memory == "ram":
            return xgboost.QuantileDMatrix(**job.training_rows(job.rows), **columns, **options)
        if len(few) < facts.rows:  # a name that is in none of them has a bin all the same
            last = [len(facts.categories[name]) - 1 if name in facts.categories else np.nan for name in facts.columns]
            few = np.concatenate([few, np.array([last], np.float32)])
            weights = None if weights is None else np.append(weights, np.float32(1))
        bins = xgboost.QuantileDMatrix(few, weight=weights, **columns, **options)
        if job.data.memory == "ram":
            return xgboost.QuantileDMatrix(**job.training_rows(job.rows), ref=bins, **columns, **options)
        folder = _make_scratch_folder(job.table.folder)
        self.until_leave.callback(shutil.rmtree, folder, ignore_errors=True)
        return xgboost.ExtMemQuantileDMatrix(Pages(job, columns, folder), ref=bins, **options)


def _make_scratch_folder(folder: Path) -> Path:
    """Create and return a scratch folder for this process, and delete those of killed processes of this host."""
    prefix = f"pages-{socket.gethostname()}-"
    for left in folder.glob(f"{prefix}*"):
        if not psutil.pid_exists(int(left.name.removeprefix(prefix).partition("-")[0])):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=folder))


def describe_columns(coding: Coding) -> tuple[list[str], list[str]]:
    """Return the column names without the characters that XGBoost rejects, and the columns' types."""
    names = [re.sub(r"[\[\]<]", "_", name) for name in coding.columns]
    return names, ["c" if name in coding.categories else "q" for name in coding.columns]


def build_dmatrix(X: np.ndarray, coding: Coding, threads: int) -> Any:
    names, kinds = describe_columns(coding)
    return xgboost.DMatrix(X, feature_names=names, feature_types=kinds, enable_categorical=True, nthread=threads)


class Pages(xgboost.DataIter):
    """Yield a rank's rows a page at a time; XGBoost keeps its own form of them in the folder."""

    def __init__(self, job: BoostingJob, columns: Mapping[str, Any], folder: Path) -> None:
        self.job, self.columns = job, columns
        self.rows = max(1, PAGE_BYTES // (4 * len(job.table.facts.columns)))
        self.first = job.rows.start
        starts = job.table.split("train").queries
        self.starts = None if starts is None else np.append(starts, job.table.facts.rows)
        super().__init__(cache_prefix=str(folder / "rows"))

    def reset(self) -> None:
        self.first = self.job.rows.start

    def next(self, input_data: Callable[..., None]) -> bool:
        last = min(self.first + self.rows, self.job.rows.stop)
        if self.starts is not None and self.first < last < self.job.rows.stop:
            last = int(self.starts[np.searchsorted(self.starts, last)])  # a query is in one page
        if self.first >= last:
            return False
        some = self.job.training_rows(slice(self.first, last))
        input_data(**{**some, "data": np.array(some["data"])}, **self.columns)
        self.first = last
        return True
