"""Results of checks, and the context that checks run in."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.config import RunSpec
from paceline.config.registry import describe_error
from paceline.launch.environment import SINGLE_RANK, RankInfo

ALL_NODES = "all nodes"


class Health(StrEnum):
    OK = "ok"
    LOOK = "look"
    """It works, but not as well as it could; or it depends."""
    WRONG = "wrong"
    NOT_HERE = "not here"


@dataclass(frozen=True)
class CheckResult:
    topic: str
    check: str
    found: str
    expected: str = ""
    verdict: Health = Health.OK
    remedy: str = ""
    host: str = ""
    """The node, or `a to b` for what is between two."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "CheckResult":
        return cls(**{**values, "verdict": Health(values["verdict"])})


@dataclass(frozen=True)
class CheckContext:
    folder: Path = Path()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    spec: RunSpec | None = None
    rank_info: RankInfo = SINGLE_RANK


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
        return not self.of(Health.WRONG)

    def as_json(self) -> dict[str, Any]:
        findings = [asdict(finding) for finding in self.findings]
        seconds = round(self.seconds, 2)
        return {"healthy": self.healthy, "seconds": seconds, "hosts": list(self.hosts), "findings": findings}


def run_checks(checks: Mapping[str, Sequence[Check]], context: CheckContext, host: str) -> list[CheckResult]:
    """Run the checks of each topic on this machine, which is called `host`; one that fails is a result, too."""
    found: list[CheckResult] = []
    for topic, check in ((topic, check) for topic, some in checks.items() for check in some):
        try:
            found += check(context)
        except Exception as error:  # drivers and file systems fail in many ways
            name = check.__name__.removeprefix("check_").replace("_", " ")
            problem = f"could not be checked: {describe_error(error)[:200]}"
            found.append(CheckResult(topic, name, problem, verdict=Health.LOOK))
    return [replace(finding, host=finding.host or host) for finding in found]
