"""A run file in the making: what each key claims, where two contradict each other, and what became of each key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.convert.rules import Outcome, Ruling, UnreadableValue
from paceline.convert.sources import Settings, flatten_keys
from paceline.errors import UserError

SECRET = re.compile(r"(^|[_. ])(token|secret|password|api_key)$", re.IGNORECASE)
"""Keys whose values are repeated nowhere."""
SAME = {"zero3": "fsdp"}
"""Two names of one strategy."""


@dataclass(frozen=True)
class ConvertedKey:
    """What became of one key."""

    source: str
    key: str
    value: Any
    outcome: Outcome
    where: tuple[str, ...] = ()
    """Keys of the run file; before all is settled, what it claims."""
    why: str = ""
    given: bool = True
    """False for what a tool does unasked and Paceline would not."""
    ask: bool = False
    """See `Ruling.ask`."""

    @property
    def said(self) -> str:
        """As a person would point at it."""
        return f"{self.source} {self.key}" + ("" if self.given else ", not given")


@dataclass(frozen=True)
class Claim:
    value: Any
    row: int
    """Which row makes it."""
    weight: int


@dataclass(frozen=True)
class RunFileLine:
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
    became: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For quantities without a key of their own: the keys they went into."""
    fill_in: dict[str, str] = field(default_factory=dict)
    """Keys of the run file that the user must look at, with the reason."""
    files: list[Path] = field(default_factory=list)
    """Named by what was read, and there: to be read as well."""

    def read(self, source: Settings) -> None:
        """Every key of a source."""
        values = dict(flatten_keys(source.values))
        together = _together(source, values)
        for key, value in values.items():
            shown = key.replace("_", "-") if source.table.dashed else key
            ruling = together[key] if key in together else _judged(source, key, value)
            self.add(source, f"{source.prefix}{shown}", value, ruling)
        for key, value, ruling in source.extra:
            self.add(source, key, value, ruling)
        self.sources.append(source)

    def add_unsaid(self) -> None:
        """What the tools do where nothing is said, once all is read; a run file among it has defaults of its own."""
        if self.has_run_file:
            return
        for source in self.sources:
            unsaid = source.table.unsaid
            for key, value, ruling in unsaid(dict(flatten_keys(source.values))) if unsaid else ():
                self.add(source, key, value, ruling, given=False)

    @property
    def has_run_file(self) -> bool:
        return any(source.table.ours for source in self.sources)

    def add(self, source: Settings, key: str, value: Any, ruling: Ruling, *, given: bool = True) -> None:
        if ruling.file:
            ruling = self._file(source, ruling)
        outcome = ruling.outcome
        if outcome is Outcome.TRANSLATED and _unchanged(key, value, ruling.claims):
            outcome = Outcome.KEPT
        value = "…" if SECRET.search(key) and value else value
        row = ConvertedKey(source.name, key, value, outcome, tuple(ruling.claims), ruling.why, given, ruling.ask)
        self.rows.append(row)
        for name, claimed in ruling.claims.items():
            self._claim(name, Claim(claimed, len(self.rows) - 1, ruling.weight + source.weight))

    def _claim(self, name: str, new: Claim) -> None:
        old = self.claims.get(name)
        if old is None or _same(old.value, new.value):
            self.claims.setdefault(name, new)
            return
        if old.weight == new.weight:
            first, second = self.rows[old.row], self.rows[new.row]
            raise UserError(
                f"{_shown(first)} and {_shown(second)} contradict each other ({_as_key(name)} would be {old.value} "
                f"and {new.value}); leave one of them out"
            )
        winner, loser = (new, old) if new.weight > old.weight else (old, new)
        self.claims[name] = winner
        why = f"{self.rows[winner.row].said} has the last word"
        self.rows[loser.row] = replace(self.rows[loser.row], outcome=Outcome.REPLACED, where=(), why=why)

    def _file(self, source: Settings, ruling: Ruling) -> Ruling:
        for folder in (source.folder, Path()):
            if (path := folder / ruling.file).is_file():
                self.files.append(path)
                return replace(ruling, why="read as well", file="")
        why = "there is no such file here; give it to adopt as well"
        return Ruling(Outcome.NOT_SUPPORTED, why=why, ask=True)

    def value(self, name: str) -> Any:
        """What is claimed under a name; None where nothing is."""
        return self.claims[name].value if name in self.claims else None

    def shown(self, name: str) -> str:
        """Who claims it, for a message: `ds.json train_batch_size=256`."""
        return _shown(self.rows[self.claims[name].row])

    def put(self, key: str, value: Any, comment: str) -> None:
        self.lines[key] = RunFileLine(value, comment)

    def use(self, name: str, *keys: str) -> None:
        """A quantity went into these keys of the run file."""
        self.became[name] = (*self.became.get(name, ()), *keys)

    def reject(self, name: str, why: str, *, noted: bool = False) -> None:
        """What was claimed is no value of a run file after all."""
        claim = self.claims.pop(name)
        row = self.rows[claim.row]
        outcome = Outcome.NOTED if noted else Outcome.NOT_SUPPORTED
        left = tuple(other for other in row.where if other != name)
        self.rows[claim.row] = (
            replace(row, where=left, why=why) if left else replace(row, outcome=outcome, where=(), why=why)
        )

    def keep(self, name: str, why: str) -> None:
        """What was claimed is so in any case."""
        claim = self.claims.pop(name)
        self.rows[claim.row] = replace(self.rows[claim.row], outcome=Outcome.KEPT, where=(), why=why)

    def overrule(self, name: str, by: str) -> None:
        """Of two keys for one thing the second counts."""
        claim = self.claims.pop(name)
        why = f"{self.rows[self.claims[by].row].said} has the last word"
        self.rows[claim.row] = replace(self.rows[claim.row], outcome=Outcome.REPLACED, where=(), why=why)


def _together(source: Settings, values: Mapping[str, Any]) -> Mapping[str, Ruling]:
    try:
        return source.table.together(values) if source.table.together else {}
    except ValueError as error:
        raise UserError(f"{source.name}: {error}") from None


def _judged(source: Settings, key: str, value: Any) -> Ruling:
    rule = source.table.rule(key)
    if rule is None:
        tool = source.table.tool
        return Ruling(Outcome.NOT_SUPPORTED, why=f"{tool} has no such key{source.table.near(key)}", ask=True)
    try:
        return rule(value)
    except UnreadableValue as kind:
        if isinstance(value, str) and "$" in value:
            return Ruling(Outcome.NOTED, why="known only when the job runs", ask=True)
        raise UserError(f"{source.name}: {key}: {value!r} is not {kind}") from None


def _shown(row: ConvertedKey) -> str:
    value = str(row.value).lower() if isinstance(row.value, bool) else row.value
    return f"{row.said}={value}" if row.given else row.said


def _as_key(name: str) -> str:
    return name if "." in name else name.replace("_", " ")


def _same(one: Any, other: Any) -> bool:
    return bool(SAME.get(str(one), one) == SAME.get(str(other), other))


def _unchanged(key: str, value: Any, claims: Mapping[str, Any]) -> bool:
    """Whether a key has its own name and value in the run file."""
    if len(claims) != 1:
        return False
    ((name, claimed),) = claims.items()
    return name.split(".")[-1] == key.split(".")[-1] and (claimed == value or str(claimed) == str(value))
