"""What a run file asks to be priced: the shape of its model, its samples, its types and its length.

Built-in workloads have a closed form, and nothing of torch is imported. A user's own module is measured on fake tensors
(`fake.py`). What the run file does not say, and the data are not there to say, is assumed and listed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import UserError
from paceline.planning.formulas.shape import LAUNCHES_PER_OPERATION, Block, Matmul, ModelShape
from paceline.planning.formulas.spread import NUMBERS, Numbers
from paceline.planning.topics import Counted, counted, passes_of
from paceline.spec import RunSpec

Blocks = tuple[Block, ...]

MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1, "lars": 1}
"""Optimiser states per parameter."""
TYPES = {"fp32": "fp32", "fp64": "fp64", "bf16": "amp_bf16", "fp16": "amp_fp16", "fp8": "amp_fp8"}
OPERATIONS_PER_LENGTH = 2
"""For each distinct length in a batch, where attention goes length by length."""
DROPOUT_PASSES = 33
"""Over the elements that are dropped, to draw them from the key of each text."""
DROPOUT_OPERATIONS = 35
RESIDUAL_BYTES = 4.0
"""Of an element that layers hand on: half precision is for what goes on within them."""
AG_NEWS = (120_000, 48.0, 18.0)
"""Texts of the original training set, their mean length in tokens and its standard deviation."""
USUAL_FILL = 0.5
"""Of the longest sample, where nothing is known of the data."""
SPREAD_SIGMAS = 3.0
"""How far the fullest batch of a run is above the mean one."""


@dataclass(frozen=True)
class Subject:
    """All that prices depend on besides layout and cluster."""

    name: str
    workload: str
    blocks: Blocks
    """Of a sample of mean length."""
    global_batch: int
    numbers: Numbers
    steps: int | None
    """Optimiser steps of the whole run; None where the number of samples is not known."""
    samples: int | None = None
    unit: str = "samples"
    units_per_sample: float = 1.0
    sample_bytes: float = 0.0
    """Read from storage or host memory for each sample."""
    splits: tuple[int, ...] = ()
    """Numbers that the ranks of `tensor` must divide; empty where the model cannot be divided."""
    sequence: int = 0
    """Positions that the ranks of `tensor` may divide among them; 0 where they cannot."""
    layers: int = 0
    """Layers that a pipeline can divide; 0 where it cannot."""
    longest_ratio: float = 1.0
    """Longest sample over the mean one."""
    varies: float = 0.0
    """Standard deviation of the length over its mean; 0 where unknown or constant."""
    lengths: float = 1.0
    """Distinct lengths in a very large batch, where attention goes length by length in fp32; 1 where it does not."""
    recomputes: bool = True
    """Has repeated layers, which activation checkpointing computes again."""
    records: bool = False
    """One CUDA device runs a step of one pass, without recomputation, as a recorded graph of compiled kernels."""
    compiles: bool = False
    """CUDA devices compile each layer, under any layout."""
    narrow_gathers: bool = False
    """Sharded layers are cast before they are gathered; embedding and head are not, and stay gathered."""
    counts: Counted | None = None
    """Of a topic model: a step is a pass over all its documents, and ranks divide nothing but those."""
    assumptions: tuple[str, ...] = field(default=())

    @property
    def params(self) -> float:
        return sum(b.repeat * b.params for b in self.blocks)

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward."""
        return 3 * sum(b.repeat * b.flops for b in self.blocks)

    def fullest(self, micro_batch: float) -> float:
        """The largest of all batches over the mean one: samples differ in length, and batches less than samples."""
        if not self.varies:
            return self.longest_ratio
        return min(self.longest_ratio, 1 + SPREAD_SIGMAS * self.varies / math.sqrt(max(1.0, micro_batch)))

    def launched(self, micro_batch: float, half_on_gpu: bool) -> Blocks:
        """The blocks with the kernels that a batch of this size launches."""
        if self.lengths <= 1 or half_on_gpu:
            return self.blocks
        distinct = self.lengths * (1 - (1 - 1 / self.lengths) ** micro_batch)
        more = LAUNCHES_PER_OPERATION * OPERATIONS_PER_LENGTH * max(0.0, distinct - 1)
        return tuple(replace(b, kernels=b.kernels + more) if b.attention else b for b in self.blocks)


def subject_of(spec: RunSpec, samples: int | None = None, tokens: float | None = None) -> Subject:
    """The subject of a run file; `samples` and `tokens` (mean, per sample) replace what is read or assumed."""
    for name, value in (("samples", samples), ("tokens", tokens)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name}: {value:g} is not possible; give more than 0")
    match spec.workload:
        case "classifier":
            return _classifier(spec, samples, tokens)
        case "lm":
            return _language_model(spec, samples, tokens)
        case "topics":
            return _topics(spec, samples, tokens)
        case _:
            from paceline.planning.fake import measured

            return measured(spec, samples)


def numbers_of(spec: RunSpec) -> Numbers:
    """Types as the loop uses them: weights in fp32 (fp64), cast for the products; shards travel as they are kept."""
    kind = NUMBERS[TYPES[spec.train.precision]]
    moments = MOMENTS[spec.train.optimizer]
    if spec.train.optimizer == "sgd" and not spec.train.momentum:
        moments = 0
    return replace(kind, state_bytes=moments * kind.weight_bytes, gathered_bytes=kind.weight_bytes)


def steps_of(spec: RunSpec, samples: int | None) -> int | None:
    if spec.train.steps:
        return spec.train.steps
    if samples is None:
        return None
    return (spec.train.epochs or 1) * math.ceil(samples / spec.train.global_batch)


def _records(spec: RunSpec) -> bool:
    return spec.train.compile != "off" and spec.train.optimizer in ("adamw", "sgd")


def _classifier(spec: RunSpec, samples: int | None, tokens: float | None) -> Subject:
    model, data = _section(spec, "model"), _section(spec, "data")
    longest, vocab, classes = data.max_length, data.vocab, 4
    assumptions = []
    known, mean, deviation = samples, tokens, 0.0
    found = None if samples and tokens else _corpus(data)
    if found is not None:
        lengths = found.train.offsets[1:] - found.train.offsets[:-1]
        known, mean = known or len(found.train), mean or float(lengths.mean())
        deviation, longest = float(lengths.std()), int(lengths.max())
        vocab, classes = found.vocab, len(found.classes)
    elif data.source == "ag_news":
        count, usual, deviation = AG_NEWS
        known, mean = known or (min(count, data.limit) if data.limit else count), mean or min(usual, longest)
        assumptions.append(f"{known:,} texts of {mean:.0f} tokens on average, as in the original AG News")
    elif mean is None:
        mean = max(1.0, USUAL_FILL * longest)
        assumptions.append(f"texts of {mean:.0f} tokens on average, half of data.max_length; the data were not read")
    if known is None and not spec.train.steps:
        assumptions.append("the number of texts is not known, so no hours; say it with  --samples N")
    mean = min(mean or longest, longest)
    if mean == longest:  # all alike
        deviation = 0.0
    length = max(1, round(mean))
    shape = ModelShape(model.layers, model.width, model.heads, length, vocab, model.ffn, causal=False, classes=classes)
    w, f = model.width, model.ffn
    embedding, layer, head = shape.blocks
    kinds = numbers_of(spec)
    wide = max(0.0, RESIDUAL_BYTES / kinds.element_bytes - 1)
    masks = length * w if wide else 0.0  # where layers are compiled, they are made again
    drops = DROPOUT_PASSES * length * w if model.dropout else 0.0
    launches = LAUNCHES_PER_OPERATION * DROPOUT_OPERATIONS / 3 if model.dropout else 0.0  # in the forward pass alone
    blocks = (
        replace(
            embedding,
            params=(vocab + data.max_length) * w,
            eager_elements=drops,
            kernels=embedding.kernels + launches,
        ),
        replace(
            layer,
            params=4 * w * w + 2 * w * f + f + w + 4 * w,
            attention=layer.attention and replace(layer.attention, packed=True),
            # two norms read the stream and two sums read and write it; the norms keep what they read
            moved_elements=layer.moved_elements + 6 * wide * length * w,
            saved_whole_elements=layer.saved_whole_elements + 2 * wide * length * w - masks,
            eager_saved_elements=masks,
            eager_elements=2 * drops,
            kernels=layer.kernels + 2 * launches,
        ),
        replace(head, params=w * classes + classes + 2 * w),
    )
    return Subject(
        name=spec.name,
        workload=spec.workload,
        blocks=blocks,
        global_batch=spec.train.global_batch,
        numbers=kinds,
        steps=steps_of(spec, known),
        samples=known,
        unit="tokens",
        units_per_sample=mean,
        sample_bytes=2 * mean,
        longest_ratio=longest / mean,
        varies=deviation / mean,
        lengths=1.0 if mean == longest else max(1.0, min(longest, 3.5 * deviation)) if deviation else longest / 2,
        records=_records(spec),
        assumptions=tuple(assumptions),
    )


def _corpus(data: Any) -> Any:
    """The tokenised corpus, if it is in the cache."""
    from paceline.data.corpora.tokens import find

    try:
        return find(data)
    except (UserError, OSError):
        return None


def _language_model(spec: RunSpec, samples: int | None, tokens: float | None) -> Subject:
    from paceline.planning.formulas.decoder import decoder_blocks

    model, data = _section(spec, "model"), _section(spec, "data")
    assumptions: list[str] = []
    vocab, known, length = data.vocab, samples, data.sequence
    if tokens is not None:
        raise UserError(f"--tokens: samples of lm have data.sequence={length} tokens; change that instead")
    found = None if samples else _streams(data)
    if found is not None:
        vocab, known = found.vocab, -(-(len(found.train) - 1) // length)
    elif known is None and not spec.train.steps:
        assumptions.append("the number of samples is not known, so no hours; say it with  --samples N")
    sizes = model.shape(vocab, length)
    narrow = spec.train.precision in ("bf16", "fp8")
    kinds = numbers_of(spec)
    return Subject(
        name=spec.name,
        workload=spec.workload,
        blocks=decoder_blocks(sizes, length),
        global_batch=spec.train.global_batch,
        numbers=replace(kinds, gathered_bytes=2) if narrow else kinds,
        steps=steps_of(spec, known),
        samples=known,
        unit="tokens",
        units_per_sample=length,
        sample_bytes=16.0 * length,
        splits=(sizes.heads, sizes.kv_heads, sizes.ffn),
        sequence=length if sizes.positions == "rotary" else 0,
        layers=0 if sizes.tied else sizes.layers,
        records=_records(spec),
        compiles=spec.train.compile != "off",
        narrow_gathers=narrow,
        assumptions=tuple(assumptions),
    )


def _streams(data: Any) -> Any:
    """The tokenised corpus of a language model, if it is in the cache."""
    from paceline.data.corpora.stream import find

    try:
        return find(data)
    except (UserError, OSError):
        return None


def _topics(spec: RunSpec, samples: int | None, tokens: float | None) -> Subject:
    counts, assumptions = counted(spec, samples, tokens)
    each = Block(
        "topics",
        1,
        params=counts.k * (counts.documents + counts.terms),
        matmuls=(Matmul(1, counts.k, round(counts.per_document)),),
        attention=None,
        moved_elements=0,
        saved_split_elements=0,
        saved_whole_elements=0,
        edge_elements=0,
        kernels=0,
    )
    return Subject(
        name=spec.name,
        workload=spec.workload,
        blocks=(each,),
        global_batch=counts.documents,
        numbers=NUMBERS["fp32"],
        steps=passes_of(spec),
        samples=counts.documents,
        unit="documents",
        recomputes=False,
        counts=counts,
        assumptions=tuple(assumptions),
    )


def _section(spec: RunSpec, name: str) -> Any:
    return getattr(spec, name)
