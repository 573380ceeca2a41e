"""What a fit is asked for, when it ends, and why it ended. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from paceline.errors import UserError
from paceline.workloads.topics.sizes import MOST_PASSES

STARTS = ("auto", "race", "least_squares", "random")
ROWS = ("em", "newton")
STEADY = 0.005


@dataclass(frozen=True)
class FitOptions:
    """How counts are fitted; each default stands here alone. A fit ends when its gain and its residual are small."""

    seed: int = 0
    start: str = "auto"
    rows: str = "em"
    tolerance: float = 1e-7
    """Of the loss: the mean relative gain per pass, over the last passes, that is small."""
    fractional: bool = False
    device: str = "auto"
    starts: int = 1
    """That many fits from different seeds, of which the one with the lowest loss is kept."""
    passes: int | None = None
    """At most; None is MOST_PASSES."""
    residual: float = 1e-3
    """How far an EM step still moves the topics, as a share of their mass: 0 where the optimum's conditions hold."""

    @property
    def most_passes(self) -> int:
        return MOST_PASSES if self.passes is None else self.passes

    @property
    def steady(self) -> float:
        """Topics that move less than this over many passes, as a share of their mass, no longer change for a reader."""
        return STEADY * min(1.0, self.tolerance / FitOptions.tolerance)

    def check(self) -> None:
        """Refuse what no fit can be made with."""
        for name, value, allowed in (("start", self.start, STARTS), ("rows", self.rows, ROWS)):
            if value not in allowed:
                raise UserError(f"{name}={value!r}: give one of {', '.join(allowed)}")
        whole = (("starts", 1, self.starts), ("passes", 1, self.most_passes), ("seed", 0, self.seed))
        for name, least, number in whole:
            if not isinstance(number, Integral) or not least <= number < 1 << 31:
                raise UserError(f"{name}={number}: give a whole number, {least} or more")
        if not isinstance(self.tolerance, int | float) or not self.tolerance >= 0:
            raise UserError(f"tolerance={self.tolerance}: give 0 or more")
