"""What a plan says of an ensemble: its members are planned one by one."""

from __future__ import annotations

from typing import Any

from paceline.errors import UserError
from paceline.spec import RunSpec


def subject(spec: RunSpec, samples: int | None, tokens: float | None) -> Any:
    raise UserError(
        "an ensemble costs what its members cost, each as often as there are folds and once more; "
        "plan each of them with  paceline plan MEMBER.yaml"
    )
