"""A script as a workload: its model, data and loss are found by running it until it passes them to its run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import RunSpec
from paceline.config.sections import Section, field
from paceline.errors import UserError
from paceline.layout import Layout
from paceline.script.injected_run import build_no_run_error, execute_script, find_script
from paceline.workload import LogFn, OwnLoop

if TYPE_CHECKING:
    from torch import Tensor, nn

SCORE = "score"
"""Key of `callback_state`: the metric by which the script ranks its checkpoints."""


class ScriptArguments(Section):
    arguments: tuple[str, ...] = field((), "", "of the script, as on a command line")


class Script(OwnLoop):
    """A workload of what the script has passed to its run."""

    Data = ScriptArguments
    asks_for_values = True
    data_words = "run.batches: the data set"

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.given_model: nn.Module | None = None
        self.given_data: Any = None
        self.sums: Any = None

    def has(self, method: str) -> bool:
        return method in vars(self) or super().has(method)

    def prepare(self, say: LogFn) -> None:
        find_script(self.spec)

    def suits(self, layout: Layout) -> None:
        for key, ranks in (("tensor", layout.tensor), ("pipeline", layout.pipeline)):
            if ranks > 1:
                message = f"parallel.{key}={ranks}: a script's model cannot be cut; use parallel.strategy=fsdp, or "
                message += "make it a paceline.Workload, as on docs/own_model.md"
                raise UserError(message, code="not-supported", key=f"parallel.{key}")
        if (engine := self.spec.parallel.engine) != "torch":
            message = f"parallel.engine={engine}: a script has its own loop, and {engine} would have another; use "
            message += "parallel.engine=torch, whose parallel.strategy=zero2 and fsdp do the same"
            raise UserError(message, code="not-supported", key="parallel.engine")

    def model(self) -> nn.Module:
        from paceline.script.probe import probe_model

        return probe_model(self.spec) if self.given_model is None else self.given_model

    def data(self, split: str) -> Any:
        if split != "train":
            return None
        if self.given_data is None:
            from paceline.script.probe import probe_data

            self.given_data, self.collate = probe_data(self.spec)
        return self.given_data

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        from paceline.script.probe import probe_loss

        return probe_loss(self.spec, model, batch)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        found: Mapping[str, Tensor | float] = self.sums(*batch) if isinstance(batch, tuple | list) else self.sums(batch)
        return found

    def goodness(self, metrics: Mapping[str, Any]) -> float:
        """Rank by what `run.evaluate` was given, else by a low loss, else by the first metric."""
        numbers = [name for name, value in metrics.items() if isinstance(value, int | float)]
        first = next((name for name in numbers if name not in ("n", "of")), "loss")
        vars(self)["score"] = self.callback_state.get(SCORE) or ("-loss" if "loss" in numbers else first)
        return super().goodness(metrics)

    def drive(self, layout: Layout, rank_info: Any, show: bool, folder: Any) -> tuple[Path, Any]:
        from paceline.script.rank_run import RankRunFactory

        factory = RankRunFactory(self.spec, layout, rank_info, show, folder)
        with nullcontext() if show else open(os.devnull, "w") as hidden, redirect_stdout(hidden or sys.stdout):
            execute_script(self.spec, factory)
        if factory.outcome is None:
            raise build_no_run_error(self.spec)
        return factory.outcome
