"""Cost models: steps, types, states, frozen weights, the user's own model, and a kind of work that is not known."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config import build_spec, load
from paceline.data.corpora.tokenizer import estimate_vocabulary_size
from paceline.errors import UserError
from paceline.layout import divide_layers, layout_of, parse_layout
from paceline.planner.candidates import RejectReason
from paceline.planner.cost_model import build_cost_model
from paceline.planner.emit import build_launch_files
from paceline.planner.formulas.placement import GPU_PHYSICS
from paceline.planner.formulas.shape import find_repeated_block
from paceline.planner.formulas.step_time import StepPricer
from paceline.planner.plan import plan
from paceline.planner.show import render_plan
from paceline.planner.target import resolve_target
from paceline.workloads.lm.decoder import Decoder
from plan_specs import classifier, lm
from results import expect_error, render_text


def test_steps_follow_from_samples_and_batch():
    spec = classifier().replace({"train.epochs": 3, "train.global_batch": 100})
    assert build_cost_model(spec).steps == 3 * 1200
    assert build_cost_model(spec.replace({"train.epochs": None, "train.steps": 7})).steps == 7


OWN = """
import numpy as np, torch
from paceline import Outline, Workload

class Rows:
    def __len__(self): return 64
    def cost(self, ids): return np.ones(len(ids))
    def batch(self, ids, keys): return torch.zeros(len(ids), 32)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(6))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

class Deep(Workload):
    def model(self): return Net()
    def data(self, split): return Rows()
    def loss(self, model, x): return model(x).sum(), len(x)

class Words(Deep):
    def model(self): return torch.nn.LSTM(8, 8, batch_first=True)
    def loss(self, model, x): return model(x.view(len(x), 4, 8))[0].sum(), len(x)

class Enormous(Deep):
    def model(self): return torch.nn.Linear(32, 10**9)

class Fails(Deep):
    def loss(self, model, x): return model(x[:, :3]).sum(), len(x)

class Outlined(Deep):
    def prepare(self, say): raise AssertionError("it takes long")
    def loss(self, model, batch): return model(batch[0]).sum(), len(batch[0])
    def outline(self): return Outline((torch.zeros(40, 32),), 7)

class NoOutline(Deep):
    def outline(self): return 7

class EmptyOutline(Deep):
    def outline(self): return Outline((torch.zeros(0, 32),), 7)

class StreamOutline(Deep):
    def outline(self): return Outline((row for row in ()), 7)

class Peeks(Deep):
    def loss(self, model, x):
        y = model(x)
        return (y.sum() if y.sum().item() > 0 else -y.sum()), len(x)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)

    def spec(name):
        (tmp_path / "run.yaml").write_text(f"workload: own.py:{name}\ntrain: {{steps: 5, global_batch: 16}}\n")
        return load(tmp_path / "run.yaml")

    return spec


def test_a_module_of_the_users_own_is_tried_out(own):
    found = build_cost_model(own("Deep"))
    _, layer, rest = found.blocks
    assert found.params == 6 * (32 * 32 + 32)
    assert layer.repeat == 6
    assert [(m.rows, m.inner, m.outer) for m in layer.matmuls] == [(1, 32, 32)]
    assert found.flops_per_sample == pytest.approx(3 * 6 * 2 * 32 * 32)
    assert found.sample_bytes == 128
    assert layer.eager.forward_kernels == 1  # a product; activations and the sum of all are the rest
    assert rest.eager.forward_kernels == 6 + 1
    assert rest.eager.forward_elements == pytest.approx(6 * 2 * 32 + 32, rel=0.01)
    assert 6 * layer.eager.backward_kernels + rest.eager.backward_kernels >= 6 * 3
    assert rest.eager.backward_elements > rest.eager.forward_elements
    words = build_cost_model(own("Words"))
    assert {m.steps for block in words.blocks for m in block.matmuls} == {1, 4}, "recurrent layers go word by word"


ON_CPU, FAKE = "measured on 8 samples on the CPU", "measured on fake tensors"


@pytest.mark.parametrize(
    ("name", "seconds", "how"),
    [("Deep", 1.5, ON_CPU), ("Enormous", 1.5, FAKE), ("Deep", 0.0, FAKE), ("Peeks", 0.0, ON_CPU)],
)
def test_large_models_are_traced_on_fake_tensors_unless_they_need_values(own, monkeypatch, name, seconds, how):
    on_cpu = build_cost_model(own("Deep"))
    monkeypatch.setattr("paceline.planner.tracing.MAX_SECONDS", seconds)
    found = build_cost_model(own(name))
    assert how in found.assumptions[0]
    assert name != "Deep" or found.blocks == on_cpu.blocks
    assert found.params == (32 * 10**9 + 10**9 if name == "Enormous" else on_cpu.params)


def test_a_model_that_fails_in_any_case_is_refused_in_one_line(own):
    with expect_error("user-code-failed", "workload") as error:
        build_cost_model(own("Fails"))
    assert "\n" not in str(error.value)
    assert str(error.value).count("on 8 samples") == 1, "the same failure is reported once"


@pytest.mark.parametrize(("usual", "table"), [(classifier(), 8192 * 128), (lm("tiny"), 32_000 * 128)])
def test_frozen_parts_have_no_gradients(usual, table):
    some = usual.replace({"train.groups": {"layers.0.*": {"frozen": True}, "tokens*": {"frozen": True}}})
    cost_model, found = build_cost_model(usual), build_cost_model(some)
    assert cost_model.trained_params == cost_model.params == found.params
    assert found.trained_params == pytest.approx(found.params - table - cost_model.blocks[1].params)


def test_a_plan_knows_what_is_frozen_and_what_is_done_between_the_steps():
    example = Path(__file__).resolve().parents[3] / "docs" / "examples" / "own_training.yaml"
    cost_model = build_cost_model(load(example))
    assert (cost_model.params, cost_model.trained_params) == (2241, 2241 - 96)
    layers = build_cost_model(load(example, ['train.groups={"layers.*": {frozen: true}}']))
    assert (layers.params, layers.trained_params) == (2241, 33)
    pauses = cost_model.pauses
    assert (pauses.evaluations(), pauses.checkpoints(), pauses.evaluated) == (10, 10, 120)
    assert cost_model.checkpoint_bytes == 4 * (2241 + 3 * (2241 - 96)), "weights, two moments and the average"


def test_an_outline_spares_the_data_and_must_be_one(own):
    found = build_cost_model(own("Outlined"))
    assert (found.samples, found.held_out, found.sample_bytes) == (40, 7, 128)
    for name in ("NoOutline", "EmptyOutline", "StreamOutline"):
        with pytest.raises(UserError, match=r"^[^\n]*outline\(\) returned[^\n]*$"):
            build_cost_model(own(name))


def sharded(**train):
    parallel = {"strategy": "fsdp", "activation_checkpointing": "full", "micro_batch": 1}
    return lm("8b", 64, 8192, 128256, train=train, parallel=parallel)


def memory(**train):
    return plan(sharded(**train), "8xH100", [8]).rows[0].price.memory


def test_states_in_fewer_bits_need_fewer_bytes():
    usual, small = memory(), memory(optimizer_state="8bit")
    pure, muon = memory(weights="bf16", optimizer_state="bf16"), memory(optimizer="muon")
    assert pure.weights_bytes == usual.weights_bytes / 2
    assert pure.states_bytes == usual.states_bytes / 2
    assert small.weights_bytes == usual.weights_bytes
    assert small.states_bytes == pytest.approx(usual.states_bytes / 4, rel=0.02)
    assert usual.states_bytes / 2 < muon.states_bytes < 0.6 * usual.states_bytes
    for momentum, share in ((0.9, 1 / 2), (0, 0)):
        assert memory(optimizer="sgd", momentum=momentum).states_bytes == share * usual.states_bytes


def test_a_divided_sequence_divides_activations_and_not_states():
    usual = plan(sharded(), "8xH100", [8]).rows[0]
    spec = sharded().replace({"parallel.context": 8})
    divided = plan(spec, "8xH100", [8]).rows[0]
    assert divided.price.memory.weights_bytes == usual.price.memory.weights_bytes
    gathered = 2 * 8 * 128 * 8192 * 7 / 8 * 2  # keys and values that other ranks sent to the layer at work, in bf16
    joined = 2 * 4096 * 8192 / 8 * 2  # what attention returns, once more, and the stream between two compiled graphs
    activations = usual.price.memory.activations_bytes / 8 + gathered + joined
    assert divided.price.memory.activations_bytes == pytest.approx(activations)
    assert divided.price.devices == 8
    assert usual.price.time.compute_s < divided.price.time.compute_s < 2 * usual.price.time.compute_s  # more passes
    assert divided.price.layout == layout_of(spec.replace({"parallel.ranks": 8}))
    odd = plan(spec.replace({"parallel.context": 3}), "8xH100", [3])
    assert odd.misfits[0].rejected[0].code.name == "ODD_CONTEXT"


@pytest.mark.parametrize(("sequence", "measured_s"), [(4096, 0.175), (16_384, 0.331), (65_536, 0.997)])
def test_long_sequences_are_planned_as_an_h200_runs_them(sequence, measured_s):
    """Measured by benchmarks/axes_gpu.py; published rows, with older kernels, are priced without the fraction."""
    sizes = {"preset": "custom", "width": 1024, "heads": 16, "kv_heads": 4, "layers": 12, "vocab": 16384, "tied": False}
    spec = lm(sequence=sequence, vocab=257, batch=65_536 // sequence, train={"compile": "on"})
    spec = spec.replace({f"model.{name}": value for name, value in sizes.items()})
    spec = spec.replace({"parallel.strategy": "single", "parallel.micro_batch": spec.train.global_batch})
    where = resolve_target("1xH200").at(1)
    assert where.physics.attention_efficiency == where.cluster.device.attention_fraction > 0.7
    price = build_cost_model(spec.replace({"parallel.activation_checkpointing": "none"})).price(layout_of(spec), where)
    assert price.step_s == pytest.approx(measured_s, rel=0.05)
    assert resolve_target("1xA100").at(1).physics == GPU_PHYSICS


def test_a_ring_keeps_no_keys_of_others_and_is_taken_where_they_do_not_fit():
    whole = {
        "parallel.activation_checkpointing": "none",
        "parallel.context": 8,
        "data.sequence": 131_072,
        "data.vocab": 32_000,
    }
    spec = sharded().replace({**whole, "model.preset": "7b", "parallel.micro_batch": 1, "train.global_batch": 8})
    layout = layout_of(spec.replace({"parallel.ranks": 8}))
    where, model = resolve_target("8xH200").at(8), build_cost_model(spec)
    gathered, ring = (model.price(replace(layout, ring=way), where) for way in (False, True))
    keys, queries, rounds = 2 * 4096 * 131_072, 4096 * 131_072, 7  # of a sample, in a layer
    on_its_way = 2 * (6 * keys + 6 * queries) / 8
    kept = gathered.memory.activations_bytes - ring.memory.activations_bytes
    assert kept == pytest.approx(2 * 32 / 8 * (rounds * keys + queries) - on_its_way)
    assert gathered.step_s < ring.step_s  # an older kernel, and its parts are joined
    assert (gathered.fits, ring.fits) == (False, True)
    found = plan(spec, "8xH200", [8]).rows[0]
    assert found.price.layout.ring
    assert model.overrides(found.price.layout)["parallel.context"] == "8:ring"
    assert not plan(sharded().replace({"parallel.context": 8}), "8xH100", [8]).rows[0].price.layout.ring


@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (2, 2), (6, 3), (8, 4)])
def test_keys_are_gathered_beside_attention_but_for_those_of_the_first_heads(kv_heads, groups):
    sizes = {"preset": "custom", "width": 1536, "heads": 24, "kv_heads": kv_heads, "layers": 4}
    spec = sharded().replace({f"model.{name}": value for name, value in sizes.items()} | {"parallel.context": 8})
    spec = spec.replace({"data.sequence": 65_536, "parallel.activation_checkpointing": "none"})
    where, layout = resolve_target("8xH100").at(8), layout_of(spec.replace({"parallel.ranks": 8}))
    model = build_cost_model(spec)
    placement = model.placement(layout, where.cluster.device)
    pricer = StepPricer(model.blocks, placement, where.cluster, model.numbers, where.physics)
    layer = find_repeated_block(model.blocks)
    sent = pricer.list_layer_travels(layer, 0.0)[1]
    hidden = where.physics.overlap * (1 - 1 / groups)  # attention takes longer than its keys
    assert sent.exposed_s == pytest.approx(sent.flight_s * (1 - hidden))


def test_an_expert_for_all_tokens_hides_their_way_to_others():
    sizes = {"model.experts": 4, "data.sequence": 1024, "data.vocab": 32000, "parallel.strategy": "zero2"}
    spec = sharded().replace({**sizes, "model.preset": "1b", "parallel.expert": 4})
    where, layout = resolve_target("8xH100").at(8), layout_of(spec.replace({"parallel.ranks": 8}))
    alone, beside = (
        build_cost_model(spec.replace({"model.shared_ffn": ffn})).price(layout, where).time for ffn in (None, 4096)
    )
    hidden = [time.comm_s - time.exposed_s for time in (alone, beside)]
    assert hidden[1] > hidden[0]
    assert beside.comm_s == pytest.approx(alone.comm_s, rel=0.2)


def test_divided_experts_are_held_once_in_each_group():
    sizes = {"model.preset": "1b", "model.experts": 4, "data.sequence": 1024, "data.vocab": 32000}
    mixture = sharded().replace({**sizes, "parallel.strategy": "zero2", "parallel.ranks": 8})
    whole, divided = (plan(mixture.replace({"parallel.expert": n}), "8xH100", [8]).rows[0].price for n in (1, 4))
    assert divided.layout == layout_of(mixture.replace({"parallel.expert": 4, "parallel.micro_batch": 1}))
    shape = mixture.model.shape(32000, 1024)
    experts = shape.layers * 4 * 3 * shape.width * shape.ffn
    ends = (2 * 32000 + 1) * shape.width
    layers = shape.parameters - ends  # gathered in bf16
    assert whole.memory.weights_bytes == 4 * ends + 2 * layers
    assert divided.memory.weights_bytes == pytest.approx(4 * ends + 2 * (layers - experts * 3 / 4))
    assert divided.memory.states_bytes == pytest.approx(whole.memory.states_bytes)
    assert divided.time.comm_s != whole.time.comm_s


@pytest.mark.parametrize("changes", [{}, {"model.experts": 8, "model.ffn": 704}, {"model.vocab": 64_000}])
@pytest.mark.parametrize("layout", ["pipeline:2", "pipeline:4", "pipeline:2:interleaved"])
def test_the_first_stage_is_planned_with_the_layers_that_it_gets(changes, layout):
    """Fewer are where the head is."""
    sizes = {"model.preset": "custom", "model.width": 1024, "model.heads": 16, "model.layers": 12, "data.vocab": 16384}
    parallel = {f"parallel.{name}": value for name, value in parse_layout(layout).items()}
    spec = sharded().replace({**sizes, "model.tied": False, "data.sequence": 2048, **changes, **parallel})
    model, asked = build_cost_model(spec), layout_of(spec)
    with torch.device("meta"):
        before, costs, after = Decoder(spec.model.shape(estimate_vocabulary_size(spec.data), 2048)).costs(2048)
    parts = divide_layers(costs, before, after, asked.stages)
    placement = model.placement(asked, resolve_target("8xH100").at(asked.ranks).cluster.device)
    assert placement.layers == sum(map(len, parts[:: asked.pipeline]))
    assert placement.layers >= len(costs) / asked.pipeline


def test_work_without_gradients_is_planned_shown_and_not_given_to_engines(tmp_path):
    topics = build_spec({"workload": "topics", "train": {"steps": 3}})
    found = plan(topics, "4xA100", samples=1_000_000, tokens=90)
    assert found.overrides() == {"parallel.ranks": found.chosen.devices}
    text = render_text(*render_plan(found, verbose=True))
    assert "time per pass" in text
    assert "layouts on" not in text
    with expect_error("not-supported", "--emit"):
        build_launch_files(found, tmp_path / "run.yaml", "deepspeed")
    few = plan(topics, "4xA100", [4], samples=2, tokens=90)
    assert few.misfits[0].rejected[0].code is RejectReason.NO_SAMPLE
