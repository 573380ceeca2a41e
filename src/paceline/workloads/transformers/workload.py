"""A model of the library transformers as a workload: causal language model or sequence classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import RunSpec
from paceline.data.corpora.documents import LMBatch, Windows
from paceline.data.corpora.labelled import LabelledCorpus, Tokens, TokenSamples
from paceline.data.corpora.tokenizer import MASK, ChosenTokenizer, encode_texts, load_tokenizer
from paceline.errors import UserError
from paceline.io.files import write_atomic
from paceline.layout import Layout
from paceline.nn.chunked_loss import NOT_COUNTED
from paceline.nn.class_metrics import class_sums
from paceline.parallel.precision import to_at_least_fp32
from paceline.trainer.init_from.weights import open_weights
from paceline.workload import LogFn, Samples, Workload
from paceline.workloads.transformers import lora, model_files
from paceline.workloads.transformers.build import (
    attach_initialise,
    build_config,
    build_transformer,
    find_dropouts,
    find_model_class,
    make_causal,
    write_adapters,
    write_transformer,
)
from paceline.workloads.transformers.model_files import CONFIG, EXTRA_FILES, TOKENIZER, find_tokenizer_file, read_config
from paceline.workloads.transformers.sections import ModelFolder, Texts

EVALUATION_TOKENS = 16_384
ONNX_TOKENS = 8
LENGTH_STEP = 32


class PaddedTexts(NamedTuple):
    """Tokens (B, S), where they are (B, S), and the class of each text (B,)."""

    tokens: Tensor
    mask: Tensor
    labels: Tensor


def pad_texts(
    texts: Sequence[np.ndarray], labels: np.ndarray, pad: int, shape: tuple[int, int] = (0, 0)
) -> PaddedTexts:
    """Pad to the longest text, and at least to `shape`; rows that are added do not count.

    An added row shows one token, because fully masked attention gives NaN.
    """
    rows, longest = max(len(texts), shape[0]), max(max(map(len, texts), default=1), shape[1])
    tokens_BS = np.full((rows, longest), pad, np.int64)
    mask_BS = np.zeros((rows, longest), np.int64)
    mask_BS[len(texts) :, 0] = 1
    labels_B = np.full(rows, NOT_COUNTED, np.int64)
    labels_B[: len(labels)] = labels
    for row, ids in enumerate(texts):
        tokens_BS[row, : len(ids)] = ids
        mask_BS[row, : len(ids)] = 1
    return PaddedTexts(*map(torch.from_numpy, (tokens_BS, mask_BS, labels_B)))


class LabelledTexts(TokenSamples):
    def __init__(self, tokens: Tokens, pad: int, longest: int) -> None:
        super().__init__(tokens, longest)
        self.pad = pad

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> PaddedTexts:
        return self._padded(ids)

    def fixed_shape_batches(self, cuts: list[tuple[np.ndarray, np.ndarray]], most: int) -> list[PaddedTexts]:
        lengths = [int(self.tokens.lengths(ids).max(initial=1)) for ids, _ in cuts]
        lengths = [min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.longest) for length in lengths]
        return [self._padded(ids, (most, length)) for (ids, _), length in zip(cuts, lengths, strict=True)]

    def _padded(self, ids: np.ndarray, shape: tuple[int, int] = (0, 0)) -> PaddedTexts:
        texts = np.split(self.tokens.gather(ids), np.cumsum(self.tokens.lengths(ids))[:-1]) if len(ids) else []
        return pad_texts(texts, np.asarray(self.tokens.labels[ids], np.int64), self.pad, shape)


class LogitsOnly(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


class TransformersModel(Workload):
    Model = ModelFolder
    Data = Texts
    unit = "tokens"
    draws_by_name = True

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.section, self.texts = cast(ModelFolder, spec.model), cast(Texts, spec.data)
        self.classifies = self.section.task == "sequence_classification"
        length = self.texts.max_length if self.classifies else self.texts.sequence
        self.evaluation_chunk = max(1, EVALUATION_TOKENS // length)
        self.score = "accuracy" if self.classifies else "-loss"  # type: ignore[misc]

    def prepare(self, log: LogFn) -> None:
        config = self._plain_config()
        self.corpus = model_files.prepare_texts(self.spec, log)
        self._check_sizes()
        if not self.classifies and make_causal(config):
            log(f"model: {config.model_type} attends both ways; as causal_lm to earlier tokens only (is_decoder)")
        if (drops := find_dropouts(config)) and not self.section.dropout:
            named = ", ".join(f"{name}={value:g}" for name, value in drops.items())
            log(f"model: dropout of the config ({named}) is off; model.dropout=true keeps it")

    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @cached_property
    def start_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return open_weights(self.section.init_from).shapes if self.section.init_from is not None else {}

    def init_from_name(self, name: str) -> str | None:
        """Return the name in the folder, which may lack adapters, or the first word of a bare model's names."""
        if name in self.start_shapes:
            return name
        if name.endswith((lora.A, lora.B)):
            return None
        bare = name.removeprefix(f"{find_model_class(self.config, self.section.task).base_model_prefix}.")
        return bare if bare in self.start_shapes else name

    @cached_property
    def corpus(self) -> model_files.Corpus:
        return model_files.prepare_texts(self.spec, verify=False)  # `prepare` has verified it, for all ranks

    def _plain_config(self) -> Any:
        return build_config(read_config(self.section, self.kept))

    @cached_property
    def config(self) -> Any:
        """The library's config, with the classes of the data and without dropout."""
        config = self._plain_config()
        if not self.section.dropout:
            for name in find_dropouts(config):
                setattr(config, name, 0.0)
        if self.kept is not None:
            return config
        config.use_cache = False
        if not self.classifies:
            make_causal(config)
        else:
            names = cast(LabelledCorpus, self.corpus).classes
            config.id2label = dict(enumerate(names))
            config.label2id = {name: number for number, name in enumerate(names)}
            config.problem_type = "single_label_classification"
            if getattr(config, "pad_token_id", None) is None:
                known = [self.corpus.tokenizer.token_to_id(name) for name in ("[PAD]", "<pad>", "<|pad|>")]
                end = getattr(config, "eos_token_id", None)
                ends = end if isinstance(end, list) else [end]
                config.pad_token_id = next((number for number in (*known, *ends) if number is not None), 0)
        return config

    def _check_sizes(self) -> None:
        text = self.config.get_text_config()
        rows, longest = text.vocab_size, getattr(text, "max_position_embeddings", None)
        if self.corpus.vocab > rows:
            sizes = f"the tokenizer has {self.corpus.vocab:,} tokens and the model rows for {rows:,}"
            raise UserError(f"{sizes}; give the tokenizer.json of the model, or a smaller data.vocab", code="conflict")
        key = "max_length" if self.classifies else "sequence"
        length = getattr(self.texts, key)
        if longest and length > longest:
            message = f"data.{key}={length} is longer than the {longest} positions of the model; use {longest}"
            raise UserError(message, code="invalid-value", key=f"data.{key}")

    def model(self) -> nn.Module:
        model = build_transformer(self.config, self.section.task)
        blocks = self.blocks(model)
        if self.section.lora_rank:
            lora.add_adapters(blocks, self.section.lora_targets, self.section.lora_rank, self.section.lora_scale)
            for name, parameter in model.named_parameters():
                child = name.rpartition(".")[0].split(".")[0]
                head = self.classifies and child not in ("", cast(Any, model).base_model_prefix)
                parameter.requires_grad = head or name.endswith((lora.A, lora.B))
        late = torch.get_default_device().type == "meta"
        attach_initialise(model, blocks, self._given(model) if late or self.kept is not None else ())
        if not late or self.kept is not None:
            model.to_empty(device="cpu")
            cast(Any, model).initialise(self.spec.train.seed)
        return model

    def kept_in_bf16(self, model: nn.Module) -> Sequence[nn.Parameter]:
        return lora.find_frozen_products(model) if read_config(self.section, self.kept).bf16 else ()

    def _given(self, model: nn.Module) -> set[str]:
        """Return the parameters that are read later, from `model.init_from` or a checkpoint."""
        if self.kept is not None:
            return {name for name, _ in model.named_parameters()}
        shapes = self.start_shapes
        return {n for n, p in model.named_parameters() if shapes.get(self.init_from_name(n) or "") == tuple(p.shape)}

    def data(self, split: str) -> Samples:
        tokens: Any = self.corpus.train if split == "train" else self.corpus.test
        if self.classifies:
            return LabelledTexts(tokens, self.config.pad_token_id, self.texts.max_length)
        return Windows(tokens, self.texts.sequence)

    def suits(self, layout: Layout) -> None:
        for axis in ("tensor", "pipeline"):
            if getattr(layout, axis) > 1:
                given = f"parallel.{axis}={getattr(layout, axis)}"
                raise UserError(f"{given}: not supported; use parallel.strategy=fsdp", code="not-supported")

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        if self.classifies:
            return self._class_losses(model, batch)[1].sum(), (batch.labels >= 0).sum()
        return self._token_losses(model, batch).sum(), (batch.targets >= 0).sum()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        if not self.classifies:
            return {"loss": self._token_losses(model, batch).double().sum(), "count": (batch.targets >= 0).sum()}
        logits_BC, losses_B = self._class_losses(model, batch)
        sums = class_sums(logits_BC, batch.labels)
        return {"loss": losses_B.double().sum(), "count": len(batch.labels), **sums}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        metrics = super().metrics(sums)
        return metrics if self.classifies else {**metrics, "perplexity": math.exp(min(metrics["loss"], 700.0))}

    def _token_losses(self, model: nn.Module, batch: LMBatch) -> Tensor:
        logits_TV = to_at_least_fp32(model(input_ids=batch.tokens, use_cache=False).logits.flatten(0, 1))
        return F.cross_entropy(logits_TV, batch.targets.flatten(), ignore_index=NOT_COUNTED, reduction="none")

    def _class_losses(self, model: nn.Module, batch: PaddedTexts) -> tuple[Tensor, Tensor]:
        logits_BC = to_at_least_fp32(model(input_ids=batch.tokens, attention_mask=batch.mask).logits)
        return logits_BC, F.cross_entropy(logits_BC, batch.labels, ignore_index=NOT_COUNTED, reduction="none")

    def keep(self, folder: Path) -> None:
        """Write all that `from_pretrained` reads beside the weights."""
        write_atomic(folder / CONFIG, self.config.to_json_string(use_diff=False))
        own = find_tokenizer_file(self.section, self.texts)
        text = own.read_text(encoding="utf-8") if own is not None else self.corpus.tokenizer.to_str()
        write_atomic(folder / TOKENIZER, text)
        for name in EXTRA_FILES:
            if own is not None and (file := own.with_name(name)).is_file():
                write_atomic(folder / name, file.read_bytes())

    def classes(self) -> Sequence[str]:
        if not self.classifies:
            return ()
        return [str(name) for _, name in sorted(self.config.id2label.items())]

    def encode(self, inputs: Sequence[Any]) -> PaddedTexts:
        if not self.classifies:
            hint = "to generate text, type  paceline export RUN --out FOLDER  and use transformers"
            raise UserError(f"model.task=causal_lm has no classes to predict; {hint}", code="not-supported")
        found = encode_texts(*self._tokenizer, [str(text) for text in inputs], framed=True)
        texts = np.split(found.ids.astype(np.int64), np.cumsum(found.lengths)[:-1])
        return pad_texts(texts, np.zeros(len(texts), np.int64), self.config.pad_token_id)

    @cached_property
    def _tokenizer(self) -> ChosenTokenizer:
        kept = find_tokenizer_file(self.section, self.texts) if self.kept is None else self.kept / TOKENIZER
        data = self.texts.model_copy(update={"tokenizer": kept})
        return load_tokenizer(data, (), MASK, self.texts.max_length, False, lambda line: None)

    def predict(self, model: nn.Module, batch: PaddedTexts) -> Mapping[str, Tensor]:
        logits_BC = self._class_losses(model, batch)[0]
        return {"probabilities": logits_BC.softmax(1), "logits": logits_BC}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write a folder for `from_pretrained` with adapters merged, and beside it the adapters for PEFT."""
        assert self.kept is not None, "of a run that is opened"
        write_transformer(model, self.config, self.kept, folder)
        if self.section.lora_rank:
            write_adapters(model, self.section, folder / "adapter")

    def onnx(self, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
        tokens = torch.arange(2 * ONNX_TOKENS).view(2, -1) % self.config.get_text_config().vocab_size
        masked = {"attention_mask": torch.ones_like(tokens)} if self.classifies else {}
        return LogitsOnly(model), {"input_ids": tokens, **masked}
