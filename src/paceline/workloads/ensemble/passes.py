"""The work of an ensemble, piece by piece: train a member and ask it about rows; at the end, find the weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from paceline.errors import UserError, listed
from paceline.passes import FitEnd
from paceline.record.run_dir import RunDir
from paceline.workload import Say
from paceline.workloads.ensemble.answers import Answers, mean_loss, truth_of
from paceline.workloads.ensemble.combining import Combination, fitted_to_classes, fitted_to_numbers
from paceline.workloads.ensemble.fitted import Reference, write_ensemble
from paceline.workloads.ensemble.members import Member, Outputs, digest_of_run
from paceline.workloads.ensemble.pictures import write_members, write_reliability
from paceline.workloads.ensemble.rows import RowSet
from paceline.workloads.ensemble.scoring import ENSEMBLE, metrics_of_classes, metrics_of_numbers, score_lines, scores
from paceline.workloads.ensemble.sections import EnsembleModel
from paceline.workloads.ensemble.training import Folds, MemberFile, trained, written

FIT, TEST = "fit", "test"
PARTS = ("predictions", "tables", "folds", "members")
"""Folders of an ensemble's run."""


@dataclass(frozen=True)
class Piece:
    """A member to be asked: about all rows or, trained for that, about those of a fold."""

    member: int
    fold: int | None = None


@dataclass(frozen=True, eq=False)
class EnsembleRequest:
    """All that an ensemble is made of."""

    model: EnsembleModel
    label: str
    names: Sequence[str]
    fit: RowSet
    test: RowSet
    files: Sequence[MemberFile]
    """Of members that are trained here."""
    folds: Folds | None
    seed: int
    say: Say

    def pieces(self) -> list[Piece]:
        folds = range(self.folds.count) if self.folds is not None else ()
        there = [Piece(number, fold) for fold in folds for number in range(len(self.names))]
        return [*there, *(Piece(number) for number in range(len(self.names)))]

    def asked(self, piece: Piece) -> dict[str, RowSet]:
        """The rows that the member of a piece is asked about, by what they are called."""
        if self.folds is None:
            return {FIT: self.fit, TEST: self.test}
        return {TEST: self.test} if piece.fold is None else {f"fold-{piece.fold + 1}": self.folds.of(piece.fold)}


class EnsemblePasses:
    """One piece is one pass; the last finds the weights."""

    parameters = None

    def __init__(self, request: EnsembleRequest, folder: Path) -> None:
        self.request, self.folder, self.answers = request, folder, Answers(folder / "predictions")
        self.pieces = request.pieces()
        self.samples, self.most, self.done = len(request.fit), len(self.pieces) + 1, 0
        self.combination: Combination | None = None

    @property
    def end(self) -> FitEnd | None:
        return FitEnd.MOST_PASSES if self.done >= self.most else None

    def end_words(self) -> str:
        return f"{len(self.request.names)} members are one"

    def begin(self) -> None:
        pass

    def close(self) -> None:
        pass

    def step(self, flag: bool) -> dict[str, Any]:
        began = perf_counter()
        try:
            asking = self.done < len(self.pieces)
            loss = None if flag else self._ask(self.pieces[self.done]) if asking else self._combine()
        except UserError:
            if not self.done:  # the request was wrong: nothing is left of it
                for part in PARTS:
                    shutil.rmtree(self.folder / part, ignore_errors=True)
            raise
        self.done += loss is not None
        times = {"step_s": perf_counter() - began, "data_s": 0.0, "comm_s": 0.0, "exposed_s": 0.0}
        told = {} if loss is None else {"loss": loss}
        return {**told, **times, "flagged": loss is None, "of_samples": self.most * self.samples}

    def _ask(self, piece: Piece) -> float | None:
        """The loss of a piece; None where its training was asked to stop."""
        name, asked = self.request.names[piece.member], self.request.asked(piece)
        if not all(self.answers.has(name, kind) for kind in asked):
            run, finished = self._run(piece)
            if not finished:
                return None
            member = Member.open(name, run)
            for kind, rows in asked.items():
                found = member.outputs(rows.blocks())
                self._check(kind, rows, found, piece)
                self.answers.write(name, kind, found)
        if piece.fold is not None:
            shutil.rmtree(self._fold_runs, ignore_errors=True)
        kind, rows = next(iter(asked.items()))
        found = self.answers.read(name, kind)
        return mean_loss(found.values, truth_of(rows.labels, found.classes, self.request.label))

    def _run(self, piece: Piece) -> tuple[Path, bool]:
        """The run of a piece; (its folder, whether it is finished)."""
        request, folds = self.request, self.request.folds
        if folds is None:
            return request.model.runs[piece.member], True
        member = request.files[piece.member]
        learn, test = folds.split(member, piece.fold)
        part = "" if piece.fold is None else f"-{piece.fold + 1}"
        part += "-stop" if member.stops_early else ""
        learn_file, test_file = (
            written(rows, self.folder / "tables", f"{what}{part}") for what, rows in (("learn", learn), ("test", test))
        )
        told = "all of them" if piece.fold is None else f"fold {piece.fold + 1} of {folds.count}"
        request.say(f"  {member.name}: {told}, {len(learn):,} rows to learn from")
        if piece.fold is None:
            return trained(member.on(learn_file, test_file, request.label), self.folder / "members")
        out = self._fold_runs
        return trained(member.on(learn_file, test_file, request.label, out / "cache"), out)

    def _check(self, kind: str, rows: RowSet, found: Outputs, piece: Piece) -> None:
        """What a member says must go together with the labels, and with what the first member said."""
        name, first = self.request.names[piece.member], self.request.names[0]
        if found.classes and (new := sorted(set(rows.labels) - set(found.classes))):
            raise UserError(
                f"{rows.file}: {self.request.label!r} is {listed(new)} there, and {name} predicts "
                f"{listed(found.classes)}; leave such rows out, or give another data.label"
            )
        if piece.member:
            found.aligned(self.answers.read(first, kind).classes, name)

    def _combine(self) -> float:
        outputs, classes = self._outputs(FIT)
        model, truth = self.request.model, truth_of(self.request.fit.labels, classes, self.request.label)
        if classes:
            self.combination = fitted_to_classes(outputs, truth, model.combine, model.calibrate)
        else:
            self.combination = fitted_to_numbers(outputs, truth, model.combine)
        return mean_loss(self.combination(outputs), truth)

    def _outputs(self, kind: str) -> tuple[np.ndarray, tuple[str, ...]]:
        """(members, rows, …) in the order of the rows, and the classes."""
        request, found = self.request, list[np.ndarray]()
        classes: tuple[str, ...] | None = None
        for name in request.names:
            if kind == FIT and request.folds is not None:
                which = request.folds.fold
                parts = {fold: self.answers.read(name, f"fold-{fold + 1}") for fold in range(request.folds.count)}
            else:
                parts, which = {0: self.answers.read(name, kind)}, np.zeros(len(getattr(request, kind)), np.int64)
            classes = parts[0].classes if classes is None else classes
            values = np.empty((len(which), *parts[0].values.shape[1:]))
            for fold, part in parts.items():
                values[which == fold] = part.aligned(classes, name)
            found.append(values)
        return np.stack(found), classes or ()

    def evaluate(self) -> dict[str, Any]:
        if self.combination is None:
            return {}
        outputs, classes = self._outputs(TEST)
        truth, whole = truth_of(self.request.test.labels, classes, self.request.label), self.combination(outputs)
        return metrics_of_classes(whole, truth, classes) if classes else metrics_of_numbers(whole, truth)

    def tensors(self) -> dict[str, Any]:
        weights = self.combination.weights if self.combination is not None else (0.0,) * len(self.request.names)
        return {"model": {"weights": torch.tensor(weights, dtype=torch.float64)}}

    def meta(self) -> dict[str, Any]:
        return {"done": self.done}

    def room(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": {"weights": torch.zeros(len(self.request.names), dtype=torch.float64)}}

    def restored(self, meta: Mapping[str, Any]) -> None:
        self.done = int(meta["done"])

    def equations(self, ranks: int) -> list[str]:
        request = self.request
        on = f"weights found on {len(request.fit):,} rows"
        if request.folds is not None:
            on += f", each predicted by members that were trained without its fold ({request.folds.count} folds)"
        how = f"{request.model.combine} of {len(request.names)} members: {', '.join(request.names)}"
        return [how, on, f"evaluated on {len(request.test):,} held-out rows"]

    def conclude(self, result: Mapping[str, Any], folder: Path) -> None:
        if self.combination is None:
            self._combine()
        assert self.combination is not None
        request = self.request
        outputs, classes = self._outputs(TEST)
        truth = truth_of(request.test.labels, classes, request.label)
        by_name = {**dict(zip(request.names, outputs, strict=True)), ENSEMBLE: self.combination(outputs)}
        found = scores(by_name, truth, request.seed)
        write_members(found, folder, self.most)
        if classes:
            write_reliability(by_name, truth, folder, self.most)
        write_ensemble(folder, self._references(), classes, self.combination, found)
        for file in (folder / "tables").glob("*-[0-9]*"):
            file.unlink()
        for line in score_lines(found, dict(zip(request.names, self.combination.weights, strict=True))):
            request.say(line)

    def _references(self) -> list[Reference]:
        names, finished = self.request.names, self.request.model.runs
        paths = finished or [self.folder / "members" / name for name in names]
        workloads = [RunDir(path).recorded_spec().workload for path in paths]
        return [Reference(*one, digest_of_run(one[1])) for one in zip(names, paths, workloads, strict=True)]

    @property
    def _fold_runs(self) -> Path:
        return self.folder / "folds"
