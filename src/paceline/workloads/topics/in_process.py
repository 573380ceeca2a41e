"""Fit a topic model in this process."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import InvalidValue, UserError
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.result.model import TopicFit
from paceline.workloads.topics.sections import FitOptions
from paceline.workloads.topics.sizes import DEFAULT_PASSES

if TYPE_CHECKING:
    from paceline.workloads.topics.fitting.engine import AcceleratedEM, PassResult
    from paceline.workloads.topics.fitting.problem import FitProblem

Progress = Callable[["AcceleratedEM", "PassResult"], None]


def fit(
    X: Any,
    k: int,
    *,
    seed: int = FitOptions.seed,
    start: str = FitOptions.start,
    starts: int = FitOptions.starts,
    tolerance: float = FitOptions.tolerance,
    passes: int = DEFAULT_PASSES,
    device: str = "auto",
    fractional: bool = False,
    progress: Progress | None = None,
) -> TopicFit:
    """Fit k topics, until a pass gains less than `tolerance` of the loss and topics hardly move, or for `passes`.

    Of `starts` fits from different seeds the best is returned. `start`: "race" (the best of a few tries on a sample),
    "least_squares" or "random"; "auto" takes least squares for dense counts.
    """
    from paceline.workloads.topics.fitting.problem import build_problem, check_topics

    options = FitOptions(seed, start, tolerance, starts, passes)
    options.check()
    began = perf_counter()
    fit_device = resolve_fit_device(device, X)
    counts = read_counts(X, fractional=fractional, on_device=fit_device != "cpu")
    check_topics(k, counts)
    with use_device(getattr(counts, "device", fit_device)):
        problem = build_problem(counts, fit_device, alone=True)
        best, loss = _fit_starts(problem, k, options, progress)
    L, Ft = best.result()
    factors = L.cpu().numpy(), np.ascontiguousarray(Ft.cpu().numpy().T)
    settings = {"k": k, "seed": seed, "start": start, "starts": starts, "tolerance": tolerance}
    return TopicFit.of(best, counts, factors, loss, perf_counter() - began, settings)


def _fit_starts(
    problem: "FitProblem", k: int, options: FitOptions, progress: Progress | None
) -> "tuple[AcceleratedEM, float]":
    best: Any = None
    loss = math.inf
    for number in range(options.starts):
        found = problem.begin(k, replace(options, seed=options.seed + number))
        while found.end is None:
            done = found.step()
            if progress is not None:
                progress(found, done)
        if (reached := found.final_loss()) < loss or best is None:
            best, loss = found, reached
    return best, loss


def use_device(device: Any) -> AbstractContextManager[Any]:
    """Set the current CUDA device while entered: kernels run there, wherever their tensors are."""
    import torch

    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


def resolve_fit_device(name: str, X: Any = None) -> str:
    """Return the device to use; "auto" is that of X, if it is a CUDA tensor."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise InvalidValue(f"device={name!r}: give one of auto, cpu, cuda", key="device")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but there is no CUDA device; use device=cpu", code="unavailable", key="device")
    if name != "cpu" and isinstance(X, torch.Tensor) and X.is_cuda:
        return str(X.device)
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
