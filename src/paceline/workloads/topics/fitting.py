"""Fit a topic model in this process: counts in, mixtures and topics out.

    model = fit(X, k=20)        # X: an array, a tensor, a sparse matrix, or the path of a file or folder
    model.L, model.F            # rows sum to one

On several ranks, with checkpoints and a record, the same fit runs as the workload `topics` of a run file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import UserError
from paceline.workloads.topics.blocks import Counts, Csr
from paceline.workloads.topics.counts import read_counts
from paceline.workloads.topics.model import TopicFit
from paceline.workloads.topics.sizes import MOST_PASSES
from paceline.workloads.topics.stream import blocks

if TYPE_CHECKING:
    from paceline.workloads.topics.engine import Fit, Turn

ROWS = ("em", "newton")
EXACT_BYTES = 4 << 20


def fit(
    X: Any,
    k: int,
    *,
    seed: int = 0,
    start: str = "auto",
    starts: int = 1,
    rows: str = "em",
    tolerance: float = 1e-7,
    passes: int = MOST_PASSES,
    device: str = "auto",
    fractional: bool = False,
    progress: Callable[[Fit, Turn], None] | None = None,
) -> TopicFit:
    """Fit k topics. Ends when a pass gains less than `tolerance` of the loss and topics hardly move, or after `passes`.

    `starts`: that many fits from different seeds, of which the one with the lowest loss is returned. `start`: "race"
    (the best of a few tries on a sample), "least_squares" or "random"; "auto" takes least squares for dense counts.
    """
    from paceline.workloads.topics.engine import Stop
    from paceline.workloads.topics.problem import check_topics, problem_of
    from paceline.workloads.topics.start import STARTS

    for name, value, allowed in (("start", start, STARTS), ("rows", rows, ROWS)):
        if value not in allowed:
            raise UserError(f"{name}={value!r}: give one of {', '.join(allowed)}")
    for name, least, number in (("starts", 1, starts), ("passes", 1, passes), ("seed", 0, seed)):
        if not isinstance(number, int | np.integer) or not least <= number < 1 << 31:
            raise UserError(f"{name}={number}: give a whole number, {least} or more")
    if not isinstance(tolerance, int | float) or not tolerance >= 0:
        raise UserError(f"tolerance={tolerance}: give 0 or more")
    began = perf_counter()
    where = device_of(device, X)
    counts = read_counts(X, fractional=fractional, on_device=where != "cpu")
    check_topics(k, counts)
    best, loss = None, math.inf
    with current_device(getattr(counts, "device", where)):
        problem = problem_of(counts, where, fractional=fractional)
        for number in range(starts):
            found = problem.begin(k, start=start, seed=seed + number, rows=rows, stop=Stop(tolerance, passes=passes))
            while not found.why_done:
                turn = found.step()
                if progress is not None:
                    progress(found, turn)
            reached = found.final_loss()
            if best is None or reached < loss:
                best, loss = found, reached
    assert best is not None
    L, Ft = best.result()
    settings = {"k": k, "seed": seed, "start": start, "starts": starts, "rows": rows, "tolerance": tolerance}
    return TopicFit(
        L=L.cpu().numpy(),
        F=np.ascontiguousarray(Ft.cpu().numpy().T),
        losses=list(best.losses),
        loss=loss,
        terms=None if counts.vocabulary is None else list(counts.vocabulary),
        names=None if counts.names is None else list(counts.names),
        passes=best.passes,
        converged=best.converged,
        stopped_because=best.why_done,
        seconds=perf_counter() - began,
        settings=settings,
    )


def documents_given_topics(
    counts: Counts, F: np.ndarray, *, passes: int = 100, tolerance: float = 1e-7
) -> tuple[np.ndarray, float]:
    """Mixtures (documents, k) for topics that stay as they are, and the loss.

    Each row ends when a step gains less than `tolerance` of its own loss: it does not depend on the other documents.
    """
    import torch

    from paceline.workloads.topics.engine import LEAST
    from paceline.workloads.topics.rows import rows_for_topics

    Ft = torch.from_numpy(np.ascontiguousarray(F.T, np.float32)).clamp_min(LEAST)
    L = torch.full((counts.documents, Ft.shape[1]), 1 / Ft.shape[1])
    loss = float(counts.documents)
    for block in blocks(counts):
        loss += rows_for_topics(block, L[block.start : block.stop], Ft, passes, tolerance)
    return L.numpy(), loss


def exact_loss(X: Any, L: np.ndarray, F: np.ndarray, *, fractional: bool = False) -> float:
    """The loss, sum(LF - X log LF), in float64."""
    counts = read_counts(X, fractional=fractional, on_device=True)
    total = float(L.sum(0, dtype=np.float64) @ F.sum(1, dtype=np.float64))
    if hasattr(counts, "minus_x_log_p"):  # they are on a device
        return total + counts.minus_x_log_p(L, F)
    Ft = np.ascontiguousarray(F.T, np.float64)
    for block in blocks(counts, block_bytes=EXACT_BYTES):
        rows, values = L[block.start : block.stop].astype(np.float64), block.values
        if isinstance(values, Csr):
            at = np.repeat(np.arange(values.rows), np.diff(values.indptr))
            p = np.einsum("ek,ek->e", rows[at], Ft[values.indices])
            total -= float(values.data @ np.log(np.maximum(p, np.finfo(float).tiny)))
        else:
            p = rows @ Ft.T
            total -= float((values * np.log(np.maximum(p, np.finfo(float).tiny))).sum())
    return total


def current_device(device: Any) -> AbstractContextManager[Any]:
    """For as long as kernels are launched: they run on the current device, wherever their tensors are."""
    import torch

    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


def device_of(name: str, X: Any = None) -> str:
    """The device to use; "auto" is that of X, if it is a tensor on one."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={name!r}: give one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but there is no CUDA device; use device=cpu")
    if name != "cpu" and isinstance(X, torch.Tensor) and X.is_cuda:
        return str(X.device)
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
