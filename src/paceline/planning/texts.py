"""What a plan knows of labelled texts: as they are in the cache or, where they are not, as they usually are."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.data.corpora.tokens import LabelledCorpus
from paceline.planning.training import Lengths

USUAL_FILL = 0.5
"""Of the longest text, where nothing is known of the data."""


@dataclass(frozen=True)
class TextStatistics:
    """Of the training set."""

    count: int | None
    mean: float
    """Tokens of a text."""
    longest: int
    deviation: float = 0.0
    classes: int = 0
    held_out: int | None = None
    """Texts to evaluate on, where that is known."""
    assumptions: tuple[str, ...] = ()

    @classmethod
    def of(cls, corpus: LabelledCorpus, samples: int | None, tokens: float | None) -> TextStatistics:
        """Those of a corpus; a number of samples and their mean length may be said instead."""
        lengths = corpus.train.offsets[1:] - corpus.train.offsets[:-1]
        mean, longest = tokens or float(lengths.mean()), int(lengths.max())
        count, classes = samples or len(corpus.train), len(corpus.classes)
        return cls(count, min(mean, longest), longest, float(lengths.std()), classes, len(corpus.test))

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.longest / self.mean, self.deviation / self.mean)


def usual_mean(longest: int) -> float:
    return max(1.0, USUAL_FILL * longest)
