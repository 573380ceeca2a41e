"""`model.init_from`: what is read, what is said of it, and what is refused, in one process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline import Workload, train
from paceline.config import build_spec
from paceline.errors import UserError
from paceline.launch.environment import SINGLE_RANK
from paceline.launch.signals import StopRequest
from paceline.layout import layout_of
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.trainer.context import RunContext
from paceline.trainer.init_from import open_weights
from paceline.trainer.setup import build_gradient_job
from paceline.workload import build_workload

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.tied = nn.Linear(6, 8)
        self.tied.weight = self.up.weight
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.tied(self.down(torch.relu(self.norm(self.up(x))))))


class Two(Workload):
    score = "-loss"
    classes = 2

    def model(self):
        return Net(self.classes)

    def data(self, split):
        return X, (X.sum(1) > 0).long()

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


class Three(Two):
    classes = 3


class Adapted(Two):
    """A model in a wrapper, with weights that are in no file."""

    def model(self):
        return nn.ModuleDict({"base": Net(2), "adapter": nn.Linear(2, 2)})

    def init_from_name(self, name):
        return name.removeprefix("base.") if name.startswith("base.") else None


def spec_of(kind=Two, **fields):
    values = {"name": "run", "workload": f"{__name__}:{kind.__name__}", "train": {"steps": 2, "global_batch": 10}}
    return build_spec({**values, "parallel": {"device": "cpu"}}).replace(fields)


def begun(folder, kind=Two, **fields):
    """A job of one rank that has not made a step, and what was matched."""
    spec = spec_of(kind, **fields)
    context = RunContext(spec, layout_of(spec), SINGLE_RANK, torch.device("cpu"), folder, None, None, StopRequest())
    job = build_gradient_job(context, build_workload(spec))
    return job.state.model.net, job.facts


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(spec_of(), tmp_path_factory.mktemp("run"), show=False)


@pytest.fixture(scope="module")
def weights(run):
    return run.weights()


@pytest.fixture
def save(tmp_path):
    def write(tensors, name="given.safetensors"):
        save_file({key: value.clone() for key, value in tensors.items()}, tmp_path / name)
        return tmp_path / name

    return write


def same(model, weights):
    return all(torch.equal(value, weights[name].to(value.dtype)) for name, value in model.state_dict().items())


def test_a_file_a_run_a_checkpoint_and_a_folder_are_read(tmp_path, run, weights, save):
    half = {name: value.to(torch.bfloat16) if value.is_floating_point() else value for name, value in weights.items()}
    model, facts = begun(tmp_path, **{"model.init_from": save(half)})
    assert same(model, half), "converted to the type of the model"
    assert facts.notes["weights"]["taken"] == len(weights)
    assert any(line.startswith(f"weights: {len(weights)} of {len(weights)} tensors from ") for line in facts.equations)
    for path in (run.path, run.path / "checkpoints" / "step-00000002"):
        assert same(begun(tmp_path, **{"model.init_from": path})[0], weights)
    folder = tmp_path / "hf"
    folder.mkdir()
    names = sorted(weights)
    for part, some in (("a", names[::2]), ("b", names[1::2])):
        save_file({name: weights[name].clone() for name in some}, folder / f"{part}.safetensors")
    index = {"weight_map": {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(begun(tmp_path, **{"model.init_from": folder})[0], weights)


def test_a_weight_with_two_names_needs_one_of_them(tmp_path, weights, save):
    once = {name: value for name, value in weights.items() if name != "tied.weight"}
    file = save(once)
    assert same(begun(tmp_path, **{"model.init_from": file})[0], weights)
    assert all(torch.equal(value, weights[name]) for name, value in load_file(file).items()), "the file stays as it is"


def test_names_of_a_wrapped_model_are_translated(tmp_path, weights, save):
    model, facts = begun(tmp_path, Adapted, **{"model.init_from": save(weights)})
    assert same(model["base"], weights)
    assert facts.notes["weights"]["drawn"] == ("adapter.bias", "adapter.weight")


def test_what_does_not_fit_is_refused_or_named(tmp_path, weights, save):
    file = save(weights)
    with pytest.raises(UserError, match=r"head.bias .* \[3\]"):
        begun(tmp_path, Three, **{"model.init_from": file})
    model, facts = begun(tmp_path, Three, **{"model.init_from": file, "model.match": "some"})
    assert torch.equal(model.up.weight, weights["up.weight"])
    assert "drawn anew: head.bias ([2] there and [3] in the model), head.weight" in facts.equations[-1]

    less = {name: value for name, value in weights.items() if "down" not in name} | {"more": torch.zeros(2)}
    file = save(less)
    with pytest.raises(UserError, match=r"down.weight.* more"):
        begun(tmp_path, **{"model.init_from": file})
    _, facts = begun(tmp_path, **{"model.init_from": file, "model.match": "some"})
    assert facts.equations[-1].endswith("; drawn anew: down.bias, down.weight; left over: more")


def test_weights_that_are_not_numbers_or_of_which_none_fits_are_refused(tmp_path, weights, save):
    broken = {**weights, "down.weight": torch.full_like(weights["down.weight"], torch.nan)}
    with pytest.raises(UserError, match=r"down.weight .*nan"):
        begun(tmp_path, **{"model.init_from": save(broken)})
    (tmp_path / "given.safetensors").unlink()
    other = save({f"layer.{i}": torch.zeros(2) for i in range(9)}, "model.safetensors")
    with pytest.raises(UserError, match=r"layer.3 and 5 more"):
        begun(tmp_path, **{"model.init_from": other, "model.match": "some"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"llama.*transformers"):
        begun(tmp_path, **{"model.init_from": tmp_path})


def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path, run, capsys):
    shutil.copytree(run.path, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    next(step.glob("*.distcp")).write_bytes(b"")
    with pytest.raises(UserError, match=r"__0_0\.distcp has 0"):
        open_weights(step)
    with pytest.raises(UserError, match="paceline train --resume"):
        open_weights(tmp_path / "run")
    assert "step-00000002 is skipped" in capsys.readouterr().err


def test_a_resumed_run_does_not_need_the_file_once_it_has_a_checkpoint(tmp_path, weights, save, ask):
    file = save(weights)
    result = train(spec_of(**{"model.init_from": file}), tmp_path, show=False)
    (start,) = read_events(RunDir(result.path).events_file(0), "start")
    assert start["weights"]["digest"] == open_weights(file).digest()
    file.unlink()
    assert ask("train", "--resume", result.path, "train.steps=+1", "--quiet").code == 0


def test_weights_and_texts_have_one_vocabulary(tmp_path, small, monkeypatch, ask):
    """Another run on other texts has the vocabulary of the first, unless its own is asked for, which is refused."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{word} number {i},{i % 2}" for i, word in enumerate(["wheel", "road", "hill", "chain"] * 10)]
    Path("rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    data = {"data.source": "csv", "data.path": tmp_path / "rows.csv", "data.vocab": 300, "train.steps": 1}
    first = train(small.replace({"model.layers": 1, **data}), tmp_path, show=False).path
    Path("more.csv").write_text("\n".join(["text,label", *(row.replace("wheel", "saddle") for row in rows)]) + "\n")
    assert ask("train", "--from", first, "data.path=more.csv", "--quiet").code == 0
    assert RunDir(Path("runs/small-next")).spec().data.tokenizer == first / "kept" / "tokenizer.json"

    answer = ask("train", "--from", first, "data.path=more.csv", "data.tokenizer=null", "--quiet")
    assert answer.code == 2
    assert "data.tokenizer=" in answer.err
