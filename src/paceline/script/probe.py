"""Run a script until it gives its model, its data, or the loss of a batch. Nothing is trained."""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from paceline.config import RunSpec
from paceline.data.samples import preserve_generators
from paceline.script.api import ScriptRun, check_dataset, check_loss
from paceline.script.workload import build_no_run_error, execute_script


class ProbeDone(BaseException):
    """Leaves the script; its own `except Exception` does not catch it."""


class ProbeRun(ScriptRun):
    """A run that answers with the model, the run file or the data set; one rank, on the CPU."""

    device, rank, ranks = torch.device("cpu"), 0, 1
    steps = 0

    def __init__(self, spec: RunSpec, asked: Literal["file", "model", "data"] = "data") -> None:
        self.spec, self.asked = spec, asked
        self.answer: Any = None

    def note_ignored(self, file: Any, overrides: Mapping[str, Any]) -> None:
        if self.asked == "file":
            raise self.finish((file, overrides))

    def prepare(self, model: Any, optimizer: Any = None, *others: Any, schedule: Any = None) -> Any:
        prepared = super().prepare(model, optimizer, *others)
        if self.asked == "model":
            raise self.finish(model)
        return prepared

    @contextmanager
    def open(self) -> Iterator[ScriptRun]:
        yield self

    def ask(self) -> Any:
        try:
            with redirect_stdout(io.StringIO()):
                execute_script(self.spec, self)
        except ProbeDone:
            return self.answer
        raise build_no_run_error(self.spec)

    def finish(self, answer: Any) -> ProbeDone:
        self.answer = answer
        return ProbeDone()

    def batches(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, workers: int | None = None
    ) -> Iterator[Any]:
        check_dataset(dataset)
        raise self.finish((dataset, collate))

    def step(self, loss_sum: Tensor, count: float | Tensor) -> None:
        check_loss(loss_sum, count)
        raise self.finish((loss_sum, count))

    def keep(self, **things: Any) -> None:
        pass


class LossProbe(ProbeRun):
    """The loop's first pass, with another model and batch than the script's own."""

    def __init__(self, spec: RunSpec, model: nn.Module, batch: Any) -> None:
        super().__init__(spec)
        self.model, self.batch = model, batch
        self.before_loop = ExitStack()
        """Hides from the pass what the script draws and computes before its loop."""
        self.before_loop.enter_context(preserve_generators())
        self.before_loop.enter_context(_disable_current_modes())

    def ask(self) -> Any:
        with self.before_loop:
            return super().ask()

    def prepare(self, model: Any, optimizer: Any = None, *others: Any, schedule: Any = None) -> Any:
        super().prepare(model, optimizer, *others)
        return self.model, optimizer

    def batches(self, dataset: Any, collate: Any = None, workers: int | None = None) -> Iterator[Any]:
        self.before_loop.close()
        yield self.batch
