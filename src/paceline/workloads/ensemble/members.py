"""Open the members of an ensemble, cache their predictions, and combine them."""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from paceline.data.npz import open_npz
from paceline.data.tables import check_columns, format_label
from paceline.errors import UserError, get_first_line, join_names
from paceline.inference.trained_model import FittedModel, TrainedModel, find_text_column
from paceline.inference.trained_model import open as open_run
from paceline.io.files import read_bytes, read_sealed, write_atomic, write_sealed
from paceline.io.table import Table
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary
from paceline.trainer.checkpoint.reader import MANIFEST, list_sealed
from paceline.workloads.ensemble.combination import Combination, compute_logs
from paceline.workloads.ensemble.scoring import Scores, build_score_table

NUMBERS = "predicted"
FILE = "ensemble.json"


@dataclass(frozen=True, eq=False)
class MemberOutputs:
    """Predictions: (rows, classes) probabilities, or (rows,) numbers."""

    values: np.ndarray
    classes: tuple[str, ...]

    def write(self, file: Path) -> None:
        content = io.BytesIO()
        np.savez_compressed(content, values=self.values, classes=np.array(self.classes, str))
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, content.getvalue())

    @classmethod
    def read(cls, file: Path) -> "MemberOutputs":
        try:
            with open_npz(file) as found:
                return cls(found["values"], tuple(found["classes"].tolist()))
        except (UserError, KeyError):
            raise UserError(f"{file} is damaged; remove it, and train the ensemble again", code="damaged") from None

    def aligned(self, classes: Sequence[str], who: str) -> np.ndarray:
        if set(classes) != set(self.classes):
            ours, theirs = (join_names(some) if some else "numbers" for some in (self.classes, classes))
            raise UserError(f"{who} predicts {ours}, the members before it {theirs}; leave it out", code="conflict")
        return self.values[:, [self.classes.index(name) for name in classes]] if classes else self.values


@dataclass(frozen=True, eq=False)
class Member:
    name: str
    model: TrainedModel | FittedModel

    @classmethod
    def open(cls, name: str, path: Path) -> "Member":
        return cls(name, open_run(check_finished(path).path))

    def outputs(self, blocks: Iterable[Sequence[Any]]) -> MemberOutputs:
        parts = [self._predict_block(block) for block in blocks]
        return MemberOutputs(np.concatenate([part.values for part in parts]), parts[0].classes)

    def _predict_block(self, block: Sequence[Any]) -> MemberOutputs:
        found = self.model.predict([self._select_input(row) for row in block])
        if found.of_classes:
            names = [format_label(found.name_of(number)) for number in range(found.probabilities.shape[1])]
            return MemberOutputs(found.probabilities.astype(np.float64), tuple(names))
        if NUMBERS in found.columns and found[NUMBERS].ndim == 1:
            return MemberOutputs(found[NUMBERS].astype(np.float64), ())
        message = f"{self.name} predicts {join_names(list(found.columns))}; members predict classes or {NUMBERS!r}"
        raise UserError(message, code="not-supported")

    def _select_input(self, row: Any) -> Any:
        """Return the text of a row for a member that reads texts, else the row."""
        text = find_text_column(self.model.workload.spec.data)
        if not text or not isinstance(row, Mapping):
            return row
        check_columns({"": text}, row, self.name)
        return "" if row[text] is None else str(row[text])


def check_finished(path: Path) -> RunDir:
    """Return the run; raise UserError if it is not finished."""
    run = RunDir.open(path)
    with suppress(UserError):
        if read_summary(run.summary_file).status == RunStatus.FINISHED:
            return run
    raise UserError(f"{path} is not finished; resume it with  paceline train --resume {path}")


def hash_run(path: Path) -> str:
    """Hash the manifest of the newest checkpoint, which has the sums of its files, and what the run kept."""
    run = RunDir(path)
    sealed = list_sealed(run.checkpoints)
    if not sealed:
        raise UserError(f"{path} has no checkpoint; resume it with  paceline train --resume {path}")
    whole = hashlib.sha256(read_bytes(sealed[0] / MANIFEST))
    for file in sorted(path for path in run.kept.rglob("*") if path.is_file()):
        whole.update(str(file.relative_to(run.kept)).encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()


def name_members(paths: Sequence[Path]) -> list[str]:
    """Return a name for each member, of its file or folder; a name that is taken gets a number."""
    found: list[str] = []
    for path in paths:
        stem = path.stem if path.suffix in (".yaml", ".yml") else path.name
        count = sum(name == stem or name.startswith(f"{stem}-") for name in found)
        found.append(f"{stem}-{count + 1}" if count else stem)
    return found


def compute_mean_loss(found: np.ndarray, truth: np.ndarray) -> float:
    if found.ndim == 2:
        return -float(compute_logs(found)[np.arange(len(truth)), truth].mean())
    return float(((found - truth) ** 2).mean())


@dataclass(frozen=True, eq=False, repr=False)
class FittedEnsemble:
    members: Sequence[Member]
    classes: tuple[str, ...]
    combination: Combination

    @classmethod
    def read(cls, folder: Path) -> "FittedEnsemble":
        if not (folder / FILE).exists():
            raise UserError(f"{folder} is not finished; resume it with  paceline train --resume {folder}")
        members, classes, combination = read_manifest(folder)
        return cls([_open_member(folder, **member) for member in members], classes, combination)

    def predict(self, inputs: Sequence[Any]) -> dict[str, np.ndarray]:
        found = [member.outputs([inputs]).aligned(self.classes, member.name) for member in self.members]
        whole = self.combination(np.stack(found))
        return {"probabilities": whole} if self.classes else {NUMBERS: whole}

    def export(self, folder: Path) -> None:
        paths = [member.model.run.path for member in self.members]
        lines = "  and  ".join(f"paceline export {path} --out {path.name}" for path in paths)
        raise UserError(f"an ensemble is its members and {FILE}; export each member with  {lines}")


def read_manifest(folder: Path) -> tuple[list[dict[str, str]], tuple[str, ...], Combination]:
    values = read_sealed(folder / FILE)
    try:
        members = [{key: str(member[key]) for key in ("name", "path", "sha256")} for member in values["members"]]
        found = TypeAdapter(Combination).validate_json(json.dumps(values["combination"]), strict=True)
        return members, tuple(values["classes"]), found
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{get_first_line(error)}; write it again with  paceline train --resume {folder}"
        raise UserError(f"{folder / FILE} is damaged: {problem}", code="damaged") from None


def build_member_tables(folder: Path) -> list[Table]:
    """Build the table of members and ensemble from what a finished run recorded; none if it did not."""
    with suppress(UserError, KeyError, TypeError, ValueError, AttributeError):
        values = read_sealed(folder / FILE)
        names = [str(member["name"]) for member in values["members"]]
        weights = [float(weight) for weight in values["combination"]["weights"]]
        scores = TypeAdapter(Scores).validate_python(values["held_out"])
        return [build_score_table(scores, dict(zip(names, weights, strict=False)))]
    return []


def write_ensemble(
    folder: Path, members: Mapping[str, Path], classes: tuple[str, ...], combination: Combination, scores: Scores
) -> None:
    listed = [
        {
            "name": name,
            "path": os.path.relpath(path.resolve(), folder.resolve()),
            "workload": RunDir(path).recorded_spec().workload,
            "sha256": hash_run(path),
        }
        for name, path in members.items()
    ]
    values = {"format": 1, "members": listed, "classes": classes, "combination": asdict(combination)}
    write_sealed(folder / FILE, {**values, "held_out": asdict(scores)})


def _open_member(folder: Path, name: str, path: str, sha256: str) -> Member:
    run = Path(os.path.normpath(folder / path))
    if not run.is_dir():
        raise UserError(f"{folder}: its member {run} does not exist any more; restore it", code="not-found")
    if hash_run(run) != sha256:
        command = f"paceline train {folder / 'spec.yaml'}"
        raise UserError(f"{folder}: its member {run} has changed; train again with  {command}", code="conflict")
    return Member.open(name, run)
