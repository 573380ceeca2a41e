"""What is not carried over from Horovod: each says so in one sentence, with what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from paceline.errors import PacelineError


class NotCarriedOver(PacelineError, NotImplementedError):
    """A part of Horovod that we do not have."""

    exit_code = 2


class PartNotCarriedOver(NotCarriedOver, ModuleNotFoundError):
    """A module of Horovod; a script that tries to import it may go on without."""


def refuse(what: str, instead: str) -> NoReturn:
    raise NotCarriedOver(f"paceline.horovod has no {what}; {instead}")


class ProcessSet:
    """Ranks that communicate among themselves. Ours is that of all ranks."""

    process_set_id = 0

    def __init__(self, *ranks: Any) -> None:
        refuse_process_sets()

    def included(self) -> bool:
        return True

    def rank(self) -> int:
        from paceline.horovod import world

        return world.rank()

    def size(self) -> int:
        from paceline.horovod import world

        return world.size()


global_process_set: ProcessSet = object.__new__(ProcessSet)


def only_global(process_set: ProcessSet | None) -> None:
    """All ranks take part in everything."""
    if process_set not in (None, global_process_set):
        refuse_process_sets()


def refuse_process_sets() -> NoReturn:
    refuse("process sets", "use torch.distributed.new_group and torch.distributed's own collectives")


def add_process_set(*ranks: Any) -> NoReturn:
    refuse_process_sets()


def remove_process_set(process_set: Any) -> NoReturn:
    refuse_process_sets()


def join(device: int = -1) -> NoReturn:
    refuse("join", "give every rank the same number of batches: torch's DistributedSampler does")


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    refuse("timelines", "paceline measure  says where the time of a step goes")


def stop_timeline() -> NoReturn:
    start_timeline("")


def refuse_adasum() -> NoReturn:
    refuse("Adasum", "use op=hvd.Average")


def run(*args: Any, **options: Any) -> NoReturn:
    """`horovod.run`, which starts ranks from inside a script."""
    refuse("run()", "start the script with  paceline launch --ranks N -- python -m paceline.horovod SCRIPT.py")
