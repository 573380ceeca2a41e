"""Cost models: steps, types, states, frozen weights, the user's own model, and a kind of work that is not known."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from paceline.config import build_spec, load
from paceline.errors import UserError
from paceline.layout import layout_of
from paceline.planner import plan as planner
from paceline.planner.candidates import PricedLayout
from paceline.planner.cost_model import PassCostModel, build_cost_model, rows_per_rank, split_rows
from paceline.planner.emit import build_launch_files
from paceline.planner.formulas.memory import DeviceMemory
from paceline.planner.formulas.placement import DTYPE_SIZES, GPU_PHYSICS
from paceline.planner.formulas.step_time import StepTime
from paceline.planner.plan import plan
from paceline.planner.show import render_plan
from paceline.planner.target import resolve_target
from plan_specs import classifier, lm
from results import expect_error, render_text


def test_steps_follow_from_samples_and_batch():
    spec = classifier().replace({"train.epochs": 3, "train.global_batch": 100})
    assert build_cost_model(spec).steps == 3 * 1200
    assert build_cost_model(spec.replace({"train.epochs": None, "train.steps": 7})).steps == 7


@pytest.mark.parametrize(
    ("optimizer", "momentum", "moments"), [("adamw", 0.9, 2), ("sgd", 0.9, 1), ("sgd", 0.0, 0), ("lamb", 0.9, 2)]
)
def test_the_optimiser_decides_on_the_states(optimizer, momentum, moments):
    spec = classifier().replace({"train.optimizer": optimizer, "train.momentum": momentum})
    assert build_cost_model(spec).numbers.state_bytes == 4 * moments


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
    layer = found.blocks[1]
    assert found.params == 6 * (32 * 32 + 32)
    assert layer.repeat == 6
    assert [(m.rows, m.inner, m.outer) for m in layer.matmuls] == [(1, 32, 32)]
    assert found.flops_per_sample == pytest.approx(3 * 6 * 2 * 32 * 32)
    assert found.sample_bytes == 128


def test_kernels_as_they_are_written_are_counted_forward_and_backward(own):
    _, layer, rest = build_cost_model(own("Deep")).blocks
    each, others = layer.eager, rest.eager
    assert each.forward_kernels == 1  # a product; activations and the sum of all are the rest
    assert 6 * each.forward_kernels + others.forward_kernels == 6 + 6 + 1
    assert others.forward_elements == pytest.approx(6 * 2 * 32 + 32, rel=0.01)
    assert 6 * each.backward_kernels + others.backward_kernels >= 6 * 3
    assert others.backward_elements > others.forward_elements


def test_recurrent_layers_are_priced_word_by_word(own):
    steps = {m.steps for block in build_cost_model(own("Words")).blocks for m in block.matmuls}
    assert steps == {1, 4}
    assert {m.steps for block in build_cost_model(own("Deep")).blocks for m in block.matmuls} == {1}


@pytest.fixture
def no_moment(monkeypatch):
    """Every model is too large to be tried out on the CPU."""
    monkeypatch.setattr("paceline.planner.tracing.MAX_SECONDS", 0.0)


def test_fake_tensors_tell_of_a_large_model_what_the_cpu_tells_of_a_small_one(own, request):
    on_cpu = build_cost_model(own("Deep"))
    request.getfixturevalue("no_moment")
    on_fake_tensors = build_cost_model(own("Deep"))
    assert on_fake_tensors.blocks == on_cpu.blocks
    assert "measured on 8 samples on the CPU" in on_cpu.assumptions[0]
    assert "measured on fake tensors" in on_fake_tensors.assumptions[0]


def test_a_model_of_a_hundred_gigabytes_is_never_allocated(own):
    found = build_cost_model(own("Enormous"))
    assert found.params == 32 * 10**9 + 10**9
    assert "measured on fake tensors" in found.assumptions[0]


def test_a_model_that_needs_values_is_tried_out_on_the_cpu_however_large(own, no_moment):
    assert "measured on 8 samples on the CPU" in build_cost_model(own("Peeks")).assumptions[0]


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


def test_an_outline_spares_the_data_and_may_hold_them_as_data_does(own):
    found = build_cost_model(own("Outlined"))
    assert (found.samples, found.held_out, found.sample_bytes) == (40, 7, 128)


@pytest.mark.parametrize("name", ["NoOutline", "EmptyOutline", "StreamOutline"])
def test_an_invalid_outline_is_rejected(own, name):
    with pytest.raises(UserError, match=r"outline\(\) returned") as error:
        build_cost_model(own(name))
    assert "\n" not in str(error.value)


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
    assert memory(optimizer="sgd", momentum=0).states_bytes == 0


def test_a_divided_sequence_divides_activations_and_not_states():
    usual = plan(sharded(), "8xH100", [8]).rows[0]
    spec = sharded().replace({"parallel.context": 8})
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


@dataclass(frozen=True)
class RowsMemory(DeviceMemory):
    rows_bytes: float
    terms: ClassVar[Mapping[str, str]] = {"rows_bytes": "rows"}


@dataclass(frozen=True, kw_only=True)
class Sums(PassCostModel):
    """Adds up numbers: a pass reads eight bytes of each row."""

    model: ClassVar[str] = "a sum"
    params = 1.0
    flops_per_sample = 1.0

    def headline(self):
        return f"{self.global_batch:,} rows"

    def layout_name(self, price):
        return f"{rows_per_rank(price.layout):,} rows each"

    def memory(self, layout, where):
        return RowsMemory(8.0 * rows_per_rank(layout))

    def price(self, layout, where):
        memory = self.memory(layout, where)
        seconds = memory.rows_bytes / where.cluster.device.bandwidth_bytes_s
        return PricedLayout(layout, where, StepTime(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), memory)

    def advice(self, plan):
        yield f"take {plan.chosen.devices}"


def planned(monkeypatch, rows, cluster):
    cost_model = Sums(name="sums", workload="sums", global_batch=rows, numbers=DTYPE_SIZES["fp32"], steps=3)
    monkeypatch.setattr(planner, "build_cost_model", lambda *_: cost_model)
    return planner.plan(build_spec({"name": "sums"}), cluster)


def test_it_is_planned_shown_and_written(monkeypatch):
    found = planned(monkeypatch, 1_000_000_000, "4xA100")
    assert [row.speedup for row in found.rows] == pytest.approx([1, 2, 4])
    assert found.overrides() == {"parallel.ranks": 4}
    assert found.advice == ("take 4",)
    assert found.as_json()["rows"][0]["memory"]["rows_bytes"] == 8e9
    text = render_text(*render_plan(found, verbose=True))
    assert "250,000,000 rows each" in text
    assert "time per pass" in text
    assert "rule of thumb" not in text


def test_engines_that_send_gradients_are_refused(monkeypatch, tmp_path):
    found = planned(monkeypatch, 1000, "2xA100")
    with pytest.raises(UserError, match="a sum has no gradients"):
        build_launch_files(found, tmp_path / "run.yaml", "deepspeed")


def test_what_does_not_fit_is_refused_by_its_term(monkeypatch):
    found = planned(monkeypatch, 100_000_000_000, "4xA100")
    assert not found.fits
    assert "rows 120 GB over" in found.advice[0]


def test_ranks_divide_rows():
    layout = split_rows(10, 3)
    assert (layout.ranks, rows_per_rank(layout), layout.passes(10)) == (3, 4, 1)
