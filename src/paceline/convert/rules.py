"""Rules for keys of other tools: what a value of such a key becomes in a run file."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

Entry = Mapping[str, Any]
"""A rule as the tables in `tables/*.yaml` write it."""


class Outcome(Enum):
    KEPT = "kept"
    """Under the same name with the same value, or what Paceline does in any case."""
    TRANSLATED = "translated"
    DERIVED = "derived"
    """Together with other keys it makes a value of the run file."""
    NOTED = "noted"
    """A comment in the run file: for the scheduler, for the shell, or for the script."""
    REPLACED = "replaced"
    """Another key takes precedence, as it did in the tool that both belong to."""
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True)
class Translation:
    """What a key of another tool becomes: `claims` are keys of the run file, or quantities that give keys."""

    outcome: Outcome
    claims: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    priority: int = 0
    """Of two claims that differ, the one of higher priority counts; equal ones are a contradiction."""
    file: str = ""
    """Another file that is named here, and is to be read as well."""
    review: bool = False
    """The user must look at it: an unknown word, a missing file."""


Rule = Callable[[Any], Translation]
"""From the value of a key; UnreadableValue where the value cannot be read."""


def keep(reason: str) -> Translation:
    return Translation(Outcome.KEPT, reason=reason)


def note(reason: str, *, review: bool = False) -> Translation:
    return Translation(Outcome.NOTED, reason=reason, review=review)


def reject(reason: str, *, review: bool = False) -> Translation:
    return Translation(Outcome.NOT_SUPPORTED, reason=reason, review=review)


def accept(claims: Mapping[str, Any], reason: str = "", priority: int = 0, *, review: bool = False) -> Translation:
    return Translation(Outcome.TRANSLATED, claims, reason, priority, review=review)


def derive(claims: Mapping[str, Any], reason: str = "") -> Translation:
    return Translation(Outcome.DERIVED, claims, reason)


OFF, NOT_SET = keep("off"), keep("not set")


class UnreadableValue(ValueError):
    """A value of the wrong type; the text says what it must be."""


def parse_int(value: Any) -> int:
    found = parse_number(value)
    if not math.isfinite(found) or found != int(found):
        raise UnreadableValue("a whole number")
    return int(found)


def parse_number(value: Any) -> float:
    try:
        if not isinstance(value, bool | None):
            found = float(value)  # also of a whole number: no setting is too large for it
            return value if isinstance(value, int) else found
    except (TypeError, ValueError, OverflowError):
        pass
    raise UnreadableValue("a number")


def parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if (text := str(value).lower()) in ("true", "yes", "1", "false", "no", "0"):
        return text in ("true", "yes", "1")
    raise UnreadableValue("true or false")


def parse_word(value: Any) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise UnreadableValue("a word")


PARSERS: dict[str, Callable[[Any], Any]] = {"int": parse_int, "number": parse_number, "word": parse_word, "text": str}


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing: null, false, an empty text or list, or one of the words for none."""
    return value is None or value is False or value in ("", "no", "none", "off", "false", "None", "NO", [], {}, ())


def build_rule(entry: Entry, functions: Mapping[str, Rule]) -> Rule:
    """Return the rule that an entry of a table describes; `call` names one of the functions."""
    if "call" in entry:
        return functions[entry["call"]]
    build = next(build for name, build in KINDS.items() if name in entry)
    translate = build(entry)

    def rule(value: Any) -> Translation:
        if any(value == other and type(value) is type(other) for other in entry.get("ignored", ())):
            return OFF
        try:
            return translate(value)
        except UnreadableValue:
            if "unreadable" not in entry:
                raise
            return note(entry["unreadable"])

    return rule


def _build_claim(entry: Entry) -> Rule:
    """`to` a key of the run file, or to a `quantity` that others are derived from; null leaves the default."""
    translated = "to" in entry
    name = entry["to"] if translated else entry["quantity"]
    parse = PARSERS[entry.get("as", "int")]
    outcome = Outcome.TRANSLATED if translated else Outcome.DERIVED

    def rule(value: Any) -> Translation:
        if value is None:
            return NOT_SET
        if "at_least" in entry and parse_number(value) < entry["at_least"]:
            return reject(entry["otherwise"])
        parsed = parse(value)
        if "off_below" in entry and parsed < entry["off_below"]:
            return OFF
        return Translation(outcome, {name: parsed}, entry.get("reason", ""), entry.get("priority", 0))

    return rule


def _build_choice(entry: Entry) -> Rule:
    """One of several words, or a dotted name that ends with it; each with what it claims."""
    options = {str(word).lower(): dict(claims) for word, claims in entry["choice"].items()}

    def rule(value: Any) -> Translation:
        text = str(value).lower()
        if isinstance(value, str) and text[:1].isalpha() and text not in options:
            text = text.rpartition(".")[2]
        if text not in options:
            return reject(entry["reason"])
        claims = {key: claim for key, claim in options[text].items() if key != "reason"}
        if not claims:
            return keep(entry.get("kept", ""))
        return accept(claims, options[text].get("reason", ""), entry.get("priority", 0))

    return rule


def _build_switch(entry: Entry) -> Rule:
    """True or false: on, it claims something; off, nothing or what `otherwise` has."""
    on = accept(entry["switch"], entry.get("reason", ""), entry.get("priority", 0))
    off = replace(on, claims=entry["otherwise"]) if "otherwise" in entry else OFF
    return lambda value: NOT_SET if value is None else on if parse_bool(value) else off


def _build_keep(entry: Entry) -> Rule:
    """What Paceline does in any case, if the value is one of `values`, or whatever it is without these."""
    values, reason = entry.get("values", ()), entry["keep"]
    words = {text for value in values for text in (str(value).lower(), repr(value))}

    def rule(value: Any) -> Translation:
        equal = isinstance(value, int | float) and any(value == known for known in values)
        if not values or value is None or equal or str(value).lower() in words:
            return keep(reason)
        return reject(entry.get("otherwise", f"here {reason}"))

    return rule


def translate_file(value: Any) -> Translation:
    """Keep the name of a file whose settings are read too, unless it stands for none."""
    return OFF if is_off(value) else Translation(Outcome.KEPT, file=str(value))


KINDS: dict[str, Callable[[Entry], Rule]] = {
    "to": _build_claim,
    "quantity": _build_claim,
    "choice": _build_choice,
    "switch": _build_switch,
    "keep": _build_keep,
    "reject": lambda entry: lambda value: OFF if is_off(value) else reject(entry["reject"]),
    "note": lambda entry: lambda value: NOT_SET if value is None else note(entry["note"]),
    "file": lambda entry: translate_file,
}
