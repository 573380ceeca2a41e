"""Paceline: distributed training from one run file, with the same answer on any number of ranks."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.errors import RunFailed as RunFailed
    from paceline.errors import UserError as UserError
    from paceline.measuring.result import Measurement as Measurement
    from paceline.measuring.sweep import measure as measure
    from paceline.parity import check as check
    from paceline.planning.plan import Plan as Plan
    from paceline.planning.plan import plan as plan
    from paceline.reporting.report import report as report
    from paceline.spec import RunSpec as RunSpec
    from paceline.spec import load as load
    from paceline.training.export import export as export
    from paceline.training.run import RunResult as RunResult
    from paceline.verbs import resume as resume
    from paceline.verbs import train as train
    from paceline.workload import Workload as Workload
    from paceline.workloads.lm.sample import sample as sample

_HOME = {
    "load": "paceline.spec",
    "RunSpec": "paceline.spec",
    "train": "paceline.verbs",
    "RunResult": "paceline.training.run",
    "resume": "paceline.verbs",
    "check": "paceline.parity",
    "plan": "paceline.planning.plan",
    "Plan": "paceline.planning.plan",
    "measure": "paceline.measuring.sweep",
    "Measurement": "paceline.measuring.result",
    "report": "paceline.reporting.report",
    "export": "paceline.training.export",
    "sample": "paceline.workloads.lm.sample",
    "Workload": "paceline.workload",
    "UserError": "paceline.errors",
    "RunFailed": "paceline.errors",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `import paceline` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
