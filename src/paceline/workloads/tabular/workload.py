"""The network for tables as a workload of a run file."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import RunSpec
from paceline.data.prepared_table import (
    Coding,
    PreparedTable,
    RowSplit,
    TableTarget,
    Task,
    choose_target,
    describe_predicted,
    encode_rows,
    parse_predicted,
    prepare_table,
)
from paceline.io.files import read_sealed, write_sealed
from paceline.nn.class_metrics import class_sums
from paceline.workload import LogFn, Workload, ignore_log
from paceline.workloads.tabular.sections import TabularData, TabularModel

COLUMNS_FILE = "columns.json"
SCALED_ROWS = 1 << 18  # the first ones, which give means, spreads and bins of numbers


class TableNet(nn.Module):
    """Maps rows of numbers and category numbers, NaN where one is missing, to logits or one scaled number.

    Means, spreads and bins are buffers, so that exported weights hold all that the network knows of the table.
    """

    def __init__(self, coding: Coding, outputs: int, section: TabularModel) -> None:
        super().__init__()
        self.mean: Tensor
        self.spread: Tensor
        self.cuts: Tensor
        self.first: Tensor
        self.target: Tensor
        sizes = [len(coding.categories[name]) for name in coding.columns if name in coding.categories]
        words = [number for number, name in enumerate(coding.columns) if name in coding.categories]
        numbers = [number for number in range(len(coding.columns)) if number not in words]
        sizes += [section.bins] * len(numbers)
        self.numbers, self.words, width = numbers, words, section.width
        for name, shape in (("mean", ()), ("spread", ()), ("cuts", (section.bins - 1,))):
            self.register_buffer(name, torch.zeros(len(numbers), *shape))
        self.register_buffer("target", torch.tensor([0.0, 1.0]))  # mean and spread of the label
        first = torch.tensor([0, *(size + 1 for size in sizes)]).cumsum(0)  # row 0 of each column: missing
        self.register_buffer("first", first[:-1], persistent=False)
        self.embedding = nn.Embedding(int(first[-1]), section.embedding)
        nn.init.normal_(self.embedding.weight, std=0.05)  # as they are learned from few rows each
        self.enter = nn.Linear(len(sizes) * section.embedding + len(numbers), width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(section.layers))
        self.dropout = nn.Dropout(section.dropout)
        self.leave = nn.Linear(width, outputs)

    @torch.no_grad()
    def scale_to(self, rows: RowSplit, of_numbers: bool) -> "TableNet":
        """Set means, spreads and bins from training rows, and return the model."""
        most = self.cuts.shape[1]
        for place, number in enumerate(self.numbers):
            column = np.asarray(rows.X[:SCALED_ROWS, number], np.float64)
            if len(known := column[~np.isnan(column)]):
                self.mean[place], self.spread[place] = float(known.mean()), float(known.std())
                halves = ((known, most // 2), (np.unique(known), most - most // 2))  # values few rows have count, too
                cuts = [np.quantile(values, np.linspace(0, 1, count + 2)[1:-1]) for values, count in halves]
                self.cuts[place] = torch.tensor(np.sort(np.concatenate(cuts)), dtype=torch.float32)
        if of_numbers:
            y = np.asarray(rows.y[:SCALED_ROWS], np.float64)
            self.target[0], self.target[1] = float(y.mean()), float(y.std()) or 1.0
        return self

    def forward(self, X: Tensor) -> Tensor:
        values = X[:, self.numbers]
        bins = torch.searchsorted(self.cuts, values.T.contiguous(), right=True).T + 1
        codes = torch.cat([X[:, self.words].nan_to_num(-1).long() + 1, bins.masked_fill(values.isnan(), 0)], 1)
        scaled = (values - self.mean) / self.spread.clamp(min=1e-12)
        embedded = self.embedding(codes + self.first).flatten(1)
        x = self.enter(torch.cat([embedded, scaled.nan_to_num(0.0).clamp(-10, 10)], 1))
        for layer in self.layers:
            x = x + layer(self.dropout(F.gelu(x)))
        return self.leave(self.dropout(F.gelu(x)))


class Tabular(Workload):
    Model, Data = TabularModel, TabularData
    evaluation_chunk = 4096

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._model, self._data = cast(TabularModel, spec.model), cast(TabularData, spec.data)

    @cached_property
    def table(self) -> PreparedTable:
        return prepare_table(self._data, ignore_log, verify=False)  # `prepare` has verified it, for all ranks

    def prepare(self, log: LogFn) -> None:
        self.table = prepare_table(self._data, log)
        self.target  # noqa: B018 - rejects labels that do not fit

    @cached_property
    def _predicted(self) -> tuple[TableTarget, Coding]:
        if self.kept is not None:
            return parse_predicted(read_sealed(self.kept / COLUMNS_FILE))
        objective, facts = self._model.objective, self.table.facts
        task = None if objective == "auto" else Task(objective)
        return choose_target(objective, task, self._data.label, facts), facts

    @property
    def target(self) -> TableTarget:
        return self._predicted[0]

    @property
    def coding(self) -> Coding:
        return self._predicted[1]

    def keep(self, folder: Path) -> None:
        write_sealed(folder / COLUMNS_FILE, describe_predicted(*self._predicted))

    def sample_count(self) -> int:
        return self.table.facts.rows

    def fingerprint(self) -> str:
        return self.table.facts.digest

    def data(self, split: str) -> tuple[np.ndarray, ...] | None:
        rows = self.table.split(split)
        if not len(rows):
            return None
        y = self.target.labels(rows.y)
        columns = (rows.X, y.astype(np.int64) if self.target.classes else y)
        return columns if rows.weights is None else (*columns, rows.weights)

    def model(self) -> TableNet:
        net = TableNet(self.coding, len(self.target.classes) or 1, self._model)
        return net if self.kept is not None else net.scale_to(self.table.split("train"), not self.target.classes)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        X, y, *weights = batch
        found = model(X)
        if self.target.classes:
            each = F.cross_entropy(found, y, reduction="none")
        else:
            mean, spread = cast(TableNet, model).target
            each = (found[:, 0] - (y - mean) / spread) ** 2
        return ((each * weights[0]).sum(), weights[0].sum()) if weights else (each.sum(), len(y))

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        X, y, *weights = batch
        weight = weights[0] if weights else torch.ones(len(y), device=X.device)
        if self.target.classes:
            logits = model(X)
            total = (F.cross_entropy(logits, y, reduction="none") * weight).sum()
            return {"loss": total, "count": weight.sum(), **class_sums(logits, y)}
        off = self._unscale(model, X) - y
        return {"loss": (off**2 * weight).sum(), "mae": (off.abs() * weight).sum(), "count": weight.sum()}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        found = super().metrics(sums)
        return found if self.target.classes else {**found, "rmse": found["loss"] ** 0.5}

    def _unscale(self, model: nn.Module, X: Tensor) -> Tensor:
        mean, spread = cast(TableNet, model).target
        return model(X)[:, 0] * spread + mean

    def classes(self) -> Sequence[str]:
        return self.target.classes

    def encode(self, inputs: Sequence[Any]) -> Tensor:
        return torch.from_numpy(encode_rows(inputs, self.coding))

    def predict(self, model: nn.Module, batch: Tensor) -> Mapping[str, Tensor]:
        if self.target.classes:
            return {"probabilities": model(batch).softmax(1)}
        return {"predicted": self._unscale(model, batch)}
