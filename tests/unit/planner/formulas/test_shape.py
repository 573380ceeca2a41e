"""Shapes against numbers counted by hand and published parameter counts."""

import pytest
from unknown_shapes import count_flops, count_params, typical

from paceline.errors import UserError
from paceline.planner.formulas.shape import ModelShape

GPT2 = ModelShape(layers=12, hidden=768, heads=12, seq_len=1024, vocab=50_257)
LLAMA3_8B = ModelShape(
    32, 4096, 32, 8192, 128_256, 14_336, 8, gated=True, tied=False, learned_positions=False, biases=False
)


def test_gpt2_has_its_published_parameters():
    assert count_params(GPT2) == 124_439_808


def test_llama3_8b_has_its_published_parameters():
    assert count_params(LLAMA3_8B) == pytest.approx(8_030_261_248, rel=1e-5)


def test_bert_large_is_close_to_its_published_parameters():
    bert = ModelShape(24, 1024, 16, 512, 30_522, causal=False)
    assert count_params(bert) == pytest.approx(0.335e9, rel=0.01)


def test_flops_are_six_per_parameter_and_token_and_the_scores():
    tokens, weights = 1024, 12 * 12 * 768**2
    head, scores = 768 * 50_257, 12 * 2 * 1024 * 768
    assert count_flops(GPT2) == pytest.approx(6 * tokens * (weights + head + scores), rel=1e-9)


def test_grouped_queries_and_gates_change_the_products():
    layer = LLAMA3_8B.blocks[1]
    assert [(m.inner, m.outer) for m in layer.matmuls] == [(4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096)]
    assert layer.params == 4096 * 6144 + 4096 * 4096 + 4096 * 28_672 + 14_336 * 4096 + 2 * 4096


def test_activations_of_a_layer_are_the_well_known_34_bytes():
    layer = ModelShape(1, 1024, 16, 512, 1000, fused_attention=True).blocks[1]
    saved_bytes = 2 * (layer.saved_split_elements + layer.saved_whole_elements)
    assert saved_bytes == pytest.approx(34 * 512 * 1024)
    plain = ModelShape(1, 1024, 16, 512, 1000, fused_attention=False).blocks[1]
    scores_bytes = 2 * plain.saved_split_elements - 2 * layer.saved_split_elements
    assert scores_bytes == pytest.approx(5 * 16 * 512 * 512)


def test_a_classifier_has_a_small_head():
    shape = ModelShape(4, 256, 8, 128, 30_000, 1024, causal=False, classes=4)
    assert shape.blocks[2].params == 256 * 4 + 4
    assert shape.blocks[2].flops == 2 * 256 * 4


@pytest.mark.parametrize("params", [1.24e8, 1.3e9, 7e9, 7e10, 1.75e11])
@pytest.mark.parametrize("gated", [False, True])
def test_typical_shapes_have_the_size_that_was_asked_for(params, gated):
    shape = typical(params, gated=gated)
    assert count_params(shape) == pytest.approx(params, rel=0.1)
    assert shape.hidden % 64 == 0


def test_impossible_sizes_are_rejected():
    with pytest.raises(UserError, match="too small"):
        typical(100)
