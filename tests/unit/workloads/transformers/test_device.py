"""What models of the library are spared on a device gives the same answer: losses in the head, and masks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

import hf_models
from paceline.data.corpora.labelled import Tokens
from paceline.parallel.compile import find_equal_layers
from paceline.workloads.transformers import device
from paceline.workloads.transformers.samples import LabelledTexts

CAUSAL, SEQ2SEQ, CLASSES = (f"AutoModelFor{task}" for task in ("CausalLM", "Seq2SeqLM", "SequenceClassification"))


def build(kind, auto, **more):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](vocab_size=300, **{**hf_models.KINDS[kind], **more})
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return getattr(transformers, auto).from_config(config).train()


def batch(kind, auto):
    ids = torch.randint(5, 300, (3, 20))
    if auto == CAUSAL:
        return {"input_ids": ids, "use_cache": False}, (3, 20)
    shown = torch.ones_like(ids)
    shown[1:, 15:] = 0
    return {"input_ids": ids, "attention_mask": shown, "decoder_input_ids": ids[:, :7], "use_cache": False}, (3, 7)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("kind", "auto", "frozen", "possible"),
    [
        ("llama", CAUSAL, False, True),
        ("llama", CAUSAL, True, True),
        ("gpt2", CAUSAL, False, True),
        ("t5", SEQ2SEQ, False, True),
        ("bart", SEQ2SEQ, False, False),
    ],
)
def test_losses_in_the_head(kind, auto, frozen, possible, half):
    """Tied and untied heads, a frozen one as beside adapters, labels that do not count; BART adds to its logits."""
    model = build(kind, auto)
    if frozen:
        model.get_output_embeddings().weight.requires_grad = False
    inputs, shape = batch(kind, auto)
    labels = torch.randint(0, 300, shape)
    labels[0, :3] = -100
    call, context = lambda: model(**inputs), torch.autocast("cpu", torch.bfloat16, enabled=half)
    with context:
        logits = call().logits.flatten(0, 1).float()
    whole = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    whole.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with context:
        losses = device.compute_losses_in_head(call, model, labels)
    assert (losses is not None) is possible
    assert "forward" not in vars(model.get_output_embeddings())
    if losses is None:
        return
    assert losses.shape == labels.shape[:1]
    losses.sum().backward()
    torch.testing.assert_close(losses.sum(), whole, rtol=1e-2 if half else 1e-6, atol=0)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= (0.05 if half else 1e-5) * expected[name].norm() + 1e-6, name


@pytest.mark.parametrize(("kind", "auto"), [("llama", CAUSAL), ("bert", CLASSES), ("llama", CLASSES)])
def test_masks_that_ask_nothing_are_the_same(kind, auto):
    model = build(kind, auto)
    ids = torch.randint(5, 300, (3, 20))
    inputs = {"input_ids": ids}
    if auto == CLASSES:
        shown = torch.ones_like(ids)
        shown[1:, 15:] = 0
        inputs |= {"attention_mask": shown}
        inputs["input_ids"][1:, 15:] = 0
    expected = model(**inputs).logits
    with device.make_masks_on_device():
        torch.testing.assert_close(model(**inputs).logits, expected)


def test_layers_of_encoder_and_decoder_are_found():
    assert len(find_equal_layers(build("bart", SEQ2SEQ))) == 4
    assert len(find_equal_layers(build("bert", CLASSES))) == 2


def packed_texts(first):
    """Three texts, and how they are padded."""
    lengths, draw = np.array([9, 20, 4]), np.random.default_rng(0)
    ids = draw.integers(5, 300, lengths.sum())
    tokens = Tokens(ids, np.concatenate([[0], lengths.cumsum()]), np.array([1, 0, 1]))
    samples = LabelledTexts(tokens, 0, 24)
    samples.first_place = first
    few = np.arange(3)
    return samples.pack([(few, few)], 3)[0], samples.batch(few, few)


@pytest.mark.parametrize(
    ("kind", "first", "agrees"),
    [("bert", 0, True), ("roberta", 1, True), ("roberta", 0, False), ("llama", 0, False), ("gpt2", 0, False)],
)
def test_packed_texts_are_classified_as_padded(kind, first, agrees):
    """Those of a decoder are classified by their last token, which is not looked for."""
    model = build(kind, CLASSES, **({"pad_token_id": 0} if kind == "roberta" else {}))
    packing = device.PackedTexts(model, find_equal_layers(model))
    packed, padded = packed_texts(first)
    assert packed.inputs["input_ids"].shape == (1, 256)
    assert packing.agrees(model, packed.inputs, padded.inputs) is agrees
    if not agrees:
        return
    gradients = []
    for batch in (padded, packed):
        logits = device.call_on_device(model, batch.inputs, packing).logits
        F.cross_entropy(logits, batch.labels, ignore_index=-100, reduction="sum").backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)
