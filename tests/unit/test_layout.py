"""The grid of ranks, its equations, its short forms, and what is refused before a process starts."""

import pytest

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.layout import divide_layers, layout_of, parse_layout
from paceline.workload import build_workload
from results import expect_error

LM = {"workload": "lm", "model": {"preset": "custom", "width": 32, "heads": 4, "kv_heads": 2, "layers": 4, "ffn": 64}}


def of(batch=16, precision="fp32", **parallel):
    return layout_of(build_spec({"train": {"global_batch": batch, "precision": precision}, "parallel": parallel}))


@pytest.mark.parametrize(
    ("parallel", "grid"),
    [
        ({}, "1 rank = replicate 1 × shard 1 × tensor 1 × pipeline 1"),
        ({"ranks": 4}, "4 ranks = replicate 4 × shard 1 × tensor 1 × pipeline 1"),
        ({"ranks": 4, "strategy": "zero3"}, "4 ranks = replicate 1 × shard 4 × tensor 1 × pipeline 1"),
        ({"ranks": 8, "strategy": "hsdp"}, "8 ranks = replicate 2 × shard 4 × tensor 1 × pipeline 1"),
        ({"ranks": 8, "tensor": 2, "pipeline": 2}, "8 ranks = replicate 2 × shard 1 × tensor 2 × pipeline 2"),
    ],
)
def test_the_grid_is_printed_as_a_product(parallel, grid):
    layout = of(**parallel)
    assert layout.grid() == grid
    same = layout.tensor * layout.pipeline  # ranks that get the same samples
    each = [layout.data_rank(rank) for rank in range(layout.ranks)]
    assert sorted(each) == sorted([*range(layout.data)] * same)
    assert layout.tensor == 1 or each == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("batch", "parallel", "passes"),
    [
        (16, {"ranks": 2, "pipeline": 2}, 4),
        (16, {"ranks": 4, "pipeline": 2, "micro_batch": 4}, 2),
        (10, {"ranks": 2, "pipeline": 2, "micro_batch": 2}, 6),  # 5 would not be rounds of 2
        (7, {"ranks": 2, "pipeline": 2}, 8),
    ],
)
def test_a_pipeline_always_runs_full(batch, parallel, passes):
    layout = of(batch, **parallel)
    assert layout.passes(batch) == layout.passes(1) == passes
    assert passes % layout.pipeline == 0


@pytest.mark.parametrize(
    ("words", "parallel"),
    [
        ("single", {"strategy": "single", "ranks": 1}),
        ("zero1:2", {"strategy": "zero1", "ranks": 2}),
        ("hsdp:2x4", {"strategy": "hsdp", "replicate": 2, "ranks": 8}),
        ("tensor:2+sequence", {"strategy": "auto", "tensor": 2, "sequence": True, "ranks": 2}),
        ("fsdp:2+context:4:ring", {"strategy": "fsdp", "context": 4, "ranks": 8}),
        ("pipeline:2:gpipe", {"strategy": "auto", "pipeline": 2, "schedule": "gpipe", "ranks": 2}),
        ("fsdp:2+tensor:2+pipeline:2", {"strategy": "fsdp", "tensor": 2, "pipeline": 2, "ranks": 8}),
        ("deepspeed+zero2:2", {"engine": "deepspeed", "strategy": "zero2", "ranks": 2}),
    ],
)
def test_short_forms(words, parallel):
    assert parse_layout(words) == parallel


UNKNOWN = ["", "fdsp:2", "fsdp", "fsdp:0", "fsdp:two", "hsdp:4", "tensor:2x2", "single:2", "ddp:2+"]
TWICE = ["ddp:2+fsdp:2", "tensor:2+tensor:4", "single+fsdp:2"]


@pytest.mark.parametrize("words", [*UNKNOWN, *TWICE])
def test_a_short_form_that_says_nothing_or_something_twice_is_refused(words):
    with expect_error("conflict" if words in TWICE else "unknown-name", "layout"):
        parse_layout(words)


@pytest.mark.parametrize(
    ("batch", "parallel", "key", "use"),
    [
        (16, {"ranks": 6, "tensor": 4}, "parallel.ranks", "parallel.ranks=4 or 8"),
        (16, {"ranks": 1, "tensor": 2}, "parallel.ranks", "parallel.ranks=2"),
        (16, {"ranks": 4, "strategy": "hsdp", "replicate": 3}, "parallel.replicate", "parallel.replicate=2"),
        (16, {"ranks": 2, "strategy": "hsdp"}, "parallel.ranks", "4 or more"),
        (16, {"ranks": 4, "replicate": 2}, "parallel.replicate", ""),
        (16, {"ranks": 4, "strategy": "zero1", "tensor": 2}, "parallel.strategy", "zero2"),
        (16, {"ranks": 2, "sequence": True}, "parallel.sequence", "parallel.tensor=2"),
        (16, {"ranks": 2, "context": "1:ring"}, "parallel.context", "2:ring"),
        (16, {"ranks": 2, "context": "2:ring", "activation_checkpointing": "selective"}, "parallel.context", "none"),
        (16, {"ranks": 2, "offload": True}, "parallel.offload", "parallel.strategy=fsdp"),
        (16, {"ranks": 2, "strategy": "zero1", "reduce": "bf16"}, "parallel.reduce", "ddp, zero2"),
        (16, {"ranks": 2, "strategy": "fsdp", "reduce": "powersgd"}, "parallel.reduce", "ddp alone"),
        (16, {"ranks": 2, "strategy": "fsdp", "engine": "deepspeed", "wrap": 9}, "parallel.engine", "torch"),
        (16, {"ranks": 2, "backend": "nccl", "device": "cpu"}, "parallel.backend", "parallel.backend=gloo"),
        (16, {"ranks": 2, "engine_config": "x.json"}, "parallel.engine_config", ""),
        (16, {"ranks": 2, "engine": "deepspeed", "tensor": 2}, "parallel.engine", "parallel.engine=torch"),
        (16, {"ranks": 2, "strategy": "single"}, "parallel.strategy", "parallel.strategy=ddp"),
        (3, {"ranks": 4, "pipeline": 4}, "parallel.pipeline", "parallel.pipeline=3"),
        (16, {"ranks": 4, "pipeline": 4, "micro_batch": 8}, "parallel.micro_batch", "parallel.micro_batch=4"),
        (3, {"ranks": 8, "tensor": 2}, "train.global_batch", "train.global_batch=4"),
        (16, {"ranks": 2, "reduce": "powersgd", "precision": "fp16"}, "parallel.reduce", "train.precision=bf16"),
        (16, {"ranks": 4, "tensor": 2, "pipeline": 2, "least_ranks": 2}, "parallel.least_ranks", "leave it out"),
        (16, {"ranks": "3..4", "tensor": 2}, "parallel.least_ranks", "leave it out"),
        (16, {"ranks": "8..2"}, "parallel.least_ranks", "leave it out"),
        (16, {"ranks": 2, "tensor": 2, "precision": "fp8"}, "train.precision", "train.precision=bf16"),
    ],
)
def test_layouts_that_cannot_work_are_refused_with_the_nearest_that_can(batch, parallel, key, use):
    with expect_error("conflict", key) as refused:
        of(batch, **parallel)
    assert use in str(refused.value)


@pytest.mark.parametrize(
    ("values", "key", "use"),
    [
        ({"parallel": {"ranks": 4, "tensor": 4}}, "parallel.tensor", "use 2"),
        ({"parallel": {"ranks": 3, "tensor": 3}}, "parallel.tensor", "use 2"),
        ({"parallel": {"ranks": 8, "pipeline": 8}}, "parallel.pipeline", "use 4"),
        ({"parallel": {"ranks": 4, "pipeline": 4, "schedule": "interleaved"}}, "parallel.pipeline", "use 2"),
        (
            {"data": {"sequence": 33}, "parallel": {"ranks": 2, "tensor": 2, "sequence": True}},
            "parallel.tensor",
            "use 34",
        ),
    ],
)
def test_what_a_model_cannot_take_is_refused_by_name(values, key, use):
    spec = build_spec({**LM, **values})
    with pytest.raises(UserError) as error:
        build_workload(spec).suits(layout_of(spec))
    assert error.value.key == key
    assert use in str(error.value)


@pytest.mark.parametrize(
    ("costs", "before", "after", "parts", "sizes"),
    [
        ([1] * 4, 0, 2, 2, [3, 1]),
        ([1] * 4, 0, 9, 4, [1] * 4),
        ([1] * 6, 1, 1, 4, [1, 2, 2, 1]),
        ([5, 1, 1, 1], 0, 0, 2, [1, 3]),
    ],
)
def test_stages_are_cut_by_cost(costs, before, after, parts, sizes):
    ranges = divide_layers(costs, before, after, parts)
    assert [len(part) for part in ranges] == sizes
    assert [i for part in ranges for i in part] == list(range(len(costs)))


def test_a_range_of_ranks_names_the_least_that_are_enough():
    spec = build_spec({**LM, "parallel": {"ranks": "2..8", "tensor": 2}})
    assert (spec.parallel.ranks, spec.parallel.least_ranks) == (8, 2)
    again = build_spec(spec.dump())
    assert again.parallel == spec.parallel
    with expect_error("invalid-value"):
        build_spec({**LM, "parallel": {"ranks": "2...8"}})
