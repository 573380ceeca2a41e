"""Numbers in the smallest type that holds them exactly, and the refusal of what is not a count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from paceline.errors import UserError

CHUNK = 1 << 16  # numbers looked at together: they stay in the cache between the cast and the comparison
LARGEST: dict[np.dtype, int] = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65_535, np.dtype(np.int32): 2**31 - 1}
WHOLE = tuple(LARGEST)
FRACTIONS = np.dtype(np.float32)
PlaceName = Callable[[int], str]
"""Names the number at a position, for messages: "counts.npy: document 3, term 5"."""


def place_in_rows(source: str, terms: int, first_row: int = 0) -> PlaceName:
    return lambda at: f"{source}: document {first_row + at // terms}, term {at % terms} (both from 0)"


def check_dtype(dtype: np.dtype, source: str) -> None:
    if dtype.kind not in "buif":
        kind = {"O": "objects", "S": "bytes", "U": "texts", "c": "complex numbers", "V": "records"}.get(dtype.kind)
        raise UserError(f"{source}: holds {kind or dtype} ({dtype}); counts are whole numbers, of an int or float type")


def check_shape(shape: Sequence[int], source: str) -> None:
    if len(shape) != 2:
        raise UserError(
            f"{source}: has {len(shape)} dimension{'' if len(shape) == 1 else 's'} (shape {tuple(shape)}); a matrix of "
            "documents by terms has 2"
        )
    if 0 in shape:
        raise UserError(f"{source}: is empty, {shape[0]:,} documents by {shape[1]:,} terms; at least one of each")


def check_terms(terms: int, source: str) -> None:
    if terms > np.iinfo(np.int32).max:
        raise UserError(f"{source}: {terms:,} terms; at most 2,147,483,647 are possible")


def whole_type(largest: float) -> np.dtype | None:
    """The smallest type for whole numbers up to `largest`; None if there is none."""
    return next((dtype for dtype, limit in LARGEST.items() if largest <= limit), None)


def smallest_exact(array: np.ndarray, *, fractional: bool, place: PlaceName) -> np.ndarray:
    """The array in the smallest exact type, C-contiguous; itself where nothing is to be done."""
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind in "ui" and array.size:
        kind = whole_type(array.max()) if array.min() >= 0 else None
        if kind is not None:
            return np.ascontiguousarray(array.astype(kind, copy=False))
    filling = Filling(array.size, fractional=fractional, place=place)
    for piece in _flat_pieces(array):
        filling.put(piece)
    return filling.values.reshape(array.shape)


class Filling:
    """An array that is filled from its start, and becomes wider when a number needs it."""

    def __init__(self, size: int, *, fractional: bool, place: PlaceName):
        self.values: np.ndarray = np.empty(size, np.uint8)
        self.done = 0
        self._fractional = fractional
        self._place = place

    def put(self, numbers: np.ndarray) -> None:
        """Append flat numbers of any type. What cannot be a count is refused."""
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, numbers.size, CHUNK):
                chunk = numbers[start : start + CHUNK]
                if not self._fits(chunk):
                    self._widen(self._type_for(chunk))
                    if not self._fits(chunk):
                        raise AssertionError("the wider type does not hold the numbers either")
                self.done += chunk.size

    def _fits(self, chunk: np.ndarray) -> bool:
        target = self.values[self.done : self.done + chunk.size]
        limit = LARGEST.get(self.values.dtype)
        if limit is not None and chunk.dtype.kind in "uib" and (chunk.min() < 0 or chunk.max() > limit):
            return False
        np.copyto(target, chunk, casting="unsafe")
        if limit is None:  # float32
            return bool(target.min() >= 0 and target.max() < np.inf)
        if chunk.dtype.kind in "uib":
            return True
        return bool((target == chunk).all()) and (self.values.dtype != np.int32 or bool(chunk.min() >= 0))

    def _type_for(self, chunk: np.ndarray) -> np.dtype:
        """The type this chunk needs, not smaller than the present one; or a refusal."""
        if chunk.dtype.kind == "f":
            self._refuse(chunk, ~np.isfinite(chunk), "every count must be a finite number")
        self._refuse(chunk, chunk < 0, "a count cannot be negative")
        broken = chunk != np.trunc(chunk)
        if not self._fractional:
            self._refuse(
                chunk, broken, "counts are whole numbers; to allow fractions pass  fractional=True  (--fractional)"
            )
            self._refuse(chunk, chunk > LARGEST[np.dtype(np.int32)], "the largest count is 2,147,483,647")
        kind = None if broken.any() else whole_type(chunk.max())
        if kind is None:
            self._refuse(chunk, chunk > np.finfo(np.float32).max, "numbers up to 3.4e38 are possible")
            return FRACTIONS
        return np.promote_types(kind, self.values.dtype) if self.values.dtype != FRACTIONS else FRACTIONS

    def _refuse(self, chunk: np.ndarray, bad: np.ndarray, why: str) -> None:
        if bad.any():
            at = int(bad.argmax())
            raise UserError(f"{self._place(self.done + at)} is {as_text(chunk[at])}: {why}")

    def _widen(self, dtype: np.dtype) -> None:
        wider = np.empty(self.values.size, dtype)
        wider[: self.done] = self.values[: self.done]
        self.values = wider


def as_text(value: Any) -> str:
    number = float(value)
    return f"{int(number)}" if np.isfinite(number) and number == int(number) else f"{number:.6g}"


def _flat_pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers row by row, a few MB at a time, whatever the order in memory."""
    if array.flags.c_contiguous or array.ndim == 1:
        yield array.ravel()
        return
    rows = max(1, (1 << 20) // max(1, array.shape[1]))
    for start in range(0, len(array), rows):
        yield array[start : start + rows].ravel()
