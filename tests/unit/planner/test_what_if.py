"""What is priced and not supported: the bytes that it saves, and that it cannot be applied."""

import pytest

import paceline
from paceline.config import build_spec
from paceline.planner.plan import plan
from paceline.planner.what_if import WhatIf, parse_what_if


def lm(**train):
    return build_spec(
        {
            "name": "lm",
            "workload": "lm",
            "model": {"preset": "8b"},
            "data": {"sequence": 8192, "vocab": 128256},
            "train": {"steps": 10, "global_batch": 64, "precision": "bf16", **train},
            "parallel": {"strategy": "fsdp", "activation_checkpointing": "full", "micro_batch": 1},
        }
    )


def memory(what_if=None, **train):
    return plan(lm(**train), "8xH100", [8], what_if=what_if).rows[0].price.memory


def test_states_in_fewer_bits_need_fewer_bytes():
    usual, pure, small = memory(), memory(WhatIf(pure_bf16=True)), memory(WhatIf(states_8bit=True))
    assert pure.weights_bytes == usual.weights_bytes / 2
    assert pure.states_bytes == usual.states_bytes / 2
    assert small.weights_bytes == usual.weights_bytes
    assert small.states_bytes == pytest.approx(usual.states_bytes / 4, rel=0.02)
    assert memory(WhatIf(states_8bit=True), optimizer="sgd", momentum=0).states_bytes == 0


def test_a_divided_sequence_divides_activations_and_not_states():
    usual = plan(lm(), "8xH100", [8]).rows[0]
    divided = plan(lm(), "8xH100", [8], what_if=WhatIf(context=8)).rows[0]
    assert divided.price.memory.weights_bytes == usual.price.memory.weights_bytes
    assert divided.price.memory.activations_bytes == pytest.approx(usual.price.memory.activations_bytes / 8)
    assert divided.price.devices == 8
    assert usual.price.time.compute_s < divided.price.time.compute_s < 2 * usual.price.time.compute_s  # more passes
    odd = plan(lm(), "8xH100", [4, 8], what_if=WhatIf(context=8))
    assert odd.misfits[0].rejected[0].code.name == "NO_CONTEXT"
    assert odd.base.devices == 8


def test_it_is_priced_and_cannot_be_applied():
    found = plan(lm(), "8xH100", [8], what_if=WhatIf(pure_bf16=True))
    assert found.as_json()["what_if"]["pure_bf16"]
    assert found.as_json()["chosen"]["overrides"] == {}
    with pytest.raises(paceline.UserError) as error:
        found.overrides()
    assert (error.value.code, error.value.key) == ("not-supported", "--what-if")


def test_words_are_parsed_or_rejected():
    assert parse_what_if("pure-bf16, 8bit-states,context=4") == WhatIf(True, True, 4)
    assert WhatIf(True, False, 4).describe().endswith("each sequence divided among 4 devices")
    for text, code in (("context=1", "invalid-value"), ("pure-bf17", "invalid-value"), ("", "missing-value")):
        with pytest.raises(paceline.UserError) as error:
            parse_what_if(text)
        assert error.value.code == code


def test_pure_bf16_needs_bf16_and_gradients():
    trees = build_spec({"name": "t", "workload": "trees", "train": {"steps": 3}})
    for spec, cluster in ((lm(precision="fp32"), "8xH100"), (trees, "2xCPU")):
        with pytest.raises(paceline.UserError) as error:
            plan(spec, cluster, what_if=WhatIf(pure_bf16=True))
        assert (error.value.code, error.value.key) == ("not-supported", "--what-if")


def test_frozen_weights_have_no_gradients_and_no_states():
    frozen = {"tokens*": {"frozen": True}, "layers.[0-9].*": {"frozen": True}}
    usual, some = memory(), memory(groups=frozen)
    shape = lm().model.shape(128256, 8192)
    held = sum(n for name, n in shape.named() if name.startswith("tokens") or name.split(".")[1] in set("0123456789"))
    assert some.states_bytes == pytest.approx((shape.parameters - held) * 8 / 8, rel=1e-6)
    assert some.weights_bytes == usual.weights_bytes
