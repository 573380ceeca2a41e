"""A language model: a decoder that predicts each token of a corpus from those before it."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from paceline.config import RunSpec
from paceline.config.decoder_shape import DecoderShape
from paceline.data.corpora.documents import LMBatch, TokenStreams, Windows
from paceline.data.corpora.tokenised import CorpusWorkload
from paceline.errors import UserError, reject_value
from paceline.inference.export import write_standalone
from paceline.layout import Layout, check_context, check_experts
from paceline.parallel.context import ContextGroup
from paceline.workload import LogFn
from paceline.workloads.lm.decoder import Decoder, DecoderLayer, Mixture
from paceline.workloads.lm.sections import LMData, LMModel
from paceline.workloads.lm.standalone import ExportedDecoder

EVALUATION_TOKENS = 65_536


class LanguageModel(CorpusWorkload):
    Model = LMModel
    Data = LMData
    Corpus = TokenStreams
    draws_by_name = True
    compile_layers = True
    casts_layers = True
    has_experts = True
    shard_rules: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("tokens", "head"), "vocabulary"),
        **dict.fromkeys(("norm", "layers.*.attention_norm", "layers.*.ffn_norm"), "sequence"),
        **dict.fromkeys(("layers.*.attention", "layers.*.ffn"), "gather"),
        **{f"layers.*.attention.{name}": "column" for name in "qkv"},
        **{f"layers.*.ffn.{name}": "column" for name in ("gate", "up")},
        **dict.fromkeys(("layers.*.attention.out", "layers.*.ffn.down"), "row"),
    }

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.sequence = cast(LMData, spec.data).sequence
        self.evaluation_chunk = max(1, EVALUATION_TOKENS // self.sequence)
        shape = cast(LMModel, spec.model).shape(vocab=1, sequence=self.sequence)  # rejects too long a sequence
        if shape.experts:  # ranks of `tensor` share attention, those of `expert` the rest
            rules = {name: rule for name, rule in self.shard_rules.items() if ".ffn" not in name}
            self.shard_rules = rules  # type: ignore[misc]

    def prepare(self, log: LogFn) -> None:
        super().prepare(log)
        shape = self.shape
        log(f"model: {shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers of width {shape.width}")

    @property
    def shape(self) -> DecoderShape:
        return cast(LMModel, self.spec.model).shape(self.vocabulary.size, self.sequence)

    def model(self) -> Decoder:
        return Decoder(self.shape, cast(LMModel, self.spec.model).balance)

    def data(self, split: str) -> Windows:
        return Windows(self.corpus.train if split == "train" else self.corpus.test, self.sequence, half_only=True)

    def loss(self, model: nn.Module, batch: LMBatch) -> tuple[Tensor, Tensor]:
        return model(batch.tokens, targets=batch.targets).sum(), (batch.targets >= 0).sum()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(cast(Decoder, model).layers.values())

    def suits(self, layout: Layout) -> None:
        super().suits(layout)
        shape = cast(LMModel, self.spec.model).shape(vocab=1, sequence=self.sequence)
        sizes = {name: getattr(shape, name) for name in ("heads", "kv_heads", "ffn")}
        for name, size in sizes.items():
            if size % layout.tensor:
                near = max(n for n in range(1, layout.tensor) if not any(size % n for size in sizes.values()))
                raise _reject_axis(layout, "tensor", f"does not divide model.{name}={size}; use {near}")
        check_context(layout, "data.sequence", self.sequence)
        if layout.sequence and self.sequence // layout.context % layout.tensor:
            near = -(-self.sequence // layout.tensor) * layout.tensor
            raise _reject_axis(layout, "tensor", f"does not divide data.sequence={self.sequence}; use {near}")
        if layout.sequence and shape.positions == "learned":
            raise _reject_axis(layout, "sequence", "needs model.positions=rotary")
        check_experts(layout, "model.experts", shape.experts)
        if layout.stages > shape.layers:
            most = shape.layers // (layout.stages // layout.pipeline)
            stages = f"{layout.stages} stages for {shape.layers} layers"
            raise _reject_axis(layout, "pipeline", f"{stages}; use {most} or fewer")

    def inputs(self, batch: LMBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return batch.tokens, {"targets": batch.targets}

    def costs(self, model: nn.Module) -> tuple[float, list[float], float]:
        return cast(Decoder, model).costs(self.sequence)

    def stage(self, model: nn.Module, layers: range) -> nn.Module:
        return cast(Decoder, model).stage(layers)

    def gather_context(self, model: nn.Module, context: ContextGroup) -> None:
        decoder = cast(Decoder, model)
        decoder.context = context
        for layer in decoder.layers.values():
            block = cast(DecoderLayer, layer)
            block.attention.context = context
            if isinstance(block.ffn, Mixture):
                block.ffn.context = context

    def divide_context(self, batch: LMBatch, context: ContextGroup) -> LMBatch:
        return LMBatch(*map(context.part, batch))

    def evaluate(self, model: nn.Module, batch: LMBatch) -> Mapping[str, Tensor | float]:
        losses_B = model(batch.tokens, targets=batch.targets)
        return {"loss": losses_B.double().sum(), "count": (batch.targets >= 0).sum()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        metrics = super().metrics(sums)
        return {**metrics, "perplexity": math.exp(min(metrics["loss"], 700.0))}

    def generate(self, model: nn.Module, prompt: str, **how: Any) -> str:
        alone = self._build_standalone(model)
        alone.tokenizer = self.vocabulary.tokenizer
        return alone.write(prompt, **how)

    def export(self, model: nn.Module, folder: Path) -> None:
        self.vocabulary.copy_tokenizer(folder)
        write_standalone(folder, model.state_dict(), self._config(), "paceline.workloads.lm.standalone")

    def onnx(self, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
        return self._build_standalone(model), {"ids": torch.arange(10).view(2, 5)}

    def _build_standalone(self, model: nn.Module) -> ExportedDecoder:
        """Build what an export loads, with a copy of the weights in fp32."""
        with torch.device("meta"):
            alone = ExportedDecoder(self._config())
        alone.to_empty(device=next(model.parameters()).device).load_state_dict(model.state_dict())
        return alone.eval()

    def _config(self) -> dict[str, Any]:
        facts = {"tokens": self.vocabulary.size, "end": self.vocabulary.special, "sequence": self.sequence}
        return {**asdict(self.shape), **facts}


def _reject_axis(layout: Layout, axis: str, reason: str) -> UserError:
    return reject_value(f"parallel.{axis}", getattr(layout, axis), reason, "conflict")
