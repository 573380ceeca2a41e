"""The language model as a plan sees it."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from paceline.data.corpora.own_tokenizer import planned_vocabulary
from paceline.data.corpora.stream import TokenStreams
from paceline.errors import UserError
from paceline.planning.formulas.shape import BlockShape, decoder_blocks
from paceline.planning.layouts import Divisible
from paceline.planning.training import TrainingSubject, numbers_of
from paceline.shapes import DecoderShape
from paceline.spec import RunSpec, Train
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
        blocks=_frozen(decoder_blocks(sizes, length), sizes, spec.train),
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


def _frozen(blocks: tuple[BlockShape, ...], sizes: DecoderShape, train: Train) -> tuple[BlockShape, ...]:
    """The blocks, of whose weights `train.groups` freezes some."""
    if not any(group.frozen for group in train.groups.values()):
        return blocks
    held = {"tokens": 0, "layers": 0, "head": 0}
    for name, numbers in sizes.named():
        first = next((group for pattern, group in train.groups.items() if fnmatchcase(name, pattern)), None)
        if first is not None and first.frozen:
            place = {"positions": "tokens", "norm": "head"}.get(name.partition(".")[0], name.partition(".")[0])
            held[place] += numbers
    embedding, layer, head = blocks
    return (
        replace(embedding, frozen_params=float(held["tokens"])),
        replace(layer, frozen_params=held["layers"] / layer.repeat),
        replace(head, frozen_params=float(held["head"])),
    )
