"""Running a script from Paceline, and handing it what its `paceline.run()` is to be.

The script is executed as Python executes it, with its own `__main__` and arguments. What is handed over stays in this
process: no variable of the environment says anything about a run.
"""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.config import RunSpec, registry
from paceline.errors import RunFailed, UserError

if TYPE_CHECKING:
    from paceline.script.api import ScriptRun

NO_RUN_TEXT = """{name} never asked for a batch; a script without a step has nothing to train. Its loop is to be
  with paceline.run() as run:
      model, optimizer = run.prepare(model, optimizer)
      for x, y in run.batches(train_set):
          run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))"""


class InjectedRun(Protocol):
    """What a script's `paceline.run()` becomes."""

    def opened(self) -> AbstractContextManager[ScriptRun]: ...

    def note_ignored(self, file: str | Path | None, overrides: Mapping[str, Any]) -> None:
        """What the script gives to `paceline.run`: say what of it this run does not have."""


_injected: list[InjectedRun] = []


def get_injected_run() -> InjectedRun | None:
    """What the script that is being run by Paceline was given; None where it was started by hand."""
    return _injected[-1] if _injected else None


def execute_script(spec: RunSpec, given: InjectedRun) -> None:
    """Run the script of a spec to its end, as `python SCRIPT ARGUMENTS` would."""
    import numpy as np
    import torch

    for seed in (torch.manual_seed, np.random.seed, random.seed):  # what it draws before `paceline.run`
        seed(spec.train.seed)
    script = find_script(spec)
    registry.log_user_code(script)
    _injected.append(given)
    try:
        with _script_environment(script, list(getattr(spec.data, "arguments", ()))):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise RunFailed(f"{script.name} ended itself with exit code {leaving.code}") from None
    except SyntaxError as error:
        if error.filename != str(script):
            raise
        raise UserError(f"workload: {script.name} is not valid Python: {error.msg} (line {error.lineno})") from None
    finally:
        _injected.remove(given)


def find_script(spec: RunSpec) -> Path:
    script = Path(spec.workload)
    if not script.is_file():
        raise UserError(
            f"workload: there is no script {str(script)!r}; write it as  workload: path/to/train.py, relative to the "
            "run file"
        )
    return script


@contextmanager
def _script_environment(script: Path, arguments: list[str]) -> Iterator[None]:
    """Its arguments, and imports from its own folder first."""
    before: tuple[Any, Any] = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before
