"""Build the tables of a measurement, for the terminal and for a report."""

from __future__ import annotations

from paceline.io.format import number, percent, size
from paceline.measurement.rows import Resources

DEVICE_HEAD = ("device", "MFU", "busy", "in use")


def format_device_cells(used_by: Resources, unknown: str) -> tuple[str, ...]:
    """What a row used, under `DEVICE_HEAD`."""
    share, used = used_by.usage.get("device_share"), used_by.usage.get("device_bytes")
    return (
        used_by.device or unknown,
        f"{number(100 * used_by.mfu, 3)} %" if used_by.mfu is not None else unknown,
        percent(share) if share is not None else unknown,
        size(used) if used is not None else unknown,
    )
