"""DeepSpeed and Accelerate under the same loop: the same answer, the same checkpoints, refusals in place of silence."""

import json
import subprocess
import sys
import textwrap
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from engine_rows import at_half, train_all
from safetensors.torch import load_file

from paceline import RunResult, resume, train
from paceline.config import build_spec, load
from paceline.errors import UserError
from paceline.inference.export import export
from paceline.launch.local import run_ranks
from paceline.layout import layout_of
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary
from paceline.trainer import engines
from paceline.trainer.engines import accelerate_config, deepspeed_config
from paceline.trials.check import compare_weights, compute_relative_difference
from results import steps_of

pytestmark = pytest.mark.usefixtures("warm_ranks")

if missing := [name for name in ("deepspeed", "accelerate") if find_spec(name) is None]:
    pytest.skip(f"needs  pip install 'paceline[{','.join(missing)}]'", allow_module_level=True)

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-3, "odd-fp16": 1e-3}
SMALL = {"train.steps": 8, "train.checkpoint_every": 4, "train.evaluate_every": 8, "train.evaluate_on": 48}
SMALL |= {"train.keep": 9, "train.clip": 0.7}
LONGER = {"train.steps": 20, "train.checkpoint_every": 10}
SGD = {"train.optimizer": "sgd", "train.lr": 0.05}
BF16 = {"train.precision": "bf16"}
FP16 = {"train.precision": "fp16", "train.loss_scale_start": 512, "train.loss_scale_window": 6}
ODD = """
import numpy as np, torch
from torch import nn
from paceline import Workload

X = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
X[37, 3] = float("inf")  # two steps are not finite, whoever computes them

class Rows:
    def __len__(self): return len(X)
    def cost(self, ids): return np.ones(len(ids))
    def batch(self, ids, keys): return X[ids]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8, bias=False)
        self.mix.weight.requires_grad_(False)
        self.deep, self.last = nn.Linear(8, 7), nn.Linear(7, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        if self.training: self.calls += 1
        return self.last(torch.tanh(self.deep(self.mix(x))))

class Odd(Workload):
    "A frozen matrix, a buffer, sizes that no number divides, and a sample that breaks a step."
    def model(self): return Net()
    def data(self, split): return Rows() if split == "train" else None
    def loss(self, model, x): return ((model(x)[:, 0] - x.sum(1)) ** 2).sum(), len(x)
"""
OWN_JSON = {
    "train_batch_size": "auto",
    "gradient_clipping": 0.7,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5000},
}
OWN_YAML = {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True, "mixed_precision": "no"}
OWN_YAML["debug"] = False


def under(engine, strategy, **more):
    return {"parallel.engine": engine, "parallel.strategy": strategy, **more}


deepspeed, accelerate = partial(under, "deepspeed"), partial(under, "accelerate")
ACCELERATE = {"parallel.engine": "accelerate"}
PASSES = {"parallel.micro_batch": 5}
OFFLOAD = {"parallel.offload": True, "parallel.bucket_mb": 0.02}
# name: (what it is compared with, values that differ); those of fp32 first, since autocast leaves traces in DeepSpeed
ROWS = {
    "deepspeed-ddp": ("small", deepspeed("ddp")),
    "deepspeed-zero1": ("small", deepspeed("zero1")),
    "deepspeed-zero2": ("small", deepspeed("zero2", **PASSES)),
    "deepspeed-zero3": ("small", deepspeed("zero3")),
    "offload-zero3": ("small", deepspeed("zero3", **PASSES, **OFFLOAD)),
    "sgd-zero3": ("sgd", deepspeed("zero3")),
    "lm-zero2": ("lm", deepspeed("zero2", **PASSES)),
    "lm-zero3": ("lm", deepspeed("zero3", **{"parallel.activation_checkpointing": "full"})),
    "odd-zero1": ("odd", deepspeed("zero1")),
    "odd-zero3": ("odd", deepspeed("zero3")),
    "accelerate-ddp": ("small", {**ACCELERATE, **PASSES}),
    "accelerate-own": ("small", {**ACCELERATE, "parallel.engine_config": "own.yaml"}),
    "accelerate-fsdp": ("lm", accelerate("fsdp", **PASSES)),  # where it takes CPUs for CUDA devices
    "accelerate-zero2": ("lamb", accelerate("zero2")),
    "resumed-zero1": ("small", deepspeed("zero1")),
    "resumed-zero3": ("small", deepspeed("zero3", **OFFLOAD)),
    "resumed-fsdp": ("small", accelerate("fsdp", **PASSES)),
    "resumed-odd": ("odd", deepspeed("zero3")),
    "fp16-zero2": ("odd-fp16", deepspeed("zero2")),
    "fp16-zero3": ("fp16", deepspeed("zero3", **PASSES)),
    "fp16-accelerate": ("odd-fp16", ACCELERATE),
    "fp16-fsdp": ("fp16", accelerate("fsdp", **PASSES)),
    "resumed-fp16": ("odd-fp16", deepspeed("zero1")),
    "bf16-ddp": ("bf16", deepspeed("ddp")),
    "bf16-zero3": ("bf16", deepspeed("zero3", **PASSES)),
    "bf16-own": ("bf16", deepspeed("zero2", **{"parallel.engine_config": "own.json"})),
    "bf16-accelerate": ("bf16", ACCELERATE),
    "bf16-fsdp": ("bf16", accelerate("fsdp")),
}


LIES = {
    "stage": (deepspeed("zero3"), "ZeRO stage 3 and has 1"),
    "offload": (deepspeed("zero2"), "asked for offload False and has True"),
    "alone": (ACCELERATE, "asked for processes 2 and has 1"),
    "whole": (accelerate("fsdp"), "asked for layers gathered one by one 2 and has 0"),
}
LIED: dict[str, str] = {}
"""How the runs of LIES ended."""


@pytest.fixture(scope="module")
def specs(small, corpus_cache, tmp_path_factory):
    (file := tmp_path_factory.mktemp("odd") / "odd.py").write_text(textwrap.dedent(ODD))
    small = small.replace(SMALL)
    lm = {
        "name": "lm",
        "workload": "lm",
        "model": {"preset": "custom", "width": 32, "heads": 4, "kv_heads": 2, "layers": 2, "ffn": 64, "tied": True},
        "data": {"sequence": 32, "vocab": 512, "limit": 40, "cache": str(corpus_cache)},
        "train": {"global_batch": 13, "lr": 3e-3, "log_every": 1},
        "parallel": {"threads": 1},
    }
    odd = {"name": "odd", "workload": f"{file}:Odd", "train": {"global_batch": 10, "lr": 0.03, "nonfinite": "skip"}}
    return {
        "small": small,
        "sgd": small.replace(SGD),
        "lamb": small.replace({"train.optimizer": "lamb"}),
        "bf16": small.replace(BF16),
        "fp16": small.replace(FP16),
        "lm": build_spec(lm).replace(SMALL),
        "odd": build_spec(odd).replace({**SMALL, **LONGER, "train.checkpoint_format": "full", "parallel.threads": 1}),
        "odd-fp16": build_spec(odd).replace({**SMALL, **LONGER, **FP16, "parallel.threads": 1}),
    }


@pytest.fixture(scope="module")
def alone(specs, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    return {name: train(spec, out / name, show=False) for name, spec in specs.items()}


@pytest.fixture(scope="module")
def rows(specs, alone, tmp_path_factory):
    out = tmp_path_factory.mktemp("rows")
    (out / "own.json").write_text(json.dumps(OWN_JSON))
    (out / "own.yaml").write_text(yaml.safe_dump(OWN_YAML))
    runs = {}
    for name, (base, changes) in ROWS.items():
        own = {key: str(out / value) for key, value in changes.items() if key == "parallel.engine_config"}
        spec = specs[base].replace({**changes, **own, "parallel.ranks": 2})
        if "-fsdp" not in name and name != "accelerate-zero2":
            engines.check_engine(spec, layout_of(spec), {})
        if name.startswith("resumed"):
            folder = at_half(alone[base].path, out / name)
        else:
            folder = RunDir.claim(out, name, spec).path
        runs[name] = (str(folder), spec)
    lies = []
    for lie, (changes, _) in LIES.items():
        folder = str(RunDir.claim(out, lie, specs["small"]).path)
        lies.append((lie, folder, specs["small"].replace({**changes, "parallel.ranks": 2})))
    found, same = run_ranks(train_all, (list(runs.values()), lies), 2)
    assert found == same
    LIED.update(found)
    folders = {name: Path(folder) for name, (folder, _) in runs.items()}
    return {name: RunResult(folder, read_summary(folder / "summary.json")) for name, folder in folders.items()}


def assert_same(reference, other, tolerance, least=0):
    """`least`: dimensions of the weights that are compared."""
    ours, theirs = steps_of(reference), steps_of(other)
    assert len(ours) == len(theirs) >= 8
    for one, two in zip(ours, theirs, strict=True):
        for key in ("step", "samples", "batch", "lr", "skipped"):
            assert one[key] == two[key], key
        for key in () if one["skipped"] else ("loss", "grad_norm"):
            assert compute_relative_difference(one[key], two[key]) <= tolerance, (one, two)
    weights = other.weights()
    kinds = [{name: (t.shape, t.dtype) for name, t in run.weights().items()} for run in (other, reference)]
    assert kinds[0] == kinds[1]
    ours = {name: tensor for name, tensor in reference.weights().items() if tensor.ndim >= least}
    assert compare_weights(ours, {name: weights[name] for name in ours}).value <= tolerance
    for name, value in reference.metrics.items():
        assert compute_relative_difference(value, other.metrics[name]) <= tolerance


@pytest.mark.parametrize("row", ROWS)
def test_an_engine_gives_the_answer_of_one_rank(alone, rows, row):
    base, _ = ROWS[row]
    least = 2 if row == "bf16-own" else 0  # norms in bf16, which Paceline never has: their biases follow the rounding
    assert_same(alone[base], rows[row], TOLERANCE.get(base, 1e-5), least)


def test_two_steps_of_the_odd_run_are_passed_over_and_the_clip_takes_part(alone):
    assert sum(step["skipped"] for step in steps_of(alone["odd"])) == 2
    assert any(step["grad_norm"] > SMALL["train.clip"] for step in steps_of(alone["small"]))


@pytest.mark.parametrize("row", ["deepspeed-zero1", "deepspeed-zero3", "accelerate-fsdp", "odd-zero3"])
def test_a_run_goes_on_under_torch(alone, rows, tmp_path, row):
    base, _ = ROWS[row]
    folder = at_half(rows[row].path, tmp_path / "run")
    on_one = ["parallel.engine=torch", "parallel.ranks=1", "parallel.strategy=auto", "parallel.offload=false"]
    resumed = resume(folder, on_one, show=False)
    assert_same(alone[base], resumed, TOLERANCE["fp32"])
    ours, theirs = (load_file(export(run, tmp_path / "w.safetensors")) for run in (alone[base].path, folder))
    assert ours.keys() == theirs.keys()
    assert compare_weights(ours, theirs).value <= TOLERANCE["fp32"]


@pytest.mark.parametrize("lie", LIES)
def test_an_engine_that_got_something_else_ends_the_run(rows, lie):
    assert LIES[lie][1] in LIED[lie]


def test_the_configuration_is_kept_in_the_run_folder(rows):
    own = json.loads((rows["bf16-own"].path / "deepspeed.json").read_text())
    assert own["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 5000, "overlap_comm": False}
    assert own["bf16"] == {"enabled": True}
    assert own["gradient_clipping"] == 0, "Paceline clips"
    assert "torch_autocast" not in own
    assert "train_batch_size" not in own
    made = json.loads((rows["offload-zero3"].path / "deepspeed.json").read_text())
    assert made["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert made["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert made["gradient_accumulation_steps"] == 3
    copied = yaml.safe_load((rows["accelerate-ddp"].path / "accelerate.yaml").read_text())
    assert (copied["distributed_type"], copied["num_processes"]) == ("MULTI_CPU", 2)
    sharded = yaml.safe_load((rows["accelerate-zero2"].path / "accelerate.yaml").read_text())
    assert sharded["distributed_type"] == "FSDP"
    assert (sharded["fsdp_config"]["fsdp_version"], sharded["fsdp_config"]["fsdp_reshard_after_forward"]) == (2, False)


def test_the_four_times_are_measured(rows):
    for row in ("deepspeed-zero3", "accelerate-ddp"):
        for step in steps_of(rows[row]):
            assert 0 < step["comm_s"] < step["step_s"]


def test_one_rank_under_deepspeed(specs, alone, tmp_path):
    """Through the front door: a process of its own, since DeepSpeed leaves traces in it."""
    before = {*sys.modules}
    run = train(specs["small"].replace(deepspeed("zero3")), tmp_path, show=False)
    assert_same(alone["small"], run, TOLERANCE["fp32"])
    assert not torch.distributed.is_initialized()
    assert "deepspeed" not in {*sys.modules} - before


def test_accelerate_launch_that_starts_one_process_of_two_is_noticed(small, tmp_path):
    run_file = RunDir.claim(tmp_path, "spec", small.replace(ACCELERATE)).spec_file
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--cpu", "--num_processes", "2"]
    command += ["-m", "paceline", "train", str(run_file), "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "started one process for several ranks" in done.stderr
    assert "parallel.ranks=N" in done.stderr
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------------------------- refusals

CUDA = {"parallel.device": "cuda"}
REFUSALS = yaml.safe_load(Path(__file__).with_name("engine_refusals.yaml").read_text())
REFUSED = REFUSALS.pop("refused")
CONTRADICTIONS = {(kind, row): table["rows"][row] for kind, table in REFUSALS.items() for row in table["rows"]}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_go_wrong_is_refused(small, case):
    changes, environ, said = REFUSED[case]
    spec = small.replace({"parallel.ranks": 2, **changes})
    with pytest.raises(UserError, match=said):
        engines.check_engine(spec, layout_of(spec), environ)


def test_sections_that_say_what_the_run_file_says_are_taken_and_not_handed_on(small, tmp_path):
    """To DeepSpeed the run is one in fp32, with an optimiser; the names are those of the guides."""
    theirs = {
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 14},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 4}},
        "steps_per_print": 7,
    }
    says = {"precision": "fp16", "weight_decay": 0, "schedule": "linear", "warmup_steps": 4, "warmup_shape": "log"}
    changes = deepspeed("zero2", **{f"train.{key}": it for key, it in says.items()})
    spec = with_own_file(small, tmp_path, theirs, "own.json", changes)
    engines.check_engine(spec, layout_of(spec), {})
    made = deepspeed_config.build_deepspeed_config(spec, layout_of(spec), False, 0)
    assert made["steps_per_print"] == 7
    assert not made.keys() & {"fp16", "optimizer", "scheduler", "torch_autocast"}


def with_own_file(small, folder, content, name, changes):
    text = content if isinstance(content, str) else json.dumps(content)  # which is YAML too
    (folder / name).write_text(text)
    return small.replace({"parallel.ranks": 2, **changes, "parallel.engine_config": str(folder / name)})


@pytest.mark.parametrize(("kind", "row"), CONTRADICTIONS)
def test_an_own_file_that_contradicts_the_run_file_is_refused_by_name(small, tmp_path, kind, row):
    content, said = CONTRADICTIONS[kind, row]
    spec = with_own_file(small, tmp_path, content, REFUSALS[kind]["file"], REFUSALS[kind]["run"])
    check = partial(engines.check_engine, spec, layout_of(spec), {})
    if accelerate_config.is_sharding(layout_of(spec)):  # the layers are known in the ranks alone
        check = partial(accelerate_config.build_accelerate_config, spec, layout_of(spec), "cuda", ["Block", "Block"])
    with pytest.raises(UserError, match=said):
        check()


def test_an_own_yaml_on_fsdp_is_taken_over(small, tmp_path):
    theirs = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_state_dict_type": "FULL_STATE_DICT"}}
    spec = with_own_file(small, tmp_path, theirs, "own.yaml", accelerate("fsdp", **CUDA))
    engines.check_engine(spec, layout_of(spec), {})
    found = accelerate_config.build_accelerate_config(spec, layout_of(spec), "cuda", ["Block"])["fsdp_config"]
    assert found["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    assert found["fsdp_transformer_layer_cls_to_wrap"] == "Block"
    ddp = spec.replace({"parallel.strategy": "ddp"})
    with pytest.raises(UserError, match="fsdp_config is not"):
        engines.check_engine(ddp, layout_of(ddp), {})


def test_an_own_file_is_found_beside_the_run_file(tmp_path):
    (tmp_path / "run.yaml").write_text("parallel: {engine: deepspeed, engine_config: own.json}")
    assert load(tmp_path / "run.yaml").parallel.engine_config == tmp_path / "own.json"


@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
def test_an_engine_that_is_not_installed_is_named_with_its_extra(small, monkeypatch, engine):
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    spec = small.replace({"parallel.engine": engine})
    with pytest.raises(UserError, match=rf"pip install 'paceline\[{engine}\]'"):
        engines.check_engine(spec, layout_of(spec), {})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("row", ["deepspeed-zero1", "deepspeed-zero3", "offload-zero3", "bf16-zero3", "accelerate-ddp"])
def test_on_a_cuda_device(specs, alone, tmp_path, row):
    base, changes = ROWS[row]
    run = train(specs[base].replace({**changes, "parallel.device": "cuda"}), tmp_path, show=False)
    assert_same(alone[base], run, 1e-2 if base == "bf16" else 1e-4)
