"""A script as a workload: executed with a run that its `paceline.run()` returns.

Its model, data and loss are found by running it until it passes them to its run, which stays in this process.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.config import RunSpec, registry
from paceline.config.sections import Section, field
from paceline.errors import RunFailed, UserError, reject_value
from paceline.layout import Layout
from paceline.workload import LogFn, OwnLoop

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.script.api import ScriptRun

MISUSE = json.loads(Path(__file__).with_name("misuse.json").read_text(encoding="utf-8"))
"""Messages by call and problem."""


class InjectedRun(Protocol):
    """What a script's `paceline.run()` returns."""

    def open(self) -> AbstractContextManager[ScriptRun]: ...

    def note_ignored(self, file: Any, overrides: Mapping[str, Any]) -> None:
        """Report which arguments of `paceline.run` this run ignores."""


_injected: list[InjectedRun] = []
_run_requested: list[bool] = [False]
"""Whether the script has called `paceline.run()`."""


def get_injected_run() -> InjectedRun | None:
    """Return the run of the script that Paceline executes; None in a script that was started by hand."""
    _run_requested[0] = True
    return _injected[-1] if _injected else None


def build_no_run_error(spec: RunSpec) -> UserError:
    text = "\n".join(MISUSE["script"]["no run"]).format(name=Path(spec.workload).name)
    return UserError(text, code="invalid-workload", key="run.batches")


def execute_script(spec: RunSpec, run: InjectedRun) -> None:
    """Execute the script of a spec to its end, with its arguments, and imports from its own folder first."""
    import numpy as np
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    for seed in (torch.manual_seed, np.random.seed, random.seed):  # for what it draws before `paceline.run`
        seed(spec.train.seed)
    script = find_script(spec)
    registry.log_user_code(script)
    before: tuple[Any, Any] = sys.argv, sys.path
    sys.argv = [str(script), *getattr(spec.data, "arguments", ())]
    sys.path = [str(script.parent), *sys.path]
    _injected.append(run)
    _run_requested[0] = False
    handle = register_optimizer_step_pre_hook(partial(_stop_own_loop, spec))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            message = f"{script.name} exited with code {leaving.code}"
            raise RunFailed(message, code="user-code-failed") from None
    except SyntaxError as error:
        if error.filename != str(script):
            raise
        message = f"workload: {script.name} is not valid Python: {error.msg} (line {error.lineno})"
        raise UserError(message, code="invalid-workload", key="workload") from None
    finally:
        handle.remove()
        _injected.remove(run)
        sys.argv, sys.path = before


def _stop_own_loop(spec: RunSpec, *_: Any) -> None:
    """Raise UserError before an optimiser step of a script that never names Paceline."""
    if not _run_requested[0] and b"paceline" not in find_script(spec).read_bytes():
        raise build_no_run_error(spec)


def check_own_loop(spec: RunSpec) -> None:
    """Raise UserError for a script that takes its own steps and never names Paceline, without executing it."""
    script = Path(spec.workload)
    if registry.is_script(spec.workload) and script.is_file():
        text = script.read_bytes()
        if b"paceline" not in text and b".step(" in text:
            raise build_no_run_error(spec)


def find_script(spec: RunSpec) -> Path:
    script = Path(spec.workload)
    if not script.is_file():
        message = f"workload: there is no script {str(script)!r}; write it relative to the run file, as in  "
        raise UserError(f"{message}workload: path/to/train.py", code="not-found", key="workload")
    return script


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
        for key in ("tensor", "context", "expert", "pipeline"):
            if (ranks := getattr(layout, key)) > 1:
                reason = "a script's model cannot be cut; use parallel.strategy=fsdp"
                raise reject_value(f"parallel.{key}", ranks, reason)
        if (engine := self.spec.parallel.engine) != "torch":
            reason = "a script has its own loop; use parallel.strategy=zero2 or fsdp"
            raise reject_value("parallel.engine", engine, reason)

    def model(self) -> nn.Module:
        from paceline.script.probe import ProbeRun

        return ProbeRun(self.spec, "model").ask() if self.given_model is None else self.given_model

    def data(self, split: str) -> Any:
        if split != "train":
            return None
        if self.given_data is None:
            from paceline.script.probe import ProbeRun

            self.given_data, self.collate = ProbeRun(self.spec).ask()
        return self.given_data

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        from paceline.script.probe import LossProbe

        return LossProbe(self.spec, model, batch).ask()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        return self.sums(*batch) if isinstance(batch, tuple | list) else self.sums(batch)

    def goodness(self, metrics: Mapping[str, Any]) -> float:
        """Return the score by what `run.evaluate` was given, else by a low loss, else by the first metric."""
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
