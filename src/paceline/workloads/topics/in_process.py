"""Fit a topic model in this process; also as a scikit-learn estimator."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import InvalidValue, UserError
from paceline.workloads.topics.counts.matrices import Counts
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.result.model import TopicFit
from paceline.workloads.topics.sections import FitOptions
from paceline.workloads.topics.sizes import DEFAULT_PASSES

if TYPE_CHECKING:
    from paceline.workloads.topics.fitting.engine import AcceleratedEM, PassResult
    from paceline.workloads.topics.fitting.problem import FitProblem

Progress = Callable[["AcceleratedEM", "PassResult"], None]
try:
    from sklearn.base import BaseEstimator as _Base
    from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils.validation import check_is_fitted, validate_data

    class _Transformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin):
        """Name the columns and the output."""

except ImportError:

    class _Base:  # type: ignore[no-redef]
        def __new__(cls, *_: Any, **__: Any) -> Any:
            raise UserError("TopicModel needs scikit-learn 1.6: pip install scikit-learn", code="not-installed")

    class _Transformer:  # type: ignore[no-redef]
        """Nothing without scikit-learn."""


def fit(
    X: Any,
    k: int,
    *,
    seed: int = FitOptions.seed,
    start: str = FitOptions.start,
    starts: int = FitOptions.starts,
    rows: str = FitOptions.rows,
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

    options = FitOptions(seed, start, rows, tolerance, starts, passes)
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
    settings = {"k": k, "seed": seed, "start": start, "starts": starts, "rows": rows, "tolerance": tolerance}
    return TopicFit.of(best, counts, factors, loss=loss, seconds=perf_counter() - began, settings=settings)


def _fit_starts(
    problem: "FitProblem", k: int, options: FitOptions, progress: Progress | None
) -> "tuple[AcceleratedEM, float]":
    best, loss = None, math.inf
    for number in range(options.starts):
        found = problem.begin(k, replace(options, seed=options.seed + number))
        while found.end is None:
            done = found.step()
            if progress is not None:
                progress(found, done)
        reached = found.final_loss()
        if best is None or reached < loss:
            best, loss = found, reached
    assert best is not None
    return best, loss


def use_device(device: Any) -> AbstractContextManager[Any]:
    """Make a device the current one: kernels run there, wherever their tensors are."""
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


class TopicModel(_Transformer, _Base):
    """Topics of counts, in the style of scikit-learn.

    Takes what scikit-learn takes, and paths, tensors and datasets on disk as `paceline.topics.fit`, which gets
    `options` as they are.
    """

    def __init__(
        self,
        k: int = 10,
        *,
        seed: int = FitOptions.seed,
        starts: int = FitOptions.starts,
        fractional: bool = True,
        options: dict | None = None,
    ):
        self.k = k
        self.seed = seed
        self.starts = starts
        self.fractional = fractional
        self.options = options

    def fit(self, X: Any, y: Any = None) -> "TopicModel":
        given = self._validate(X, reset=True)
        shape = getattr(given, "shape", None)
        if shape is not None and isinstance(self.k, int | np.integer) and self.k > min(shape):
            message = f"k={self.k}: at most {min(shape)} for n_samples={shape[0]} and n_features={shape[1]}"
            raise InvalidValue(message, key="k")
        self.fit_: TopicFit = fit(
            given, self.k, seed=self.seed, starts=self.starts, fractional=self.fractional, **(self.options or {})
        )
        self.n_features_in_ = self.fit_.F.shape[1]
        if self.fit_.terms is None and hasattr(self, "feature_names_in_"):
            self.fit_.terms = [str(name) for name in self.feature_names_in_]
        self.n_iter_ = self.fit_.passes
        return self

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        return self.fit(X).fit_.L

    def transform(self, X: Any) -> np.ndarray:
        given = self._validate(X)
        return self.fit_.transform(given, fractional=self.fractional)

    def perplexity(self, X: Any) -> float:
        given = self._validate(X)
        return self.fit_.perplexity(given, fractional=self.fractional)

    def score(self, X: Any, y: Any = None) -> float:
        """Return the mean log-likelihood of unseen words, -log(perplexity). Higher is better."""
        return -math.log(self.perplexity(X))

    @property
    def components_(self) -> np.ndarray:
        return self.fit_.F

    @property
    def _n_features_out(self) -> int:
        return self.fit_.k

    def _validate(self, X: Any, reset: bool = False) -> Any:
        """Let scikit-learn validate what it knows; the rest is validated by `read_counts`."""
        if not reset:
            check_is_fitted(self, "fit_")
        own = isinstance(X, str | Path | np.memmap | Counts) or callable(getattr(X, "as_counts", None))
        texts = isinstance(X, list) and bool(X) and isinstance(X[0], str)
        if own or texts or type(X).__module__.partition(".")[0] == "torch":
            return X
        return validate_data(self, X, reset=reset, accept_sparse=True, dtype="numeric", ensure_non_negative=True)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = []
        tags.requires_fit = True
        tags.target_tags.required = False
        return tags
