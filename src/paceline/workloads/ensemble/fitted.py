"""A fitted ensemble: its members, by relative path and hash, and the numbers that combine them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.io.files import read_sealed, write_sealed
from paceline.workloads.ensemble.combination import Combination
from paceline.workloads.ensemble.members import NUMBERS, Member, hash_run
from paceline.workloads.ensemble.scoring import Scores

FILE = "ensemble.json"


@dataclass(frozen=True)
class MemberReference:
    name: str
    path: Path
    workload: str
    digest: str

    def to_json(self, folder: Path) -> dict[str, str]:
        path = os.path.relpath(self.path.resolve(), folder.resolve())
        return {"name": self.name, "path": path, "workload": self.workload, "sha256": self.digest}


@dataclass(frozen=True, eq=False)
class FittedEnsemble:
    members: Sequence[Member]
    classes: tuple[str, ...]
    combination: Combination

    @classmethod
    def read(cls, folder: Path) -> FittedEnsemble:
        if not (folder / FILE).exists():
            raise UserError(f"{folder} is not finished; resume it with  paceline train --resume {folder}")
        members, classes, combination = read_manifest(folder)
        return cls([_open_member(folder, **member) for member in members], classes, combination)

    def predict(self, inputs: Sequence[Any]) -> dict[str, np.ndarray]:
        found = [member.outputs([inputs]).aligned(self.classes, member.name) for member in self.members]
        whole = self.combination(np.stack(found))
        return {"probabilities": whole} if self.classes else {NUMBERS: whole}

    def export(self, folder: Path) -> None:
        runs = [str(member.model.run.path) for member in self.members]
        raise UserError(
            f"an ensemble is its members and the few numbers in {FILE}; export each member with  "
            + "  and  ".join(f"paceline export {run} --out {Path(run).name}" for run in runs)
        )


def read_manifest(folder: Path) -> tuple[list[dict[str, str]], tuple[str, ...], Combination]:
    values = read_sealed(folder / FILE)
    try:
        members = [{key: str(one[key]) for key in ("name", "path", "sha256")} for one in values["members"]]
        return members, tuple(values["classes"]), Combination.from_json(values["combination"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder / FILE} is damaged ({error}); write it again with  paceline train --resume {folder}",
            code="damaged",
        ) from None


def write_ensemble(
    folder: Path, members: Sequence[MemberReference], classes: tuple[str, ...], combination: Combination, scores: Scores
) -> None:
    listed = [member.to_json(folder) for member in members]
    values = {"format": 1, "members": listed, "classes": classes, "combination": asdict(combination)}
    write_sealed(folder / FILE, {**values, "held_out": asdict(scores)})


def _open_member(folder: Path, name: str, path: str, sha256: str) -> Member:
    run = Path(os.path.normpath(folder / path))
    if not run.is_dir():
        raise UserError(f"{folder}: its member {run} does not exist any more; restore it", code="not-found")
    if hash_run(run) != sha256:
        raise UserError(
            f"{folder}: its member {run} has changed since its weight was fitted; train the ensemble again with  "
            f"paceline train {folder / 'spec.yaml'}",
            code="conflict",
        )
    return Member.open(name, run)
