"""An ensemble that is there: its members, named by relative path and hash, and the numbers that make them one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.io.files import read_sealed, validate_fields, write_sealed
from paceline.workloads.ensemble.combination import Combination
from paceline.workloads.ensemble.members import NUMBERS, Member, hash_run
from paceline.workloads.ensemble.scoring import Scores

FILE = "ensemble.json"


@dataclass(frozen=True)
class MemberReference:
    """A member as the ensemble's folder has it."""

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
            raise UserError(f"{folder} is not finished; go on with  paceline train --resume {folder}")
        told = read_manifest(folder)
        return cls([_open_member(folder, *one) for one in told.members], told.classes, told.combination)

    def predict(self, inputs: Sequence[Any]) -> dict[str, np.ndarray]:
        found = [member.outputs([inputs]).aligned(self.classes, member.name) for member in self.members]
        whole = self.combination(np.stack(found))
        return {"probabilities": whole} if self.classes else {NUMBERS: whole}

    def export(self, folder: Path) -> None:
        runs = [str(member.model.run.path) for member in self.members]
        raise UserError(
            f"an ensemble is its members and the few numbers in {FILE}; export each member by itself, with  "
            + "  and  ".join(f"paceline export {run} --out {Path(run).name}" for run in runs)
        )


@dataclass(frozen=True)
class EnsembleManifest:
    """As its file has it."""

    members: tuple[tuple[str, str, str], ...]  # (name, relative path, hash)
    classes: tuple[str, ...]
    combination: Combination


def read_manifest(folder: Path) -> EnsembleManifest:
    """UserError where the file does not describe an ensemble."""
    about = read_sealed(folder / FILE)
    try:
        members = [[one[key] for key in ("name", "path", "sha256")] for one in about["members"]]
        told = validate_fields(EnsembleManifest, {"members": members, "classes": about["classes"]})
        found = EnsembleManifest(**told, combination=Combination.from_json(about["combination"]))
        found.combination.check(len(found.members), len(found.classes))
        return found
    except (KeyError, TypeError, ValueError) as error:
        again = f"paceline train --resume {folder}"
        raise UserError(f"{folder / FILE} is damaged ({error}); write it again with  {again}") from None


def write_ensemble(
    folder: Path, members: Sequence[MemberReference], classes: tuple[str, ...], combination: Combination, scores: Scores
) -> None:
    told = [member.to_json(folder) for member in members]
    values = {"format": 1, "members": told, "classes": classes, "combination": combination.to_json()}
    write_sealed(folder / FILE, {**values, "held_out": asdict(scores)})


def _open_member(folder: Path, name: str, path: str, sha256: str) -> Member:
    run = Path(os.path.normpath(folder / path))
    if not run.is_dir():
        raise UserError(f"{folder}: its member {run} is not there any more; bring it back")
    if hash_run(run) != sha256:
        raise UserError(
            f"{folder}: its member {run} has changed since; its weight was found for the model that it was. Train the "
            f"ensemble again, with  paceline train {folder / 'spec.yaml'}"
        )
    return Member.open(name, run)
