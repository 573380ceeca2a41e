"""What smaller states, divided sequences, divided experts and frozen weights save."""

import pytest

import plan_specs
from paceline.layout import layout_of
from paceline.planner.plan import plan


def lm(**train):
    parallel = {"strategy": "fsdp", "activation_checkpointing": "full", "micro_batch": 1}
    return plan_specs.lm("8b", 64, 8192, 128256, train=train, parallel=parallel)


def memory(**train):
    return plan(lm(**train), "8xH100", [8]).rows[0].price.memory


def test_states_in_fewer_bits_need_fewer_bytes():
    usual, small = memory(), memory(optimizer_state="8bit")
    pure, muon = memory(weights="bf16", optimizer_state="bf16"), memory(optimizer="muon")
    assert pure.weights_bytes == usual.weights_bytes / 2
    assert pure.states_bytes == usual.states_bytes / 2
    assert small.weights_bytes == usual.weights_bytes
    assert small.states_bytes == pytest.approx(usual.states_bytes / 4, rel=0.02)
    assert usual.states_bytes / 2 < muon.states_bytes < 0.6 * usual.states_bytes
    assert memory(optimizer="sgd", momentum=0).states_bytes == 0


def test_a_divided_sequence_divides_activations_and_not_states():
    usual = plan(lm(), "8xH100", [8]).rows[0]
    spec = lm().replace({"parallel.context": 8})
    divided = plan(spec, "8xH100", [8]).rows[0]
    assert divided.price.memory.weights_bytes == usual.price.memory.weights_bytes
    gathered = 2 * 8 * 128 * 8192 * 7 / 8 * 2  # keys and values that other ranks sent to the layer at work, in bf16
    activations = usual.price.memory.activations_bytes / 8 + gathered
    assert divided.price.memory.activations_bytes == pytest.approx(activations)
    assert divided.price.devices == 8
    assert usual.price.time.compute_s < divided.price.time.compute_s < 2 * usual.price.time.compute_s  # more passes
    assert divided.price.layout == layout_of(spec.replace({"parallel.ranks": 8}))
    odd = plan(spec.replace({"parallel.context": 3}), "8xH100", [3])
    assert odd.misfits[0].rejected[0].code.name == "ODD_CONTEXT"


def test_divided_experts_are_held_once_in_each_group():
    sizes = {"model.preset": "1b", "model.experts": 4, "data.sequence": 1024, "data.vocab": 32000}
    mixture = lm().replace({**sizes, "parallel.strategy": "zero2", "parallel.ranks": 8})
    whole, divided = (plan(mixture.replace({"parallel.expert": n}), "8xH100", [8]).rows[0].price for n in (1, 4))
    assert divided.layout == layout_of(mixture.replace({"parallel.expert": 4, "parallel.micro_batch": 1}))
    shape = mixture.model.shape(32000, 1024)
    experts = shape.layers * 4 * 3 * shape.width * shape.ffn
    assert whole.memory.weights_bytes == 4 * shape.parameters
    assert divided.memory.weights_bytes == pytest.approx(4 * (shape.parameters - experts * 3 / 4))
    assert divided.memory.states_bytes == pytest.approx(whole.memory.states_bytes)
    assert divided.time.comm_s != whole.time.comm_s
