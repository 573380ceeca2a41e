"""Local files of a Hugging Face model: config, tokenizer, tokenised texts. Nothing is downloaded."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.config import RunSpec
from paceline.config.sections import MAX_INT
from paceline.data.corpora.documents import TokenStreams
from paceline.data.corpora.labelled import LabelledCorpus
from paceline.data.corpora.tokenised import TokenisedCorpus
from paceline.data.files import invalid_data, invalid_format
from paceline.errors import Code, UserError, reject_value
from paceline.io.files import read_text
from paceline.runlog.run_dir import RunDir
from paceline.workload import LogFn, ignore_log
from paceline.workloads.transformers import chat
from paceline.workloads.transformers.pairs import PairCorpus, TaggedCorpus
from paceline.workloads.transformers.sections import CONFIG, TABLES, TASKS

TOKENIZER = "tokenizer.json"
EXTRA_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("vocab.txt", "merges.txt", chat.TEMPLATE),
)
"""Small files that the library also reads, copied unchanged."""
MAX_CONFIG_BYTES, MAX_REPEATED, MAX_LISTED = 1 << 22, 20_000, 1 << 20
REPEATED = ("layer", "layers", "experts", "depth", "depths", "blocks", "block_sizes", "repeats")
"""Keys of what the library builds one by one,"""
LISTED = ("labels", "channels", "langs")
"""and of what it makes a list of."""

ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
EXPERTS = ("eager", "grouped_mm", "batched_mm")
TASK_OF_CLASS = {row.auto.removeprefix("AutoModel"): task for task, row in TASKS.items()}
TASK_OF_CLASS |= {"LMHeadModel": "causal_lm", "ForConditionalGeneration": "seq2seq_lm"}
REJECTED: dict[str, tuple[Code, str]] = {
    "use_pretrained_backbone": ("not-trusted", "would fetch weights; remove it, and give them as  model.init_from"),
    "quantization_config": ("not-supported", "is of quantised weights; use those in full precision"),
}
FOREIGN = ("auto_map", "custom_pipelines", "kernel_config", "use_kernels")
"""Keys that name code beside a config; they are dropped."""


@dataclass(frozen=True)
class ConfigFile:
    path: Path
    values: dict[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.values["model_type"])

    @property
    def bf16(self) -> bool:
        return (self.values.get("dtype") or self.values.get("torch_dtype")) in ("bfloat16", "torch.bfloat16")


def read_config(model: Any, kept: Path | None = None) -> ConfigFile:
    """Read the config of a section `model`, or the copy that a run kept."""
    if kept is not None:
        return _read_config_file(kept / CONFIG)
    given = model.config or model.init_from
    if given is None:
        hint = "type  model.init_from=FOLDER  for local weights, or  model.config=config.json  for random ones"
        raise UserError(f"model: a model is needed; {hint}", code="missing-value", key="model.init_from")
    key = "model.init_from" if model.config is None else "model.config"
    if not given.exists():
        hub_name = "/".join(given.parts[-2:]) if not given.parent.is_dir() else given.name
        hint = f"fetch it:  hf download {hub_name} --local-dir {given.name}"
        hint = "give the config.json of a model, or its folder" if given.suffix == ".json" else hint
        raise reject_value(key, given, f"not found; {hint}", "not-found")
    if given.is_dir():
        given = given / "kept" if RunDir(given).spec_file.is_file() else given
        if not (given / CONFIG).is_file():
            raise reject_value(key, given, f"the folder has no {CONFIG}", "not-found")
        given = given / CONFIG
    elif given.suffix == ".safetensors":
        message = f"model.init_from={given} has only weights; type  model.config=config.json  too"
        raise UserError(message, code="missing-value", key="model.config")
    return _read_config_file(given)


def suggest_settings(config: str) -> dict[str, Any]:
    """Return the task, precision and length that a config was made for."""
    file = read_config(SimpleNamespace(config=Path(config), init_from=None))
    names = file.values.get("architectures") or ("",)
    task = next((task for ending, task in TASK_OF_CLASS.items() if str(names[0]).endswith(ending)), None)
    dtype = str(file.values.get("dtype") or file.values.get("torch_dtype")).removeprefix("torch.")
    rope = file.values.get("rope_scaling")
    scaled = rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None
    length = scaled or file.values.get("max_position_embeddings") or file.values.get("n_positions")
    found = {
        "model.task": task,
        "train.precision": {"bfloat16": "bf16", "float16": "fp16"}.get(dtype),
        "data.sequence": length if task == "causal_lm" else None,
    }
    return {key: value for key, value in found.items() if value}


def _read_config_file(path: Path) -> ConfigFile:
    try:
        values = json.loads(read_text(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise invalid_format(f"{path}: not a readable {CONFIG} ({reason})") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise invalid_format(f'{path}: not the config of a Hugging Face model: no "model_type"')
    for part in iter_objects(values):
        for key, value in part.items():
            most = MAX_REPEATED if key.endswith(REPEATED) else MAX_LISTED if key.endswith(LISTED) else MAX_INT
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, int) and abs(number) > most for number in numbers):
                raise invalid_data(f"{path}: its {key} is beyond {most:,}; is this the config of a model?", key)
            _check_harmless(path, key, value)
        for key in FOREIGN:
            part.pop(key, None)
    return ConfigFile(path, values)


def find_dropouts(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the probabilities above 0 of a config."""
    named = {name: value for name, value in values.items() if "drop" in name}
    return {name: value for name, value in named.items() if isinstance(value, int | float) and value > 0}


def iter_objects(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a JSON object and all objects in it."""
    left: list[Any] = [values]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            yield found
        left += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()


def _check_harmless(path: Path, key: str, value: Any) -> None:
    """Raise UserError for a value that would have the library fetch, or execute, what a file names."""
    name = key.strip("_").removesuffix("_internal")
    known = {"attn_implementation": ATTENTION, "experts_implementation": EXPERTS}.get(name)
    for given in (*value.values(),) if isinstance(value, dict) else (value,):
        if known and given is not None and given not in known:
            hint = f"remove it, or use one of {', '.join(known)}"
            message = f"{path}: {key} is {given!r:.80}, which would load code from elsewhere; {hint}"
            raise UserError(message, code="not-trusted", key=key)
    if value and name in REJECTED:
        code, reason = REJECTED[name]
        raise UserError(f"{path}: {key} {reason}", code=code, key=key)


def find_tokenizer_file(model: Any, data: Any) -> Path | None:
    """Return the tokenizer.json that the run file names, or that beside the config; None if it is to be learned."""
    if data.tokenizer is not None:
        return Path(data.tokenizer)
    beside = read_config(model).path.with_name(TOKENIZER)
    if beside.is_file():
        return beside
    if model.init_from is not None and model.init_from.is_dir():
        hint = "write one in Python:  AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise UserError(f"model.init_from={model.init_from}: it has no {TOKENIZER}; {hint}", code="not-found")
    return None


class FramedCorpus(LabelledCorpus):
    """Labelled texts with the tokens around them that mark a text, such as [CLS] … [SEP]."""

    prefix = "framed-"
    framed = True


CORPORA: dict[str, type[TokenisedCorpus]] = {
    **dict.fromkeys(("causal_lm", "masked_lm"), TokenStreams),
    "sequence_classification": FramedCorpus,
    "seq2seq_lm": PairCorpus,
    "token_classification": TaggedCorpus,
}
"""The others are of images; causal_lm takes those of `find_corpus` from a table."""


def prepare_data(spec: RunSpec, log: LogFn = ignore_log, verify: bool = True) -> Any:
    """Return the images, or the tokenised texts from the cache; `verify` as for `TokenisedCorpus.prepare`."""
    if (corpus := _find_corpus(check_source(spec), spec.data)) is not None:
        return corpus.prepare(_with_tokenizer(spec), log, verify)
    from paceline.workloads.transformers.images import ImageFolders

    return ImageFolders(spec.data)


def find_cached(spec: RunSpec) -> Any:
    """Return the images, or the tokenised texts if they are cached; else None."""
    corpus = _find_corpus(check_source(spec), spec.data)
    return prepare_data(spec) if corpus is None else corpus.cached(_with_tokenizer(spec))


def _find_corpus(task: str, data: Any) -> type[TokenisedCorpus] | None:
    return chat.find_corpus(data) if task == "causal_lm" and data.source in TABLES else CORPORA.get(task)


def check_source(spec: RunSpec) -> str:
    """Return the task of a run; UserError if its data are of another kind."""
    model: Any = spec.model
    data: Any = spec.data
    known = TASKS[model.task].sources
    if data.source not in known:
        reason = f"model.task={model.task} reads {', '.join(known)}; type  data.source={known[-1]}"
        raise reject_value("data.source", data.source, reason, "conflict")
    if data.test_path is not None and data.source == "text":
        reason = "of source text, documents are held out by data.test_fraction"
        raise reject_value("data.test_path", data.test_path, reason)
    return str(model.task)


def _with_tokenizer(spec: RunSpec) -> Any:
    return spec.data.model_copy(update={"tokenizer": find_tokenizer_file(spec.model, spec.data)})
