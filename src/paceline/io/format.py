"""Format numbers, durations and sentences for people."""

import math
import re
import textwrap
from collections.abc import Iterator, Mapping

TEXT_COLUMNS = 98
PLAIN = str.maketrans({"×": "x", "≈": "~", "…": "...", "→": ">", "µ": "u"})


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with four significant digits: 0.8731, 12.5, 1,234, 3.2e-06."""
    if value is None or not math.isfinite(value):
        return "nan" if value is None or math.isnan(value) else str(value)
    if value == 0 or isinstance(value, int):
        return f"{value:,}" if value else "0"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}g}"
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Format seconds: 35 µs, 48 ms, 12.3 s, 3 min 12 s, 2 h 05 min, 4 d 06 h."""
    if 0 < seconds < 0.9995e-3:
        return f"{number(seconds * 1e6, 3)} µs"
    if seconds < 0.9995:
        return f"{number(seconds * 1000, 3)} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def format_short_duration(seconds: float) -> str:
    """Format seconds in few columns: 12.3 ms, 1.82 s, 23.9 min, 3.1 h."""
    for unit, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= scale * (1 if unit == "s" else 1.5):
            return f"{number(seconds / scale, 3)} {unit}"
    return f"{number(seconds * 1e3, 3)} ms"


def clock(seconds: float) -> str:
    """Format seconds as a clock: 0:48, 3:12, 2:05:10, 4 d 06 h."""
    whole = round(seconds)
    if whole >= 86400:
        return duration(whole)
    hours = f"{whole // 3600}:{whole % 3600 // 60:02}" if whole >= 3600 else f"{whole // 60}"
    return f"{hours}:{whole % 60:02}"


def size(nbytes: float) -> str:
    """Format bytes in decimal units: 812 MB, 1.25 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale * 0.9995:
            return f"{number(nbytes / scale, 3)} {unit}"
    return f"{nbytes:.0f} B"


def format_quantity(n: float, billion: str = "B") -> str:
    """Format a count with three significant digits: 7.03 B, 124 M, 12.3 k, 12."""
    for unit, scale in ((billion, 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f}"


def plural(count: int, noun: str) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def format_metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())


def wrap_lines(text: str, mark: str) -> Iterator[str]:
    """Wrap a sentence to the width of tables; a number and its unit stay together."""
    kept = re.sub(r"(?<=\d) (?=[%a-zA-Z]{1,3}\b|%)", "\u00a0", text)
    for i, line in enumerate(textwrap.wrap(kept, TEXT_COLUMNS - len(mark), break_on_hyphens=False)):
        yield (mark if i == 0 else " " * len(mark)) + line.replace("\u00a0", " ")


def to_encodable(text: str, encoding: str | None) -> str:
    """Replace characters that the encoding lacks by the nearest plain ones."""
    encoding = encoding or "utf-8"
    if not encoding.lower().startswith("utf"):
        text = text.translate(PLAIN)
    return text.encode(encoding, "replace").decode(encoding)
