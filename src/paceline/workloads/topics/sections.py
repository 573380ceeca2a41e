"""Sections `model` and `data` of a run file of a topic model, and the same options for Python callers."""

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import model_validator

from paceline.config.sections import Section, field
from paceline.errors import InvalidValue
from paceline.workloads.topics.sizes import DEFAULT_PASSES

Start = Literal["auto", "race", "least_squares", "random"]
STARTS = get_args(Start)
STEADY = 0.005


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit, with all defaults. A fit ends when its gain and its residual are small."""

    seed: int = 0
    start: str = "auto"
    tolerance: float = 1e-7  # mean relative gain of the loss per pass, over the last passes, that ends a fit
    starts: int = 1
    passes: int = DEFAULT_PASSES
    residual: float = 1e-3  # share of the topics' mass that an EM step still moves: 0 at an optimum

    @property
    def steady(self) -> float:
        """Return the share of their mass by which topics may move over many passes and still count as settled."""
        return STEADY * min(1.0, self.tolerance / FitOptions.tolerance)

    def check(self) -> None:
        """Raise UserError for a value that is not possible."""
        wrong = {} if self.start in STARTS else {"start": f"one of {', '.join(STARTS)}"}
        for key, least, number in (("starts", 1, self.starts), ("passes", 1, self.passes), ("seed", 0, self.seed)):
            if not isinstance(number, Integral) or not least <= number < 1 << 31:
                wrong[key] = f"a whole number, {least} or more"
        if not isinstance(self.tolerance, int | float) or not self.tolerance >= 0:
            wrong["tolerance"] = "0 or more"
        for key, expected in wrong.items():
            raise InvalidValue(f"{key}={getattr(self, key)!r}: give {expected}", key=key)


class TopicsModel(Section):
    """Counts ~ L F: a mixture of topics for each document, and a distribution over terms for each topic."""

    k: int = field(20, "topics", "number of topics", gt=0, le=512)
    start: Start = field("auto", "", "first topics; auto: least squares for dense counts, else the best of a few tries")
    tolerance: float = field(FitOptions.tolerance, "of the loss", "a mean gain per pass below this ends the fit", ge=0)

    @model_validator(mode="before")
    @classmethod
    def _drop_rows(cls, values: Any) -> Any:
        """Drop `rows: em`, which run files of earlier versions have recorded."""
        if isinstance(values, dict) and values.get("rows") == "em":
            return {key: value for key, value in values.items() if key != "rows"}
        return values


class TopicsData(Section):
    """Documents by terms, from a matrix, a folder of shards, or texts."""

    path: Path | None = field(None, "path", "matrix (.npy, .npz, .mtx, .parquet), shards, or texts; see docs/topics.md")
    fractional: bool = field(False, "", "allow numbers that are not whole")
    text: str = field("text", "column", "texts: the column or key of the text")
    min_df: int | float = field(2, "documents", "texts: terms in fewer are left out; 0.1 is a tenth of all", ge=0)
    max_df: int | float = field(0.95, "documents", "texts: terms in more are left out; 1.0 is all of them", ge=0)
    max_terms: int | None = field(None, "terms", "texts: only the most frequent ones", gt=0)
    stop_words: str = field("english", "", "texts: words left out: english, none, or a file with a word per line")
    markup: bool = field(False, "", "texts: count tags such as <br /> as words too")
    name: str | None = field(None, "column", "texts: the column or key with the title of a document")
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of counted texts, named by file, size and date")

    def text_options(self) -> dict[str, Any]:
        same = ("min_df", "max_df", "max_terms", "stop_words", "markup")
        return {"column": self.text, "name_column": self.name, **{key: getattr(self, key) for key in same}}
