"""A model of the library transformers as a workload: every task of `TASKS`, on one path."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import RunSpec
from paceline.data.corpora.tokenizer import MASK, ChosenTokenizer, encode_texts, load_tokenizer
from paceline.data.files import invalid_data
from paceline.data.prefetch import move_batch
from paceline.errors import UserError, reject_value
from paceline.inference.trained_model import StoredModel
from paceline.io.files import read_json, write_atomic, write_json
from paceline.layout import Layout, check_experts
from paceline.nn.chunked_loss import NOT_COUNTED
from paceline.nn.class_metrics import class_sums
from paceline.nn.nf4 import PackedTarget
from paceline.parallel.precision import HALF, autocast, to_at_least_fp32
from paceline.trainer.init_from import open_weights
from paceline.workload import LogFn, Samples, Workload, ignore_log
from paceline.workloads.transformers import build, lora, model_files
from paceline.workloads.transformers import samples as kinds
from paceline.workloads.transformers.chat import PACKABLE, TEMPLATE, ChatCorpus, ChatEncoder, ChatTemplate
from paceline.workloads.transformers.context import check_model_context, divide_context, gather_context
from paceline.workloads.transformers.device import PackedTexts, call_on_device, compute_losses_in_head
from paceline.workloads.transformers.experts import NUMBERED_TWICE, ExpertMatrix, find_expert_matrices
from paceline.workloads.transformers.images import PixelFormat
from paceline.workloads.transformers.model_files import TOKENIZER, find_dropouts, find_tokenizer_file, read_config
from paceline.workloads.transformers.pairs import TextFrame, encode_pieces, encode_tagged
from paceline.workloads.transformers.samples import Batch, Conversations, MaskRule, pad_rows, pad_texts
from paceline.workloads.transformers.sections import CONFIG, PREPROCESSOR, TASKS, ModelFolder, Texts

EVALUATION_TOKENS = 16_384
ONNX_TOKENS = 8
GENERATION = "generation.json"
TRIED_TEXTS = 4


class TransformersModel(Workload):
    Model = ModelFolder
    Data = Texts
    unit = "tokens"
    draws_by_name = casts_layers = True
    packing: PackedTexts | None = None

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.section, self.texts = cast(ModelFolder, spec.model), cast(Texts, spec.data)
        self.task = TASKS[self.section.task]
        self.of_images = self.task.sources == ("images",)
        self.evaluation_chunk = max(1, EVALUATION_TOKENS // getattr(self.texts, self.task.length))
        self.score = "accuracy" if self.task.classes else "-loss"  # type: ignore[misc]
        self.unit = "" if self.of_images else "tokens"  # type: ignore[misc]
        self.chunks_loss = self.section.task in ("causal_lm", "masked_lm", "seq2seq_lm")  # type: ignore[misc]

    def prepare(self, log: LogFn) -> None:
        config = self._plain_config()
        build.find_model_class(config, self.section.task)
        self.corpus = model_files.prepare_data(self.spec, log)
        self._check_sizes()
        if self.section.quantize != "none" and self.section.init_from is None:
            reason = "random weights are not worth keeping; type  model.init_from=FOLDER"
            raise reject_value("model.quantize", self.section.quantize, reason, "conflict")
        if isinstance(self.corpus, ChatCorpus):
            samples = Conversations(self.corpus.train, self.texts.sequence, self.packs)
            kind = "several in each" if self.packs else "one in each"
            if self.texts.pack and not self.packs:
                kind += f": {self.config.model_type} is not known to tell several apart"
            log(f"data: conversations in {len(samples):,} sequences, {kind}")
        if self.section.task == "causal_lm" and build.make_causal(config):
            log(f"model: {config.model_type} attends both ways; as causal_lm to earlier tokens only (is_decoder)")
        if drops := self._list_switched_off(config):
            named = ", ".join(f"{name}={value:g}" for name, value in drops.items())
            why = "model.dropout=true keeps it" if not self.section.dropout else "its draws depend on the layout"
            log(f"model: dropout of the config ({named}) is off; {why}")
        if self.section.dropout and config.model_type.startswith("deberta"):
            log(f"model: {build.SHARED_DROPOUT} is off: it is one draw for all samples, which depends on the layout")

    def fingerprint(self) -> str:
        return str(self.corpus.fingerprint)

    @cached_property
    def start_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return open_weights(self.section.init_from).shapes if self.section.init_from is not None else {}

    def init_from_name(self, name: str) -> str | None:
        """Return the name in the folder, which may be older or lack the first word; None of an adapter."""
        if name in self.start_shapes:
            return name
        return None if name.endswith((lora.A, lora.B)) else self._renamed.get(name, name)

    @cached_property
    def _renamed(self) -> Mapping[str, str]:
        return build.find_renamed(build.build_transformer(self.config, self.section.task), self.start_shapes)

    @cached_property
    def _expert_matrices(self) -> Mapping[str, ExpertMatrix]:
        names = [name for name in self.start_shapes if NUMBERED_TWICE.search(name)]
        return find_expert_matrices(build.build_transformer(self.config, self.section.task), names) if names else {}

    @cached_property
    def corpus(self) -> Any:
        return model_files.prepare_data(self.spec, verify=False)  # `prepare` has verified it, for all ranks

    def _plain_config(self) -> Any:
        return build.build_sized_config(read_config(self.section, self.kept))

    @cached_property
    def config(self) -> Any:
        """The library's config, with the classes of the data, and without dropout that is off."""
        config = self._plain_config()
        for name in self._list_switched_off(config):
            setattr(config, name, 0.0)
        if self.kept is not None:
            return config
        config.use_cache = False
        if self.section.task == "causal_lm":
            build.make_causal(config)
        if self.task.classes:
            config.id2label = dict(enumerate(self.corpus.classes))
            config.label2id = {name: number for number, name in enumerate(self.corpus.classes)}
        if self.section.task == "sequence_classification":
            config.problem_type = "single_label_classification"
        if not self.of_images and self.task.length == "max_length" and getattr(config, "pad_token_id", None) is None:
            known = [self.corpus.tokenizer.token_to_id(name) for name in ("[PAD]", "<pad>", "<|pad|>")]
            end = getattr(config, "eos_token_id", None)
            ends = end if isinstance(end, list) else [end]
            config.pad_token_id = next((number for number in (*known, *ends) if number is not None), 0)
        return config

    @property
    def packs(self) -> bool:
        return self.texts.pack and self.config.model_type in PACKABLE

    def _list_switched_off(self, config: Any) -> dict[str, float]:
        found, all_off = find_dropouts(config.to_dict()), not self.section.dropout
        return {name: p for name, p in found.items() if all_off or any(part in name for part in build.UNKEYED)}

    def _check_sizes(self) -> None:
        if self.of_images:
            return
        text = self.config.get_text_config()
        rows, longest = text.vocab_size, getattr(text, "max_position_embeddings", None)
        if self.corpus.vocab > rows:
            sizes = f"the tokenizer has {self.corpus.vocab:,} tokens and the model rows for {rows:,}"
            raise UserError(f"{sizes}; give the tokenizer.json of the model, or a smaller data.vocab", code="conflict")
        key, length = self.task.length, getattr(self.texts, self.task.length)
        if longest and length > longest:
            reason = f"longer than the {longest} positions of the model; use {longest}"
            raise reject_value(f"data.{key}", length, reason, "invalid-value")
        if self.section.task == "masked_lm":
            _ = self.mask_rule  # rejects a tokenizer without a mask before ranks start

    @cached_property
    def mask_rule(self) -> MaskRule:
        tokenizer = self.corpus.tokenizer if self.kept is None else self.tokenizer
        found = (tokenizer.token_to_id(name) for name in MASK.names)
        mask = next((number for number in found if number is not None), None)
        if mask is None:
            reason = f"the tokenizer has none of {', '.join(MASK.names)}; give another as  data.tokenizer"
            raise invalid_data(f"model.task=masked_lm: {reason}", "data.tokenizer")
        special, vocab = (self.corpus.special, self.corpus.vocab) if self.kept is None else (-1, 1)
        return MaskRule(self.texts.masked, mask, special, vocab)

    @property
    def start_token(self) -> int:
        """The token that a decoder begins with."""
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        return next((n for name in names if (n := getattr(self.config, name, None)) is not None), 0)

    @cached_property
    def pixels(self) -> PixelFormat:
        folder = self.kept or read_config(self.section).path.parent
        return PixelFormat.of(self.config, folder / PREPROCESSOR)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return build.find_blocks(model)

    def _build_empty(self) -> nn.Module:
        model = build.build_transformer(self.config, self.section.task)
        blocks = self.blocks(model)
        if self.section.quantize != "none":
            lora.quantise_blocks(blocks)
        if self.section.lora_rank:
            lora.add_adapters(blocks, self.section.lora_targets, self.section.lora_rank, self.section.lora_scale)
            for name, parameter in model.named_parameters():
                child = name.rpartition(".")[0].split(".")[0]
                head = self.task.classes and child not in ("", cast(Any, model).base_model_prefix)
                parameter.requires_grad = head or name.endswith((lora.A, lora.B))
        return model

    def model(self) -> nn.Module:
        model = self._build_empty()
        blocks = self.blocks(model)
        late = torch.get_default_device().type == "meta"
        build.attach_initialise(model, blocks, self._given(model) if late or self.kept is not None else ())
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
        targets = self.init_from_targets(model)
        given = {name for name, p in targets.items() if shapes.get(self.init_from_name(name) or "") == tuple(p.shape)}
        lacking = {matrix.tensor for name, matrix in self._expert_matrices.items() if name not in given}
        return given | {matrix.tensor for matrix in self._expert_matrices.values()} - lacking

    def init_from_targets(self, part: nn.Module) -> Mapping[str, Any]:
        """Return the tensors of a part of the model; weights in 4 bits as what is read into them."""
        tensors = dict(super().init_from_targets(part))
        own = self.start_shapes
        held = {name: one for name, one in self._expert_matrices.items() if one.tensor in tensors}
        matrices = {name: one.select(tensors[one.tensor]) for name, one in held.items()}
        tensors = {name: t for name, t in tensors.items() if name not in {one.tensor for one in held.values()}}
        for name, tensor in tensors.items():
            if tensor.dtype == torch.uint8 and own.get(self.init_from_name(name) or "") != tensor.shape:
                tensors[name] = PackedTarget(tensor)
        return tensors | matrices

    def data(self, split: str) -> Samples:
        if self.of_images:
            return cast(Samples, self.corpus.samples(split, self.pixels))
        part = getattr(self.corpus, split)
        match self.section.task:
            case "causal_lm" if isinstance(self.corpus, ChatCorpus):
                return Conversations(part, self.texts.sequence, self.packs)
            case "causal_lm":
                return kinds.CausalWindows(part, self.texts.sequence)
            case "masked_lm":
                return kinds.MaskedWindows(part, self.texts.sequence, self.mask_rule)
            case "sequence_classification":
                return kinds.LabelledTexts(part, self.config.pad_token_id, self.texts.max_length)
        decoder = (self.start_token, self.config.eos_token_id) if self.section.task == "seq2seq_lm" else None
        return kinds.PairedTexts(part, self.config.pad_token_id, decoder)

    def suits(self, layout: Layout) -> None:
        adapted = self.section.lora_rank or self.section.quantize != "none"
        for axis in ("tensor", "pipeline"):
            if adapted and getattr(layout, axis) > 1:
                reason = "not supported with adapters; use parallel.strategy=fsdp"
                raise reject_value(f"parallel.{axis}", getattr(layout, axis), reason)
        experts = {getattr(self._plain_config(), name, 0) for name in ("num_local_experts", "num_experts")}
        check_experts(layout, "num_experts", max(experts) or 0)
        if layout.context > 1:
            check_model_context(layout, self.config, self.section.task, self.texts.sequence)

    gather_context = staticmethod(gather_context)
    divide_context = staticmethod(divide_context)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | int]:
        count = (batch.labels >= 0).sum()
        if self.chunked_loss:
            losses_B = compute_losses_in_head(partial(self._call, model, batch), model, batch.labels)
            if losses_B is not None:
                return losses_B.sum(), count
            self.chunked_loss = False
        return self._losses(model, batch)[1].sum(), count

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor | float]:
        logits_NC, losses_N = self._losses(model, batch)
        sums = class_sums(logits_NC, batch.labels.flatten()) if self.task.classes else {}
        return {"loss": losses_N.double().sum(), "count": (batch.labels >= 0).sum(), **sums}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        metrics = super().metrics(sums)
        return metrics if self.task.classes else {**metrics, "perplexity": math.exp(min(metrics["loss"], 700.0))}

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits and losses of all predictions, a row each; what has no label has the loss 0."""
        logits_NC = to_at_least_fp32(self._call(model, batch).logits.flatten(0, -2))
        return logits_NC, F.cross_entropy(logits_NC, batch.labels.flatten(), ignore_index=NOT_COUNTED, reduction="none")

    def _call(self, model: nn.Module, batch: Batch) -> Any:
        options = {} if self.of_images or self.task.classes else {"use_cache": False}
        return call_on_device(model, batch.inputs, self.packing, **options)

    def before_recording(self, model: nn.Module, samples: Any, device: torch.device) -> None:
        """Let texts lie end to end, without padding, if the model finds the same in them."""
        precision = self.spec.train.precision
        whole_texts = self.section.task == "sequence_classification"
        if not whole_texts or precision not in HALF or find_dropouts(self.config.to_dict()):
            return
        few = np.arange(min(len(samples), TRIED_TEXTS))
        padded, packing = move_batch(samples.batch(few, few), device), PackedTexts(model, self.blocks(model))
        for samples.first_place in (0, self.config.pad_token_id + 1):  # where some count those of a text from
            (packed,) = samples.pack([(few, few)], len(few))
            with autocast(precision, device):
                samples.packed = packing.agrees(model, move_batch(packed, device).inputs, padded.inputs)
            if samples.packed:
                break
        self.packing = packing if samples.packed else None

    def keep(self, folder: Path) -> None:
        """Write all that `from_pretrained` reads beside the weights."""
        write_atomic(folder / CONFIG, self.config.to_json_string(use_diff=False))
        if self.of_images:
            write_atomic(folder / PREPROCESSOR, json.dumps(self.pixels.to_json(), indent=1))
            return
        own = find_tokenizer_file(self.section, self.texts)
        text = own.read_text(encoding="utf-8") if own is not None else self.corpus.tokenizer.to_str()
        write_atomic(folder / TOKENIZER, text)
        for name in model_files.EXTRA_FILES:
            if own is not None and (file := own.with_name(name)).is_file():
                write_atomic(folder / name, file.read_bytes())
        if self.texts.template is not None:
            write_atomic(folder / TEMPLATE, self.texts.template.read_bytes())
        if self.section.task == "causal_lm":
            chats = isinstance(self.corpus, ChatCorpus)
            data = self.texts.model_copy(update={"tokenizer": folder / TOKENIZER})
            chosen = ChosenTokenizer(self.corpus.tokenizer, self.corpus.special)
            ends = ChatEncoder(chosen, ChatTemplate.find(data)).find_ends() if chats else {self.corpus.special}
            write_json(folder / GENERATION, {"special": self.corpus.special, "ends": sorted(ends), "chats": chats})

    def classes(self) -> Sequence[str]:
        return [str(name) for _, name in sorted(self.config.id2label.items())] if self.task.classes else ()

    def encode(self, inputs: Sequence[Any]) -> Batch:
        if self.of_images:
            pixels = torch.stack([self.pixels.read(value) for value in inputs])
            return Batch({"pixel_values": pixels}, torch.zeros(len(inputs), dtype=torch.long))
        if self.section.task == "causal_lm":
            hint = 'to generate text, type  paceline sample RUN "PROMPT"'
            raise UserError(f"model.task=causal_lm has no classes to predict; {hint}", code="not-supported")
        if self.section.task == "token_classification":
            words = [value.split() if isinstance(value, str) else list(map(str, value)) for value in inputs]
            rows = [(row or [""], ["word"] * max(1, len(row))) for row in words]
            texts, first = encode_tagged(self._chosen, rows, {"word": 0})
            return Batch(pad_texts(texts, self.config.pad_token_id), pad_rows(first, NOT_COUNTED))
        pad, nothing = getattr(self.config, "pad_token_id", None) or 0, torch.zeros(len(inputs), dtype=torch.long)
        if self.section.task == "masked_lm":
            mask = self.mask_rule.mask
            parts = encode_pieces(self._chosen, [str(text).split(self.tokenizer.id_to_token(mask)) for text in inputs])
            joined = [[token for piece in row for token in (mask, *piece)][1:] for row in parts]
            return Batch(pad_texts([*map(TextFrame.of(self._chosen).mark, joined)], pad), nothing)
        found = encode_texts(*self._chosen, [str(text) for text in inputs], framed=True)
        texts = np.split(found.ids.astype(np.int64), np.cumsum(found.lengths)[:-1])
        return Batch(pad_texts(texts, pad), nothing)

    @cached_property
    def _chosen(self) -> ChosenTokenizer:
        kept = find_tokenizer_file(self.section, self.texts) if self.kept is None else self.kept / TOKENIZER
        data = self.texts.model_copy(update={"tokenizer": kept})
        return load_tokenizer(data, (), MASK, getattr(self.texts, self.task.length), False, ignore_log)

    @property
    def tokenizer(self) -> Any:
        return self._chosen.tokenizer

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        return PREDICTIONS.get(self.section.task, classify)(self, model, batch)

    def has(self, method: str) -> bool:
        return super().has(method) and (method != "generate" or self.section.task == "causal_lm")

    @torch.no_grad()
    def generate(self, model: nn.Module, prompt: str, **how: Any) -> str:
        """Return a prompt and what follows; after training on conversations, the answer alone."""
        assert self.kept is not None, "of a run that is opened"
        facts = read_json(self.kept / GENERATION)
        data = self.texts.model_copy(update={"tokenizer": self.kept / TOKENIZER})
        chosen = ChosenTokenizer(self._chosen.tokenizer, facts["special"])
        encoder = ChatEncoder(chosen, ChatTemplate.find(data) if facts["chats"] else None)
        plain = chosen.tokenizer.encode(prompt, add_special_tokens=False).ids
        ids = encoder.encode_prompt(prompt) if facts["chats"] else [facts["special"], *plain]
        if longest := getattr(self.config.get_text_config(), "max_position_embeddings", None):
            ids = ids[-max(1, longest - how["tokens"]) :]
        written = continue_tokens(model, ids, facts["ends"], **how)
        return ("" if facts["chats"] else prompt) + str(chosen.tokenizer.decode(written))

    def export_by_tensor(self, stored: StoredModel, folder: Path) -> None:
        """Write a folder for `from_pretrained` with adapters merged, and beside it the adapters for PEFT."""
        assert self.kept is not None, "of a run that is opened"
        model = self._build_empty()
        stored.check_fit(model.state_dict())
        build.write_transformer(model, stored.weights, self.config, self.kept, folder)
        if self.section.lora_rank:
            build.write_adapters(model, stored.weights, self.section, folder / "adapter")

    def onnx(self, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
        cast(Any, model).config.use_cache = False
        model.register_forward_hook(lambda module, given, found: found.logits)
        if self.of_images:
            shape = (2, self.pixels.channels, self.pixels.height, self.pixels.width)
            return model, {"pixel_values": torch.zeros(shape)}
        tokens = torch.arange(2 * ONNX_TOKENS).view(2, -1) % self.config.get_text_config().vocab_size
        inputs = {"input_ids": tokens}
        if self.section.task != "causal_lm":
            inputs["attention_mask"] = torch.ones_like(tokens)
        if self.section.task == "seq2seq_lm":
            inputs["decoder_input_ids"] = tokens
        return model, inputs


def classify(work: TransformersModel, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
    logits = to_at_least_fp32(model(**batch.inputs).logits)
    return {"probabilities": logits.softmax(-1), "logits": logits}


def tag_words(work: TransformersModel, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    """Return the tags of each text, as many as it has words that are not cut."""
    found = model(**batch.inputs).logits.argmax(-1)
    names, rows = work.classes(), zip(found.tolist(), (batch.labels != NOT_COUNTED).tolist(), strict=True)
    return {"tags": np.array([" ".join(names[n] for n, own in zip(*row, strict=True) if own) for row in rows])}


def fill_masks(work: TransformersModel, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    """Return each text with the likeliest token in place of each mask, and how probable they are on average."""
    probabilities = to_at_least_fp32(model(**batch.inputs).logits).softmax(-1)
    best, ids = probabilities.max(-1), batch.inputs["input_ids"]
    masked = ids == work.mask_rule.mask
    filled = torch.where(masked, best.indices, ids)
    sure = (best.values * masked).sum(1) / masked.sum(1).clamp(min=1)
    return {"filled": _decode(work, filled, batch.inputs["attention_mask"]), "sure": sure}


def write_targets(work: TransformersModel, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    """Return what the decoder writes, always the likeliest token, up to data.max_length tokens."""
    config, start = work.config, work.start_token
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id or 0}
    most = {"max_new_tokens": work.texts.max_length, "do_sample": False, "num_beams": 1}
    ids = _generate(model, batch.inputs, decoder_start_token_id=start, **ends, **most)[:, 1:]
    return {"text": _decode(work, ids, torch.ones_like(ids))}


def continue_tokens(
    model: nn.Module, ids: list[int], ends: list[int], tokens: int, temperature: float, top_k: int, seed: int
) -> list[int]:
    """Return what the model draws after these tokens, without the one that ends it."""
    given = torch.tensor([ids], device=next(model.parameters()).device)
    inputs = {"input_ids": given, "attention_mask": torch.ones_like(given)}
    draw = {"do_sample": True, "temperature": temperature, "top_k": top_k, "max_new_tokens": tokens}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found = _generate(model, inputs, **draw, eos_token_id=ends, pad_token_id=ends[0])
    written: list[int] = found[0, len(ids) :].tolist()
    return written[:-1] if written and written[-1] in ends else written


def _generate(model: nn.Module, inputs: Mapping[str, Tensor], **how: Any) -> Tensor:
    from transformers import GenerationConfig

    library: Any = model
    found: Tensor = library.generate(**inputs, generation_config=GenerationConfig(use_cache=True, **how))
    return found


def _decode(work: TransformersModel, ids: Tensor, mask: Tensor) -> np.ndarray:
    rows = [[n for n, own in zip(*row, strict=True) if own] for row in zip(ids.tolist(), mask.tolist(), strict=True)]
    return np.array([work.tokenizer.decode(row) for row in rows])


PREDICTIONS = {"masked_lm": fill_masks, "seq2seq_lm": write_targets, "token_classification": tag_words}
"""Of the other tasks, `classify`."""
