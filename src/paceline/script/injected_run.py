"""Execute a script with a run that its `paceline.run()` returns.

The script is executed as by `python SCRIPT ARGUMENTS`. The run stays in this process: no environment variable carries
anything about it.
"""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.config import RunSpec, registry
from paceline.errors import RunFailed, UserError

if TYPE_CHECKING:
    from paceline.script.api import ScriptRun

NO_RUN_TEXT = """{name} never asked for a batch; a script without a step has nothing to train. Write its loop as
  with paceline.run() as run:
      model, optimizer = run.prepare(model, optimizer)
      for x, y in run.batches(train_set):
          run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))"""


class InjectedRun(Protocol):
    """What a script's `paceline.run()` returns."""

    def open(self) -> AbstractContextManager[ScriptRun]: ...

    def note_ignored(self, file: str | Path | None, overrides: Mapping[str, Any]) -> None:
        """Report which arguments of `paceline.run` this run ignores."""


_injected: list[InjectedRun] = []


def get_injected_run() -> InjectedRun | None:
    """Return the run of the script that Paceline executes; None in a script that was started by hand."""
    return _injected[-1] if _injected else None


def build_no_run_error(spec: RunSpec) -> UserError:
    return UserError(NO_RUN_TEXT.format(name=Path(spec.workload).name), code="invalid-workload", key="run.batches")


def execute_script(spec: RunSpec, run: InjectedRun) -> None:
    """Execute the script of a spec to its end, with its arguments, and imports from its own folder first."""
    import numpy as np
    import torch

    for seed in (torch.manual_seed, np.random.seed, random.seed):  # for what it draws before `paceline.run`
        seed(spec.train.seed)
    script = find_script(spec)
    registry.log_user_code(script)
    before: tuple[Any, Any] = sys.argv, sys.path
    sys.argv = [str(script), *getattr(spec.data, "arguments", ())]
    sys.path = [str(script.parent), *sys.path]
    _injected.append(run)
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
        _injected.remove(run)
        sys.argv, sys.path = before


def find_script(spec: RunSpec) -> Path:
    script = Path(spec.workload)
    if not script.is_file():
        message = f"workload: there is no script {str(script)!r}; write it relative to the run file, as in  "
        raise UserError(f"{message}workload: path/to/train.py", code="not-found", key="workload")
    return script
