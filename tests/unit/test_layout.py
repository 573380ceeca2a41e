"""The grid of ranks, its equations, its short forms, and what is refused before a process starts."""

from pathlib import Path

import pytest
import yaml

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.layout import divide_layers, layout_of, parse_layout
from paceline.workload import build_workload
from results import expect_error

TABLES = yaml.safe_load(Path(__file__).with_name("layout.yaml").read_text(encoding="utf-8"))

LM = {"workload": "lm", "model": {"preset": "custom", "width": 32, "heads": 4, "kv_heads": 2, "layers": 4, "ffn": 64}}


def of(batch=16, precision="fp32", **parallel):
    return layout_of(build_spec({"train": {"global_batch": batch, "precision": precision}, "parallel": parallel}))


@pytest.mark.parametrize(("parallel", "grid"), TABLES["grids"])
def test_the_grid_is_printed_as_a_product(parallel, grid):
    layout = of(**parallel)
    assert layout.grid() == grid
    same = layout.tensor * layout.pipeline  # ranks that get the same samples
    each = [layout.data_rank(rank) for rank in range(layout.ranks)]
    assert sorted(each) == sorted([*range(layout.data)] * same)
    assert layout.tensor == 1 or each == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(("batch", "parallel", "passes"), TABLES["passes of pipelines"])
def test_a_pipeline_always_runs_full(batch, parallel, passes):
    layout = of(batch, **parallel)
    assert layout.passes(batch) == layout.passes(1) == passes
    assert passes % layout.pipeline == 0


@pytest.mark.parametrize(("words", "parallel"), TABLES["short forms"])
def test_short_forms(words, parallel):
    assert parse_layout(words) == parallel


UNKNOWN = ["", "fdsp:2", "fsdp", "fsdp:0", "fsdp:two", "hsdp:4", "tensor:2x2", "single:2", "ddp:2+"]
TWICE = ["ddp:2+fsdp:2", "tensor:2+tensor:4", "single+fsdp:2"]


@pytest.mark.parametrize("words", [*UNKNOWN, *TWICE])
def test_a_short_form_that_says_nothing_or_something_twice_is_refused(words):
    with expect_error("conflict" if words in TWICE else "unknown-name", "layout"):
        parse_layout(words)


@pytest.mark.parametrize(("batch", "parallel", "key", "use"), TABLES["refused layouts"])
def test_layouts_that_cannot_work_are_refused_with_the_nearest_that_can(batch, parallel, key, use):
    with expect_error("conflict", key) as refused:
        of(batch, **parallel)
    assert use in str(refused.value)


@pytest.mark.parametrize(("values", "key", "use"), TABLES["refused by a model"])
def test_what_a_model_cannot_take_is_refused_by_name(values, key, use):
    spec = build_spec({**LM, **values})
    with pytest.raises(UserError) as error:
        build_workload(spec).suits(layout_of(spec))
    assert error.value.key == key
    assert use in str(error.value)


@pytest.mark.parametrize(("costs", "before", "after", "parts", "sizes"), TABLES["cuts"])
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
