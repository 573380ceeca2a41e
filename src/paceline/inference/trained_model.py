"""A finished run, opened: `paceline.open(RUN).predict([...])`.

Neither the training data nor their cache are needed: what the model takes is in RUN/kept. A prediction computes as the
evaluations of the run did, so that it agrees with them to the last digit on the same device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import RunSpec
from paceline.config.registry import find_entry, is_script
from paceline.errors import UserError
from paceline.inference.predictions import Predictions
from paceline.io.terminal import warn
from paceline.runlog.run_dir import RunDir
from paceline.trainer.failures import translate_failures
from paceline.trainer.inference_assets import SOURCE, find_user_file
from paceline.trainer.passes import Fitted
from paceline.workload import BaseWorkload, PassWorkload, Workload, build_workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class TrainedModel:
    run: RunDir
    workload: Workload
    model: nn.Module
    step: int
    device: torch.device
    threads: int | None
    """Of the main rank, where it was known: sums of fp32 depend on how many cores share them."""

    @property
    def classes(self) -> Sequence[str]:
        return self.workload.classes()

    def predict(self, inputs: Sequence[Any]) -> Predictions:
        """What the model says of each of these inputs: texts, rows, pictures, whatever its workload encodes."""
        import numpy as np

        from paceline.data.prefetch import move_batch
        from paceline.trainer.evaluation import use_evaluation_mode

        check_predicts(self.run, self.workload)
        inputs = [inputs] if isinstance(inputs, str | Path) else list(inputs)
        if not inputs:
            raise UserError("there is nothing to predict: the list of inputs is empty")
        chunk, parts = self.workload.evaluation_chunk, []
        with translate_failures(self.workload.spec), _set_threads(self.threads):
            for begin in range(0, len(inputs), chunk):
                some = inputs[begin : begin + chunk]
                with use_evaluation_mode(self.model, self.workload.spec.train.precision, self.device):
                    found = self.workload.predict(self.model, move_batch(self.workload.encode(some), self.device))
                parts.append(_to_host(found, len(some)))
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return Predictions(columns, tuple(self.classes))

    def __repr__(self) -> str:
        weights = sum(p.numel() for p in self.model.parameters())
        told = f"{len(self.classes)} classes, " if self.classes else ""
        return f"TrainedModel({self.run.path}: {told}{weights:,} parameters, step {self.step})"


@dataclass(frozen=True, eq=False)
class FittedModel:
    """The same of a fit by passes."""

    run: RunDir
    workload: PassWorkload
    fitted: Fitted

    @property
    def classes(self) -> Sequence[str]:
        return self.fitted.classes

    def predict(self, inputs: Sequence[Any]) -> Predictions:
        """What was fitted says of each of these inputs."""
        if not inputs:
            raise UserError("there is nothing to predict: the list of inputs is empty")
        return Predictions(self.fitted.predict(inputs), tuple(self.classes))


def open(run: str | Path, which: str = "newest", *, code: str | Path | None = None) -> TrainedModel | FittedModel:
    """The model of a run with the weights of its newest (or best) checkpoint, ready to predict.

    `code` is the file that has the run's own workload class, where that of the training is not there any more.
    """
    import torch

    from paceline.trainer.checkpoint.reader import find_checkpoint, read_tensors
    from paceline.trainer.resume_guard import ANSWER_KEY, check_same_values

    folder = RunDir.open(Path(run))
    work = build_workload(_resolve_spec(folder, None if code is None else Path(code)))
    if isinstance(work, PassWorkload) and (fitted := work.fitted(folder.path)) is not None:
        return FittedModel(folder, work, fitted)
    workload = _prepare_workload(folder, work)
    checkpoint = find_checkpoint(folder, which)
    check_same_values(folder, workload.spec, checkpoint.meta.get(ANSWER_KEY, {}), checkpoint.step)
    with translate_failures(workload.spec):
        torch.manual_seed(workload.spec.train.seed)
        with torch.device("meta" if workload.draws_by_name else "cpu"):
            model = workload.model()
    _load_weights(model, read_tensors(checkpoint), folder)
    device = torch.device("cuda" if torch.cuda.is_available() and workload.spec.parallel.device != "cpu" else "cpu")
    asked = folder.start().get("threads")
    threads = asked if isinstance(asked, int) and 0 < asked <= (os.cpu_count() or 1) else None
    return TrainedModel(folder, workload, model.to(device).eval(), checkpoint.step, device, threads)


@contextmanager
def _set_threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def open_workload(folder: RunDir, code: Path | None = None) -> Workload:
    """The workload of a run, as it takes what the run kept."""
    return _prepare_workload(folder, build_workload(_resolve_spec(folder, code)))


def _prepare_workload(folder: RunDir, workload: BaseWorkload) -> Workload:
    if not isinstance(workload, Workload):
        raise UserError(f"{folder.path} is a run of {workload.spec.workload}, {_suggest_verbs(folder, workload.spec)}")
    folder.check_kept()
    workload.kept = folder.kept if folder.kept.is_dir() else None
    return workload


def check_predicts(folder: RunDir, workload: Workload) -> None:
    missing = [name for name in ("encode", "predict") if not workload.has(name)]
    if not missing:
        return
    spec = workload.spec
    if is_script(spec.workload):
        raise UserError(
            f"{folder.path} is a run of {Path(spec.workload).name}, a script, and nothing says how it would encode new "
            f"inputs; in Python  paceline.open({str(folder.path)!r}).model  is its trained model"
        )
    if find_entry(spec.workload).verbs:
        raise UserError(f"{folder.path} is a run of {spec.workload}, {_suggest_verbs(folder, spec)}")
    raise UserError(
        f"{folder.path}: its workload {type(workload).__name__} has no method {' and no '.join(missing)}; "
        "a prediction needs\n"
        "  def encode(self, inputs): ...          # a list of new inputs -> a batch\n"
        '  def predict(self, model, batch): ...   # -> {"probabilities": model(batch).softmax(1)}'
    )


def _suggest_verbs(folder: RunDir, spec: RunSpec) -> str:
    verbs = [f"paceline {verb} {folder.path} …" for verb in find_entry(spec.workload).verbs]
    return "which predicts nothing of new inputs" + (f"; use  {' or  '.join(verbs)}" if verbs else "")


def _resolve_spec(folder: RunDir, code: Path | None) -> RunSpec:
    """Which file the run's own class comes from is never a surprise: the one it was trained from, or the one named."""
    if code is not None:
        if not code.is_file():
            raise UserError(f"--code {code}: there is no such file")
        return folder.spec(code)
    copies = sorted((folder.kept / SOURCE).glob("*.py"))
    try:
        spec = folder.spec()
    except UserError as error:
        if not copies or "there is no file" not in str(error):
            raise
        raise UserError(
            f"{folder.path}: the file that its model was trained from is not there any more. The run kept a copy; "
            f"read it and, if it may be run, add  --code {copies[0]}"
        ) from None
    now = find_user_file(spec.workload)
    if now is not None and copies and now.read_bytes() != copies[0].read_bytes():
        warn(f"{now} has changed since the run began, and runs as it is now; for that of then add  --code {copies[0]}")
    return spec


def _load_weights(model: nn.Module, weights: dict[str, Tensor], folder: RunDir) -> None:
    """Put the weights in; one line says what does not fit."""
    there = model.state_dict()
    wrong = [name for name in there if name not in weights] + [name for name in weights if name not in there]
    wrong += [name for name in there if name in weights and there[name].shape != weights[name].shape]
    if wrong:
        raise UserError(
            f"{folder.path}: its weights are not those of the model that its workload makes now; the first that does "
            f"not fit is {wrong[0]}; bring the code back that it was trained with"
        )
    meta = any(tensor.is_meta for tensor in there.values())
    model.load_state_dict(weights, assign=meta)


def _to_host(found: Any, rows: int) -> dict[str, Any]:
    import numpy as np
    import torch

    if not isinstance(found, dict) or not all(len(value) == rows for value in found.values()):
        raise UserError(
            f"workload: predict must return tensors by name, each with a row for each of the {rows} inputs, as in\n"
            '  return {"probabilities": model(batch).softmax(1)}'
        )
    host = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in found.items()}
    wide = {name: value.float() for name, value in host.items() if getattr(value, "dtype", None) == torch.bfloat16}
    return {name: np.asarray(value) for name, value in {**host, **wide}.items()}
