"""Shapes and memory by term, against sums worked by hand and published parameter counts."""

from dataclasses import replace

import pytest
from unknown_shapes import count_flops, count_params, typical

from paceline.config.decoder_shape import DecoderShape
from paceline.planner.formulas.memory import estimate_memory
from paceline.planner.formulas.placement import DTYPE_SIZES, GPU_PHYSICS, Placement, Runtime
from paceline.planner.formulas.shape import ModelShape, build_decoder_blocks

BARE = replace(GPU_PHYSICS, context_bytes=0, communicator_bytes=0, fragmentation=0, bucket_bytes=0)
MODEL = ModelShape(24, 2048, 16, 1024, 50_304)
BF16 = DTYPE_SIZES["bf16"]


def priced(placement, model=MODEL, kind=BF16, physics=BARE):
    return estimate_memory(model.blocks, placement, kind, physics)


@pytest.mark.parametrize(("zero", "per_param"), [(0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_zero_divides_states_then_gradients_then_weights(zero, per_param):
    m = priced(Placement(shard=8, zero=zero) if zero else Placement(replicate=8))
    assert m.weights_bytes + m.gradients_bytes + m.states_bytes == pytest.approx(per_param * count_params(MODEL))


@pytest.mark.parametrize(("recompute", "layers"), [("none", 34 * 24), ("full", 2 * 24 + 34)])
def test_activations_are_34_bytes_per_token_width_and_layer(recompute, layers):
    """Full recomputation keeps the edges, and one layer at work."""
    m = priced(Placement(micro_batch=4, recompute=recompute))
    assert m.activations_bytes == pytest.approx(4 * 1024 * 2048 * (layers + 2 * 3), rel=1e-6)


def test_a_stage_holds_its_layers_for_all_passes_in_flight():
    one = priced(Placement(micro_batch=1))
    first = priced(Placement(micro_batch=1, pipeline=4, accumulate=16))
    ends = 1024 * 2048 * 2 * 3
    assert first.activations_bytes - ends == pytest.approx(one.activations_bytes - ends)


def test_the_first_stage_holds_more_layers_where_the_last_has_a_head():
    even, first = (priced(Placement(pipeline=4, accumulate=4, layers=layers)) for layers in (0, 8))
    ends = MODEL.blocks[0]
    assert first.states_bytes - 12 * ends.params == pytest.approx(8 / 6 * (even.states_bytes - 12 * ends.params))
    kept = [m.activations_bytes - 1024 * 2048 * 2 * 3 for m in (even, first)]
    assert kept[1] == pytest.approx(8 / 6 * kept[0])


@pytest.mark.parametrize("shared", [0, 384])
def test_ranks_of_tensor_divide_attention_and_hold_experts_whole(shared):
    sizes = DecoderShape(
        vocab=4096, context=1024, width=512, layers=4, heads=8, kv_heads=2, ffn=256, experts=8, shared_ffn=shared
    )
    blocks = build_decoder_blocks(sizes, 1024)
    one, two = (estimate_memory(blocks, Placement(tensor=tensor), BF16, BARE) for tensor in (1, 2))
    whole = 4 * 3 * 512 * (8 * 256 + shared)
    assert two.weights_bytes == pytest.approx(2 * (whole + (count_params_of(blocks) - whole) / 2))
    features = 1024 * (3 * (2 * 256 + shared) + 2 * 2 * 512 + 2 * 256 + 2 * 512)  # up, gate, between; sent, come back
    cut = 1024 * 512 * (1 + 2 / 4 + 1)  # queries, keys, values, and what attention returns
    ends = one.activations_bytes - two.activations_bytes
    assert ends == pytest.approx(4 * 2 * cut / 2)
    assert two.activations_bytes > 4 * 2 * features


def count_params_of(blocks):
    return sum(b.repeat * b.params for b in blocks)


def test_tensor_and_sequence_parallel_cut_what_they_should():
    layer = MODEL.blocks[1]
    t = priced(Placement(tensor=4))
    both = priced(Placement(tensor=4, sequence_parallel=True))
    saved = 24 * 2 * layer.saved_whole_elements
    assert t.activations_bytes - both.activations_bytes == pytest.approx(saved * 3 / 4)


def test_offloading_moves_states_to_the_host_and_the_context_is_outside_the_allocator():
    here, there = priced(Placement(shard=4, zero=3)), priced(Placement(shard=4, zero=3, offload="states"))
    assert there.host_bytes == pytest.approx(here.states_bytes + here.gradients_bytes)
    assert here.total_bytes - there.total_bytes == pytest.approx(there.host_bytes)
    m = priced(Placement(replicate=8), physics=replace(BARE, context_bytes=1e9, communicator_bytes=2e9))
    assert m.total_bytes - m.allocated_bytes == pytest.approx(3e9 + m.lost_bytes)


# A 7B model in the often-quoted comparison of strategies: published per-device memory, to about ±20 %.
SEVEN = typical(7e9, 2048, 32_000, gated=True)


@pytest.mark.parametrize(
    ("published_gb", "placement", "kind"),
    [
        (140, Placement(replicate=8), "amp_bf16"),
        (25, Placement(shard=8, zero=3, recompute="full"), "bf16"),
        (20, Placement(shard=8, zero=3, recompute="full"), "amp_bf16"),
        (8, Placement(shard=8, zero=3, recompute="full", offload="states"), "bf16"),
    ],
)
def test_seven_billion_parameters_under_each_strategy(published_gb, placement, kind):
    total = priced(placement, SEVEN, DTYPE_SIZES[kind], GPU_PHYSICS).total_bytes
    assert total / 1e9 == pytest.approx(published_gb, rel=0.2)


def test_gradients_that_come_as_activations_go_are_not_added_to_them():
    kept, fresh = (priced(Placement(micro_batch=64, runtime=Runtime(fresh_gradients=fresh))) for fresh in (False, True))
    assert kept.gradients_bytes > 0
    assert fresh.gradients_bytes == 0
    alone = priced(Placement(micro_batch=0.01, runtime=Runtime(fresh_gradients=True)))
    assert alone.gradients_bytes == pytest.approx(kept.gradients_bytes, rel=0.02)


def test_a_compiled_layer_keeps_less_than_an_eager_one():
    sizes = DecoderShape.of("1.3b", {}, 32_000, 1024)
    blocks = build_decoder_blocks(sizes, 1024)
    eager, compiled = (
        estimate_memory(
            blocks, Placement(micro_batch=8, runtime=Runtime(kernels=kernels)), DTYPE_SIZES["amp_bf16"], BARE
        ).activations_bytes
        for kernels in ("eager", "compiled")
    )
    per_token = compiled / (8 * 1024 * sizes.width * sizes.layers)
    assert per_token == pytest.approx(32.8, rel=0.02)  # as measured on an H200; the ends add little
    assert eager > 1.4 * compiled


GPT2 = ModelShape(layers=12, hidden=768, heads=12, seq_len=1024, vocab=50_257)
LLAMA3_8B = ModelShape(
    32, 4096, 32, 8192, 128_256, 14_336, 8, gated=True, tied=False, learned_positions=False, biases=False
)


BERT = ModelShape(24, 1024, 16, 512, 30_522, causal=False)


@pytest.mark.parametrize(
    ("model", "params", "error"), [(GPT2, 124_439_808, 0), (LLAMA3_8B, 8_030_261_248, 1e-5), (BERT, 0.335e9, 0.01)]
)
def test_models_have_their_published_parameters(model, params, error):
    assert count_params(model) == pytest.approx(params, rel=error)


def test_flops_are_six_per_parameter_and_token_and_the_scores():
    tokens, weights = 1024, 12 * 12 * 768**2
    head, scores = 768 * 50_257, 12 * 2 * 1024 * 768
    assert count_flops(GPT2) == pytest.approx(6 * tokens * (weights + head + scores), rel=1e-9)


def test_grouped_queries_and_gates_change_the_products():
    layer = LLAMA3_8B.blocks[1]
    assert [(m.inner, m.outer) for m in layer.matmuls] == [(4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096)]
    assert layer.params == 4096 * 6144 + 4096 * 4096 + 4096 * 28_672 + 14_336 * 4096 + 2 * 4096


def test_scores_are_kept_unless_attention_is_fused():
    fused, plain = (ModelShape(1, 1024, 16, 512, 1000, fused_attention=f).blocks[1] for f in (True, False))
    scores_bytes = 2 * plain.saved_split_elements - 2 * fused.saved_split_elements
    assert scores_bytes == pytest.approx(5 * 16 * 512 * 512)
