"""Bands of predicted memory and time, by how work is spread: `bands.csv`, measured by `benchmarks/plan_bands.py`."""

import csv
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from paceline.layout import ZERO_STAGES, Layout

BANDS_FILE = Path(__file__).with_name("bands.csv")
ALL, UNKNOWN = "all", "unknown"
Quantity = Literal["memory", "time"]


@dataclass(frozen=True)
class Band:
    """Factors of a predicted value between which measurements lie."""

    quantity: str
    situation: str
    low: float
    high: float
    rows: int  # published measurements that it stands on
    families: int  # groups of people who made them
    coverage: float  # of those rows, inside the band that the other families give; NaN without rows


def name_situation(pipeline: int, tensor: int, zero: int, ranks: int) -> str:
    """Name how work is spread, as far as errors of the plan depend on it."""
    if pipeline > 1:
        return "pipeline"
    if tensor > 1:
        return "tensor"
    return "sharded" if zero >= 2 else "replicated" if ranks > 1 else "single"


@functools.cache
def load_bands() -> dict[tuple[str, str], Band]:
    """Return the bands by quantity and situation."""
    with BANDS_FILE.open(encoding="utf-8", newline="") as file:
        bands = TypeAdapter(list[Band]).validate_python(list(csv.DictReader(file)))
    return {(band.quantity, band.situation): band for band in bands}


def find_band(quantity: Quantity, layout: Layout, known: bool = True) -> Band:
    """Return the band of a layout; the widest for offloaded states and for what no published row is about."""
    situation = UNKNOWN
    if known and not layout.offload:
        situation = name_situation(layout.pipeline, layout.tensor, ZERO_STAGES[layout.strategy], layout.ranks)
    bands = load_bands()
    return bands.get((quantity, situation)) or bands[quantity, ALL]
