"""How a step runs: the decision and its words, without a device."""

import subprocess
import sys

import pytest

from paceline.config import build_spec
from paceline.config.registry import StepWork, Traits, find_entry
from paceline.data.order import Order
from paceline.execution import CPU, CUDA, NoGraphReason, Target, decide_execution, estimate_compiling
from paceline.layout import layout_of
from paceline.trainer.explain import describe_execution

CNN, MLP = StepWork(51, 717e6), StepWork(7, 0.5e6)
"""A batch of 256 images through the networks of benchmarks/own_model_gpu.py."""
ONE_SHAPE = Traits(few_shapes=True)


def decided(train, work=None, target=CUDA, traits=ONE_SHAPE, parallel=None):
    spec = build_spec({"train": {"precision": "bf16", "global_batch": 256, **train}, "parallel": parallel or {}})
    layout = layout_of(spec)
    weighed = estimate_compiling(work, spec.train.steps, layout) if work else None
    return decide_execution(spec.train, layout, target, traits, weighed)


def test_a_run_is_compiled_where_that_saves_more_time_than_it_takes():
    """On an H200 the CNN took 16 to 24 s to compile and saved 4.5 ms a step, the MLP 9 s and 0.03 ms at most."""
    cnn, mlp = decided({"steps": 1000}, CNN).compiling, decided({"steps": 1000}, MLP).compiling
    assert 15 < cnn.cost_s < 25
    assert 3e-3 < cnn.saved_s_per_step < 6e-3
    assert 8 < mlp.cost_s < 12
    assert mlp.saved_s_per_step < 5e-5
    words = decided({}, CNN).describe()
    assert words.startswith("compiled whole and recorded as one CUDA graph (compiling takes about 18 s and pays from")
    for work, steps, pays in ((CNN, 400, False), (CNN, 20_000, True), (MLP, 100_000, False)):
        found = decided({"steps": steps}, work)
        assert (found.recorded, found.compiled_whole) == (True, pays)
    nothing = StepWork(10, 0.0)
    assert not decided({}, nothing).compiled
    assert not decided({"steps": 10**9}, nothing).compiled


@pytest.mark.parametrize(
    ("train", "target", "traits", "reason"),
    [
        ({}, CPU, ONE_SHAPE, NoGraphReason.ON_CPU),
        ({"compile": "off"}, CUDA, ONE_SHAPE, NoGraphReason.COMPILE_OFF),
        ({"optimizer": "lamb"}, CUDA, ONE_SHAPE, NoGraphReason.OPTIMIZER),
        ({}, CUDA, Traits(few_shapes=True, own_optimizer=True), NoGraphReason.OPTIMIZER),
        ({}, CUDA, Traits(), NoGraphReason.MANY_SHAPES),
        ({"precision": "fp32"}, CUDA, Traits(few_shapes=True, half_only=True), NoGraphReason.FULL_PRECISION),
        ({"precision": "fp32"}, CUDA, ONE_SHAPE, NoGraphReason.RECORDED),
        ({}, Target("cuda", compiles=False), ONE_SHAPE, NoGraphReason.RECORDED),
    ],
)
def test_a_step_is_recorded_or_says_why_not(train, target, traits, reason):
    found = decided(train, None, target, traits)
    assert found.reason is reason
    assert found.recorded is (reason is NoGraphReason.RECORDED)


def test_nothing_is_compiled_without_a_compiler_or_for_full_precision():
    assert not decided({}, None, Target("cuda", compiles=False)).compiled
    assert not decided({"precision": "fp32"}).compiled
    assert decided({"precision": "fp32", "compile": "on"}).compiled_whole


def test_explain_weighs_the_recipe_of_the_classifier():
    spec = build_spec({"train": {"epochs": 6, "precision": "bf16"}, "data": {"source": "ag_news", "path": "nowhere"}})
    cpu, cuda = describe_execution(spec, layout_of(spec), Order.of(spec.train, 46_387))
    assert cpu == "on CPU cores a step is eager: there is no CUDA device"
    assert "not compiled and recorded as one CUDA graph (compiling takes about" in cuda
    assert find_entry("classifier").work(spec).moved_elements > 1e6


def test_explain_says_that_ranks_can_share_a_device():
    spec = build_spec({"parallel": {"ranks": 2, "backend": "gloo"}})
    assert describe_execution(spec, layout_of(spec))[-1].startswith("of 2 ranks, those beyond")
    for other in (spec.replace({"parallel.backend": "auto"}), spec.replace({"parallel.device": "cpu"})):
        assert not any("share" in line for line in describe_execution(other, layout_of(other)))


def test_what_trains_does_not_import_the_compiler():
    """It takes seconds, and many a run does not."""
    code = (
        "import sys, torch, paceline.trainer.setup\n"
        "from paceline.trainer.optim.optimizers import AdamW, SGD\n"
        "from paceline.nn.op_counter import OperationCounter\n"
        "for kind in (AdamW, SGD):\n"
        "    weight = torch.ones(2, requires_grad=True)\n"
        "    optimizer = kind([weight], lr=0.1)\n"
        "    with OperationCounter() as counter:\n"
        "        loss = (weight * 2).sum()\n"
        "    loss.backward(); optimizer.step(); optimizer.zero_grad()\n"
        "    assert counter.operations == 2, counter.operations\n"
        "    assert not torch.equal(weight, torch.ones(2))\n"
        "print([name for name in ('sympy', 'torch._dynamo') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
