"""The search: what it chooses and rejects, bands of its prices, and that the runtime accepts its choice."""

from dataclasses import replace

import pytest

from paceline.config import build_spec
from paceline.layout import Layout, layout_of
from paceline.planner.candidates import ALL, UNKNOWN, LayoutConstraints, RejectReason, constraints_of, load_bands
from paceline.planner.cost_model import build_cost_model
from paceline.planner.plan import apply_plan, plan
from paceline.planner.search import EQUAL_SPEED, search_layouts
from paceline.planner.show import render_plan, summarize_plan
from paceline.planner.target import resolve_target
from paceline.workload import build_workload
from plan_specs import lm


def on(spec, where, devices, **fixed):
    cost_model = replace(build_cost_model(spec), constraints=LayoutConstraints(**fixed))
    return search_layouts(cost_model, devices, resolve_target(where).at(devices))


@pytest.mark.parametrize(
    ("spec", "where", "devices", "chosen"),
    [
        (lm("gpt2", sequence=1024), "8xA100", 8, "ddp"),
        (lm(), "8xH100", 8, "fsdp"),
        (lm(batch=1024, sequence=8192), "2x8xH100", 16, "fsdp"),
        (lm(batch=2048), "16x8xA100", 128, "fsdp"),
    ],
)
def test_of_equally_fast_layouts_the_simplest_is_taken(spec, where, devices, chosen):
    found = on(spec, where, devices)
    assert found.chosen.layout.family == chosen
    assert found.chosen.step_s <= (1 + EQUAL_SPEED) * found.prices[0].step_s


def test_what_does_not_fit_is_rejected_by_its_largest_term():
    found = on(lm(), "4x24GB", 4)
    ddp = next(r for r in found.rejected if r.family == "ddp")
    assert ddp.code in (RejectReason.MEMORY, RejectReason.MEMORY_OFFLOADED)
    assert ddp.facts["term"] == "optimiser states"
    assert found.chosen.layout.offload
    assert found.chosen.memory.total_bytes < 24e9
    assert found.chosen.as_json()["host"] == {"node_bytes": found.chosen.host_node_bytes, "capacity_bytes": None}
    lines = [part for part in render_plan(plan(lm(), "4x24GB")) if isinstance(part, str)]
    assert any("host_memory_gb" in line for line in lines), "how much the host has is not known"


def with_host(tmp_path, gigabytes, more=""):
    file = tmp_path / f"{gigabytes}.yaml"
    file.write_text(f"device: RTX-3090\nper_node: 4\nhost_memory_gb: {gigabytes}\n{more}")
    return str(file)


def test_offloaded_states_must_fit_into_the_host(tmp_path):
    enough = on(lm(), with_host(tmp_path, 256), 4).chosen
    assert enough.layout.offload
    assert enough.host_node_bytes == pytest.approx(4 * (enough.memory.host_bytes + 2e9))
    assert enough.host_over_bytes == pytest.approx(enough.host_node_bytes - 256e9)
    poor = on(lm(), with_host(tmp_path, 64), 4)
    assert poor.chosen is None
    facts = next(r.facts for r in poor.rejected if r.code is RejectReason.HOST_MEMORY)
    assert facts["needed_bytes"] == pytest.approx(116e9, rel=0.01)
    assert facts["capacity_bytes"] == 64e9
    two = with_host(tmp_path, 64, "nodes: 2\nnetwork: 200Gb\n")
    found = on(lm(), two, 8, strategy="fsdp", tensor=1, pipeline=1, offload=True).chosen
    assert found.host_node_bytes < 64e9, "more nodes share it"


def test_cores_have_one_memory_so_offloading_to_it_gains_nothing():
    cost_model, where = build_cost_model(lm("1.3b", batch=8, sequence=256)), resolve_target("1x1xCPU").at(1)
    here, there = (cost_model.price(Layout("fsdp", 1, 8, 8, offload=offload), where) for offload in (False, True))
    assert there.memory.total_bytes < 0.5 * here.memory.total_bytes
    assert there.over_bytes == pytest.approx(here.over_bytes, abs=0.2 * here.memory.total_bytes)


def test_layouts_that_are_not_possible_are_rejected():
    found = on(lm(), "4x2xA100", 8)
    crossing = [r.facts for r in found.rejected if r.code is RejectReason.CROSSES_NODES]
    assert (4, 2) in [(facts["tensor"], facts["per_node"]) for facts in crossing]
    assert all(p.layout.tensor <= 2 for p in found.prices)
    found = on(lm("gpt2", batch=4, sequence=128), "8xA100", 8, tensor=1, pipeline=1)
    assert found.chosen is None
    assert found.rejected[0].code is RejectReason.NO_SAMPLE


def test_the_run_file_constrains_the_search():
    spec = lm(parallel={"strategy": "zero3", "activation_checkpointing": "full", "micro_batch": 2})
    assert constraints_of(spec) == LayoutConstraints(strategy="fsdp", activation_checkpointing="full", micro_batch=2)
    assert {p.layout.strategy for p in plan(spec, "8xH100", [8]).rows[0].found.prices} == {"fsdp"}
    assert constraints_of(lm(parallel="auto")) == LayoutConstraints()
    written = "parallel.strategy=zero3 parallel.micro_batch=2 parallel.activation_checkpointing=full"
    assert constraints_of(spec).describe() == written
    assert constraints_of(lm(parallel={"reduce": "bf16"})).describe() == "parallel.reduce=bf16"


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        (lm(batch=1024), "8x8xA100"),
        (lm("1b"), "4x24GB"),
        (lm("tiny", 64, 128), "2x2xCPU+1Gb"),
        (lm("gpt2", 64, 1024), "4xA100@pcie"),
    ],
)
def test_the_runtime_takes_every_layout_that_fits_as_it_was_priced(spec, where):
    """The planner prices the object that the runtime applies: nothing is lost on the way through the run file."""
    found = plan(spec, where)
    workload = build_workload(spec)
    layouts = [p.layout for row in found.rows for p in row.found.prices]
    for layout in layouts[:: max(1, len(layouts) // 40)]:
        applied_layout = layout_of(spec.replace(found.cost_model.overrides(layout)))
        assert applied_layout == layout
        workload.suits(applied_layout)
        assert found.cost_model.placement(layout, found.target.whole.device).ranks == layout.ranks


def test_auto_takes_the_chosen_layout_on_a_named_cluster_alone():
    spec = lm(parallel="auto", cluster="8xH100")
    chosen = apply_plan(spec, None)
    assert chosen.parallel.strategy in ("fsdp", "zero2")
    assert chosen.parallel.ranks == 8
    assert apply_plan(spec, 4).parallel.ranks == 4
    local = lm("tiny", 16, 64, parallel="auto")
    assert apply_plan(local, None) is local
    named = lm(parallel={"strategy": "ddp"}, cluster="8xH100")
    assert apply_plan(named, None) is named


def test_fp8_is_planned_as_it_can_be_trained():
    spec = lm(train={"precision": "fp8"})
    found = plan(spec, "8xH100", [8])
    assert {p.layout.tensor for p in found.rows[0].found.prices} == {1}
    layout_of(spec.replace(found.overrides()))
    fixed = plan(spec.replace({"parallel.tensor": 2}), "8xH100", [8])
    assert not fixed.fits
    assert fixed.misfits[0].rejected[0].code is RejectReason.FP8
    assert plan(spec.replace({"model.preset": "small"}), "1x1xCPU").cost_model.numbers.matmul == "fp8"  # cores can


RECORDED = {"strategy": "single", "ranks": 1, "activation_checkpointing": "none"}


@pytest.mark.parametrize(
    ("precision", "optimizer", "parallel", "expected"),
    [
        ("bf16", "adamw", {}, True),
        ("fp8", "sgd", {}, True),
        ("fp32", "adamw", {}, False),
        ("bf16", "lamb", {}, False),
        ("bf16", "adamw", {"micro_batch": 4}, False),
    ],
)
@pytest.mark.parametrize("workload", ["lm", "classifier"])
def test_a_step_is_recorded_where_training_records_it(workload, precision, optimizer, parallel, expected):
    train = {"steps": 10**7, "global_batch": 8, "precision": precision, "optimizer": optimizer}
    spec = build_spec({"workload": workload, "train": train, "parallel": {**RECORDED, "micro_batch": 8, **parallel}})
    layout, device = layout_of(spec), resolve_target("2xH200").whole.device
    lengths = (spec.replace({"train.steps": steps}) for steps in (10**7, 10))
    runtime, short = (build_cost_model(of).placement(layout, device).runtime for of in lengths)
    assert runtime.recorded is expected
    layer_by_layer = workload == "lm" and precision != "fp32"
    assert runtime.kernels == ("compiled" if expected or layer_by_layer else "eager")
    assert (short.kernels, short.recorded) == ("eager", expected)


FIXED = {"strategy": "single", "micro_batch": 1, "activation_checkpointing": "none"}


def test_nine_in_ten_rows_that_were_left_out_lie_inside():
    bands = load_bands()
    for (quantity, _), band in bands.items():
        widest = bands[quantity, UNKNOWN]
        assert widest.low <= band.low < 1 < band.high <= widest.high
        assert band.rows < 10 or band.coverage >= 0.9
        assert bands[quantity, ALL].families >= 5


def test_a_layout_has_the_band_of_its_situation_and_what_nobody_measured_the_widest():
    dense, sharded = build_cost_model(lm("1b", 8, 1024)), Layout("fsdp", 1, 8, 2, 4)
    for layout, device, situation in (
        (Layout("single", 1, 8, 8), "H100", "single"),
        (Layout("ddp", 4, 8, 2), "H100", "replicated"),
        (replace(sharded, strategy="zero1"), "H100", "replicated"),
        (sharded, "H100", "sharded"),
        (replace(sharded, tensor=2), "H100", "tensor"),
        (replace(sharded, tensor=2, pipeline=2), "H100", "pipeline"),
        (replace(sharded, offload=True), "H100", UNKNOWN),
        (Layout("ddp", 4, 8, 2), "CPU", UNKNOWN),
    ):
        where = resolve_target(f"2x8x{device}").at(layout.ranks)
        assert dense.price(layout, where).find_band("time").situation == situation
    where, layout, (first, layer, last) = resolve_target("1xH100").at(1), Layout("single", 1, 8, 8), dense.blocks
    for other in (replace(layer, attention=None), replace(layer, expert_params=layer.params / 2)):
        price = replace(dense, blocks=(first, other, last)).price(layout, where)
        assert {price.find_band(quantity).situation for quantity in ("memory", "time")} == {UNKNOWN}
        assert price.memory_band_bytes[1] >= 1.47 * price.memory.total_bytes  # one in twenty needs more


@pytest.mark.parametrize(("factor", "verdict"), [(1.6, "lm fits"), (1.1, "lm may not fit"), (0.3, "lm does not fit")])
def test_what_fits_by_its_estimate_alone_may_not_fit(tmp_path, factor, verdict):
    spec = lm("1b", 8, 1024, parallel=FIXED)
    need = plan(spec, "1xH100").chosen.price.memory.total_bytes / 1e9
    (tmp_path / "lab.yaml").write_text(f"device: H100\nmemory_gb: {need * factor}\nhost_memory_gb: 1\n")
    found = plan(spec, str(tmp_path / "lab.yaml"))
    assert summarize_plan(found).startswith(verdict)
    assert found.fits == (factor > 1)
    if found.fits:
        assert found.chosen.price.tight == (factor < 1.4)
        low, high = found.chosen.hours_band
        assert low < found.chosen.hours < high


def test_the_search_prefers_what_surely_fits():
    found = plan(lm("1b", 64, 1024), "1xA100-40GB").chosen.price
    assert not found.tight
    assert found.memory_band_bytes[1] <= found.capacity_bytes
