"""A Keras model as a workload: trained by Paceline's loop, with its own loss and metrics, saved by Keras."""

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.config import RunSpec
from paceline.config.registry import guard_user_code, load_user_function, load_user_module
from paceline.data.files import invalid_data
from paceline.data.npz import UNREADABLE
from paceline.data.samples import as_samples
from paceline.errors import UserError, did_you_mean, missing_value, reject_value
from paceline.io.files import write_atomic
from paceline.layout import Layout
from paceline.nn.keras_backend import import_keras
from paceline.parallel.parallelize import reject_for_keras
from paceline.trainer.evaluation import ChunkSums, sum_chunks
from paceline.trainer.run import SOURCE
from paceline.workload import LogFn, Samples, Workload
from paceline.workloads.keras.sections import SAVED, KerasData, KerasModel

if TYPE_CHECKING:
    from paceline.nn.keras_module import KerasModule
    from paceline.workloads.keras.model import SampleLoss, SummedMetrics

SOURCE_KEY = "data.source"
FINGERPRINT_SAMPLES = 32
FIRST_SAMPLE = np.zeros(1, np.int64)


class KerasWorkload(Workload):
    Model = KerasModel
    Data = KerasData
    export_suffix = SAVED
    asks_for_values = True
    sample_loss: "SampleLoss"
    keras_metrics: "SummedMetrics"

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.section, self.source = cast(KerasModel, spec.model), cast(KerasData, spec.data)
        if not self.section.build:
            raise missing_value("model.build", "type  model=file.py:build  for a function that returns a model")
        import_keras()

    @property
    def file(self) -> Path | None:
        place = self.section.build.rpartition(":")[0]
        return Path(place) if place.endswith(".py") else None

    def suits(self, layout: Layout) -> None:
        reject_for_keras(self.spec, layout)

    def prepare(self, log: LogFn) -> None:
        """Try model, loss and metrics on two samples before ranks start; report what is not used of compile()."""
        samples, module = self._training_samples(), self.model()
        few = np.arange(min(2, len(samples)))
        with torch.no_grad(), guard_model_call():
            (sums := ChunkSums()).add(0, self.evaluate(module.eval(), samples.batch(few, few)))
            self._check_score(self.metrics(sum_chunks([sums], 1)))
        optimizer, train = module.original.optimizer if module.original.compiled else None, self.spec.train
        if optimizer is not None:
            unused = f"{optimizer.name} with a learning rate of {float(optimizer.learning_rate):g}"
            log(f"the optimiser of compile(), {unused}, is not used: the run file has {train.optimizer}, {train.lr:g}")

    def _check_score(self, metrics: Mapping[str, Any]) -> None:
        known = [name for name, value in metrics.items() if isinstance(value, int | float)]
        known += ["auc"] * ("macro_f1" in known)  # which needs samples of two classes
        if self.section.score.removeprefix("-") not in ("", *known):
            hint = did_you_mean(self.section.score, known) or f"; use one of {', '.join(known)}"
            raise reject_value("model.score", self.section.score, f"no such metric{hint}", "unknown-name")

    def goodness(self, metrics: Mapping[str, Any]) -> float:
        self.score = self.section.score or ("accuracy" if "accuracy" in metrics else "-loss")  # type: ignore[misc]
        return super().goodness(metrics)

    def _training_samples(self) -> Samples:
        return cast(Samples, self.data("train"))

    def data(self, split: str) -> Samples | None:
        place = self.section.build.rpartition(":")[0]
        return load_keras_samples(self.source.source or (f"{place}:data" if place else ""), split)

    def fingerprint(self) -> str:
        samples = self._training_samples()
        ids = np.unique(np.linspace(0, len(samples) - 1, FINGERPRINT_SAMPLES).astype(np.int64))
        digest = hashlib.sha256(str(len(samples)).encode())
        for leaf in tree_leaves(samples.batch(ids, np.zeros_like(ids))):
            digest.update(str(leaf.shape).encode() + np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()

    def classes(self) -> Sequence[str]:
        return self.source.classes

    def model(self) -> "KerasModule":
        from paceline.workloads.keras.model import SummedMetrics, build_keras_model, resolve_loss

        first = lambda: cast(Any, self._training_samples().batch(FIRST_SAMPLE, FIRST_SAMPLE))[0]  # noqa: E731
        module = build_keras_model(self.spec, self.section, first)
        self.sample_loss = resolve_loss(self.section, module.original)
        self.keras_metrics = SummedMetrics.of(self.section, module.original)
        return module

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        total, count, _ = self._compute(model, batch)
        return total, count

    def _compute(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Any]:
        """Return (sum of the losses, their number, the outputs); regularisation counts once in the mean."""
        inputs, y, *weight = batch
        output, penalty = model(inputs, penalised=True)
        total, count = self.sample_loss(output, y, *weight)
        return total + penalty * count, count, output

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        from paceline.workloads.keras.model import BY_SHAPES

        total, count, output = self._compute(model, batch)
        by_class = self.sample_loss.class_sums(output, batch[1])
        mine = self.keras_metrics.sums(output, batch[1], BY_SHAPES if by_class else ())
        return {"loss": total.double(), "count": count, **by_class, **mine}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        mine = self.keras_metrics.among(sums)
        found = super().metrics({name: value for name, value in sums.items() if name not in mine})
        return {**found, **self.keras_metrics.results(sums)}

    def keep(self, folder: Path) -> None:
        if self.file is not None:
            (folder / SOURCE).mkdir()
            write_atomic(folder / SOURCE / self.file.name, self.file.read_bytes())

    def encode(self, inputs: Sequence[Any]) -> Any:
        """Call the user's `encode` beside the function that builds the model, else convert to numbers."""
        module = load_user_module(self.section.build, "model.build", "function") if self.file else None
        if (own := getattr(module, "encode", None)) is not None:
            with guard_user_code("encode", f"{self.file}:encode"):
                return tree_map(torch.as_tensor, own(list(inputs)))
        return torch.stack([_to_numbers(value) for value in inputs])

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        shape = getattr(cast(Any, model).original, "input_shape", None)
        if isinstance(batch, Tensor) and isinstance(shape, tuple) and None not in shape[1:]:
            if batch[0].numel() != np.prod(shape[1:]):
                raise invalid_data(f"an input has shape {list(batch.shape[1:])}, expected {list(shape[1:])}")
            batch = batch.reshape(-1, *shape[1:])
        output = model(batch)
        logits = self.sample_loss.logits(output)
        if logits is not None and logits.ndim == 2:
            return {"probabilities": logits.softmax(1), "logits": logits}
        if isinstance(output, Tensor):
            return {"output": output}
        return output if isinstance(output, dict) else {f"output_{i}": part for i, part in enumerate(output)}

    def export(self, model: nn.Module, folder: Path) -> None:
        original = cast(Any, model).original
        if original.compiled and original.optimizer is not None:
            original.optimizer.build(original.trainable_variables)
        original.save(folder / f"model{SAVED}")
        if self.file is not None:
            write_atomic(folder / self.file.name, self.file.read_bytes())

    def onnx(self, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
        command = "keras.saving.load_model('model.keras').export('model.onnx', format='onnx')"
        raise UserError(f"--onnx: use Keras itself, in Python:  {command}", code="not-supported", key="--onnx")


def _to_numbers(given: Any) -> Tensor:
    try:
        if isinstance(given, Path) and given.suffix == ".npy":
            given = np.load(given, allow_pickle=False)
        return torch.from_numpy(np.asarray(list(given.values()) if isinstance(given, Mapping) else given, np.float32))
    except UNREADABLE:
        hint = "write  encode(inputs)  beside the function that builds the model"
        raise invalid_data(f"{str(given)[:60]!r} is no array of numbers; {hint}") from None


@contextmanager
def guard_model_call() -> Iterator[None]:
    """Translate errors of the first call of the model with its samples, of which the first lines matter."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:3])
        message = f"model, loss and data do not fit together: {type(error).__name__}: {reason}"
        raise UserError(message, code="invalid-workload") from error


def load_keras_samples(source: str, split: str) -> Samples | None:
    """Load a split; None if it does not exist. `source` is a function of the split, or one that returns both."""
    if not source.rpartition(":")[0]:
        raise missing_value(SOURCE_KEY, "type  data=file.py:function  for what returns (inputs, targets)")
    function = load_user_function(source, SOURCE_KEY)
    with guard_user_code(SOURCE_KEY, source):
        takes_split = bool(inspect.signature(function).parameters)
        found = function(split) if takes_split else function()
    call = f"{SOURCE_KEY}: {source.rpartition(':')[2]}({repr(split) if takes_split else ''})"
    if not takes_split:
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise _source_error(f"{call} must return both splits:  return (x_train, y_train), (x_test, y_test)")
        found = found[split == "test"]
    if found is None and split != "train":
        return None
    samples = None if found is None else as_samples(found, None, call)
    if samples is None or not len(samples):
        raise _source_error(f"{call} has no samples for {split!r}")
    first = samples.batch(FIRST_SAMPLE, FIRST_SAMPLE)
    if not isinstance(first, tuple | list) or len(first) not in (2, 3):
        raise _source_error(f"{call} must return (inputs, targets) or (inputs, targets, weights)")
    return samples


def _source_error(message: str) -> UserError:
    return UserError(message, code="invalid-workload", key=SOURCE_KEY)
