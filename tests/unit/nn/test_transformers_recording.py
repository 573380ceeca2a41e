"""What the library transformers asks and draws without need, and what it draws with need."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.nn.transformers_recording import patch_for_recording

transformers = pytest.importorskip("transformers")


def build(layerdrop):
    sides = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    sides |= dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim", "vocab_size"), 16)
    names = dict.fromkeys(("pad_token_id", "decoder_start_token_id", "eos_token_id"), 0)
    drops = dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), layerdrop)
    config = transformers.MarianConfig(**sides, **names, **drops, dropout=0.0, use_cache=False)
    return transformers.MarianMTModel(config).train()


@pytest.mark.parametrize(("layerdrop", "draws"), [(0.0, False), (0.5, True)])
def test_only_layers_that_may_be_dropped_are_drawn_for(layerdrop, draws):
    model, ids = build(layerdrop), torch.ones(2, 5, dtype=torch.long)
    before = torch.get_rng_state()
    with patch_for_recording():
        model(input_ids=ids, decoder_input_ids=ids)
    assert bool((torch.get_rng_state() != before).any()) == draws
    assert torch.rand.__module__ != patch_for_recording.__module__


def test_no_value_of_a_mask_is_asked_for():
    with FakeTensorMode(allow_non_fake_inputs=True), patch_for_recording():
        ids = torch.ones(2, 5, dtype=torch.long)
        assert build(0.0)(input_ids=ids, decoder_input_ids=ids).logits.shape == (2, 5, 16)
