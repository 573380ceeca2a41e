"""The shape of a model in closed form: parameters, matrix products, traffic and activations, by block.

A block is a part of a model: an embedding, one repeated layer, a head. All amounts are for the whole block and one
sample; how they divide among devices is decided where they are priced.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.config.decoder_shape import DecoderShape

Split = Literal["outer", "inner", "none"]

LAUNCHES_PER_OPERATION = 3.6
"""Host time of one operation of a framework, in launches: a layer of 11 operations is counted as 40."""
RELATIVE = 11
"""Operations of relative positions: memory joined, positions projected, two biases, a product, the shift, masks."""
CHUNK_LOGITS, CHUNK_TOKENS = 1 << 28, 8192
"""Of one chunk of the loss on a device: about as many logits, and at most as many tokens (`chunked_loss.py`)."""
LOSS_PASSES, EAGER_LOSS_PASSES = 1.0, 8.0
"""Over the logits, a third of all: two reads and a write, in one kernel; and what several kernels do besides."""
PACKED_BLOCK = 64  # weights in 4 bits that share a scale in 16
PACKED_BYTES = 0.5 + 2 / PACKED_BLOCK  # of one of them
UNFUSED_NORMS = 6  # widths that are kept besides where norms are made of several kernels
ROTARY_PASSES = 9  # over queries and keys, to turn each pair of features, where no compiler fuses them
ROTARY_OPERATIONS = 22
GATE_PASSES = 2  # over the features of a gated feed-forward part, beside those of a plain one

ROUTED_PASSES, ROUTER_OPERATIONS = 4, 12
"""Over what is sent to an expert and back, copied and weighted; operations that choose the experts."""


@dataclass(frozen=True)
class Matmul:
    """rows × inner by inner × outer, for one sample; `split` is the side that tensor parallelism cuts."""

    rows: float
    inner: int
    outer: int
    split: Split = "none"
    useful: float = 1.0
    """On a GPU, of the time of the kernel that makes it: what a plain product with these sides would take."""
    steps: int = 1  # of a recurrent layer: parts of its rows that are multiplied one after the other

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.outer


@dataclass(frozen=True)
class AttentionShape:
    """The products of queries with keys and of weights with values, for one sample."""

    length: int
    span: int  # keys that a query meets, before any mask
    heads: int
    kv_heads: int
    head_width: int
    causal: bool
    fused: bool
    """One kernel that never stores the scores; otherwise scores are written, masked, normalised and read."""
    packed: bool = False
    masked: bool = False  # by padding, which an older kernel reads for each score
    dropped: bool = False  # by the keys of samples, in kernels of their own

    @property
    def flops(self) -> float:
        return 4.0 * self.length * self.span * self.heads * self.head_width

    @property
    def score_elements(self) -> float:
        return float(self.heads) * self.length * self.span

    @property
    def copies(self) -> float:
        """Return how often the scores are kept, unless a kernel is fused: normalised, dropped, and what dropped them.

        In 16 bits they are normalised in 32 where they are dropped by key.
        """
        return 3.5 if self.dropped else 2.5

    @property
    def query_elements(self) -> float:
        return float(self.heads) * self.head_width * self.length

    @property
    def key_elements(self) -> float:
        """Return the elements of the keys and values of a sample."""
        return 2.0 * self.kv_heads * self.head_width * self.length


@dataclass(frozen=True)
class EagerTraffic:
    """What the kernels of a block move beside their arithmetic, if a GPU runs its operations as written."""

    forward_elements: float  # of one sample, as elements of a plain element-wise kernel that takes as long
    backward_elements: float
    forward_fixed: float  # the same, for any number of samples: casts of weights
    backward_fixed: float
    forward_kernels: float
    backward_kernels: float


@dataclass(frozen=True)
class BlockShape:
    """One repeated part of a model."""

    name: str
    repeat: int
    params: float
    matmuls: tuple[Matmul, ...]
    attention: AttentionShape | None
    moved_elements: float  # read and written by element-wise kernels in a forward pass of one sample
    saved_split_elements: float  # kept for the backward pass of one sample, and cut by tensor parallelism
    saved_whole_elements: float
    """Kept for the backward pass of one sample, and cut by sequence parallelism only."""
    edge_elements: float  # what enters the block: all that full recomputation keeps
    kernels: float
    most_logits: float = math.inf  # logits alive at a time, where the loss is computed in chunks
    loss_params: float = 0.0
    """Weights of the products with which such a loss makes its gradients, in the forward pass already."""
    eager_saved_elements: float = 0.0
    """Kept for the backward pass of one sample besides, unless a compiler makes it again."""
    unfused_saved_elements: float = 0.0  # of that, what is kept only where a norm is not one kernel
    eager_elements: float = 0.0  # read and written in the forward pass besides, unless a compiler fuses it away
    cast_elements: float = 0.0  # the same in both directions, by casts to and from fp32 and by sums of gradients
    frozen_params: float = 0.0  # of `params`, those that have no gradient and are never updated
    half_params: float = 0.0  # of those, the ones that are kept in 16 bits
    table_params: float = 0.0  # of `params`, those that are looked up and never multiplied
    packed_params: float = 0.0  # of those, the ones that are kept in 4 bits
    unpacked_params: float = 0.0  # of the largest matrix of these, which is unpacked while it multiplies
    expert_params: float = 0.0  # of `params`, those of experts, which the devices of `expert` divide
    routed_elements: float = 0.0  # of one sample, sent to the experts of its tokens
    beside_tokens: tuple[Matmul, ...] = ()  # of `matmuls`, those that are computed while tokens are on their way
    whole_params: float = 0.0  # of `params`, beside those of experts, what tensor parallelism does not cut
    expert_elements: float = 0.0  # of `saved_split_elements`, those of experts, which it does not cut
    eager: EagerTraffic | None = None  # if it was counted; else it follows from `moved_elements`
    channels_last: EagerTraffic | None = None  # the same with the channels of images innermost
    gathered_elements: float = 0.0
    """Of one sample, read and written to reorder sequences for convolutions, also where a compiler fuses the rest."""

    @property
    def trained_params(self) -> float:
        return self.params - self.frozen_params

    @property
    def cast_params(self) -> float:
        """Return the parameters kept in full, and cast where products are in 16 bits."""
        return self.params - self.half_params - self.table_params - self.packed_params

    @property
    def stored_params(self) -> float:
        """Return the parameters by the bytes they take, in full ones."""
        return self.params - self.half_params / 2 - self.packed_params * (1 - PACKED_BYTES / 4)

    def elsewhere(self, expert: int) -> float:
        """Count the parameters that so many devices leave to each other."""
        return self.expert_params * (1 - 1 / expert)

    def undivided(self, params: float, tensor: int, expert: int = 1) -> float:
        """Count what each of `tensor` devices holds beyond an equal part of these: all of the experts."""
        return min(self.expert_params / expert + self.whole_params, params) * (1 - 1 / tensor)

    @property
    def flops(self) -> float:
        """Forward, one sample, one block."""
        return sum(m.flops for m in self.matmuls) + (self.attention.flops if self.attention else 0.0)


def find_repeated_block(blocks: Sequence[BlockShape]) -> BlockShape:
    """Return the layer between the first and the last block, also if there is one of each."""
    return max(blocks[1:-1] or blocks, key=lambda block: block.repeat)


@dataclass(frozen=True)
class ModelShape:
    """A transformer: decoder language model, masked language model or classifier."""

    layers: int
    hidden: int
    heads: int
    seq_len: int
    vocab: int
    ffn_hidden: int = 0
    kv_heads: int = 0
    gated: bool = False  # gate and up projection instead of one (SwiGLU)
    tied: bool = True
    learned_positions: bool = True
    biases: bool = True
    causal: bool = True
    fused_attention: bool = True
    memory_len: int = 0
    """Tokens of the previous segment that are attended to, at relative positions (Transformer-XL)."""
    classes: int = 0  # a classifier over the pooled tokens instead of a head over the vocabulary
    head_width: int = 0  # features of a head; without it, an equal part of `hidden`

    def __post_init__(self) -> None:
        object.__setattr__(self, "ffn_hidden", self.ffn_hidden or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)

    @functools.cached_property
    def blocks(self) -> tuple[BlockShape, BlockShape, BlockShape]:
        return (self._build_embedding_block(), self._build_layer_block(), self._build_head_block())

    def _build_embedding_block(self) -> BlockShape:
        tokens, h = self.seq_len, self.hidden
        params = self.vocab * h + (tokens * h if self.learned_positions else 0)
        return BlockShape("embedding", 1, params, (), None, 5.0 * tokens * h, 0.0, 1.0 * tokens * h, 0.0, 6)

    def _build_layer_block(self) -> BlockShape:
        s, h, f = self.seq_len, self.hidden, self.ffn_hidden
        width = self.head_width or math.ceil(h / self.heads)
        q, kv = self.heads * width, self.kv_heads * width
        ups = 2 if self.gated else 1
        products = (
            Matmul(s + self.memory_len, h, q + 2 * kv, "outer"),
            Matmul(s, q, h, "inner"),
            Matmul(s, h, ups * f, "outer"),
            Matmul(s, f, h, "inner"),
        )
        weights = sum(m.inner * m.outer for m in products)
        biases = (q + 2 * kv) + h + ups * f + h if self.biases else 0
        norms = (4 if self.biases else 2) * h
        # relative positions need a second product of the scores' size, shifted and added
        score_heads = self.heads * (2 if self.memory_len else 1)
        attention = AttentionShape(
            s, s + self.memory_len, score_heads, self.kv_heads, width, self.causal, self.fused_attention
        )
        # two norms (2h each), rotary or bias on q k v, two residual sums (3h each), the activation (in and out)
        moved = s * (4.0 * h + (q + kv) + 6.0 * h + (ups + 1.0) * f)
        # q k v, attention output, activation in and out | two norms in and out, two dropout masks (half an element)
        scores = 0.0 if self.fused_attention else attention.copies * attention.score_elements
        split = s * (q + 2 * kv + q + (ups + 1.0) * f) + scores
        whole = s * (4.0 * h + 1.0 * h)
        kernels = (40 if self.fused_attention else 50) + (LAUNCHES_PER_OPERATION * RELATIVE if self.memory_len else 0)
        return BlockShape(
            "layer", self.layers, weights + biases + norms, products, attention, moved, split, whole, s * h, kernels
        )

    def _build_head_block(self) -> BlockShape:
        s, h = self.seq_len, self.hidden
        if self.classes:
            params = h * self.classes + self.classes
            return BlockShape("head", 1, params, (Matmul(1, h, self.classes),), None, s * h, 0.0, s * h, 0.0, 8)
        params = 2 * h + (0 if self.tied else self.vocab * h)
        logits = float(s) * self.vocab
        # the loss reads the logits for the largest, the sum and the difference, and writes their gradient
        return BlockShape(
            "head", 1, params, (Matmul(s, h, self.vocab, "outer"),), None, 4.0 * logits, logits, 2.0 * s * h, 0.0, 8
        )


def add_experts(
    layer: BlockShape, active: int, ffn: int, shared: int, length: int, cuts_shared: bool = True
) -> BlockShape:
    """Add the experts of a layer that a token goes through, as products over all experts at once.

    Tensor parallelism leaves them whole; `cuts_shared`: but not the expert for all tokens.
    """
    *attention, up, down = layer.matmuls
    products = (*attention, *(replace(m, rows=m.rows * active, split="none") for m in (up, down)))
    sides: tuple[Matmul, ...] = ()
    if shared:
        sides = (replace(up, outer=2 * shared), replace(down, inner=shared))
        sides = sides if cuts_shared else tuple(replace(m, split="none") for m in sides)
    features, routed = length * 3.0 * ((active - 1) * ffn + shared), length * active * up.inner
    whole = 0 if cuts_shared else shared
    return replace(
        layer,
        matmuls=products + sides,
        beside_tokens=() if cuts_shared else sides,  # the library computes it before or after
        moved_elements=layer.moved_elements + features + ROUTED_PASSES * routed,
        saved_split_elements=layer.saved_split_elements + features + 2 * routed,  # as sent, and as it comes back
        kernels=layer.kernels + LAUNCHES_PER_OPERATION * ROUTER_OPERATIONS,
        routed_elements=float(routed),
        whole_params=3.0 * up.inner * whole,
        expert_elements=length * 3.0 * (active * ffn + whole) + 2 * routed,
    )


def build_decoder_blocks(sizes: DecoderShape, length: int) -> tuple[BlockShape, ...]:
    """Build the blocks of the built-in decoder: every parameter, and a chunked loss."""
    rotary, gated = sizes.positions == "rotary", sizes.ffn_kind == "swiglu"
    sides = (sizes.layers, sizes.width, sizes.heads, length, sizes.vocab, sizes.ffn, sizes.kv_heads)
    embedding, layer, head = ModelShape(*sides, gated, sizes.tied, learned_positions=False, biases=False).blocks
    turned = sizes.head_dim * (sizes.heads + sizes.kv_heads)
    tables = sizes.vocab + (sizes.context if sizes.positions == "learned" else 0)
    active = sizes.top_k if sizes.experts else 0
    given = active, sizes.ffn, sizes.shared_ffn, length
    mixed = add_experts(layer, *given, cuts_shared=False) if active else layer
    return (
        replace(embedding, params=tables * sizes.width, table_params=(tables - sizes.vocab * sizes.tied) * sizes.width),
        replace(
            mixed,
            params=layer.params + sizes.mixture_weights,
            expert_params=float(sizes.experts * 3 * sizes.width * sizes.ffn),
            eager_elements=length * (ROTARY_PASSES * turned * rotary + GATE_PASSES * sizes.ffn * gated),
            kernels=mixed.kernels + LAUNCHES_PER_OPERATION * ROTARY_OPERATIONS * 2 / 3 * rotary,
            # queries and keys only after they are turned; two norms, in and out; nothing is dropped
            saved_whole_elements=4.0 * length * sizes.width,
            eager_saved_elements=length * (UNFUSED_NORMS * sizes.width + sizes.ffn * max(1, active) * gated),
            unfused_saved_elements=UNFUSED_NORMS * length * sizes.width,
        ),
        chunk_loss(
            replace(head, params=sizes.width + (0 if sizes.tied else sizes.vocab * sizes.width)),
            *(length, sizes.vocab, sizes.width),
        ),
    )


def chunk_loss(head: BlockShape, length: int, vocab: int, width: int, trained: bool = True) -> BlockShape:
    """Return a head that computes its loss in chunks, in place of whole logits."""
    return replace(
        head,
        moved_elements=LOSS_PASSES * length * vocab,
        eager_elements=EAGER_LOSS_PASSES * length * vocab,
        saved_whole_elements=3.0 * length * width,  # the last norm, in and out, and a gradient
        most_logits=float(min(CHUNK_TOKENS, CHUNK_LOGITS // vocab) * vocab),
        loss_params=float(vocab * width * trained),
    )
