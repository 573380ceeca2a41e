"""Collect what each key claims for the run file, and detect contradictions."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from paceline.convert.key_tables import PacelineTable, load_table
from paceline.convert.rules import Outcome, Translation, Unreadable, note, reject
from paceline.convert.shell import AT_RUN_TIME, is_unknown
from paceline.convert.sources import Settings
from paceline.errors import UserError, did_you_mean
from paceline.io.files import flatten_keys

SECRET = re.compile(r"(^|[_. ])(token|secret|password|(api|access|secret)_key)$", re.IGNORECASE)
"""Keys whose values are repeated nowhere."""
OWN_CONFIG = ("--config", "--config_file")  # of a script, in any format
SYNONYMS = {"zero3": "fsdp"}
"""Two names of one strategy."""


@dataclass(frozen=True)
class ConvertedKey:
    """What became of one key."""

    source: str
    key: str
    value: Any
    outcome: Outcome
    run_keys: tuple[str, ...] = ()
    """Keys of the run file; while the draft is incomplete, the names that it claims."""
    reason: str = ""
    given: bool = True
    """False for a default of the tool that Paceline does not share."""
    review: bool = False
    """See `Translation.review`."""

    @property
    def origin(self) -> str:
        """Return where the key is, for a message."""
        return f"{self.source} {self.key}" + ("" if self.given else ", not given")

    def as_json(self) -> dict[str, Any]:
        values = {"source": self.source, "key": self.key, "value": self.value, "became": self.outcome.value}
        return {**values, "in_run_file": list(self.run_keys), "why": self.reason, "given": self.given}

    @property
    def assignment(self) -> str:
        """Return where the key is, with its value: `ds.json train_batch_size=256`."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.origin}={value}" if self.given else self.origin


class Claim(NamedTuple):
    """A value that a row gives to a key of the run file, or to a quantity."""

    value: Any
    row: int
    """Which row makes it."""
    priority: int


class RunFileLine(NamedTuple):
    """A value of the run file, and the comment behind it."""

    value: Any
    comment: str


@dataclass
class Draft:
    rows: list[ConvertedKey] = field(default_factory=list)
    sources: list[Settings] = field(default_factory=list)
    claims: dict[str, Claim] = field(default_factory=dict)
    lines: dict[str, RunFileLine] = field(default_factory=dict)
    """The run file by dotted keys."""
    used: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The keys of the run file that each quantity went into."""
    fill_in: dict[str, str] = field(default_factory=dict)
    """Keys of the run file that the user must look at, with the reason."""
    files: list[Path] = field(default_factory=list)
    """Existing files that a source names: to be read as well."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Quantities whose value only the running job knows, and who would give them."""

    def add_source(self, source: Settings) -> None:
        """Translate and add every key of a source; raise UserError for a value that cannot be read."""
        values = flatten_keys(source.values)
        try:
            together = source.table.translate_together(values)
        except ValueError as error:
            raise UserError(f"{source.name}: {error}", code="invalid-value") from None
        for key, value in values.items():
            shown = key.replace("_", "-") if source.table.dashed else key
            translation = together[key] if key in together else _translate_key(source, key, value)
            if is_unknown(value) and (claims := translation.claims or _list_claims(source, key)):
                self.unknown |= dict.fromkeys(claims, f"{source.name} {source.prefix}{shown}={value}")
                translation = note(AT_RUN_TIME, review=True)
            self.add(source, f"{source.prefix}{shown}", value, translation)
        for key, value, translation in source.extra:
            self.add(source, key, value, translation)
        self.sources.append(source)

    def add_defaults(self) -> None:
        """Add the tools' own defaults of keys that were not given; none if a run file was read."""
        for source in () if self.has_run_file else self.sources:
            for key, value, translation in source.table.translate_defaults(flatten_keys(source.values)):
                self.add(source, key, value, translation, given=False)

    @property
    def has_run_file(self) -> bool:
        return any(isinstance(source.table, PacelineTable) for source in self.sources)

    def add(self, source: Settings, key: str, value: Any, translation: Translation, *, given: bool = True) -> None:
        if translation.file:
            translation = self._find_file(source, translation)
        outcome = translation.outcome
        if outcome is Outcome.TRANSLATED and _is_unchanged(key, value, translation.claims):
            outcome = Outcome.KEPT
        value = "…" if SECRET.search(key) and value else value
        claims, reason = translation.claims, translation.reason
        row = ConvertedKey(source.name, key, value, outcome, tuple(claims), reason, given, translation.review)
        self.rows.append(row)
        for name, claimed in claims.items():
            self._claim(name, Claim(claimed, len(self.rows) - 1, translation.priority + source.priority))

    def _claim(self, name: str, new: Claim) -> None:
        old = self.claims.setdefault(name, new)
        if old is new or SYNONYMS.get(str(old.value), old.value) == SYNONYMS.get(str(new.value), new.value):
            return
        if name == "train.loggers" and old.priority == new.priority:
            self.claims[name] = new._replace(value=[*old.value, *(one for one in new.value if one not in old.value)])
            return
        if old.priority == new.priority:
            first, second = self.rows[old.row].assignment, self.rows[new.row].assignment
            shown = name if "." in name else name.replace("_", " ")
            both = f"{first} and {second} contradict each other ({shown} would be {old.value} and {new.value})"
            raise UserError(f"{both}; leave one of them out", code="conflict", key=name)
        self.claims[name], loser = (new, old) if new.priority > old.priority else (old, new)
        self._update(loser, Outcome.REPLACED, f"{self.rows[self.claims[name].row].origin} takes precedence")

    def _update(self, claim: Claim, outcome: Outcome, reason: str, run_keys: tuple[str, ...] = ()) -> None:
        self.rows[claim.row] = replace(self.rows[claim.row], outcome=outcome, reason=reason, run_keys=run_keys)

    def _find_file(self, source: Settings, translation: Translation) -> Translation:
        for folder in (source.folder, Path()):
            if (path := folder / translation.file).is_file():
                self.files.append(path)
                return replace(translation, reason="read as well", file="")
        reason = "the file does not exist here; give it to adopt as well"
        return reject(reason, review=True)

    def leave_to_script(self, file: Path) -> bool:
        """Note a configuration of the script's own format; return whether the file is one."""
        own = [i for i, row in enumerate(self.rows) if row.key in OWN_CONFIG and Path(str(row.value)).name == file.name]
        for i in own:
            reason = "the script reads it itself"
            self.rows[i] = replace(self.rows[i], outcome=Outcome.NOTED, reason=reason, review=True)
        return bool(own)

    def value(self, name: str) -> Any:
        """Return what is claimed under a name; None if nothing is."""
        return self.claims[name].value if name in self.claims else None

    def describe(self, name: str) -> str:
        """Return who claims it, for a message."""
        return self.rows[self.claims[name].row].assignment

    def set_line(self, key: str, value: Any, comment: str, quantities: Iterable[str] = ()) -> None:
        """Set a line of the run file, and record which claimed quantities went into it."""
        self.lines[key] = RunFileLine(value, comment)
        for name in self.claims.keys() & set(quantities):
            self.used[name] = (*self.used.get(name, ()), key)

    def reject(self, name: str, reason: str, *, noted: bool = False) -> None:
        """Drop a claim that cannot be a value of the run file after all."""
        self.lines.pop(name, None)
        claim = self.claims.pop(name)
        row = self.rows[claim.row]
        others = tuple(other for other in row.run_keys if other != name)
        outcome = row.outcome if others else Outcome.NOTED if noted else Outcome.NOT_SUPPORTED
        self._update(claim, outcome, reason, others)

    def drop(self, name: str, outcome: Outcome, reason: str) -> None:
        """Drop a claim that holds without a key, or in favour of another one."""
        self._update(self.claims.pop(name), outcome, reason)

    def override(self, name: str, by: str) -> None:
        self.drop(name, Outcome.REPLACED, f"{self.rows[self.claims[by].row].origin} takes precedence")


def _translate_key(source: Settings, key: str, value: Any) -> Translation:
    rule = source.table.rule(key)
    if rule is None:
        known = [name.removesuffix(".*") for name in source.table.rules]
        reason = f"{source.table.tool} has no such key{did_you_mean(key, known, cutoff=0.75)}"
        return reject(reason, review=True)
    try:
        return rule(value)
    except Unreadable as kind:
        if is_unknown(value):
            return note(AT_RUN_TIME, review=True)
        if source.table is load_table("script_options"):
            return note(f"not {kind}; the script reads it itself", review=True)
        raise UserError(f"{source.name}: {key}: {value!r} is not {kind}", code="invalid-value", key=key) from None


def _list_claims(source: Settings, key: str) -> list[str]:
    """Return what a key would claim if its value were a number."""
    rule = source.table.rule(key)
    with suppress(Unreadable):
        return list(rule(1).claims) if rule is not None else []
    return []


def _is_unchanged(key: str, value: Any, claims: Mapping[str, Any]) -> bool:
    """Return whether a key has the same name and value in the run file."""
    name, claimed = next(iter(claims.items())) if len(claims) == 1 else ("", None)
    return name.split(".")[-1] == key.split(".")[-1] and (claimed == value or str(claimed) == str(value))
