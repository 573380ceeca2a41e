"""The peers of benchmarks/topics.py: other programs on the same counts, judged by the same loss in float64.

tinytopics is called as its users call it, `fit_model(X, k)` with its defaults, and its factors sum to one as they are.
scikit-learn is NMF with the Kullback-Leibler loss and multiplicative updates, from "nndsvda" (updates that multiply
cannot leave the zeros of "nndsvd"), and does all its iterations (tol=0). Its X ~ W H is brought to rows that sum to
one: the sums of H's rows go into W, and the sums of W's rows are lengths of documents, which the model does not need.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

INSTALL = "pip install tinytopics==0.9.3 scikit-learn"
KNOWN = {"tinytopics": "tinytopics", "scikit-learn": "sklearn"}  # name in the index of packages -> name to import
BUSY = 0.1


@dataclass(frozen=True)
class Problem:
    """Counts in memory: a scipy CSR matrix or a dense array."""

    name: str
    X: Any
    k: int
    reference: tuple[np.ndarray, np.ndarray] | None = None
    """L and F of another fit that was shipped with the data."""

    @property
    def title(self) -> str:
        documents, terms = self.X.shape
        return f"{self.name}, {documents:,} x {terms:,}, k = {self.k}"


@dataclass(frozen=True)
class Result:
    """What a peer reached. `note` says what a reader must know of the time."""

    problem: str
    shape: tuple[int, int]
    k: int
    name: str
    version: str
    rounds: int
    """Epochs of tinytopics, iterations of scikit-learn."""
    seconds: float
    loss: float
    cores: int
    note: str = ""
    cached: bool = field(default=False, compare=False)

    @property
    def label(self) -> str:
        what = "epochs" if self.name == "tinytopics" else "iterations"
        notes = [f"{self.name} {self.version}, {self.rounds} {what}", f"{self.cores} core{'s' * (self.cores > 1)}"]
        return ", ".join(notes + ["from cache"] * self.cached)

    def answers(self, problem: Problem, name: str, version: str, rounds: int) -> bool:
        asked = (problem.name, tuple(problem.X.shape), problem.k, name, version, rounds)
        return asked == (self.problem, tuple(self.shape), self.k, self.name, self.version, self.rounds)


def on_simplex(W: np.ndarray, H: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """L and F with rows that sum to one, of the same products up to the documents' lengths. Empty rows become even."""
    topics = H.sum(1, dtype=np.float64)
    mixtures = W * topics
    lengths = mixtures.sum(1, keepdims=True)
    L = np.divide(mixtures, lengths, where=lengths > 0, out=np.full(W.shape, 1 / W.shape[1]))
    F = np.divide(H, topics[:, None], where=topics[:, None] > 0, out=np.full(H.shape, 1 / H.shape[1]))
    return L, F


# ---- results that are kept -------------------------------------------------------------------------------------------


def read_cache(path: Path | None) -> list[Result]:
    """What earlier runs found; nothing if there is no such file."""
    if path is None or not path.is_file():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Result(**{**row, "shape": tuple(row["shape"]), "cached": True}) for row in rows]


def write_cache(path: Path, results: Iterable[Result]) -> None:
    """The newest of those that answer the same question."""
    newest = {(r.problem, tuple(r.shape), r.k, r.name, r.version, r.rounds): r for r in results}
    rows = [{name: value for name, value in asdict(r).items() if name != "cached"} for r in newest.values()]
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def peer_results(
    problem: Problem, rounds: dict[str, int], threads: int, cache: Path | None, say: Callable[[str], None]
) -> list[Result]:
    """Of every peer that is installed, or that is in the cache."""
    found = []
    for name, module in KNOWN.items():
        kept = read_cache(cache)
        installed = importlib.metadata.version(name) if importlib.util.find_spec(module) else None
        same = [r for r in kept if r.answers(problem, name, installed or r.version, rounds[name])]
        if same:
            found.append(same[-1])
        elif installed is None:
            say(f"  {name}: left out, it is not installed here; type  {INSTALL}")
        else:
            result = run_peer(problem, name, installed, rounds[name], threads)
            found.append(result)
            if cache is not None:
                write_cache(cache, [*kept, result])
    return found


# ---- the peers themselves --------------------------------------------------------------------------------------------


def run_peer(problem: Problem, name: str, version: str, rounds: int, threads: int) -> Result:
    from synthetic_counts import exact_loss

    note = busy_note()
    seconds, L, F = PEERS[name](problem, rounds, threads)
    loss = exact_loss(problem.X, L, F)
    return Result(problem.name, problem.X.shape, problem.k, name, version, rounds, seconds, loss, threads, note)


def busy_note() -> str:
    """A warning where others are using the cores at this moment."""
    share = busy_share()
    return "" if share < BUSY else f"beside other work (cores {100 * share:.0f} % busy): its time is not valid"


def busy_share(seconds: float = 0.5) -> float:
    """What others use of all cores, while this process waits."""
    before = _ticks()
    time.sleep(seconds)
    total, idle = (after - start for after, start in zip(_ticks(), before, strict=True))
    return 1 - idle / max(1, total)


def _ticks() -> tuple[int, int]:
    """(all, idle) since the machine started; a disk that is waited for leaves a core idle."""
    ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def _tinytopics(problem: Problem, rounds: int, threads: int) -> tuple[float, np.ndarray, np.ndarray]:
    import tinytopics
    import torch

    X = torch.from_numpy(_dense(problem.X))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    began = time.perf_counter()
    model, _ = tinytopics.fit_model(X, problem.k, num_epochs=rounds, device=torch.device("cpu"))
    seconds = time.perf_counter() - began
    return seconds, *on_simplex(model.get_normalized_L().double().numpy(), model.get_normalized_F().double().numpy())


def _scikit_learn(problem: Problem, rounds: int, threads: int) -> tuple[float, np.ndarray, np.ndarray]:
    import warnings

    from sklearn.decomposition import NMF

    X = problem.X.astype(np.float32)
    nmf = NMF(
        problem.k, solver="mu", beta_loss="kullback-leibler", init="nndsvda", max_iter=rounds, tol=0, random_state=0
    )
    with blas_threads(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it did all its iterations
        began = time.perf_counter()
        W = nmf.fit_transform(X)
        seconds = time.perf_counter() - began
    return seconds, *on_simplex(W.astype(np.float64), nmf.components_.astype(np.float64))


PEERS = {"tinytopics": _tinytopics, "scikit-learn": _scikit_learn}


def blas_threads(threads: int) -> AbstractContextManager[Any]:
    """numpy's products on this many threads, whatever OMP_NUM_THREADS said when it was loaded."""
    if importlib.util.find_spec("threadpoolctl") is None:
        return nullcontext()
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(threads)
    return limits


def _dense(X: Any) -> np.ndarray:
    """float32; filled row by row where the counts are sparse, so that no second copy is made."""
    if isinstance(X, np.ndarray):
        return X.astype(np.float32)
    dense = np.zeros(X.shape, np.float32)
    for first in range(0, X.shape[0], 1000):
        dense[first : first + 1000] = X[first : first + 1000].toarray()
    return dense


# ---- tables ----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed: the first to the left, the others to the right."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(w) if at == 0 else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  " + "  ".join(cells).rstrip()

    return "\n".join([line(head), "  " + "  ".join("-" * w for w in widths), *map(line, rows)])
