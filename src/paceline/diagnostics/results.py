"""What a check found, and all that was found together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.config import RunSpec
from paceline.launch.environment import SINGLE_RANK, RankInfo

ALL_NODES = "all nodes"


class Health(StrEnum):
    OK = "ok"
    LOOK = "look"
    """It will work, but not as well as it could; or it depends."""
    WRONG = "wrong"
    NOT_HERE = "not here"
    """There is nothing to check."""


@dataclass(frozen=True)
class CheckResult:
    topic: str
    check: str
    found: str
    expected: str = ""
    verdict: Health = Health.OK
    remedy: str = ""
    """The line to type, or what to ask for."""
    host: str = ""
    """Where; a pair of hosts for what lies between them."""


@dataclass(frozen=True)
class CheckContext:
    """What checks look at: where runs would go, the variables, the run, and the place among other ranks."""

    folder: Path = Path()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    spec: RunSpec | None = None
    place: RankInfo = SINGLE_RANK


Check = Callable[[CheckContext], Iterable[CheckResult]]


@dataclass(frozen=True)
class Examination:
    findings: Sequence[CheckResult]
    seconds: float
    hosts: Sequence[str] = ()

    def of(self, verdict: Health) -> list[CheckResult]:
        return [finding for finding in self.findings if finding.verdict is verdict]

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.of(Health.WRONG)

    def as_json(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "seconds": round(self.seconds, 2),
            "hosts": list(self.hosts),
            "findings": [asdict(finding) for finding in self.findings],
        }


def run_checks(checks: Iterable[Check], here: CheckContext, host: str) -> list[CheckResult]:
    """What all of them find on this machine, which the others call `host`.

    One that cannot be carried out is a finding too, and no traceback.
    """
    found: list[CheckResult] = []
    for check in checks:
        topic, name = check.__module__.rpartition(".")[2], check.__name__.replace("_", " ")
        try:
            found += check(here)
        except Exception as error:  # drivers and file systems fail in as many ways as there are of them
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            found.append(CheckResult(topic, name, f"could not be checked: {why}", "", Health.LOOK))
    return [replace(finding, host=finding.host or host) for finding in found]
