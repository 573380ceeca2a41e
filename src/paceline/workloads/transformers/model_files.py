"""Local files of a Hugging Face model: config, tokenizer, and the texts tokenised with it. Nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import RunSpec
from paceline.config.sections import MAX_INT
from paceline.data.corpora.documents import TokenStreams
from paceline.data.corpora.labelled import LabelledCorpus
from paceline.data.files import invalid_data, invalid_format
from paceline.errors import UserError
from paceline.io.safe_open import read_text
from paceline.runlog.run_dir import RunDir
from paceline.workload import LogFn, ignore_log
from paceline.workloads.transformers.sections import LABELLED

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
EXTRA_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "vocab.txt", "merges.txt")
"""Small files that the library also reads, copied unchanged."""
MAX_CONFIG_BYTES, MAX_REPEATED = 1 << 22, 10_000
"""Of a config.json, and layers or experts in it: the library builds each of them to count its parameters."""

Corpus = TokenStreams | LabelledCorpus


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
    """Read the config of a section `model`: its own, or that of the weights it starts with. A run has its own copy."""
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
        raise UserError(f"{key}={given}: not found; {hint}", code="not-found", key=key)
    if given.is_dir():
        given = given / "kept" if RunDir(given).spec_file.is_file() else given
        if not (given / CONFIG).is_file():
            raise UserError(f"{key}={given}: the folder has no {CONFIG}", code="not-found", key=key)
        given = given / CONFIG
    elif given.suffix == ".safetensors":
        message = f"model.init_from={given} has only weights; type  model.config=config.json  too"
        raise UserError(message, code="missing-value", key="model.config")
    return _read_config_file(given)


def _read_config_file(path: Path) -> ConfigFile:
    try:
        values = json.loads(read_text(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise invalid_format(f"{path}: not a readable {CONFIG} ({reason})") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise invalid_format(f'{path}: not the config of a Hugging Face model: no "model_type"')
    for key, value in [*values.items(), *(item for v in values.values() if isinstance(v, dict) for item in v.items())]:
        most = MAX_REPEATED if "layer" in key or "expert" in key else MAX_INT
        if isinstance(value, int) and abs(value) > most:
            raise invalid_data(f"{path}: its {key} is beyond {most:,}; is this the config of a model?", key)
    return ConfigFile(path, values)


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


def prepare_texts(spec: RunSpec, log: LogFn = ignore_log, verify: bool = True) -> Corpus:
    """Return the tokenised texts from the cache, or build them; `verify` as for `TokenisedCorpus.prepare`."""
    return _corpus_class(spec).prepare(_with_tokenizer(spec), log, verify)


def find_cached_texts(spec: RunSpec) -> Corpus | None:
    return _corpus_class(spec).cached(_with_tokenizer(spec))


def _corpus_class(spec: RunSpec) -> type[TokenStreams] | type[FramedCorpus]:
    model: Any = spec.model
    data: Any = spec.data
    if model.task == "causal_lm":
        if data.source in LABELLED:
            hint = "model.task=causal_lm reads text or docstrings; type  data.source=text"
            raise UserError(f"data.source={data.source} has labels, and {hint}", code="conflict", key="data.source")
        return TokenStreams
    if data.source == "text":
        raise UserError("data.source=text has no labels; use csv, jsonl or parquet", code="conflict")
    return FramedCorpus


def _with_tokenizer(spec: RunSpec) -> Any:
    return spec.data.model_copy(update={"tokenizer": find_tokenizer_file(spec.model, spec.data)})
