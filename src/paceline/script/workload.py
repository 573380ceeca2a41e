"""A script as the rest of Paceline sees it: its model, data and loss are found by running it until they show."""

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
from paceline.script.injected_run import NO_RUN_TEXT, execute_script, find_script
from paceline.workload import LogFn, OwnLoop

if TYPE_CHECKING:
    from torch import Tensor, nn

SCORE = "score"
"""Of `callback_state`: by which metric the script ranks its checkpoints."""


class ScriptArguments(Section):
    arguments: tuple[str, ...] = field((), "", "what the script is given after its name, as on a command line")


class Script(OwnLoop):
    """Between a run and the script: what the script has given to its run is here, for the parts that ask for it."""

    Data = ScriptArguments
    asks_for_values = True
    data_words = "run.batches: the data set"

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.given_model: nn.Module | None = None
        self.given_data: Any = None
        self.sums: Any = None
        """What `run.evaluate` calls with each batch."""

    def has(self, method: str) -> bool:
        return method in vars(self) or super().has(method)

    def prepare(self, say: LogFn) -> None:
        find_script(self.spec)

    def suits(self, layout: Layout) -> None:
        for key, ranks in (("tensor", layout.tensor), ("pipeline", layout.pipeline)):
            if ranks > 1:
                raise UserError(
                    f"parallel.{key}={ranks}: the model of a script cannot be cut; use parallel.strategy=fsdp, or make "
                    "it a paceline.Workload, as on docs/own_model.md"
                )
        if (engine := self.spec.parallel.engine) != "torch":
            raise UserError(
                f"parallel.engine={engine}: a script has its own loop, and {engine} would have another; use "
                "parallel.engine=torch, whose parallel.strategy=zero2 and fsdp do the same"
            )

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
        """By what `run.evaluate` was told, else by a low loss, else by its first metric."""
        numbers = [name for name, value in metrics.items() if isinstance(value, int | float)]
        first = next((name for name in numbers if name not in ("n", "of")), "loss")
        vars(self)["score"] = self.callback_state.get(SCORE) or ("-loss" if "loss" in numbers else first)
        return super().goodness(metrics)

    def drive(self, layout: Layout, rank_info: Any, show: bool, folder: Any) -> tuple[Path, Any]:
        from paceline.script.rank_run import RankRunFactory

        start = RankRunFactory(self.spec, layout, rank_info, show, folder)
        with nullcontext() if show else open(os.devnull, "w") as nobody, redirect_stdout(nobody or sys.stdout):
            execute_script(self.spec, start)
        if start.outcome is None:
            raise UserError(NO_RUN_TEXT.format(name=Path(self.spec.workload).name))
        return start.outcome
