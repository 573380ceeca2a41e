"""Promise 1 over every layout: the same loss, the same gradient norm and the same weights as on one rank."""

import math

import pytest
import torch
from layout_rows import gather_in_every_way, held_bytes, train_rows, train_rows_through_host

from paceline.launch.local import run_ranks
from paceline.layout import layout_of, parse_layout
from paceline.runlog.events import read_steps
from paceline.trainer.checkpoint.reader import find_newest, read_tensors
from paceline.trials.check import compute_relative_difference

pytestmark = pytest.mark.usefixtures("warm_ranks")

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
ON_TWO = [
    *("ddp:2", "zero1:2", "zero2:2", "fsdp:2", "tensor:2", "tensor:2+sequence", "context:2", "context:2:ring"),
    *(f"pipeline:2:{schedule}" for schedule in SCHEDULES),
]
ON_MORE = [
    *("fsdp:4", "hsdp:2x2", "ddp:2+tensor:2", "fsdp:2+tensor:2", "pipeline:2+tensor:2", "fsdp:2+pipeline:2"),
    *("fsdp:2+context:2", "pipeline:2+context:2", "fsdp:2+tensor:2+pipeline:2", "ddp:2+tensor:2+context:2"),
    *("context:4:ring", "fsdp:2+context:2:ring", "tensor:2+context:2:ring", "pipeline:2+context:2:ring"),
]
VARIANTS = {
    "plain": {},
    "accumulated, recomputed": {"parallel.activation_checkpointing": "full"},
    "selective": {"parallel.activation_checkpointing": "selective"},
    "bf16": {"train.precision": "bf16"},
    "lamb": {"train.optimizer": "lamb"},
    "muon": {"train.optimizer": "muon"},
    "8bit": {"train.optimizer_state": "8bit", "model.ffn": 256},
    "pure bf16": {"train.precision": "bf16", "train.weights": "bf16", "train.optimizer_state": "bf16"},
    "growing": {"train.global_batch": {0: 8, 2: 16}},
    "tied": {"model.tied": True},
    "offload": {"parallel.offload": True},
    "fp64": {"train.precision": "fp64"},
    "by size": {"parallel.wrap": 3000, "parallel.activation_checkpointing": "full"},
    "rounded": {"parallel.reduce": "bf16"},
}
LIKE_PLAIN = ("offload", "by size", "rounded")
LAYOUTS = {
    "plain": ON_TWO,
    "accumulated, recomputed": (*ON_TWO, *ON_MORE),
    "selective": ("fsdp:2", "tensor:2+sequence", "pipeline:2:1f1b"),
    "bf16": ("ddp:2", "fsdp:2", "tensor:2+sequence", "context:2", "context:2:ring", "pipeline:2:1f1b"),
    "lamb": ("zero1:2", "fsdp:2", "tensor:2", "pipeline:2:interleaved"),
    "muon": ("zero1:2", "fsdp:2", "tensor:2", "pipeline:2:interleaved", "fsdp:2+tensor:2"),
    "8bit": ("ddp:2", "zero1:2", "fsdp:2", "tensor:2", "pipeline:2:1f1b"),
    "pure bf16": ("ddp:2", "zero1:2", "fsdp:2", "tensor:2", "pipeline:2:1f1b"),
    "growing": ("ddp:2", "pipeline:2:1f1b"),
    "tied": ("zero2:2", "tensor:2+sequence", "zero1:1+context:2", "pipeline:2:interleaved", "pipeline:2+tensor:2"),
    "fp64": ("tensor:2", "pipeline:2:zero_bubble"),
    "offload": ["fsdp:2"],
    "by size": ("fsdp:2", "zero2:2"),
    "rounded": ("fsdp:2", "hsdp:2x2"),
}
ROWS = [(layout, variant) for variant, layouts in LAYOUTS.items() for layout in layouts]
STEPS = 4
TOLERANCE = {
    "bf16": (1e-3, 5e-2, 5e-2),
    "pure bf16": (5e-3, 5e-2, 5e-2),
    "rounded": (1e-4, 1e-3, 2e-2),
    "fp64": (1e-12, 1e-12, 1e-10),
}
"""(loss, gradient norm, weights), relative; elsewhere 1e-5 for losses and norms, and 1e-4 for weights."""


def named(layout, variant, layers):
    return f"{layout} {variant} {layers} layers".replace(":", "-").replace(" ", "_")


def reference_of(variant):
    return "plain" if variant in LIKE_PLAIN else variant


def spec_of(base, layout, variant):
    spec = base.replace({f"parallel.{key}": value for key, value in parse_layout(layout).items()} | VARIANTS[variant])
    if variant != "accumulated, recomputed" or spec.parallel.pipeline > 1:  # a pipeline always accumulates
        return spec
    return spec.replace({"parallel.micro_batch": layout_of(spec).micro_batch // 2})


def depth_of(layout):
    """Layers: 4 can be cut into the 4 stages of two ranks; where nothing asks for so many, 2 are enough."""
    return 4 if layout in [f"pipeline:2:{schedule}" for schedule in SCHEDULES] else 2


@pytest.fixture(scope="module")
def trained(tiny_lm, tmp_path_factory):
    """(layout, variant, layers) -> (steps, weights), trained for a few steps; launches are shared by all of one size.

    The evaluation is not compared here: a few samples, once, are enough.
    """
    scratch = tmp_path_factory.mktemp("layouts")
    rows = {(layout, variant, depth_of(layout)): None for layout, variant in ROWS}
    rows |= {("single", reference_of(variant), depth): None for _, variant, depth in rows}
    base = tiny_lm.replace({"train.steps": STEPS, "train.evaluate_every": STEPS, "train.evaluate_on": 8})
    specs = {row: spec_of(base.replace({"model.layers": row[2]}), *row[:2]) for row in rows}
    for ranks in sorted({spec.parallel.ranks for spec in specs.values()}):
        group = [(named(*row), spec) for row, spec in specs.items() if spec.parallel.ranks == ranks]
        if ranks == 1:
            train_rows(group, str(scratch))
        else:
            run_ranks(train_rows, (group, str(scratch)), ranks)

    def read(*row):
        folder = scratch / named(*row)
        weights = read_tensors(find_newest(folder / "checkpoints", print))
        return read_steps(folder / "rank0.jsonl"), weights

    return read


@pytest.mark.parametrize(("layout", "variant"), ROWS)
def test_every_layout_gives_the_answer_of_one_rank(trained, layout, variant):
    ours, weights = trained("single", reference_of(variant), depth_of(layout))
    theirs, found = trained(layout, variant, depth_of(layout))
    loss, norm, weight = TOLERANCE.get(variant, (1e-5, 1e-5, 1e-4))
    assert len(ours) == len(theirs) == STEPS
    for a, b in zip(ours, theirs, strict=True):
        assert (a["samples"], a["tokens"]) == (b["samples"], b["tokens"])
        assert compute_relative_difference(a["loss"], b["loss"]) <= loss, f"loss at step {a['step']}"
        assert compute_relative_difference(a["grad_norm"], b["grad_norm"]) <= norm, f"gradient norm at step {a['step']}"
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype
        assert float((found[name] - tensor).norm() / tensor.norm()) <= weight, name


def test_gradients_that_travel_in_16_bits_leave_a_trace(trained):
    exact, _ = trained("fsdp:2", "plain", 2)
    rounded, _ = trained("fsdp:2", "rounded", 2)
    assert any(a["grad_norm"] != b["grad_norm"] for a, b in zip(exact, rounded, strict=True))


def test_accumulation_and_recomputing_change_nothing_on_one_rank_either(trained):
    plain, weights = trained("single", "plain", 4)
    other, found = trained("single", "accumulated, recomputed", 4)
    assert max(compute_relative_difference(a["loss"], b["loss"]) for a, b in zip(plain, other, strict=True)) <= 1e-5
    assert all(torch.allclose(found[name], weights[name], rtol=1e-3, atol=1e-5) for name in weights)
    assert plain[-1]["loss"] < plain[0]["loss"] - 1e-3, "it learns, or there is nothing to compare"


# What each rank holds, for P parameters of 4 bytes and two moments of AdamW on 4 ranks.
HELD = {
    "ddp:4": (1, 1, 2),
    "zero1:4": (1, 1, 2 / 4),
    "zero2:4": (1 + 1 / 4, 1 / 4, 2 / 4),
    "fsdp:4": (None, 1 / 4, 2 / 4),
}


def test_memory_falls_as_the_arithmetic_says(tiny_lm):
    wide = tiny_lm.replace({"model.width": 128, "model.ffn": 384})
    rows = [(layout, spec_of(wide, layout, "plain")) for layout in HELD]
    parameters = _parameters(wide)
    blocks = _parameters(wide, "layers.")
    for rank in run_ranks(held_bytes, (rows,), 4):
        for layout, (whole, gradients, moments) in HELD.items():
            if whole is None:  # a part of all, and what is not in a layer is kept until the backward pass
                whole = 1 / 4 + (parameters - blocks) / parameters
            want = {"parameters": whole, "gradients": gradients, "optimizer": moments}
            for what, share in want.items():
                assert rank[layout][what] == pytest.approx(4 * parameters * share, rel=0.1), (layout, what)


def _parameters(spec, prefix=""):
    from paceline.workload import build_workload

    with torch.device("meta"):
        model = build_workload(spec).model()
    return sum(math.prod(p.shape) for name, p in model.named_parameters() if name.startswith(prefix))


def test_gathers_of_ranks_that_share_a_device_are_those_of_others():
    """pytorch/pytorch#152645: gloo's own gathers of the functional collectives read device memory as host memory."""
    for found in run_ranks(gather_in_every_way, (), 2):
        for plain, mended in zip(found["plain"], found["mended"], strict=True):
            assert torch.equal(plain, mended)


def test_messages_and_gathers_through_host_memory_give_the_same(trained, tiny_lm, tmp_path):
    """The ways of ranks that share a CUDA device. Each schedule receives and sends in another order."""
    layouts = ["tensor:2+sequence", *(f"pipeline:2:{schedule}" for schedule in ("1f1b", "zero_bubble"))]
    base = tiny_lm.replace({"train.steps": STEPS, "train.evaluate_every": STEPS, "train.evaluate_on": 8})
    specs = [spec_of(base.replace({"model.layers": depth_of(layout)}), layout, "plain") for layout in layouts]
    rows = [(named(layout, "host", depth_of(layout)), spec) for layout, spec in zip(layouts, specs, strict=True)]
    run_ranks(train_rows_through_host, (rows, str(tmp_path)), 2)
    for layout, (name, _) in zip(layouts, rows, strict=True):
        straight, weights = trained(layout, "plain", depth_of(layout))
        folder = tmp_path / name
        found = read_tensors(find_newest(folder / "checkpoints", print))
        assert [step["loss"] for step in read_steps(folder / "rank0.jsonl")] == [step["loss"] for step in straight]
        assert all(torch.equal(found[key], tensor) for key, tensor in weights.items())
