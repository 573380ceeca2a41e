"""One chart of a report: what it shows, in numbers, and the files and lines they came from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.reporting.series import FileLine

MOST_POINTS = 24_000
MOST_PER_RUN = 1_000


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    caption: str
    data: dict[str, Any]
    files: Sequence[FileLine]
    """Where the numbers came from."""
    tall: bool = False
    sources: tuple[tuple[str, str], ...] = ()
    """(text, address) of the first of these."""
    more_sources: int = 0


def short(value: float | None, digits: int = 5) -> float:
    """Few digits: a page is read by people."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else 0.0
