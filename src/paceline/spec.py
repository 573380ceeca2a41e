"""The run file: one YAML document, validated, frozen, and able to say where each of its values came from.

Every quantity here is global (the batch, the learning rate, the length of the run); what one rank does with it is
derived in `layout.py`. Nothing else feeds a run: no hidden file, no environment variable.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paceline.errors import UserError
from paceline.shapes import DecoderShape

DEFAULT = "default"
COMMAND_LINE = "command line"
ELSEWHERE = {"batch_size": "global_batch", "learning_rate": "lr", "gpus": "ranks", "nproc_per_node": "ranks"}
"""Names that other tools have for ours, for the hint that follows an unknown key."""


PATHS = {"data": ("path", "test_path", "cache"), "parallel": ("engine_config",)}
"""What is a path, relative to the run file."""


def field(default: Any, unit: str, meaning: str, **limits: Any) -> Any:
    """A field of the run file: its default, its unit, which `explain` prints, and what it means."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)


STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)


class Section(BaseModel):
    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _yes_is_not_a_number(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key, value in values.items():
                known = cls.model_fields.get(key)
                if isinstance(value, bool) and known is not None and "bool" not in str(known.annotation):
                    raise PydanticCustomError("not_a_bool", "{key}|{value}", {"key": key, "value": value})
        return values


class ClassifierModel(Section):
    """A pre-norm transformer encoder with mean pooling over the tokens of a text."""

    width: int = field(128, "features", "size of the residual stream", gt=0)
    heads: int = field(4, "heads", "attention heads; must divide width", gt=0)
    layers: int = field(2, "layers", "encoder layers", gt=0)
    ffn: int = field(512, "features", "hidden size of the feed-forward part", gt=0)
    dropout: float = field(0.0, "probability", "dropout, drawn per sample and so the same on any layout", ge=0, lt=1)
    word_dropout: float = field(0.0, "probability", "input tokens hidden during training", ge=0, lt=1)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ClassifierModel:
        if self.width % self.heads:
            fits = [h for h in range(1, self.width + 1) if self.width % h == 0]
            near = min(fits, key=lambda h: abs(h - self.heads))
            raise PydanticCustomError(
                "heads", "{m}", {"m": f"model.heads={self.heads} does not divide model.width={self.width}; try {near}"}
            )
        return self


class TextData(Section):
    """Labelled texts, tokenised once into a memory-mapped array."""

    source: Literal["docstrings", "ag_news", "csv", "jsonl", "parquet"] = field(
        "docstrings", "", "where the texts come from; docstrings are on every machine"
    )
    path: Path | None = field(None, "path", "file (csv, jsonl, parquet) or folder (ag_news) to read")
    test_path: Path | None = field(None, "path", "held-out file; without one, test_fraction of the rows is held out")
    test_fraction: float = field(0.1, "fraction", "rows held out when there is no test_path", gt=0, lt=1)
    text: str = field("text", "column", "column or key of the text")
    label: str = field("label", "column", "column or key of the label")
    max_length: int = field(256, "tokens", "longer texts are cut", gt=0)
    vocab: int = field(8192, "tokens", "size of the byte-level BPE vocabulary", ge=257, le=1 << 20)
    lowercase: bool = field(False, "", "fold case before tokenising")
    limit: int = field(0, "rows", "read at most this many training rows; 0 reads all", ge=0)
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of tokenised corpora, named by content")


class LMModel(Section):
    """A decoder. Fields that are not given come from the preset."""

    preset: Literal["custom", "tiny", "small", "gpt2", "1b", "1.3b", "3b", "7b"] = field(
        "tiny", "", "sizes that fields below override; custom needs width, heads and layers"
    )
    width: int | None = field(None, "features", "size of the residual stream", gt=0)
    heads: int | None = field(None, "heads", "attention heads; must divide width", gt=0)
    kv_heads: int | None = field(None, "heads", "heads of keys and values; must divide heads", gt=0)
    layers: int | None = field(None, "layers", "decoder layers", gt=0)
    ffn: int | None = field(None, "features", "hidden size of the feed-forward part", gt=0)
    ffn_kind: Literal["swiglu", "gelu"] | None = field(None, "", "gated or plain feed-forward part")
    positions: Literal["rotary", "learned"] | None = field(None, "", "how a token knows its place")
    context: int | None = field(None, "tokens", "learned positions; without it data.sequence", gt=0)
    tied: bool | None = field(None, "", "the head shares the weights of the embedding")
    vocab: int | None = field(None, "tokens", "rows of the embedding; without it those of the data", gt=0)

    @model_validator(mode="after")
    def _sizes_fit(self) -> LMModel:
        try:
            self.shape(vocab=1, sequence=1)
        except UserError as error:
            raise PydanticCustomError("heads", "{m}", {"m": str(error)}) from None
        return self

    def shape(self, vocab: int, sequence: int) -> DecoderShape:
        """The whole shape, where data have `vocab` tokens in samples of `sequence`; UserError if sizes do not fit."""
        given = self.model_dump(exclude={"preset"}, exclude_none=True)
        return DecoderShape.of(self.preset, given, vocab, sequence)


class LMData(Section):
    """Texts end to end, tokenised once into a memory-mapped array and cut into samples of equal length."""

    source: Literal["docstrings", "text"] = field(
        "docstrings", "", "where the texts come from; docstrings are on every machine"
    )
    path: Path | None = field(None, "path", "text: a file, a folder, or a pattern such as books/*.txt")
    sequence: int = field(256, "tokens", "length of a sample", gt=0)
    vocab: int = field(4096, "tokens", "size of the byte-level BPE vocabulary", ge=257, le=1 << 20)
    test_fraction: float = field(0.1, "fraction", "documents held out", gt=0, lt=1)
    limit: int = field(0, "documents", "read at most this many; 0 reads all", ge=0)
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of tokenised corpora, named by content")


class TopicsModel(Section):
    """Counts ~ L F: a mixture of topics for each document, and a distribution over terms for each topic."""

    k: int = field(20, "topics", "number of topics", gt=0, le=512)
    start: Literal["auto", "race", "least_squares", "random"] = field(
        "auto", "", "first topics; auto takes least squares for dense counts, else the best of a few tries on a sample"
    )
    rows: Literal["em", "newton"] = field("em", "", "how a pass updates the mixtures; newton is for sparse counts")
    tolerance: float = field(1e-7, "of the loss", "a mean gain per pass below this ends the fit", ge=0)


class TopicsData(Section):
    """Documents by terms, from a matrix, a folder of shards, or texts."""

    path: Path | None = field(None, "path", "matrix (.npy, .npz, .mtx, .parquet), shards, or texts; see docs/topics.md")
    fractional: bool = field(False, "", "allow numbers that are not whole")
    text: str = field("text", "column", "texts: the column or key of the text")
    min_df: int | float = field(2, "documents", "texts: terms in fewer are left out; 0.1 is a tenth of all", ge=0)
    max_df: int | float = field(0.95, "documents", "texts: terms in more are left out; 1.0 is all of them", ge=0)
    max_terms: int | None = field(None, "terms", "texts: only the most frequent ones", gt=0)
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of counted texts, named by file, size and date")


class Train(Section):
    epochs: int | None = field(None, "epochs", "length of the run; give this or steps", gt=0)
    steps: int | None = field(None, "steps", "length of the run; give this or epochs", gt=0)
    global_batch: int = field(128, "samples", "samples per optimiser step, over all ranks", gt=0)
    optimizer: Literal["adamw", "sgd", "lars", "lamb"] = field("adamw", "", "update rule")
    lr: float = field(1e-3, "per step", "peak learning rate at base_batch", gt=0)
    lr_scaling: Literal["none", "linear", "sqrt"] = field("none", "", "how lr grows with global_batch / base_batch")
    base_batch: int = field(128, "samples", "the batch for which lr was chosen", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = field("cosine", "", "decay after the warm-up")
    warmup: float = field(0.05, "fraction of run", "linear warm-up from 0", ge=0, lt=1)
    final_lr: float = field(0.0, "fraction of lr", "where the decay ends", ge=0, le=1)
    weight_decay: float = field(0.01, "", "decay of matrices; biases and norms are exempt", ge=0)
    beta1: float = field(0.9, "", "first moment decay (adamw, lamb)", ge=0, lt=1)
    beta2: float = field(0.999, "", "second moment decay (adamw, lamb)", ge=0, lt=1)
    momentum: float = field(0.9, "", "momentum (sgd, lars)", ge=0, lt=1)
    clip: float = field(1.0, "gradient norm", "global gradient norm is cut to this; 0 does not cut", ge=0)
    precision: Literal["fp32", "bf16", "fp16", "fp64", "fp8"] = field("fp32", "", "type of the matrix products")
    nonfinite: Literal["stop", "skip"] = field("stop", "", "a step whose loss or gradient is not finite")
    seed: int = field(0, "", "of weights, data order and dropout", ge=0, lt=1 << 31)
    evaluate_every: int = field(0, "steps", "0 evaluates at the end of each epoch", ge=0)
    checkpoint_every: int = field(0, "steps", "0 saves at the end of each epoch", ge=0)
    keep: int = field(2, "checkpoints", "newest ones kept, beside the best", gt=0)
    log_every: int = field(10, "steps", "how often measured values are read back and shown", gt=0)
    compile: Literal["auto", "off", "on"] = field(
        "auto", "", "auto compiles and records the step where a CUDA device allows it; on compiles each layer anywhere"
    )
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = field((), "", "also send events there")

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if self.epochs and self.steps:
            raise PydanticCustomError(
                "length",
                "{m}",
                {"m": f"train.epochs={self.epochs} and train.steps={self.steps} both set the length; drop one"},
            )
        return self


class Parallel(Section):
    strategy: Literal["auto", "single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"] = field(
        "auto", "", "what each data-parallel rank keeps; auto is ddp above 1 rank; zero3 and fsdp are the same"
    )
    ranks: int = field(
        1, "processes", "one device each; what tensor and pipeline leave is data parallel", gt=0, le=65536
    )
    replicate: int | None = field(None, "copies", "hsdp: whole copies of the model, each sharded over the rest", gt=0)
    tensor: int = field(1, "ranks", "ranks that share every matrix product", gt=0)
    sequence: bool = field(False, "", "the ranks of tensor also share what lies between the matrix products")
    pipeline: int = field(1, "ranks", "ranks that hold consecutive layers", gt=0)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = field(
        "1f1b", "", "order of the passes in a pipeline; the last two give each rank 2 stages"
    )
    micro_batch: int | None = field(None, "samples", "most samples in one pass of one rank; more are accumulated", gt=0)
    checkpointing: Literal["none", "selective", "full"] = field(
        "none", "", "activations computed again in the backward pass: none, all but matrix products, whole layers"
    )
    offload: bool = field(False, "", "zero2, fsdp, hsdp: parameters and optimiser live in host memory")
    reduce: Literal["exact", "bf16", "fp16", "powersgd", "local_sgd", "diloco"] = field(
        "exact", "", "ddp: how ranks are kept together; all but exact send less and change the answer"
    )
    local_steps: int = field(8, "steps", "local_sgd, diloco: steps a rank makes alone before models are joined", gt=1)
    engine: Literal["torch", "deepspeed", "accelerate"] = field("torch", "", "who wraps the model and updates it")
    engine_config: Path | None = field(None, "path", "deepspeed: your own JSON; accelerate: your own YAML")
    device: Literal["auto", "cpu", "cuda"] = field("auto", "", "auto takes CUDA devices where there are any")
    threads: int = field(0, "threads", "CPU threads per rank; 0 divides the cores among the local ranks", ge=0, le=4096)
    timeout_s: float = field(300.0, "s", "a collective that takes longer ends the run", gt=0, le=1e7)
    bucket_mb: float = field(25.0, "MB", "gradients are sent in buckets of this size", gt=0)


MODEL_SECTIONS: dict[str, type[Section]] = {"classifier": ClassifierModel, "lm": LMModel, "topics": TopicsModel}
DATA_SECTIONS: dict[str, type[Section]] = {"classifier": TextData, "lm": LMData, "topics": TopicsData}
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class RunSpec(BaseModel):
    """A whole run file. `origin("train.lr")` says where a value came from."""

    model_config = STRICT

    name: Name = field("run", "", "name of the run folder")
    workload: str = field("classifier", "", "classifier, lm, topics, or your own as file.py:Class")
    model: SerializeAsAny[Section] = Field(default_factory=Section)
    data: SerializeAsAny[Section] = Field(default_factory=Section)
    train: Train = Field(default_factory=Train)
    parallel: Parallel = Field(default_factory=Parallel)
    cluster: str = field("local", "", "machines the run may use: local, a short form as 2x8xH100, or a cluster file")

    @field_validator("cluster")
    @classmethod
    def _known_cluster(cls, text: str) -> str:
        if text != "local":
            from paceline.hardware.catalogue import cluster

            cluster(text)
        return text

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, key: str) -> str:
        return self._origins.get(key, DEFAULT)

    def dump(self) -> dict[str, Any]:
        """Every value, as plain data that `build` reads back."""
        return self.model_dump(mode="json")

    def __reduce__(self) -> Any:
        """Travels to other processes as plain data: they may not have imported the user's own sections."""
        return build, (self.dump(), dict(self._origins))

    def fields(self) -> Iterator[tuple[str, Any, str, str]]:
        """(dotted name, value, unit, meaning) of every field, in the order of the file."""
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                for sub, sub_info in type(value).model_fields.items():
                    yield f"{name}.{sub}", getattr(value, sub), _unit(sub_info), sub_info.description or ""
            else:
                yield name, value, _unit(info), info.description or ""

    def replace(self, overrides: Mapping[str, Any]) -> RunSpec:
        """The same spec with some dotted values changed, validated again."""
        values = self.dump()
        for key, value in overrides.items():
            _put(values, key, value)
        return build(values, {**self._origins, **dict.fromkeys(overrides, "changed in Python")})


def _unit(info: Any) -> str:
    extra = info.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""


def load(path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunSpec:
    """Read a run file and lay dotted overrides over it: `load("run.yaml", ["train.lr=3e-4"])`.

    Paths inside the file are relative to the file; paths in overrides are relative to the current folder.
    """
    file = Path(path)
    values, origins = _read_yaml(file)
    _anchor_paths(values, file.resolve().parent)
    pairs = dict(overrides) if isinstance(overrides, Mapping) else dict(map(split_override, overrides))
    over: dict[str, Any] = {}
    for key, value in pairs.items():
        _put(over, key, value)
    _anchor_paths(over, Path.cwd())
    if {"train.epochs", "train.steps"} & pairs.keys() and isinstance(values.get("train"), dict):
        for length in ("epochs", "steps"):  # the new length replaces the file's, whichever way either is given
            values["train"].pop(length, None)
            origins.pop(f"train.{length}", None)
    origins |= {name: COMMAND_LINE for key in pairs for name in (key, ".".join(key.split(".")[:2]))}
    for section, value in over.items():
        if isinstance(value, dict) and isinstance(values.get(section), dict):
            values[section].update(value)
        else:
            values[section] = value
    return build(values, origins)


def build(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> RunSpec:
    """Validate plain data into a RunSpec; every problem is named, with its place, in one UserError."""
    values = dict(values)
    origins = dict(origins or {})
    for name in ("parallel", "model", "data", "train"):
        if values.get(name) is None:
            values.pop(name, None)
    if values.get("parallel") == "auto":
        values["parallel"] = {"strategy": "auto"}
    problems: list[str] = []
    sections = _section_types(values.get("workload", "classifier"))
    everywhere: dict[str, type[BaseModel]] = {"": RunSpec, **sections, "train": Train, "parallel": Parallel}
    for name, kind in sections.items():
        try:
            values[name] = kind.model_validate(values.get(name, {}))
        except ValidationError as error:
            problems += [_say(problem, name, everywhere, origins) for problem in error.errors()]
            values.pop(name, None)
    try:
        spec = RunSpec.model_validate(values)
    except ValidationError as error:
        problems += [_say(problem, "", everywhere, origins) for problem in error.errors()]
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    spec._origins.update(origins)
    return spec


def _section_types(workload: Any) -> dict[str, type[Section]]:
    if not isinstance(workload, str):
        raise UserError(
            f"workload: {workload!r} is not a name; use one of {', '.join(MODEL_SECTIONS)} or file.py:Class"
        )
    if ":" in workload:
        from paceline.workload import own_workload

        own = own_workload(workload)
        return {"model": own.Model, "data": own.Data}
    if workload not in MODEL_SECTIONS:
        hint = _nearest(workload, MODEL_SECTIONS)
        raise UserError(
            f"workload: {workload!r} is not known{hint}; use one of {', '.join(MODEL_SECTIONS)} or file.py:Class"
        )
    return {"model": MODEL_SECTIONS[workload], "data": DATA_SECTIONS[workload]}


def _nearest(word: str, words: Any) -> str:
    close = difflib.get_close_matches(str(word), list(words), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def _say(problem: Any, prefix: str, everywhere: Mapping[str, type[BaseModel]], origins: Mapping[str, str]) -> str:
    """One pydantic problem as one sentence for a person."""
    place = [prefix, *map(str, problem["loc"])] if prefix else [*map(str, problem["loc"])]
    key = ".".join(place)
    where = next((origins[k] for k in (key, ".".join(place[:2]), place[0]) if k in origins), "") if place else ""
    at = f" ({where})" if where else ""
    given = _short(problem["input"])
    match problem["type"]:
        case "extra_forbidden":
            return f"{key}: there is no such key{_meant(place, everywhere)}{at}"
        case "invalid_key":
            return f"{key}: a key must be a word{at}"
        case "missing":
            return f"{key}: not given, and it has no default{at}"
        case "literal_error":
            return f"{key}: {given} is not allowed; use one of {problem['ctx']['expected'].replace(' or ', ', ')}{at}"
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{key}: {given} is not a whole number{at}"
        case "float_parsing" | "float_type" | "finite_number":
            return f"{key}: {given} is not a number{at}"
        case "bool_parsing" | "bool_type":
            return f"{key}: {given} is neither true nor false{at}"
        case "path_type":
            return f"{key}: {given} is not a path{at}"
        case "string_type":
            return f"{key}: {given} is not a word{at}"
        case "tuple_type" | "list_type":
            return f"{key}: {given} is not a list; write it as  {key}=[{problem['input']}]{at}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"{key}: {given} is out of range; it must be {problem['msg'].split('should be ')[-1]}{at}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{key}: {given} is not a section; write it as  {key}: {{key: value}}{at}"
        case "string_pattern_mismatch":
            return f"{key}: {given} cannot name a folder; use letters, digits, '.', '_' and '-'{at}"
        case "not_a_bool":
            key = f"{key}.{problem['ctx']['key']}"
            at = f" ({origins[key]})" if key in origins else ""
            return f"{key}: {problem['ctx']['value']!r} is not a number or a word{at}"
        case "heads" | "length":
            return str(problem["msg"])
        case "value_error" | "assertion_error":
            return f"{key}: {problem['ctx']['error']}{at}"
        case _:
            return f"{key}: {given}: {problem['msg']}{at}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _meant(place: Sequence[str], everywhere: Mapping[str, type[BaseModel]]) -> str:
    """For an unknown key: the nearest one in its section or, where that is nearer, in another."""
    section, word = place[0] if len(place) > 1 else "", place[-1]
    here = everywhere[section].model_fields
    names = {leaf: f"{name}.{leaf}".strip(".") for name, kind in everywhere.items() for leaf in kind.model_fields}
    names |= {leaf: f"{section}.{leaf}".strip(".") for leaf in here}
    close = difflib.get_close_matches(ELSEWHERE.get(word, word), names, n=1, cutoff=0.6)
    return f", did you mean {names[close[0]]!r}?" if close else f"; known here: {', '.join(here) or 'nothing'}"


def split_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"{text!r} is not an override; write it as  section.key=value,  for example train.lr=3e-4")
    if not value.strip():
        raise UserError(f"{text!r} has no value; write it as  {key}=VALUE,  or  {key}=null  for none")
    try:
        return key, yaml.load(value, _Loader)
    except yaml.YAMLError:
        return key, value


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UserError(f"{section}={inner} and {key}={value} contradict each other; leave one of them out")
        values = inner
    values[last] = value


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `off`, `no` and 2024-01-01 are words, and true and false the only truth values."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if not tag.endswith((":bool", ":timestamp"))]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF"))


def _read_yaml(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a run file, and the line of each."""
    given = f"run file {str(file)!r}"
    origins: dict[str, str] = {}
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _note_lines(node, "", file.name, origins)
        values = loader.construct_document(node) if node else None
    except FileNotFoundError:
        near = sorted(file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        raise UserError(f"{given} does not exist{_nearest(file.name, [p.name for p in near])}") from None
    except IsADirectoryError:
        hint = f"; to go on with this run:  paceline train --resume {file}" if (file / "spec.yaml").is_file() else ""
        raise UserError(f"{given} is a folder{hint}") from None
    except OSError as error:
        raise UserError(f"{given} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{given} is not a text in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        parts = [getattr(error, part, None) for part in ("context", "problem")]
        why = ", ".join(filter(None, parts)) or str(error).splitlines()[0]
        raise UserError(f"{given} is not YAML{at}: {why}") from None
    except RecursionError:
        raise UserError(f"{given} is nested without end") from None
    if not isinstance(values, dict):
        raise UserError(f"{given} holds no sections; start it with  name: my-run")
    return values, origins


def _note_lines(node: Any, prefix: str, file: str, origins: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.tag.endswith(":merge"):  # <<: *another
                _note_lines(value, prefix, file, origins)
                continue
            name = f"{prefix}{key.value}"
            if name in seen:
                raise UserError(f"{name}: given twice ({file} line {key.start_mark.line + 1})")
            seen.add(name)
            origins[name] = f"{file} line {key.start_mark.line + 1}"
            _note_lines(value, f"{name}.", file, origins)


def _anchor_paths(values: dict[str, Any], folder: Path) -> None:
    """Make the paths of a run file absolute, so that the spec means the same from anywhere."""
    for section, keys in PATHS.items():
        inside = values.get(section)
        for key in keys:
            if isinstance(inside, dict) and isinstance(inside.get(key), str):
                try:
                    inside[key] = str((folder / Path(inside[key]).expanduser()).resolve())
                except (RuntimeError, ValueError, OSError) as error:
                    raise UserError(f"{section}.{key}: {inside[key]!r} is not a path: {error}") from None
    cluster = values.get("cluster")
    if isinstance(cluster, str) and cluster.endswith((".yaml", ".yml")):
        values["cluster"] = str((folder / Path(cluster).expanduser()).resolve())
    workload = values.get("workload")
    if isinstance(workload, str) and ":" in workload:
        module, _, name = workload.rpartition(":")
        file = folder / (module if module.endswith(".py") else module.replace(".", "/") + ".py")
        if file.is_file():
            values["workload"] = f"{file.resolve()}:{name}"
