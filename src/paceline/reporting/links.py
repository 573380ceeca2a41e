"""Links between ranks, as `paceline measure --links --out` left them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.measuring.links import Link, read_links
from paceline.record.units import duration
from paceline.reporting.series import FileLine


@dataclass(frozen=True)
class LinkMeasurement:
    """One measurement of links."""

    name: str
    links: tuple[Link, ...]
    sources: tuple[FileLine, ...]
    """Of each link."""

    @property
    def verdict(self) -> str:
        best = max(self.links, key=lambda link: link.bandwidth_bits_s)
        return (
            f"A link of {self.name} carries {best.rate}, the most that a "
            f"collective reached ({link_name(best)}); a small one takes {duration(best.latency_s)}."
        )


def read_link_measurement(folder: Path) -> LinkMeasurement:
    file = folder / "links.json"
    found = read_links(file)
    text = file.read_text(encoding="utf-8").splitlines()
    lines: list[int | None] = [n for n, line in enumerate(text, 1) if line.strip().startswith('"collective"')]
    lines = lines if len(lines) == len(found) else [None] * len(found)
    return LinkMeasurement(folder.resolve().name, tuple(found), tuple(FileLine(file, line) for line in lines))


def link_name(link: Link) -> str:
    """The collective, and between whom where that is not everyone."""
    return link.name if link.of_all_ranks else f"{link.name}, {link.between}"
