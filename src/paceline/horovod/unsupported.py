"""Parts of Horovod that are not supported: each raises an error that names the alternative."""

from __future__ import annotations

from typing import Any, NoReturn

from paceline.errors import PacelineError


class UnsupportedHorovodFeature(PacelineError, NotImplementedError):
    """A part of Horovod that is not supported."""

    exit_code = 2


class UnsupportedHorovodModule(UnsupportedHorovodFeature, ModuleNotFoundError):
    """A module of Horovod that is not supported; an ImportError, so that scripts may catch it."""


def raise_unsupported(what: str, instead: str) -> NoReturn:
    raise UnsupportedHorovodFeature(f"paceline.horovod has no {what}; {instead}")


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


def require_global_set(process_set: ProcessSet | None) -> None:
    if process_set not in (None, global_process_set):
        raise_no_process_sets()


def raise_no_process_sets() -> NoReturn:
    raise_unsupported("process sets", "use torch.distributed.new_group and torch.distributed's own collectives")


def add_process_set(*ranks: Any) -> NoReturn:
    raise_no_process_sets()


def remove_process_set(process_set: Any) -> NoReturn:
    raise_no_process_sets()


def join(device: int = -1) -> NoReturn:
    raise_unsupported("join", "give every rank the same number of batches: torch's DistributedSampler does")


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    raise_unsupported("timelines", "paceline measure  says where the time of a step goes")


def stop_timeline() -> NoReturn:
    start_timeline("")


def raise_no_adasum() -> NoReturn:
    raise_unsupported("Adasum", "use op=hvd.Average")


def run(*args: Any, **options: Any) -> NoReturn:
    """`horovod.run`, which starts ranks from inside a script."""
    raise_unsupported(
        "run()", "start the script with  paceline launch --ranks N -- python -m paceline.horovod SCRIPT.py"
    )
