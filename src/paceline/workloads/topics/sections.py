"""What the run file of a topic model says of its topics and its counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from paceline.section import Section, field
from paceline.workloads.topics.fitting.options import FitOptions


class TopicsModel(Section):
    """Counts ~ L F: a mixture of topics for each document, and a distribution over terms for each topic."""

    k: int = field(20, "topics", "number of topics", gt=0, le=512)
    start: Literal["auto", "race", "least_squares", "random"] = field(
        FitOptions.start,
        "",
        "first topics; auto takes least squares for dense counts, else the best of a few tries on a sample",
    )
    rows: Literal["em", "newton"] = field(
        FitOptions.rows, "", "how a pass updates the mixtures; newton is for sparse counts"
    )
    tolerance: float = field(FitOptions.tolerance, "of the loss", "a mean gain per pass below this ends the fit", ge=0)


class TopicsData(Section):
    """Documents by terms, from a matrix, a folder of shards, or texts."""

    path: Path | None = field(None, "path", "matrix (.npy, .npz, .mtx, .parquet), shards, or texts; see docs/topics.md")
    fractional: bool = field(FitOptions.fractional, "", "allow numbers that are not whole")
    text: str = field("text", "column", "texts: the column or key of the text")
    min_df: int | float = field(2, "documents", "texts: terms in fewer are left out; 0.1 is a tenth of all", ge=0)
    max_df: int | float = field(0.95, "documents", "texts: terms in more are left out; 1.0 is all of them", ge=0)
    max_terms: int | None = field(None, "terms", "texts: only the most frequent ones", gt=0)
    stop_words: str = field("english", "", "texts: words left out: english, none, or a file with a word per line")
    markup: bool = field(False, "", "texts: count tags such as <br /> as words too")
    name: str | None = field(None, "column", "texts: the column or key with the title of a document")
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of counted texts, named by file, size and date")

    def text_options(self) -> dict[str, Any]:
        """Those of TextOptions."""
        same = ("min_df", "max_df", "max_terms", "stop_words", "markup")
        return {"column": self.text, "name_column": self.name, **{key: getattr(self, key) for key in same}}
