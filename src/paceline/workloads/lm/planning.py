"""The language model as a plan sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.data.corpora.own_tokenizer import planned_vocabulary
from paceline.data.corpora.stream import TokenStreams
from paceline.errors import UserError
from paceline.planning.formulas.shape import decoder_blocks
from paceline.planning.frozen import NamedWeight, with_frozen
from paceline.planning.layouts import Divisible
from paceline.planning.training import TrainingSubject, numbers_of
from paceline.shapes import DecoderShape
from paceline.spec import RunSpec
from paceline.workloads.lm import ENTRY


def subject(spec: RunSpec, samples: int | None, tokens: float | None) -> TrainingSubject:
    model: Any = spec.model
    data: Any = spec.data
    vocab, known, length = planned_vocabulary(data), samples, data.sequence
    if tokens is not None:
        raise UserError(f"--tokens: samples of lm have data.sequence={length} tokens; change that instead")
    found, held_out = None if samples else TokenStreams.cached(data), None
    if found is not None:
        vocab, known, held_out = found.vocab, *(-(-(len(split) - 1) // length) for split in (found.train, found.test))
    sizes = model.shape(vocab, length)
    narrow, numbers = spec.train.precision in ("bf16", "fp8"), numbers_of(spec.train)
    return TrainingSubject.of(
        spec,
        known,
        blocks=with_frozen(decoder_blocks(sizes, length), spec.train.groups, partial(_weights, sizes)),
        numbers=replace(numbers, gathered_bytes=2) if narrow else numbers,
        traits=ENTRY.traits,
        divisible=Divisible(
            splits=(sizes.heads, sizes.kv_heads, sizes.ffn),
            sequence=length if sizes.positions == "rotary" else 0,
            layers=0 if sizes.tied else sizes.layers,
        ),
        unit="tokens",
        units_per_sample=length,
        sample_bytes=16.0 * length,
        narrow_gathers=narrow,
        held_out=held_out,
    )


def _weights(sizes: DecoderShape) -> Iterator[NamedWeight]:
    return (NamedWeight(name, numbers, name.startswith("layers.")) for name, numbers in sizes.named())
