"""Sections of the run file: validated, frozen pydantic models whose fields have a default, a unit and a meaning."""

from __future__ import annotations

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
    epochs: int | None = field(None, "epochs", "length of the run; give this or steps", gt=0)
    steps: int | None = field(None, "steps", "length of the run; give this or epochs", gt=0)
    global_batch: Annotated[int, WrapValidator(read_batch), PlainSerializer(write_batch), BATCH_SCHEMA] = field(
        128,
        "samples",
        "samples per optimiser step, over all ranks; {0: 256, 10000: 1024} grows after so many steps",
        gt=0,
    )
    optimizer: Literal["adamw", "adam", "sgd", "lars", "lamb", "muon"] = field(
        "adamw",
        "",
        "update rule; adam and sgd add weight_decay to the gradient, others to the update; muon is for matrices, "
        "and adamw for what is no matrix, embeddings and the last one",
    )
    optimizer_state: Literal["fp32", "bf16", "8bit"] = field(
        "fp32", "", "type of the moments (adamw, adam); smaller ones are rounded at random, by key"
    )
    weights: Literal["fp32", "bf16"] = field(
        "fp32",
        "",
        "type of weights and gradients; bf16 (adamw, adam) keeps no copy in fp32 and rounds at random, by key",
    )
    lr: float = field(1e-3, "per step", "peak learning rate at base_batch", gt=0)
    lr_scaling: Literal["none", "linear", "sqrt"] = field("none", "", "how lr grows with global_batch / base_batch")
    base_batch: int = field(128, "samples", "the batch for which lr was chosen", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = field("cosine", "", "decay after the warm-up")
    warmup: float = field(0.05, "fraction of run", "warm-up of the learning rate", ge=0, lt=1)
    warmup_steps: int | None = field(None, "steps", "length of the warm-up, in place of warmup", ge=0)
    warmup_from: float = field(0.0, "fraction of lr", "where the warm-up begins", ge=0, le=1)
    warmup_shape: Literal["linear", "log"] = field(
        "linear", "", "log grows with the logarithm of the step, as DeepSpeed's WarmupLR does"
    )
    final_lr: float = field(0.0, "fraction of lr", "where the decay ends", ge=0, le=1)
    weight_decay: float = field(0.01, "", "of matrices, or of all parameters: decay says which", ge=0)
    decay: Literal["matrices", "all"] = field("matrices", "", "what decays; matrices leaves out biases and norms")
    groups: dict[str, ParameterGroup] = field(
        {}, "", "parameters that differ: pattern of names -> {lr, weight_decay, frozen}; the first match decides"
    )
    beta1: float = field(0.9, "", "first moment decay (adamw, adam, lamb, muon)", ge=0, lt=1)
    beta2: float = field(0.999, "", "second moment decay (adamw, adam, lamb, muon)", ge=0, lt=1)
    eps: float | None = field(
        None, "", "added to the root of the second moment; none is 1e-8 for all but lamb, which has 1e-6", gt=0
    )
    momentum: float = field(0.9, "", "momentum (sgd, lars, muon)", ge=0, lt=1)
    nesterov: bool = field(False, "", "sgd: the momentum looks one step ahead")
    clip: float = field(1.0, "gradient norm", "the global gradient norm is clipped to this; 0 disables", ge=0)
    clip_value: float = field(0.0, "gradient", "each gradient value is then clipped to ± this; 0 disables", ge=0)
    ema: float | None = field(
        None,
        "per step",
        "decay of an average of the weights, which is evaluated and used in their place",
        gt=0,
        lt=1,
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64", "fp8"] = field(
        "fp32", "", "type of the matrix products; tf32 is fp32 where the device has no TF32"
    )
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0, le=1e30)] = field(
        "dynamic",
        "",
        "fp16: factor of the loss, against underflow of gradients; dynamic halves it on overflow",
    )
    loss_scale_start: float = field(16384.0, "", "fp16: where a dynamic loss_scale begins", gt=0, le=1e30)
    loss_scale_window: int = field(1000, "steps", "fp16: without overflow, after which loss_scale doubles", gt=0)
    nonfinite: Literal["stop", "skip"] = field("stop", "", "a step whose loss or gradient is not finite")
    on_oom: Literal["stop", "retry"] = field(
        "stop", "", "out of memory: stop, or resume from the last checkpoint with half the micro-batch"
    )
    batchnorm_group: Literal["auto", "sync", "as_is"] | Annotated[int, Field(ge=2)] = field(
        "auto",
        "samples",
        "whose statistics batch norm uses: auto is up to 32; sync: those of all ranks in a pass; as_is: of one rank",
    )
    seed: int = field(0, "", "of weights, data order and dropout", ge=0, lt=1 << 31)
    evaluate_every: int = field(0, "steps", "0 evaluates at the end of each epoch", ge=0)
    evaluate_on: Literal["auto", "all"] | Annotated[int, Field(gt=0)] = field(
        "auto", "samples", "of the held-out split; auto takes all of a small one, else as many as the training allows"
    )
    patience: int = field(0, "evaluations", "without a better score end the run; 0 does not end it", ge=0)
    checkpoint_every: Literal["auto"] | Annotated[int, Field(ge=0)] = field(
        0, "steps", "0 saves at the end of each epoch; auto as often as loses least to failures of the devices"
    )
    checkpoint_format: Literal["sharded", "full"] = field(
        "sharded", "", "full: one safetensors file with all tensors, joined by the main rank; sharded: a file per rank"
    )
    keep: int = field(2, "checkpoints", "newest ones kept, beside the best", gt=0)
    log_every: int = field(10, "steps", "how often measured values are read back and shown", gt=0)
    compile: Literal["auto", "off", "on"] = field(
        "auto", "", "auto records the step on a CUDA device and compiles it where that pays; on compiles, anywhere"
    )
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = field((), "", "also send events there")

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
    strategy: Literal["auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"] = field(
        "auto", "", "what each data-parallel rank keeps; auto is ddp above 1 rank; zero3 and fsdp are the same"
    )
    ranks: Annotated[int, WithJsonSchema({"type": ["integer", "string"], "pattern": r"^\d+(\.\.\d+)?$"})] = field(
        1,
        "processes",
        "one device each; what tensor, context and pipeline leave is data parallel; 2..8 sets least_ranks to 2",
        gt=0,
        le=65536,
    )
    least_ranks: int | None = field(
        None, "processes", "a run that loses ranks continues with fewer, down to this number; without it, it ends", gt=0
    )
    replicate: int | None = field(None, "copies", "hsdp: whole copies of the model, each sharded over the rest", gt=0)
    tensor: int = field(1, "ranks", "ranks that share every matrix product", gt=0)
    sequence: bool = field(False, "", "the ranks of tensor also share what lies between the matrix products")
    context: Annotated[int, WrapValidator(read_context), PlainSerializer(write_context), CONTEXT_SCHEMA] = field(
        1,
        "ranks",
        "ranks that divide each sequence; attention gathers its keys and values, or with 4:ring passes them round",
        gt=0,
    )
    expert: int = field(1, "ranks", "data-parallel ranks that divide the experts of a mixture", gt=0)
    pipeline: int = field(1, "ranks", "ranks that hold consecutive layers", gt=0)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = field(
        "1f1b", "", "order of the passes in a pipeline; the last two give each rank 2 stages"
    )
    micro_batch: int | None = field(None, "samples", "most samples in one pass of one rank; more are accumulated", gt=0)
    activation_checkpointing: Literal["none", "selective", "full"] = field(
        "none", "", "activations computed again in the backward pass: none, all but matrix products, whole layers"
    )
    offload: bool = field(False, "", "zero2, fsdp, hsdp: parameters and optimiser live in host memory")
    reduce: Literal["exact", "bf16", "fp16", "powersgd", "local_sgd", "diloco"] = field(
        "exact", "", "how ranks are synchronised; all but exact send less and change the answer"
    )
    local_steps: int = field(8, "steps", "local_sgd, diloco: steps a rank makes alone before models are joined", gt=1)
    wrap: Literal["layers"] | Annotated[int, Field(gt=0)] = field(
        "layers", "parameters", "zero2, fsdp, hsdp: what is gathered together: a layer, or modules of at least so many"
    )
    engine: Literal["torch", "deepspeed", "accelerate"] = field("torch", "", "library that wraps the model")
    engine_config: Path | None = field(None, "path", "deepspeed: your own JSON; accelerate: your own YAML")
    device: Literal["auto", "cpu", "cuda"] = field("auto", "", "auto takes CUDA devices where there are any")
    backend: Literal["auto", "nccl", "gloo", "mpi"] = field(
        "auto",
        "",
        "what carries messages: auto is nccl for CUDA devices, gloo for CPUs; gloo lets ranks share a GPU",
    )
    threads: int = field(0, "threads", "CPU threads per rank; 0 divides the cores among the local ranks", ge=0, le=4096)
    timeout_s: float = field(300.0, "s", "a collective that takes longer ends the run", gt=0, le=1e7)
    bucket_mb: float = field(25.0, "MB", "gradients are sent in buckets of this size", gt=0)

    @model_validator(mode="before")
    @classmethod
    def _split_range(cls, values: Any) -> Any:
        """Take `ranks: 2..8` for 8 ranks, of which 2 are enough."""
        words = str(values.get("ranks")).split("..") if isinstance(values, Mapping) else []
        if len(words) != 2 or not all(map(str.isdecimal, words)):
            return values
        return {**values, "least_ranks": int(words[0]), "ranks": int(words[1])}
