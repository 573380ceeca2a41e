"""What tests read of a run folder, of a command, of an error and of a check."""

import io
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from paceline.errors import UserError
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir


@dataclass(frozen=True)
class Answer:
    code: object
    out: str
    err: str
    error: BaseException | None = None


@contextmanager
def expect_error(code, key=None, kind=UserError, match=None):
    """Expect an error with this code, and with this key if one is given; yields it as `pytest.raises` does."""
    with pytest.raises(kind, match=match) as error:
        yield error
    assert error.value.code == code
    assert key is None or error.value.key == key


def render_text(*parts, width=100) -> str:
    """Render what rich prints on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


def steps_of(run, rank=0):
    """Read the steps of a `RunResult` or of a run folder."""
    return read_steps(RunDir(Path(getattr(run, "path", run))).events_file(rank))


def losses(run):
    return [step["loss"] for step in steps_of(run)]


def tensors_of(run, prefix=""):
    """Read the tensors of a run's newest checkpoint."""
    from paceline.trainer.checkpoint.reader import find_newest, read_tensors

    return read_tensors(find_newest(RunDir(run.path).checkpoints, print), prefix)


def assert_same_bits(one, other):
    """Compare the weights of two runs, or tensors by name."""
    ours, theirs = (found if isinstance(found, dict) else found.weights() for found in (one, other))
    assert ours.keys() == theirs.keys()
    assert not [name for name, tensor in ours.items() if not tensor.equal(theirs[name])]


def check_holds(spec, *layouts, **how):
    """Check that layouts give the same answer; return what was compared."""
    from paceline.trials.check import check

    parity = check(spec, *layouts, **how)
    assert parity.holds, [row for row in parity.rows if not row.agrees(parity.tolerance)]
    return parity
