"""Run trials, in separate processes: variants and repeats of a spec, for check, measure, sweep and ensembles."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from paceline.api import RunResult, resolve_parallel, train
from paceline.config import RunSpec
from paceline.errors import PacelineError, UserError
from paceline.trainer.run import PRELOAD

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")


class AbortTrials(UserError):
    """One trial found a mistake that all others would repeat."""


def interleave_repeats(trials: Sequence[TaskT], repeats: int) -> Iterator[tuple[TaskT, int]]:
    """Yield each trial with the number of each repeat, round by round, every second round in reverse order.

    Other load on the machine then affects all trials alike.
    """
    for repeat in range(repeats):
        for trial in trials if repeat % 2 == 0 else trials[::-1]:
            yield trial, repeat


def run_trials(
    tasks: Iterable[TaskT],
    run: Callable[[TaskT, int], ResultT],
    record: Callable[[TaskT, ResultT | PacelineError], None],
    jobs: int = 1,
) -> None:
    """Run the tasks, `jobs` at once, and record the result of each, or the error that it failed with.

    `run` gets a task and its slot, a number below `jobs`; `record` is called in this thread. A task is taken when its
    slot is free, so that a generator can skip what earlier results have made needless.
    """
    if jobs == 1:
        for task in tasks:
            record(task, _run_or_return_error(run, task, 0))
        return
    waiting, slots = iter(tasks), list(range(jobs))
    running: dict[Future[ResultT | PacelineError], tuple[TaskT, int]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while True:
                for task in list(islice(waiting, len(slots))):
                    slot = slots.pop(0)
                    running[pool.submit(_run_or_return_error, run, task, slot)] = task, slot
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    task, slot = running.pop(future)
                    slots.append(slot)
                    record(task, future.result())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _run_or_return_error(run: Callable[[TaskT, int], ResultT], task: TaskT, slot: int) -> ResultT | PacelineError:
    try:
        return run(task, slot)
    except AbortTrials:
        raise
    except PacelineError as error:
        return error


def train_trial(
    spec: RunSpec, out: Path, *, again: bool = False, new_process: bool = True, slot: int | None = None
) -> RunResult:
    """Train a spec into a folder below `out`; `again` resumes it there, or returns if it is finished.

    In a new process a trial that dies is one failed trial, the next has all the memory, and the peak of a rank is that
    of its run alone. It takes seconds to start, so trials that are trained one after the other may stay in this one.
    Trials in different `slots` use different devices.
    """
    if new_process:
        spec = resolve_parallel(spec, None)  # here: the new process would plan for its one rank
        if spec.parallel.ranks == 1:
            from paceline.launch.local import run_ranks

            return run_ranks(_train_in_slot, (spec, out, again, slot), 1, PRELOAD)[0]
    return train(spec, out, resume_or_start=again, show=False)


def _train_in_slot(spec: RunSpec, out: Path, again: bool, slot: int | None) -> RunResult:
    """Train on one of several devices, which alone this process can see."""
    if slot is not None:
        import torch

        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = given.split(",") if given else list(map(str, range(torch.cuda.device_count())))
        if len(names) > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = names[slot % len(names)]
    return train(spec, out, resume_or_start=again, show=False)


def check_same_request(file: Path, before: Mapping[str, Any], now: Mapping[str, Any], verb: str) -> None:
    """Raise UserError if `file` holds the results of another request, naming the first value that differs."""
    for key in dict.fromkeys([*now, *before]):
        if before.get(key) != now.get(key):
            name = key.removeprefix("keys.").removeprefix("spec.")
            other = f"{file} was started with {name}={before.get(key)}, not {name}={now.get(key)}"
            raise UserError(f"{other}; {verb} into another folder with  --out FOLDER", code="conflict", key=name)
