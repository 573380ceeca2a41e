"""A topic model as a scikit-learn estimator."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import InvalidValue, UserError
from paceline.workloads.topics.counts.matrices import Counts
from paceline.workloads.topics.in_process import fit
from paceline.workloads.topics.result.model import TopicFit
from paceline.workloads.topics.sections import FitOptions

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise UserError("TopicModel needs scikit-learn 1.6: pip install scikit-learn", code="not-installed") from None


class TopicModel(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
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
        self.k, self.seed, self.starts, self.fractional, self.options = k, seed, starts, fractional, options

    def fit(self, X: Any, y: Any = None) -> "TopicModel":
        given = self._validate(X, reset=True)
        shape = getattr(given, "shape", None)
        if shape is not None and isinstance(self.k, int | np.integer) and self.k > min(shape):
            message = f"k={self.k}: at most {min(shape)} for n_samples={shape[0]} and n_features={shape[1]}"
            raise InvalidValue(message, key="k")
        options = {"seed": self.seed, "starts": self.starts, "fractional": self.fractional, **(self.options or {})}
        self.fit_: TopicFit = fit(given, self.k, **options)
        self.n_features_in_ = self.fit_.F.shape[1]
        if self.fit_.terms is None and hasattr(self, "feature_names_in_"):
            self.fit_.terms = [str(name) for name in self.feature_names_in_]
        self.n_iter_ = self.fit_.passes
        return self

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        return self.fit(X).fit_.L

    def transform(self, X: Any) -> np.ndarray:
        return self.fit_.transform(self._validate(X), fractional=self.fractional)

    def perplexity(self, X: Any) -> float:
        return self.fit_.perplexity(self._validate(X), fractional=self.fractional)

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
