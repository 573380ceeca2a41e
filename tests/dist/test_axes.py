"""Divided sequences and experts: what test_layouts.py does not show of them, and that `check` finds faults in them."""

import shutil
import textwrap

import pytest
from axes_work import compare_packed, compare_rings

from hf_models import TEXTS, save
from paceline import RunResult, resume, train
from paceline.config import build_spec
from paceline.errors import UserError
from paceline.launch.local import run_ranks
from paceline.layout import layout_of, parse_layout
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.trials.check import check, compare_weights
from paceline.workload import build_workload
from results import check_holds, expect_error, steps_of

pytestmark = pytest.mark.usefixtures("warm_ranks")


def _values(layout):
    return {f"parallel.{name}": value for name, value in parse_layout(layout).items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_attends_as_whole_sequences_do(ranks):
    """Grouped heads; to rounding, in each type."""
    for found in run_ranks(compare_rings, (), ranks):
        assert found["float64"] < 1e-13
        assert found["float32"] < 1e-5
        assert found["bfloat16"] < 0.05
        assert found["masked"] == 0


@pytest.mark.parametrize(("ranks", "ring"), [(2, False), (2, True), (4, False)])
def test_packed_texts_do_not_see_each_other_in_a_divided_row(ranks, ring):
    for kinds in run_ranks(compare_packed, (["llama", "mistral"], ring), ranks):
        for kind, (loss, gradients) in kinds.items():
            assert loss < 1e-6, kind
            assert gradients < 1e-5, kind


FAULTS = """
import torch.distributed as dist
from paceline.nn.experts import find_experts
from paceline.workloads.lm.workload import LanguageModel

class Unsummed(LanguageModel):
    "Gradients of keys and values stay with the rank that computed them: losses of the first step are right."
    def gather_context(self, model, context):
        super().gather_context(model, context)
        whole = context.gather
        def keep(parts):
            for x, found in zip(parts, whole([x.detach() for x in parts])):
                yield found.index_copy(1, context.positions(x.shape[1], x.device), x)
        context.gather = keep

class Unreturned(LanguageModel):
    "Keys and values that came round a ring have no gradient: losses of the first step are right."
    def gather_context(self, model, context):
        from paceline.parallel import ring
        super().gather_context(model, context)
        complete = ring._attend_backward
        def partial(*sides):
            grad_q, grad_k, grad_v = complete(*sides)
            own = sides[5]  # the causal block
            return grad_q, grad_k * own, grad_v * own
        ring._attend_backward = partial

class Scaled(LanguageModel):
    "A gradient twice as large on its way back."
    def gather_context(self, model, context):
        super().gather_context(model, context)
        whole = context.gather
        context.gather = lambda parts: (2 * found - found.detach() for found in whole(parts))

class Halved(LanguageModel):
    "Half of each expert's gradient, as an average over two ranks leaves where it is a sum already."
    def loss(self, model, batch):
        if dist.is_initialized() and not hasattr(self, "hooks"):
            experts = [p for module in find_experts(model) for p in module.parameters()]
            self.hooks = [p.register_hook(lambda gradient: gradient / 2) for p in experts]
        return super().loss(model, batch)
"""


MIXTURE = {"model.experts": 4, "model.ffn": 32, "model.layers": 2, "model.shared_ffn": 16, "train.evaluate_on": 8}
ON_TWO = ["ddp:2", "ddp:2+expert:2", "fsdp:2+expert:2", "context:2", "pipeline:2"]
ON_MORE = [
    *("fsdp:4+expert:2", "hsdp:2x2+expert:2", "fsdp:2+context:2+expert:4", "fsdp:2+tensor:2+expert:2"),
    "ddp:2+pipeline:2+tensor:2+expert:2",
]
BY_BIAS = {"model.balance_by": "bias", "model.balance": 0.3}
CHECKED = {
    "by bias": (BY_BIAS, ["fsdp:2+expert:2", "context:2", "ddp:2+pipeline:2", "ddp:2+context:2"]),
    "plain": ({}, ON_TWO),
    "recomputed": ({"parallel.activation_checkpointing": "full"}, ON_MORE),
    "bf16": ({"train.precision": "bf16"}, ["fsdp:2", "fsdp:2+expert:2", "context:2"]),
}


@pytest.mark.parametrize("row", CHECKED)
def test_a_mixture_gives_the_same_wherever_its_experts_are(tiny_lm, row):
    changes, layouts = CHECKED[row]
    check_holds(tiny_lm.replace(MIXTURE | changes), layouts=["single", *layouts], steps=2)


@pytest.mark.parametrize(("layout", "changes"), [("context:2", {}), ("fsdp:2+expert:2", MIXTURE)])
def test_layers_are_compiled_around_what_an_axis_sends(tiny_lm, tmp_path, layout, changes):
    spec = tiny_lm.replace({**changes, **_values(layout), "train.steps": 2, "train.log_every": 1})
    runs = [train(spec.replace({"train.compile": way}), tmp_path, show=False) for way in ("off", "on")]
    written, compiled = ([step["loss"] for step in steps_of(run)] for run in runs)
    assert compiled == pytest.approx(written, rel=1e-5)
    events = list(read_events(RunDir(runs[1].path).events_file(0)))
    assert next(event for event in events if event["kind"] == "start")["execution"].startswith("compiled by layer")
    assert not [event for event in events if event["kind"] == "notice"]


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_experts_of_transformers_are_divided(kind, tmp_path, corpus_cache):
    """Read from files that have a matrix for each expert."""
    folder = save(kind, tmp_path / kind)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 40))
    values = {"model": {"init_from": str(folder)}, "train": {"global_batch": 8, "lr": 1e-3}}
    values["data"] = {"source": "text", "path": str(tmp_path / "texts.txt"), "sequence": 32, "cache": str(corpus_cache)}
    values["data"]["tokenizer"] = str(folder / "tokenizer.json")
    values["parallel"] = {"threads": 1, "timeout_s": 120}
    layouts = ["fsdp:2+expert:2", "ddp:2+context:2+expert:4", "tensor:2+context:2+expert:2"]
    check_holds(build_spec({"workload": "transformers", **values}), layouts=["single", *layouts], steps=2)


@pytest.mark.parametrize(
    ("saved", "resumed", "changes"),
    [
        ("fsdp:4+expert:2", "context:2", {}),
        ("single", "ddp:2+expert:2", {}),
        ("ddp:2+pipeline:2", "fsdp:2+expert:2", BY_BIAS),
    ],
)
def test_a_mixture_goes_on_under_another_layout(tiny_lm, tmp_path, saved, resumed, changes):
    spec = tiny_lm.replace(MIXTURE | changes | {"train.steps": 4, "train.checkpoint_every": 2})
    whole = train(spec, tmp_path / "whole", show=False).path
    folder = train(spec.replace(_values(saved)), tmp_path / "cut", show=False).path
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    plain = {f"parallel.{axis}": 1 for axis in ("tensor", "context", "expert", "pipeline")}
    assert resume(folder, plain | _values(resumed), show=False).status == "finished"
    for ours, theirs in zip(steps_of(whole), steps_of(folder), strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5)
    weights = [RunResult(path, None).weights() for path in (whole, folder)]
    assert compare_weights(*weights).value <= 1e-4


@pytest.mark.parametrize(
    ("fault", "layout", "changes"),
    [
        ("Unsummed", "context:2", {}),
        ("Unreturned", "context:2:ring", {}),
        ("Scaled", "fsdp:1+context:2", {}),
        ("Halved", "ddp:2+expert:2", MIXTURE),
    ],
)
def test_check_finds_a_fault_in_an_axis(tiny_lm, tmp_path, fault, layout, changes):
    (tmp_path / "faults.py").write_text(textwrap.dedent(FAULTS))
    spec = tiny_lm.replace({"workload": f"{tmp_path / 'faults.py'}:{fault}", "model.layers": 2} | changes)
    parity = check(spec.replace({"train.evaluate_on": 8}), layouts=["single", layout], steps=2)
    assert not parity.holds
    assert parity.rows[1].grad_norm > 1e-3


@pytest.mark.parametrize(
    ("layout", "changes", "key"),
    [
        ("context:3", {}, "parallel.context"),
        ("context:2", {"data.sequence": 30}, "parallel.context"),
        ("context:2", {"parallel.strategy": "single"}, "parallel.strategy"),
        ("context:2", {"parallel.ranks": 3}, "parallel.ranks"),
        ("context:2", {"parallel.reduce": "powersgd"}, "parallel.reduce"),
        ("fsdp:2+expert:2", {}, "parallel.expert"),
        ("fsdp:4+expert:4", {"model.experts": 2}, "parallel.expert"),
        ("fsdp:2+expert:4", {"model.experts": 4}, "parallel.expert"),
        ("zero1:2+expert:2", {"model.experts": 4}, "parallel.expert"),
        ("tensor:2+expert:2", {"model.experts": 4}, "parallel.expert"),
    ],
)
def test_what_an_axis_cannot_divide_is_rejected(tiny_lm, layout, changes, key):
    spec = tiny_lm.replace({**_values(layout), **changes})
    with pytest.raises(UserError) as error:
        build_workload(spec).suits(layout_of(spec))
    assert error.value.key == key


@pytest.mark.parametrize("workload", ["classifier", "unet", "transformers"])
def test_sequences_are_divided_where_the_workload_can(workload, tmp_path):
    model = {"config": save("bert", tmp_path, "AutoModelForMaskedLM"), "task": "masked_lm"}
    section = {"model": model} if workload == "transformers" else {}
    spec = build_spec({"workload": workload, "parallel": parse_layout("context:2"), **section})
    with expect_error("not-supported"):
        build_workload(spec).suits(layout_of(spec))
