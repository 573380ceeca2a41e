"""The tables of keys: every rule takes any value, and single rules that no file above exercises."""

from pathlib import Path

import pytest
import yaml

from paceline.convert.key_tables import TABLES, load_table
from paceline.convert.rules import Outcome, Translation, Unreadable

VALUES = yaml.safe_load(Path(__file__).with_name("key_values.yaml").read_text(encoding="utf-8"))
ODD = (None, True, False, -1, 0, 1, 2.5, float("inf"), float("nan"), "", "0", "auto", "none", "$N", "a:b", [], [1], {})


@pytest.mark.parametrize("name", sorted({file.stem for file in TABLES.glob("*.yaml")} - {"programs"}))
def test_every_rule_takes_any_value(name):
    for key, rule in load_table(name).rules.items():
        for value in ODD:
            translation = None
            try:
                translation = rule(value)
            except Unreadable as kind:
                assert str(kind), key  # noqa: PT017
            assert translation is None or isinstance(translation, Translation)
            assert translation is None or translation.outcome is not Outcome.NOT_SUPPORTED or translation.reason, (
                key,
                value,
            )


@pytest.mark.parametrize(("table", "key", "value", "claims"), VALUES)
def test_a_value_becomes(table, key, value, claims):
    """`claims` of None: it is not supported."""
    translation = load_table(table).rule(key)(value)
    assert (translation.outcome is Outcome.NOT_SUPPORTED) == (claims is None)
    assert dict(translation.claims) == (claims or {})
