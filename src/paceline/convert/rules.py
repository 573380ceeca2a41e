"""What can become of a key of another tool, and the rules that tables of keys are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


class Outcome(Enum):
    KEPT = "kept"
    """Under the same name with the same value, or what Paceline does in any case."""
    TRANSLATED = "translated"
    DERIVED = "derived"
    """Together with other keys it makes a value of the run file."""
    NOTED = "noted"
    """A comment in the run file: for the scheduler, for the shell, or for the script."""
    REPLACED = "replaced"
    """Another key has the last word, as it had in the tool that both are of."""
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True)
class Ruling:
    """`claims` are values of the run file by dotted key, or quantities without a dot that others are derived from."""

    outcome: Outcome
    claims: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    weight: int = 0
    """Of two claims that differ, the heavier one counts; of equals, neither: that is a contradiction."""
    file: str = ""
    """Another file that is named here, and is to be read as well."""
    ask: bool = False
    """The user must look at it: a word that is not known, a file that is not there."""


Rule = Callable[[Any], Ruling]
"""From the value of a key; ValueError where the value cannot be read."""


class UnreadableValue(ValueError):
    """A value that is not of the kind that its key takes; the text says what it must be."""


def whole(value: Any) -> int:
    found = number(value)
    if not math.isfinite(found) or found != int(found):
        raise UnreadableValue("a whole number")
    return int(found)


def number(value: Any) -> float:
    try:
        if not isinstance(value, bool | None):
            found = float(value)  # also of a whole number: no setting is too large for it
            return value if isinstance(value, int) else found
    except (TypeError, ValueError, OverflowError):
        pass
    raise UnreadableValue("a number")


def truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if (text := str(value).lower()) in ("true", "yes", "1", "false", "no", "0"):
        return text in ("true", "yes", "1")
    raise UnreadableValue("true or false")


def word(value: Any) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise UnreadableValue("a word")


def is_off(value: Any) -> bool:
    """Asks for nothing: null, false, an empty text or list, or one of the words for none."""
    return value is None or value is False or value in ("", "no", "none", "None", "NO", "off") or value in ([], {}, ())


def to(key: str, convert: Callable[[Any], Any] = lambda value: value, why: str = "") -> Rule:
    """A value of the run file; null leaves the default."""

    def rule(value: Any) -> Ruling:
        if value is None:
            return Ruling(Outcome.KEPT, why="not set")
        return Ruling(Outcome.TRANSLATED, {key: convert(value)}, why)

    return rule


def quantity(name: str, convert: Callable[[Any], Any] = whole, why: str = "") -> Rule:
    """Something that values of the run file are derived from."""

    def rule(value: Any) -> Ruling:
        if value is None:
            return Ruling(Outcome.KEPT, why="not set")
        return Ruling(Outcome.DERIVED, {name: convert(value)}, why)

    return rule


def choice(options: Mapping[Any, Mapping[str, Any]], why: str, outcome: Outcome = Outcome.TRANSLATED) -> Rule:
    """One of several words, each with what it claims; `why` the others are not supported."""

    def rule(value: Any) -> Ruling:
        for known, claims in options.items():
            if str(value).lower() == str(known).lower():
                return Ruling(outcome if claims else Outcome.KEPT, claims)
        return Ruling(Outcome.NOT_SUPPORTED, why=why)

    return rule


def when(claims: Mapping[str, Any], why: str = "", weight: int = 0) -> Rule:
    """A switch: where it is on, it claims something; off is as things are without it."""

    def rule(value: Any) -> Ruling:
        if value is None or not truth(value):
            return Ruling(Outcome.KEPT, why="off")
        return Ruling(Outcome.TRANSLATED, claims, why, weight)

    return rule


def always(why: str, *values: Any, otherwise: str = "") -> Rule:
    """What Paceline does in any case, where the value is one of these, or whatever it is if none are named."""

    def rule(value: Any) -> Ruling:
        known = [str(v).lower() for v in values] + [repr(v) for v in values]
        same = isinstance(value, int | float) and any(value == v for v in values)
        if not values or value is None or same or str(value).lower() in known:
            return Ruling(Outcome.KEPT, why=why)
        return Ruling(Outcome.NOT_SUPPORTED, why=otherwise or f"here {why}")

    return rule


def no(why: str) -> Rule:
    """Not supported, unless it asks for nothing."""

    def rule(value: Any) -> Ruling:
        return Ruling(Outcome.KEPT, why="off") if is_off(value) else Ruling(Outcome.NOT_SUPPORTED, why=why)

    return rule


def noted(why: str) -> Rule:
    return lambda value: Ruling(Outcome.KEPT, why="not set") if value is None else Ruling(Outcome.NOTED, why=why)


def backend(value: Any) -> Ruling:
    """What carries messages. NCCL is taken for CUDA devices anyway, and a run file without it runs on CPUs too."""
    if value is None or str(value).lower() in ("nccl", "auto", ""):
        return Ruling(Outcome.KEPT, why="NCCL for CUDA devices, gloo for CPUs")
    if str(value).lower() in ("gloo", "mpi"):
        return Ruling(Outcome.TRANSLATED, {"parallel.backend": str(value).lower()})
    return Ruling(Outcome.NOT_SUPPORTED, why="parallel.backend is nccl, gloo or mpi")


def sums_in(value: Any) -> Ruling:
    """The type in which gradients are summed over ranks."""
    names = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
    text = str(value).removeprefix("torch.").lower()
    found = names.get(text, text)
    if value is None or found == "fp32":
        return Ruling(Outcome.KEPT, why="gradients are summed in fp32")
    if found in ("bf16", "fp16"):
        return Ruling(Outcome.TRANSLATED, {"parallel.reduce": found})
    return Ruling(Outcome.NOT_SUPPORTED, why="gradients are summed in fp32, bf16 or fp16")


def workers(value: Any) -> Ruling:
    """Processes that make samples."""
    if value is None or whole(value) == 0:
        return Ruling(Outcome.KEPT, why="off")
    return Ruling(Outcome.DERIVED, {"workers": whole(value)})


def file_too(why: str = "") -> Rule:
    """Another file with settings."""

    def rule(value: Any) -> Ruling:
        return Ruling(Outcome.KEPT, why="off") if is_off(value) else Ruling(Outcome.KEPT, why=why, file=str(value))

    return rule


def all_of(keys: Iterable[str], what: T) -> dict[str, T]:
    """Several names of one thing: a part of a table."""
    return dict.fromkeys(keys, what)
