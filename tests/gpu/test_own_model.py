"""On a CUDA device: a user's own model is recorded with the answer of the plain step, or runs eagerly and says why."""

import shutil
import textwrap

import pytest
import torch

from paceline import train
from paceline.config import build_spec
from paceline.runlog.events import read_events, read_steps
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint.reader import find_newest
from paceline.trainer.step import probe as probing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

FILE = """
import random
import torch, torch.nn.functional as F
from torch import nn
from paceline import Workload

class Rows:
    def __init__(self, x, y): self.x, self.y = x, y
    def __len__(self): return len(self.x)
    def cost(self, ids): return ids * 0 + 1
    def batch(self, ids, keys): return self.x[ids], self.y[ids]

class Plain(Workload):
    def model(self): return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    def data(self, split):
        x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(1))
        return (x, (x[:, :4]).argmax(1)) if split == "train" else None
    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

class NotResident(Plain):
    def data(self, split):
        found = super().data(split)
        return found and Rows(*found)

class Dropout(Plain):
    def model(self): return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 4))

class Norm(Plain):
    def model(self): return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))

class Waits(Plain):
    def loss(self, model, batch):
        x, y = batch
        if x.mean().item() > 1e9: raise ValueError
        return super().loss(model, batch)

class Masks(Plain):
    def loss(self, model, batch):
        x, y = batch
        keep = x[:, 0] > 0
        return F.cross_entropy(model(x)[keep], y[keep], reduction="sum"), keep.sum()

class Draws(Plain):
    def loss(self, model, batch):
        x, y = batch
        return super().loss(model, (x * (random.random() + 0.5), y))

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(16, 4), 0
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        self.seen += 1
        return self.layer(x) * (1 + 1 / self.calls)

class Counting(Plain):
    def model(self): return nn.Sequential(Counts())

class Ragged(NotResident):
    def data(self, split):
        found = super().data(split)
        if found:
            rows = found.batch
            found.batch = lambda ids, keys: (*rows(ids, keys), torch.zeros(len(ids), 1 + int(ids.max()) % 7))
        return found
    def loss(self, model, batch):
        return super().loss(model, batch[:2])
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(textwrap.dedent(FILE))

    def spec(kind, more=None):
        train = {"steps": 24, "global_batch": 128, "lr": 1e-2, "checkpoint_every": 10, "keep": 5}
        return build_spec({"workload": f"{file}:{kind}", "train": train, "parallel": {"device": "cuda"}}).replace(
            more or {}
        )

    return spec


def trained(spec, out, **more):
    result = train(spec, out, show=False, **more)
    run = RunDir(result.path)
    said = [event["execution"] for event in read_events(run.events_file(0), "start")][-1]
    return [step["loss"] for step in read_steps(run.events_file(0))], said, result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["Plain", "NotResident", "Dropout", "Norm"])
def test_a_recorded_step_gives_the_answer_of_the_plain_one(own, tmp_path, kind, precision):
    """1,000 samples in batches of 128: the last batch of an epoch is smaller, and has a graph of its own."""
    spec = own(kind, {"train.precision": precision})
    plain, eager, first = trained(spec.replace({"train.compile": "off"}), tmp_path)
    recorded, said, second = trained(spec, tmp_path)
    assert (eager, "recorded as one CUDA graph" in said) == ("eager: train.compile=off", True)
    assert recorded == pytest.approx(plain, rel=1e-5 if precision == "fp32" else 1e-3)
    for name, tensor in first.weights().items():  # running statistics too
        torch.testing.assert_close(second.weights()[name], tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["Plain", "Dropout", "Norm"])
def test_a_compiled_model_gives_nearly_the_same(own, tmp_path, kind):
    spec = own(kind, {"train.precision": "bf16"})
    plain, _, _ = trained(spec.replace({"train.compile": "off"}), tmp_path)
    compiled, said, _ = trained(spec.replace({"train.compile": "on"}), tmp_path)
    assert said.startswith("compiled whole and recorded")
    assert compiled == pytest.approx(plain, rel=0.1 if kind == "Dropout" else 0.02)


@pytest.mark.parametrize("kind", ["Dropout", "Norm"])
def test_a_resumed_run_ends_in_the_same_weights(own, tmp_path, kind):
    spec = own(kind)
    _, _, whole = trained(spec, tmp_path)
    cut = tmp_path / "cut"
    shutil.copytree(whole.path, cut)
    for path in sorted((cut / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(path)
    assert find_newest(cut / "checkpoints", print).step == 10
    again = train(spec, tmp_path, resume=cut, show=False)
    for name, tensor in whole.weights().items():
        assert torch.equal(again.weights()[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Waits", "waits for the device during a step, as .item() and boolean masks do (own.py, line"),
        ("Masks", "waits for the device during a step"),
        ("Draws", "draws random numbers on the host"),
        ("Counting", "changes in Python during a step, which a graph would not (0.calls)"),
        ("Ragged", "samples come in many shapes"),
    ],
)
def test_what_a_graph_would_repeat_wrongly_runs_eagerly_with_the_same_answer(own, tmp_path, kind, why):
    plain, _, first = trained(own(kind, {"train.compile": "off"}), tmp_path)
    fallen, said, second = trained(own(kind), tmp_path)
    assert said.startswith("eager: ")
    assert why in said
    if kind != "Draws":
        assert fallen == plain
        assert all(torch.equal(tensor, second.weights()[name]) for name, tensor in first.weights().items())


def test_a_step_that_cuda_cannot_record_goes_on_eagerly(own, tmp_path, monkeypatch):
    run_pass = probing._pass
    monkeypatch.setattr(probing, "_pass", lambda step, micro, waits="default": run_pass(step, micro))
    plain, _, _ = trained(own("Waits", {"train.compile": "off"}), tmp_path)
    fallen, _, result = trained(own("Waits"), tmp_path)
    assert fallen == plain
    notices = list(read_events(RunDir(result.path).events_file(0), "notice"))
    assert "eager after all" in notices[0]["text"]
    assert torch.rand(2, device="cuda").isfinite().all(), "the generator of the device still draws"
