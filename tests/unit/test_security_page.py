"""docs/security.md names a test beside each claim: they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tests_that_the_page_names_are_there():
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text(encoding="utf-8")))
    assert len(named) >= 15
    missing = [f"{file}::{name}" for file, name in sorted(named) if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing
