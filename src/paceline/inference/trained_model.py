"""Trained models: open a run, read inputs and predict, `paceline.open(RUN).predict([...])`.

RUN/kept has what the model needs beside its weights. Predictions agree with the evaluations of the run to the last
digit on the same device.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config import RunSpec
from paceline.config.registry import find_entry, is_script
from paceline.data.files import iter_lines, missing_path_error
from paceline.data.frames import build_frame_like, is_frame, to_arrow
from paceline.data.tables import TABLE_KINDS, check_columns, iter_rows
from paceline.errors import UserError
from paceline.io.limits import check_limits
from paceline.io.terminal import warn
from paceline.runlog.run_dir import RunDir
from paceline.trainer.failures import translate_failures
from paceline.trainer.run import SOURCE, find_user_file
from paceline.workload import Fitted, PassWorkload, Workload, build_workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from paceline.trainer.init_from import SavedWeights

TABLE_SUFFIXES = {**TABLE_KINDS, ".txt": "txt"}
PROBABILITIES = "probabilities"
NOT_WRITTEN = (PROBABILITIES, "logits")


@dataclass(frozen=True)
class PredictInputs:
    values: list[Any]
    rows: list[dict[str, Any]]


def read_inputs(words: Sequence[str], column: str = "", usual: str = "") -> PredictInputs:
    """Read texts as they are; of a table, a named column, else the `usual` one, else each row as a dict."""
    tables = [word for word in words if _table_kind(word)]
    if not tables:
        if usual and (others := [word for word in words if _is_file(word)]):
            message = f"{others[0]!r} is a file, and this model reads texts; give a text or a table "
            raise UserError(f"{message}({', '.join(TABLE_SUFFIXES)})", code="invalid-value", key="inputs")
        values = [Path(word) if _is_file(word) else word for word in words]
        return PredictInputs(values, [{"input": str(word)} for word in words])
    if len(words) > 1:
        raise UserError(f"{tables[0]!r} is a table; give no other input", code="conflict", key="inputs")
    path = Path(tables[0])
    if not path.exists():
        raise missing_path_error(path, "inputs", "file")
    kind = _table_kind(tables[0])
    lines = (line.rstrip("\r\n") for line in iter_lines(path)) if kind == "txt" else ()
    rows = [{"text": line} for line in lines if line.strip()] if kind == "txt" else list(iter_rows(path, kind))
    if not rows:
        raise UserError(f"{path}: there are no rows", code="invalid-data", key="inputs")
    wanted = column or ("text" if kind == "txt" else usual)
    if not wanted:
        return PredictInputs(list(rows), rows)
    for number, row in enumerate(rows, 1):
        check_columns({"--column": wanted}, row, f"{path} row {number}")
    return PredictInputs([row[wanted] for row in rows], rows)


def _table_kind(word: str) -> str:
    """Return the kind of table that a word names, or ""; a text may end like a table, but has a space somewhere."""
    name = word.removesuffix(".gz").lower()
    found = next((kind for suffix, kind in TABLE_SUFFIXES.items() if name.endswith(suffix)), "")
    return found if found and (_is_file(word) or not any(map(str.isspace, word))) else ""


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or with an invalid character
        return False


@dataclass(frozen=True, eq=False)
class Predictions:
    columns: Mapping[str, np.ndarray]
    classes: Sequence[str] = field(default=())

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def probabilities(self) -> np.ndarray:
        """(inputs, classes)"""
        if not self.of_classes:
            message = f"these predictions have no classes, but {', '.join(self.columns)}; take them by name"
            raise UserError(message, code="not-supported", key=PROBABILITIES)
        return self.columns[PROBABILITIES]

    @property
    def numbers(self) -> np.ndarray:
        return np.asarray(self.probabilities.argmax(1))

    @property
    def labels(self) -> list[str]:
        return [self.name_of(number) for number in self.numbers]

    def name_of(self, number: int) -> str:
        return self.classes[number] if number < len(self.classes) else str(number)

    @property
    def of_classes(self) -> bool:
        return PROBABILITIES in self.columns

    @property
    def pictures(self) -> dict[str, np.ndarray]:
        """Return the columns of pictures: bytes [H, W] or [H, W, 3] for each input."""
        return {name: column for name, column in self.columns.items() if _has_pictures(column)}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each prediction as values by name, without pictures and logits."""
        omitted = (*NOT_WRITTEN, *self.pictures)
        others = {name: column for name, column in self.columns.items() if name not in omitted and column.ndim < 3}
        for row in range(len(self)):
            values: dict[str, Any] = {}
            if self.of_classes:
                probabilities = self.probabilities[row]
                best = int(probabilities.argmax())
                values = {"predicted": self.name_of(best), "probability": float(probabilities[best])}
                values |= {f"p({self.name_of(i)})": float(p) for i, p in enumerate(probabilities)}
            yield {**values, **{name: column[row].tolist() for name, column in others.items()}}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(column.shape)}" for name, column in self.columns.items())
        return f"Predictions({shapes})"


def _has_pictures(column: np.ndarray) -> bool:
    first = column[0] if len(column) else None
    return isinstance(first, np.ndarray) and first.dtype == np.uint8 and first.ndim in (2, 3)


@dataclass(frozen=True, eq=False)
class TrainedModel:
    run: RunDir
    workload: Workload
    model: "nn.Module"
    step: int
    device: "torch.device"
    threads: int | None
    """Of the main rank, if known: sums in fp32 depend on their number."""

    @property
    def classes(self) -> Sequence[str]:
        return self.workload.classes()

    def predict(self, inputs: Any) -> Any:
        """Predict for each input: a text, a row, a picture, whatever the workload encodes. The predictions are
        `Predictions` or, of a table (pandas, polars, Arrow), a table of the same library."""
        if is_frame(inputs):
            return _predict_frame(self, inputs)
        from paceline.data.prefetch import move_batch
        from paceline.trainer.evaluation import use_evaluation_mode

        check_predicts(self.run, self.workload)
        inputs = [inputs] if isinstance(inputs, str | Path) else list(inputs)
        _check_not_empty(inputs)
        workload, chunk, parts = self.workload, self.workload.evaluation_chunk, []
        with translate_failures(workload.spec), _set_threads(self.threads):
            for start in range(0, len(inputs), chunk):
                part = inputs[start : start + chunk]
                with use_evaluation_mode(self.model, workload.spec.train.precision, self.device):
                    predicted = workload.predict(self.model, move_batch(workload.encode(part), self.device))
                parts.append(_to_host(predicted, len(part)))
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return Predictions(columns, tuple(self.classes))

    def __repr__(self) -> str:
        from paceline.nn.nf4 import count_elements

        weights = sum(count_elements(p) for p in self.model.parameters())
        classes = f"{len(self.classes)} classes, " if self.classes else ""
        return f"TrainedModel({self.run.path}: {classes}{weights:,} parameters, step {self.step})"


@dataclass(frozen=True, eq=False)
class FittedModel:
    """A model that was fitted in passes, such as trees."""

    run: RunDir
    workload: PassWorkload
    fitted: Fitted

    @property
    def classes(self) -> Sequence[str]:
        return self.fitted.classes

    def predict(self, inputs: Any) -> Any:
        """Predict as `TrainedModel.predict` does."""
        if is_frame(inputs):
            return _predict_frame(self, inputs)
        _check_not_empty(inputs)
        return Predictions(self.fitted.predict(inputs), tuple(self.classes))

    def __repr__(self) -> str:
        classes = f"{len(self.classes)} classes, " if self.classes else ""
        return f"FittedModel({self.run.path}: {classes}{self.workload.spec.workload})"


def find_text_column(data: Any) -> str:
    """Return the column of a table that a model of texts reads; "" if it reads whole rows."""
    return "" if getattr(data, "source", "") == "images" else str(getattr(data, "text", ""))


def _predict_frame(model: TrainedModel | FittedModel, frame: Any) -> Any:
    rows = to_arrow(frame).to_pylist()
    _check_not_empty(rows)
    if column := find_text_column(model.workload.spec.data):
        check_columns({"": column}, rows[0], "the table")
    return build_frame_like(frame, list(model.predict([row[column] if column else row for row in rows]).rows()))


def _check_not_empty(inputs: Sequence[Any]) -> None:
    if not len(inputs):
        raise UserError("there is nothing to predict: the list of inputs is empty", code="missing-value")


def open(run: str | Path, which: str = "newest", *, code: str | Path | None = None) -> TrainedModel | FittedModel:
    """Open the model of a run with the weights of its newest (or best) checkpoint.

    `code` is the file with the run's own workload class, if the one it was trained from is gone.
    """
    stored = open_stored(run, which, code)
    return stored if isinstance(stored, FittedModel) else stored.load()


def open_stored(run: str | Path, which: str, code: str | Path | None) -> "StoredModel | FittedModel":
    """Open the model of a run without reading its weights."""
    check_limits()
    from paceline.trainer.checkpoint.reader import find_checkpoint
    from paceline.trainer.init_from import SavedWeights
    from paceline.trainer.resume_guard import ANSWER_KEY, check_same_values

    folder = RunDir.open(Path(run))
    workload = build_workload(_resolve_spec(folder, None if code is None else Path(code)))
    if isinstance(workload, PassWorkload) and (fitted := workload.fitted(folder.path)) is not None:
        return FittedModel(folder, workload, fitted)
    if not isinstance(workload, Workload):
        raise _no_prediction_error(folder, workload.spec)
    folder.check_kept()
    workload.kept = folder.kept if folder.kept.is_dir() else None
    checkpoint = find_checkpoint(folder, which)
    check_same_values(folder, workload.spec, checkpoint.meta.get(ANSWER_KEY, {}), checkpoint.step)
    return StoredModel(folder, workload, SavedWeights.of(checkpoint))


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A trained model whose weights are still on the disk."""

    run: RunDir
    workload: Workload
    weights: "SavedWeights"

    def check_fit(self, own: "Mapping[str, Tensor]") -> None:
        """Raise UserError if the weights are not those of the model that the workload builds."""
        there = self.weights.shapes
        wrong = sorted(own.keys() ^ there.keys())
        wrong += [name for name in own if name in there and tuple(own[name].shape) != there[name]]
        if wrong:
            message = f"{self.run.path}: its weights do not fit the model that its workload builds now "
            message += f"(first: {wrong[0]}); restore the code that it was trained with"
            raise UserError(message, code="conflict", key=wrong[0])

    def load(self) -> TrainedModel:
        """Read the weights into the model."""
        import torch

        workload, folder = self.workload, self.run
        with translate_failures(workload.spec):
            torch.manual_seed(workload.spec.train.seed)
            with torch.device("meta" if workload.draws_by_name else "cpu"):
                model = workload.model()
        own = model.state_dict()
        self.check_fit(own)
        like = self.weights.like
        into = {name: torch.empty_like(like[name], device="cpu") if t.is_meta else t for name, t in own.items()}
        self.weights.read(into)
        model.load_state_dict(into, assign=any(tensor.is_meta for tensor in own.values()))
        device = torch.device("cuda" if torch.cuda.is_available() and workload.spec.parallel.device != "cpu" else "cpu")
        recorded = folder.start().get("threads")
        threads = recorded if isinstance(recorded, int) and 0 < recorded <= (os.cpu_count() or 1) else None
        step = self.weights.checkpoint.step
        return TrainedModel(folder, workload, model.to(device).eval(), step, device, threads)


@contextmanager
def _set_threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_predicts(folder: RunDir, workload: Workload) -> None:
    missing = [name for name in ("encode", "predict") if not workload.has(name)]
    if not missing:
        return
    spec = workload.spec
    if is_script(spec.workload):
        message = f"{folder.path} is a run of a script, whose model is  paceline.open({str(folder.path)!r}).model"
    elif find_entry(spec.workload).verbs:
        raise _no_prediction_error(folder, spec)
    else:
        message = f"{folder.path}: its workload {type(workload).__name__} has no method {' and no '.join(missing)}; "
        message += """a prediction needs
  def encode(self, inputs): ...          # a list of new inputs -> a batch
  def predict(self, model, batch): ...   # -> {"probabilities": model(batch).softmax(1)}"""
    raise UserError(message, code="not-supported")


def _no_prediction_error(folder: RunDir, spec: RunSpec) -> UserError:
    entry = find_entry(spec.workload)
    verbs = [f"paceline {verb} {folder.path} …" for verb in entry.verbs]
    use = entry.new_inputs.format(run=folder.path) or " or  ".join(verbs)
    hint = f"; use  {use}" if use else ""
    message = f"{folder.path} is a run of {spec.workload}, which cannot predict on new inputs{hint}"
    return UserError(message, code="not-supported")


def _resolve_spec(folder: RunDir, code: Path | None) -> RunSpec:
    """Return the spec with the run's own class from the file that it was trained from, or from `code`."""
    if code is not None:
        if not code.is_file():
            raise UserError(f"--code {code}: there is no such file", code="not-found", key="--code")
        return folder.spec(code)
    copies = sorted((folder.kept / SOURCE).glob("*.py"))
    try:
        spec = folder.spec()
    except UserError as error:
        if not copies or error.code != "not-found":
            raise
        message = f"{folder.path}: the file that its model was trained from is gone; read the copy that the run kept"
        raise UserError(
            f"{message} and, if it may be run, add  --code {copies[0]}", code="not-found", key="--code"
        ) from None
    file = find_user_file(spec.workload)
    if file is not None and copies and file.read_bytes() != copies[0].read_bytes():
        warn(f"{file} has changed since the run started; for the file of then add  --code {copies[0]}")
    return spec


def _to_host(columns: Any, rows: int) -> dict[str, Any]:
    import torch

    if not isinstance(columns, dict) or not all(len(value) == rows for value in columns.values()):
        message = f"workload: predict must return tensors by name, each with {rows} rows, one for each input, as in\n"
        message += '  return {"probabilities": model(batch).softmax(1)}'
        raise UserError(message, code="invalid-workload", key="predict")
    host = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in columns.items()}
    wide = {name: value.float() for name, value in host.items() if getattr(value, "dtype", None) == torch.bfloat16}
    return {name: np.asarray(value) for name, value in {**host, **wide}.items()}
