"""Tables of other tools' keys, loaded from `tables/*.yaml` when they are first needed."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config import RunSpec
from paceline.config.run_file import set_nested
from paceline.config.run_spec import FIXED_SECTIONS
from paceline.convert.rules import Entry, Outcome, Rule, Translation, accept, build_rule, keep, reject
from paceline.io.safe_yaml import read_data_file
from paceline.trainer.engines.deepspeed_config import AUTO, SECTIONS, Meaning, translate_sections

TABLES = Path(__file__).with_name("tables")
AUTO_RULING = Translation(Outcome.DERIVED, reason="auto: as the other files have it, or Paceline's default")


@dataclass(frozen=True)
class KeyTable:
    """The keys of one tool. A key that ends with `.*` covers all below it."""

    tool: str
    rules: Mapping[str, Rule]
    marks: frozenset[str] = frozenset()
    """Keys by which a file of this tool is recognised: top-level ones, or dotted."""
    dashed: bool = False
    """Its options are written with `-`, where tables have `_`."""
    flags: Sequence[str] = ()
    """Options without a value; those that set keys are `switches`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Short forms of options."""
    pairs: Sequence[str] = ()
    """Options with two values."""
    optional_numbers: Sequence[str] = ()
    """Options whose value is a number, or missing."""
    switches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options without a value, and the keys that they set."""
    calls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What a call in a script claims by being made at all."""
    defaults: Sequence[Entry] = ()
    """What the tool does unless a key is given, and Paceline would not."""

    def rule(self, key: str) -> Rule | None:
        """Return the rule for a dotted key: its own, or that of a section above it."""
        parts = key.split(".")
        above = [".".join(parts[:n]) + ".*" for n in range(len(parts) - 1, 0, -1)]
        return next((self.rules[name] for name in (key, f"{key}.*", *above) if name in self.rules), None)

    def knows(self, key: str) -> bool:
        return self.rule(key) is not None

    def translate_together(self, values: Mapping[str, Any]) -> Mapping[str, Translation]:
        """Translate keys whose meaning depends on others; ValueError, with the key, for a value that cannot be read."""
        return {}

    def translate_defaults(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Translation]]:
        """Yield (key, value, translation) for each default that no given key replaces."""
        for entry in self.defaults:
            names = entry.get("unless", [entry["key"]])
            given = [value for key, value in values.items() if any(f".{name}." in f".{key}." for name in names)]
            if not any(value or (value is not None and "or_zero" not in entry) for value in given):
                translation = Translation(Outcome.DERIVED, entry["claims"], entry["reason"], entry.get("priority", -1))
                yield entry["key"], entry.get("value"), translation


class DeepSpeedTable(KeyTable):
    """`optimizer`, `scheduler` and `fp16` are read as parallel.engine=deepspeed reads them."""

    def knows(self, key: str) -> bool:
        return key.split(".")[0] in SECTIONS or super().knows(key)

    def translate_together(self, values: Mapping[str, Any]) -> Mapping[str, Translation]:
        auto = {key: AUTO_RULING for key, value in values.items() if value == AUTO and key.split(".")[0] in SECTIONS}
        return {**{one.name: _translate_meaning(one) for one in _read_sections(values) if one.given}, **auto}

    def translate_defaults(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Translation]]:
        """Yield the table's defaults, then DeepSpeed's own for keys that its sections leave out."""
        yield from super().translate_defaults(values)
        for one in _read_sections(values):
            if not one.given:
                translation = _translate_meaning(one)
                outcome = Outcome.DERIVED if translation.claims else translation.outcome
                reason = translation.reason or "DeepSpeed's default"
                yield one.name, one.value, replace(translation, outcome=outcome, reason=reason, priority=-1)


def _read_sections(values: Mapping[str, Any]) -> list[Meaning]:
    config: dict[str, Any] = {}
    for key, value in values.items():
        if key.split(".")[0] in SECTIONS:
            set_nested(config, key, value)
    return translate_sections(config)


def _translate_meaning(one: Meaning) -> Translation:
    if one.refusal:
        return reject(one.refusal)
    if not one.keys:
        other = Outcome.REPLACED if one.name == "optimizer.params.lr" else Outcome.NOT_SUPPORTED
        return Translation(other if one.own_way else Outcome.KEPT, reason=one.note)
    return accept({"total_steps" if key == "train.steps" else key: value for key, value in one.keys.items()})


class TrainingArgumentsTable(KeyTable):
    def translate_together(self, values: Mapping[str, Any]) -> Mapping[str, Translation]:
        """Translate the sections of a DeepSpeed configuration that is given in place of its file."""
        start, deepspeed = "deepspeed.", load_table("deepspeed")
        inner = {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
        return {f"{start}{key}": found for key, found in deepspeed.translate_together(inner).items()}


class PacelineTable(KeyTable):
    """Run files: every key stays as it is. Sections `model` and `data` have the keys of their workload."""

    def rule(self, key: str) -> Rule | None:
        if key not in self.rules and key.partition(".")[0] not in ("model", "data"):
            return None
        return lambda value: Translation(Outcome.KEPT, {} if value is None else {key: value})


CLASSES = {"deepspeed": DeepSpeedTable, "training_arguments": TrainingArgumentsTable}


def load_yaml_table(name: str) -> dict[str, Any]:
    """Return the content of `tables/NAME.yaml`."""
    content: dict[str, Any] = read_data_file(TABLES / f"{name}.yaml")
    return content


@functools.cache
def load_table(name: str) -> KeyTable:
    """Read the table of a tool, or build that of Paceline's own run files."""
    if name == "paceline":
        return _build_paceline_table()
    content = load_yaml_table(name)
    rules, marks = dict[str, Rule](), set(content.pop("marks", ()))
    for group in content.pop("groups"):
        own = _build_group(group)
        for section in group.get("under", [""]):
            named = {f"{section}.{key}" if section else key: rule for key, rule in own.items()}
            rules |= named
            marks |= named.keys() if "marks" in group else set()
    if content.pop("auto", False):
        rules = {key: _unless_auto(rule) for key, rule in rules.items()}
    return CLASSES.get(name, KeyTable)(rules=rules, marks=frozenset(marks), **content)


def _build_group(group: Entry) -> dict[str, Rule]:
    """Build the rules that a group lists, or takes from another table."""
    if "from" in group:
        return {key.removeprefix(group.get("strip", "")): rule for key, rule in load_table(group["from"]).rules.items()}
    return {key: rule for entry in group["rules"] for rule in [build_rule(entry)] for key in entry["keys"]}


def _unless_auto(rule: Rule) -> Rule:
    """`auto` means: as the Trainer's or Accelerate's own settings have it."""
    return lambda value: AUTO_RULING if isinstance(value, str) and value == AUTO else rule(value)


def _build_paceline_table() -> PacelineTable:
    keys = [name for name in RunSpec.model_fields if name not in ("model", "data", "train")]
    keys += [f"{name}.{key}" for name, kind in FIXED_SECTIONS.items() for key in kind.model_fields]
    return PacelineTable("Paceline", dict.fromkeys(keys, keep), frozenset(keys) - {"name"})
