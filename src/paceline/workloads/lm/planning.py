"""The cost model of the language model."""

from typing import Any

from paceline.config import RunSpec
from paceline.data.corpora.documents import TokenStreams
from paceline.data.corpora.tokenizer import estimate_vocabulary_size
from paceline.io.arguments import option_error
from paceline.planner.candidates import SplitOptions
from paceline.planner.formulas.shape import build_decoder_blocks
from paceline.planner.model_inputs import apply_frozen_groups
from paceline.planner.training_cost import TrainingCostModel
from paceline.workloads.lm import ENTRY


def build_lm_cost_model(spec: RunSpec, samples: int | None, tokens: float | None) -> TrainingCostModel:
    model: Any = spec.model
    data: Any = spec.data
    vocab, known, length = estimate_vocabulary_size(data), samples, data.sequence
    if tokens is not None:
        raise option_error("--tokens", f"a sample has data.sequence={length}; change that", "not-supported")
    found, held_out = None if samples else TokenStreams.cached(data), None
    if found is not None:
        vocab, known, held_out = found.vocab, *(-(-(len(split) - 1) // length) for split in (found.train, found.test))
    sizes = model.shape(vocab, length)

    def build() -> Any:
        from paceline.workloads.lm.decoder import Decoder

        return Decoder(sizes)

    return TrainingCostModel.of(
        spec,
        known,
        blocks=apply_frozen_groups(build_decoder_blocks(sizes, length), spec.train.groups, build),
        traits=ENTRY.traits,
        splits=SplitOptions(
            splits=() if sizes.experts else (sizes.heads, sizes.kv_heads, sizes.ffn),
            experts=sizes.experts,
            sequence=length if sizes.positions == "rotary" else 0,
            context=length,
            layers=sizes.layers,
        ),
        unit="tokens",
        units_per_sample=length,
        sample_bytes=16.0 * length,
        narrow_gathers=spec.train.precision in ("bf16", "fp8"),
        held_out=held_out,
    )
