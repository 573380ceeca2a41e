"""An engine is asked, after it has started, whether it is what was asked for: some drop requests without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RunFailed


def must_agree(engine: str, has: Mapping[str, tuple[Any, Any]]) -> None:
    """`has`: for each property, what the engine has and what it was asked for."""
    for what, (got, asked) in has.items():
        if got != asked:
            raise RunFailed(f"{engine} was asked for {what} {asked} and has {got}: the run was not started")
