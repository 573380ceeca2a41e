"""Which texts are held out: by a hash of the text, so equal texts are on the same side in whatever order they come."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


def hash64(text: str) -> int:
    """A number below 2^64 that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


@dataclass
class HashRange:
    """The hashes of all texts that were added."""

    lowest: int = 1 << 64
    highest: int = -1

    def add(self, text: str) -> None:
        value = hash64(text)
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)

    @property
    def is_empty(self) -> bool:
        return self.highest < 0

    @property
    def is_single(self) -> bool:
        """All texts are equal, so that there is nothing to divide."""
        return self.lowest == self.highest

    def threshold(self, fraction: float) -> int:
        """The hash below which a text is held out, moved as little as it takes for both sides to have one."""
        return min(max(int(fraction * 2**64), self.lowest + 1), self.highest)
