"""Sections of the run file: validated, frozen pydantic models whose fields have a default, a unit and a meaning."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError


def field(default: Any, unit: str, meaning: str, **limits: Any) -> Any:
    """Declare a field of the run file, with the unit that `explain` prints and what it means."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)


def read_meanings() -> dict[str, tuple[str, str]]:
    """Return the unit and the meaning of each key of `train` and `parallel`."""
    with Path(__file__).with_name("keys.csv").open(encoding="utf-8", newline="") as file:
        return {row["key"]: (row["unit"], row["meaning"]) for row in csv.DictReader(file)}


MEANINGS = read_meanings()


def described_field(key: str, default: Any, **limits: Any) -> Any:
    """Declare a field whose unit and meaning are in `keys.csv`."""
    return field(default, *MEANINGS[key], **limits)


def conflict_error(message: str) -> PydanticCustomError:
    """Build what a validator raises for fields that exclude each other; the message names them."""
    return PydanticCustomError("contradiction", "{message}", {"message": message})


MAX_INT = 2**63 - 1
STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)


class Section(BaseModel):
    model_config = STRICT

    word: ClassVar[str] = ""  # the field that a single word in place of the section sets
    references: ClassVar[tuple[str, ...]] = ()
    """Fields that name the user's own code as `file.py:name`; the file is relative to the run file."""
    run_files: ClassVar[tuple[str, ...]] = ()  # fields that name run files, which may name code in turn

    @classmethod
    def paths(cls) -> list[str]:
        """Return the fields that name a file or a folder, relative to the run file."""
        types = {name: (info.annotation, *get_args(info.annotation)) for name, info in cls.model_fields.items()}
        return [name for name, kinds in types.items() if Path in kinds or name == "path"]

    def determining_files(self) -> list[Path]:
        """Return files that determine the answer beside the values, if they exist."""
        return [Path(file) for key in self.run_files for file in getattr(self, key)]

    @classmethod
    def infer_source(cls, path: Any) -> str | None:
        """Return the `source` that the name of a file stands for; None if the section has none of that name."""
        suffix = Path(str(path).removesuffix(".gz")).suffix.removeprefix(".")
        known = get_args(cls.model_fields["source"].annotation) if "source" in cls.model_fields else ()
        return suffix if suffix in known and suffix in ("csv", "jsonl", "parquet") else None

    @model_validator(mode="before")
    @classmethod
    def _fill_source(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "source" not in values and (found := cls.infer_source(values.get("path"))):
            return {**values, "source": found}
        return values

    @model_validator(mode="before")
    @classmethod
    def _check_numbers(cls, values: Any) -> Any:
        """Reject true for a number, which pydantic takes for 1, and integers that torch cannot hold."""
        for key, value in values.items() if isinstance(values, Mapping) else ():
            kinds = str(cls.model_fields[key].annotation) if key in cls.model_fields else ""
            if isinstance(value, bool) and kinds and "bool" not in kinds:
                raise PydanticCustomError("not_a_bool", "{key}|{value}", {"key": key, "value": value})
            digits = value.strip().lstrip("+-0").replace("_", "") if isinstance(value, str) else ""
            large = digits.isdecimal() and len(digits) > len(str(MAX_INT))
            if "int" in kinds and (large or (isinstance(value, int) and abs(value) > MAX_INT)):
                raise PydanticCustomError("huge", "{key}", {"key": key})
        return values


class RecordedSection(Section):
    """A section of a recorded run whose workload is not ours: plain values, without the code that defines them."""

    model_config = {**STRICT, "extra": "allow"}


class ModelSection(Section):
    """What the section `model` of every training has, beside what its workload adds."""

    init_from: Path | None = field(
        None, "path", "weights to start with: a .safetensors file, a run folder, or the folder of a Hugging Face model"
    )
    match: Literal["all", "some"] = field(
        "all", "", "all: init_from has every tensor of the model and no other; some: what does not fit is initialised"
    )


class DataSection(Section):
    """What the section `data` of a workload has whose samples are made in Python."""

    workers: Literal["auto"] | Annotated[int, Field(ge=0, le=1024)] = field(
        "auto",
        "processes",
        "that make samples for each rank; 0 makes them in the rank itself, auto measures for a moment",
    )


class TableData(Section):
    """A table with a label column; without a path, a synthetic one."""

    path: Path | None = field(None, "path", ".csv, .tsv, .parquet, .arrow, .feather or .npz; without it synthetic")
    test_path: Path | None = field(None, "path", "table to test on; without it rows of the first are held out")
    test_fraction: float = field(0.2, "fraction", "of the rows held out, drawn by row number; 0 holds none", ge=0, lt=1)
    label: str = field("label", "column", "what is to be predicted")
    weight: str | None = field(None, "column", "how much a row counts")
    categories: tuple[str, ...] = field((), "columns", "of numbers that are names, not amounts; words always are names")
    ignore: tuple[str, ...] = field((), "columns", "left out")
    rows: int = field(20_000, "rows", "of the synthetic table", gt=1)
    columns: int = field(12, "columns", "of the synthetic table", ge=4, le=4096)
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of read tables, named by file, size and date")


@cache
def merge_section_fields(section: type[Section], common: type[Section]) -> type[Section]:
    """Add the fields that all workloads have to a section; KeyError where it has one of that name already."""
    if issubclass(common, section):
        return common
    if issubclass(section, common):
        return section
    if taken := section.model_fields.keys() & common.model_fields.keys():
        raise KeyError(min(taken))
    return type(section.__name__, (section, common), {"__module__": section.__module__, "__doc__": section.__doc__})


class RunClass:
    """What every workload derives from: the sections of its run file, and what can be known without its data."""

    Model: ClassVar[type[Section]] = Section
    Data: ClassVar[type[Section]] = Section
    batched: ClassVar[bool] = True  # a step is a batch of samples; False where it is a pass over all of them


class ParameterGroup(Section):
    """What is different for some parameters; a value that is not given is that of the section `train`."""

    lr: float | None = field(None, "per step", "peak learning rate in place of train.lr, in the same schedule", gt=0)
    weight_decay: float | None = field(None, "", "in place of train.weight_decay", ge=0)
    frozen: bool = field(False, "", "not trained at all")


class GrowingBatch(int):
    """The largest batch of a run whose batch grows: what layouts and plans are made for."""

    schedule: dict[int, int]


def read_batch(value: Any, check: ValidatorFunctionWrapHandler) -> int:
    if not isinstance(value, Mapping):
        return value if isinstance(value, GrowingBatch) else int(check(value))
    steps = {int(step): check(size) for step, size in value.items() if str(step).isdecimal()}
    if len(steps) < len(value) or 0 not in steps:
        raise conflict_error(
            f"train.global_batch={dict(value)} does not begin at step 0; write it as {{0: 256, 10000: 1024}}"
        )
    batch = GrowingBatch(max(steps.values()))
    batch.schedule = dict(sorted(steps.items()))
    return batch


def write_batch(batch: int) -> Any:
    return {str(k): n for k, n in batch.schedule.items()} if isinstance(batch, GrowingBatch) else batch


class RingRanks(int):
    """Ranks of `context` that pass keys and values round; written as `4:ring`."""

    def __str__(self) -> str:
        return f"{int(self)}:ring"


def read_context(value: Any, check: ValidatorFunctionWrapHandler) -> int:
    if isinstance(value, RingRanks):
        return value
    number, colon, way = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not colon:
        return int(check(value))
    if way != "ring" or not number.isdecimal():
        raise PydanticCustomError("context_ranks", "{value}", {"value": value})
    return RingRanks(check(int(number)))


def write_context(ranks: int) -> Any:
    return str(ranks) if isinstance(ranks, RingRanks) else ranks


NUMBER: dict[str, Any] = {"type": "integer", "exclusiveMinimum": 0}
CONTEXT_SCHEMA = WithJsonSchema({"anyOf": [NUMBER, {"type": "string", "pattern": r"^\d+:ring$"}]})
BATCH_SCHEMA = WithJsonSchema({"anyOf": [NUMBER, {"type": "object", "additionalProperties": NUMBER}]})


class Train(Section):
    epochs: int | None = described_field("train.epochs", None, gt=0)
    steps: int | None = described_field("train.steps", None, gt=0)
    global_batch: Annotated[int, WrapValidator(read_batch), PlainSerializer(write_batch), BATCH_SCHEMA] = (
        described_field("train.global_batch", 128, gt=0)
    )
    optimizer: Literal["adamw", "adam", "sgd", "lars", "lamb", "muon"] = described_field("train.optimizer", "adamw")
    optimizer_state: Literal["fp32", "bf16", "8bit"] = described_field("train.optimizer_state", "fp32")
    weights: Literal["fp32", "bf16"] = described_field("train.weights", "fp32")
    lr: float = described_field("train.lr", 1e-3, gt=0)
    lr_scaling: Literal["none", "linear", "sqrt"] = described_field("train.lr_scaling", "none")
    base_batch: int = described_field("train.base_batch", 128, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = described_field("train.schedule", "cosine")
    warmup: float = described_field("train.warmup", 0.05, ge=0, lt=1)
    warmup_steps: int | None = described_field("train.warmup_steps", None, ge=0)
    warmup_from: float = described_field("train.warmup_from", 0.0, ge=0, le=1)
    warmup_shape: Literal["linear", "log"] = described_field("train.warmup_shape", "linear")
    final_lr: float = described_field("train.final_lr", 0.0, ge=0, le=1)
    weight_decay: float = described_field("train.weight_decay", 0.01, ge=0)
    decay: Literal["matrices", "all"] = described_field("train.decay", "matrices")
    groups: dict[str, ParameterGroup] = described_field("train.groups", {})
    beta1: float = described_field("train.beta1", 0.9, ge=0, lt=1)
    beta2: float = described_field("train.beta2", 0.999, ge=0, lt=1)
    eps: float | None = described_field("train.eps", None, gt=0)
    momentum: float = described_field("train.momentum", 0.9, ge=0, lt=1)
    nesterov: bool = described_field("train.nesterov", False)
    clip: float = described_field("train.clip", 1.0, ge=0)
    clip_value: float = described_field("train.clip_value", 0.0, ge=0)
    ema: float | None = described_field("train.ema", None, gt=0, lt=1)
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64", "fp8"] = described_field("train.precision", "fp32")
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0, le=1e30)] = described_field(
        "train.loss_scale", "dynamic"
    )
    loss_scale_start: float = described_field("train.loss_scale_start", 16384.0, gt=0, le=1e30)
    loss_scale_window: int = described_field("train.loss_scale_window", 1000, gt=0)
    nonfinite: Literal["stop", "skip"] = described_field("train.nonfinite", "stop")
    on_oom: Literal["stop", "retry"] = described_field("train.on_oom", "stop")
    batchnorm_group: Literal["auto", "sync", "as_is"] | Annotated[int, Field(ge=2)] = described_field(
        "train.batchnorm_group", "auto"
    )
    seed: int = described_field("train.seed", 0, ge=0, lt=1 << 31)
    evaluate_every: int = described_field("train.evaluate_every", 0, ge=0)
    evaluate_on: Literal["auto", "all"] | Annotated[int, Field(gt=0)] = described_field("train.evaluate_on", "auto")
    patience: int = described_field("train.patience", 0, ge=0)
    checkpoint_every: Literal["auto"] | Annotated[int, Field(ge=0)] = described_field("train.checkpoint_every", 0)
    checkpoint_format: Literal["sharded", "full"] = described_field("train.checkpoint_format", "sharded")
    keep: int = described_field("train.keep", 2, gt=0)
    log_every: int = described_field("train.log_every", 10, gt=0)
    compile: Literal["auto", "off", "on"] = described_field("train.compile", "auto")
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = described_field("train.loggers", ())

    @field_validator("epochs", "steps", mode="before")
    @classmethod
    def _reject_relative_length(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject `+2`, which extends an existing run."""
        if isinstance(value, str) and value.startswith("+"):
            adds = f"train.{info.field_name}={value}"
            raise conflict_error(f"{adds} adds to an existing run; type  paceline train --resume RUN_FOLDER {adds}")
        return value

    @model_validator(mode="after")
    def _check_conflicts(self) -> Train:
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            what = f"train.optimizer={self.optimizer}" if self.optimizer != "sgd" else "train.momentum=0"
            raise conflict_error(f"train.nesterov=true is for sgd with momentum, not {what}; drop it")
        if self.batch_schedule and (self.lr_scaling != "none" or self.warmup_shape == "log"):
            raise conflict_error("train.lr_scaling and train.warmup_shape=log need a global_batch that does not grow")
        if self.epochs and self.steps:
            length = f"train.epochs={self.epochs} and train.steps={self.steps}"
            raise conflict_error(f"{length} both set the length; drop one")
        return self

    @property
    def batch_schedule(self) -> dict[int, int]:
        """The sizes of a batch that grows, by the step from which they hold."""
        return self.global_batch.schedule if isinstance(self.global_batch, GrowingBatch) else {}

    def count_samples(self, steps: int) -> int:
        """Return the samples of the first steps, if no epoch ends among them."""
        sizes = sorted({0: self.global_batch, **self.batch_schedule}.items())
        ends = [*(begin for begin, _ in sizes[1:]), steps]
        return sum(max(0, min(end, steps) - begin) * size for (begin, size), end in zip(sizes, ends, strict=True))


class Parallel(Section):
    strategy: Literal["auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"] = described_field(
        "parallel.strategy", "auto"
    )
    ranks: Annotated[int, WithJsonSchema({"type": ["integer", "string"], "pattern": r"^\d+(\.\.\d+)?$"})] = (
        described_field("parallel.ranks", 1, gt=0, le=65536)
    )
    least_ranks: int | None = described_field("parallel.least_ranks", None, gt=0)
    replicate: int | None = described_field("parallel.replicate", None, gt=0)
    tensor: int = described_field("parallel.tensor", 1, gt=0)
    sequence: bool = described_field("parallel.sequence", False)
    context: Annotated[int, WrapValidator(read_context), PlainSerializer(write_context), CONTEXT_SCHEMA] = (
        described_field("parallel.context", 1, gt=0)
    )
    expert: int = described_field("parallel.expert", 1, gt=0)
    pipeline: int = described_field("parallel.pipeline", 1, gt=0)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = described_field("parallel.schedule", "1f1b")
    micro_batch: int | None = described_field("parallel.micro_batch", None, gt=0)
    activation_checkpointing: Literal["none", "selective", "full"] = described_field(
        "parallel.activation_checkpointing", "none"
    )
    offload: bool = described_field("parallel.offload", False)
    reduce: Literal["exact", "bf16", "fp16", "powersgd", "local_sgd", "diloco"] = described_field(
        "parallel.reduce", "exact"
    )
    local_steps: int = described_field("parallel.local_steps", 8, gt=1)
    wrap: Literal["layers"] | Annotated[int, Field(gt=0)] = described_field("parallel.wrap", "layers")
    engine: Literal["torch", "deepspeed", "accelerate"] = described_field("parallel.engine", "torch")
    engine_config: Path | None = described_field("parallel.engine_config", None)
    device: Literal["auto", "cpu", "cuda"] = described_field("parallel.device", "auto")
    backend: Literal["auto", "nccl", "gloo", "mpi"] = described_field("parallel.backend", "auto")
    threads: int = described_field("parallel.threads", 0, ge=0, le=4096)
    timeout_s: float = described_field("parallel.timeout_s", 300.0, gt=0, le=1e7)
    bucket_mb: float = described_field("parallel.bucket_mb", 25.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _split_range(cls, values: Any) -> Any:
        """Read `ranks: 2..8` as 8 ranks, of which 2 are enough."""
        words = str(values.get("ranks")).split("..") if isinstance(values, Mapping) else []
        if len(words) != 2 or not all(map(str.isdecimal, words)):
            return values
        return {**values, "least_ranks": int(words[0]), "ranks": int(words[1])}
