"""Parts of Horovod that are not supported: each raises an error that names the alternative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from paceline.errors import PacelineError


class UnsupportedHorovodFeature(PacelineError, NotImplementedError):
    """A part of Horovod that is not supported."""

    exit_code = 2


class UnsupportedHorovodModule(UnsupportedHorovodFeature, ModuleNotFoundError):
    """A module of Horovod that is not supported; an ImportError, so that scripts may catch it."""


def _reject(what: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function that raises, whatever it is called with."""

    def call(*args: Any, **options: Any) -> NoReturn:
        raise UnsupportedHorovodFeature(f"paceline.horovod has no {what}; {instead}")

    return call


join = _reject("join", "give every rank the same number of batches: torch's DistributedSampler does")
start_timeline = stop_timeline = _reject("timelines", "paceline measure  says where the time of a step goes")
raise_no_adasum = _reject("Adasum", "use op=hvd.Average")
raise_no_communicators = _reject(
    "communicators of MPI", "call hvd.init() without them: all ranks of the launcher take part"
)
raise_no_process_sets = add_process_set = remove_process_set = _reject(
    "process sets", "use torch.distributed.new_group and torch.distributed's own collectives"
)
run = _reject("run()", "start the script with  paceline launch --ranks N -- python -m paceline.horovod SCRIPT.py")


class ProcessSet:
    """The set of all ranks; no other is supported."""

    process_set_id = 0

    def __init__(self, *ranks: Any) -> None:
        raise_no_process_sets()

    def included(self) -> bool:
        return True

    def rank(self) -> int:
        from paceline.horovod import world

        return world.rank()

    def size(self) -> int:
        from paceline.horovod import world

        return world.size()


global_process_set: ProcessSet = object.__new__(ProcessSet)
AnySet = ProcessSet | None
"""Of `process_set=`."""


def require_global_set(process_set: AnySet) -> None:
    if process_set not in (None, global_process_set):
        raise_no_process_sets()
