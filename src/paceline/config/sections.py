"""Sections of the run file: validated, frozen pydantic models whose fields have a default, a unit and a meaning."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
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

    word: ClassVar[str] = ""
    """The field that a single word in place of the section sets."""
    references: ClassVar[tuple[str, ...]] = ()
    """Fields that name the user's own code as `file.py:name`; the file is relative to the run file."""
    run_files: ClassVar[tuple[str, ...]] = ()
    """Fields that name run files, which may name code in turn."""

    @classmethod
    def paths(cls) -> list[str]:
        """Return the fields that name a file or a folder, relative to the run file."""
        types = {name: (info.annotation, *get_args(info.annotation)) for name, info in cls.model_fields.items()}
        return [name for name, kinds in types.items() if Path in kinds or name == "path"]

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


@cache
def merge_section_fields(section: type[Section], common: type[Section]) -> type[Section]:
    """A workload's section with the fields that all of them have; KeyError where it has one of that name already."""
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
    batched: ClassVar[bool] = True
    """A step is a batch of samples; False where it is a pass over all of them."""


class ParameterGroup(Section):
    """What is different for some parameters; a value that is not given is that of the section `train`."""

    lr: float | None = field(None, "per step", "peak learning rate in place of train.lr, in the same schedule", gt=0)
    weight_decay: float | None = field(None, "", "in place of train.weight_decay", ge=0)
    frozen: bool = field(False, "", "not trained at all")


class Train(Section):
    """How the model is trained; `keys.csv` has the unit and the meaning of each key."""

    epochs: int | None = Field(None, gt=0)
    steps: int | None = Field(None, gt=0)
    global_batch: int = Field(128, gt=0)
    optimizer: Literal["adamw", "adam", "sgd", "lars", "lamb"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    base_batch: int = Field(128, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: float = Field(0.05, ge=0, lt=1)
    warmup_steps: int | None = Field(None, ge=0)
    warmup_from: float = Field(0.0, ge=0, le=1)
    warmup_shape: Literal["linear", "log"] = "linear"
    final_lr: float = Field(0.0, ge=0, le=1)
    weight_decay: float = Field(0.01, ge=0)
    decay: Literal["matrices", "all"] = "matrices"
    groups: dict[str, ParameterGroup] = Field({})
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float | None = Field(None, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    clip: float = Field(1.0, ge=0)
    clip_value: float = Field(0.0, ge=0)
    ema: float | None = Field(None, gt=0, lt=1)
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64", "fp8"] = "fp32"
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0, le=1e30)] = "dynamic"
    loss_scale_start: float = Field(16384.0, gt=0, le=1e30)
    loss_scale_window: int = Field(1000, gt=0)
    nonfinite: Literal["stop", "skip"] = "stop"
    on_oom: Literal["stop", "retry"] = "stop"
    seed: int = Field(0, ge=0, lt=1 << 31)
    evaluate_every: int = Field(0, ge=0)
    evaluate_on: Literal["auto", "all"] | Annotated[int, Field(gt=0)] = "auto"
    patience: int = Field(0, ge=0)
    checkpoint_every: int = Field(0, ge=0)
    checkpoint_format: Literal["sharded", "full"] = "sharded"
    keep: int = Field(2, gt=0)
    log_every: int = Field(10, gt=0)
    compile: Literal["auto", "off", "on"] = "auto"
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()

    @field_validator("epochs", "steps", mode="before")
    @classmethod
    def _reject_relative_length(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject `+2`, which extends an existing run."""
        if isinstance(value, str) and value.startswith("+"):
            adds = f"train.{info.field_name}={value}"
            raise conflict_error(f"{adds} adds to an existing run; type  paceline train --resume RUN_FOLDER {adds}")
        return value

    @model_validator(mode="after")
    def _check_nesterov(self) -> Train:
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            what = f"train.optimizer={self.optimizer}" if self.optimizer != "sgd" else "train.momentum=0"
            raise conflict_error(f"train.nesterov=true is for sgd with momentum, not {what}; drop it")
        return self

    @model_validator(mode="after")
    def _check_one_length(self) -> Train:
        if self.epochs and self.steps:
            raise conflict_error(
                f"train.epochs={self.epochs} and train.steps={self.steps} both set the length; drop one"
            )
        return self


class Parallel(Section):
    """How ranks share the work; `keys.csv` has the unit and the meaning of each key."""

    strategy: Literal["auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"] = "auto"
    ranks: int = Field(1, gt=0, le=65536)
    replicate: int | None = Field(None, gt=0)
    tensor: int = Field(1, gt=0)
    sequence: bool = False
    pipeline: int = Field(1, gt=0)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    micro_batch: int | None = Field(None, gt=0)
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    offload: bool = False
    reduce: Literal["exact", "bf16", "fp16", "powersgd", "local_sgd", "diloco"] = "exact"
    local_steps: int = Field(8, gt=1)
    wrap: Literal["layers"] | Annotated[int, Field(gt=0)] = "layers"
    engine: Literal["torch", "deepspeed", "accelerate"] = "torch"
    engine_config: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    threads: int = Field(0, ge=0, le=4096)
    timeout_s: float = Field(300.0, gt=0, le=1e7)
    bucket_mb: float = Field(25.0, gt=0)


def _add_meanings(sections: Mapping[str, type[Section]]) -> None:
    """Set the unit and the meaning of every key that `keys.csv` lists."""
    with Path(__file__).with_name("keys.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            section, _, name = row["key"].partition(".")
            info = sections[section].model_fields[name]
            info.description, info.json_schema_extra = row["meaning"], {"unit": row["unit"]}


_add_meanings({"train": Train, "parallel": Parallel})
