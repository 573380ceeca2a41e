"""A Keras model as a workload, in one process: its loss is that of fit(), its weights have one name each."""

import inspect
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import paceline
from paceline.config import Train, build_spec, load
from paceline.config.registry import load_user_function
from paceline.config.sections import Parallel
from paceline.errors import UserError
from paceline.nn.keras_backend import import_keras
from paceline.planner.candidates import UNSHARDED_STRATEGIES
from paceline.planner.cost_model import build_cost_model
from paceline.runlog.run_dir import RunDir
from paceline.trainer.run import build_resumed_spec
from paceline.trials.layout_causes import find_layout_causes
from paceline.workload import build_workload
from paceline.workloads.keras.sections import KerasModel
from results import assert_same_bits, expect_error

keras = import_keras()
MODELS = Path(__file__).with_name("models.py")


def run(model="build", data=None, train=None, **more):
    section = model if isinstance(model, dict) else {"build": model}
    section = {**section, "build": f"{MODELS}:{section['build']}"}
    train = {"steps": 6, "global_batch": 16, "lr": 1e-2, "warmup": 0.0, **(train or {})}
    values = {"workload": "keras", "model": section, "data": data or {}, "train": train}
    return build_spec({**values, "parallel": {"threads": 1}, **more})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with every trap: dropout, statistics, a weight that is regularised."""
    arguments = {"dropout": 0.3, "norm": True, "penalty": 1e-2}
    model, data = {"build": "build", "arguments": arguments}, {"classes": ["a", "b", "c"]}
    spec = run(model, data, {"checkpoint_every": 3, "schedule": "constant"})
    return paceline.train(spec, tmp_path_factory.mktemp("runs"), show=False)


def test_losses_are_those_of_fit(tmp_path):
    """Whole epochs in one batch, so that the order does not matter."""
    arguments = {"penalty": 0.1}
    plain = {"steps": 4, "global_batch": 41, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}
    spec = run({"build": "build", "arguments": arguments}, train={**plain, "schedule": "constant"})
    ours = paceline.train(spec, tmp_path, show=False)
    keras.utils.set_random_seed(spec.train.seed)
    model = load_user_function(f"{MODELS}:build", "")(**arguments)
    model.compile(keras.optimizers.SGD(1e-2), model.loss, metrics=["accuracy"])
    x, y = load_user_function(f"{MODELS}:data", "")("train")
    theirs = model.fit(x, y, batch_size=41, epochs=4, verbose=0).history["loss"]
    assert [ours.summary.loss_first, ours.summary.loss_last] == pytest.approx([theirs[0], theirs[-1]], rel=1e-5)
    held_out = model.evaluate(*load_user_function(f"{MODELS}:data", "")("test"), verbose=0, return_dict=True)
    assert ours.metrics["loss"] == pytest.approx(held_out["loss"], rel=1e-5)
    assert ours.metrics["accuracy"] == pytest.approx(held_out["accuracy"])


def test_every_weight_is_saved_once_under_its_keras_name(finished):
    parts = dict.fromkeys(("conv2d", "dense", "dense_1"), ("kernel", "bias"))
    parts["batch_normalization"] = ("gamma", "beta", "moving_mean", "moving_variance")
    assert set(finished.weights()) == {f"{layer}/{part}" for layer, names in parts.items() for part in names}
    assert all(tensor.is_floating_point() for tensor in finished.weights().values())
    assert {"loss", "accuracy", "macro_f1", "auc", "sparse_categorical_crossentropy"} <= finished.metrics.keys()


def test_a_resumed_run_ends_in_the_same_bits(finished, tmp_path):
    """Another run stops after three steps and goes on: dropout, statistics and the update are as if it had not."""
    spec = RunDir(finished.path).spec().replace({"train.steps": 3})
    half = paceline.train(spec, tmp_path, show=False)
    longer = build_resumed_spec(half.path, ["train.steps=6"])
    rest = paceline.train(longer, resume=half.path, show=False)
    assert_same_bits(rest, finished)


def test_it_predicts_and_is_exported_as_keras_reads_it(finished, tmp_path):
    x, y = build_workload(run()).data("test").columns
    trained = paceline.open(finished.path)
    found = trained.predict(list(x.numpy().astype("float32")))
    assert np.mean(found.numbers == y.numpy()) == pytest.approx(finished.metrics["accuracy"])
    assert set(found.labels) <= {"a", "b", "c"}
    assert len(trained.predict(["ab", "abc"])) == 2, "by the file's own encode"
    for out in ("alone.keras", "folder"):
        paceline.export(finished.path, tmp_path / out)
    assert sorted(file.name for file in (tmp_path / "folder").iterdir()) == ["model.keras", "models.py"]
    assert not list(tmp_path.glob(".exporting*"))
    for file in (tmp_path / "alone.keras", tmp_path / "folder" / "model.keras"):
        loaded = keras.saving.load_model(file)
        assert np.allclose(loaded.predict(x.numpy(), verbose=0), found.probabilities, atol=1e-6)
    again = build_spec({"workload": "keras", "model": str(tmp_path / "alone.keras"), "data": f"{MODELS}:both"})
    begun = build_workload(again).model()
    assert torch.equal(begun.get_parameter("dense/kernel"), trained.model.get_parameter("dense/kernel"))
    with pytest.raises(UserError, match="--onnx"):
        paceline.export(finished.path, tmp_path / "other", onnx=True)


def test_one_word_and_paths_beside_the_run_file(tmp_path):
    (tmp_path / "mine.py").write_text(MODELS.read_text())
    (tmp_path / "run.yaml").write_text("workload: keras\nmodel: mine.py:build\ndata: mine.py:both\n")
    spec = load(tmp_path / "run.yaml", ["model.arguments.dropout=0.5"])
    assert spec.model.build == f"{tmp_path / 'mine.py'}:build"
    assert spec.model.arguments == {"dropout": 0.5}
    assert spec.origin("model.build") == "run.yaml line 2"
    other = load(tmp_path / "run.yaml", ["model=mine.py:frozen"])
    assert (other.model.build, other.origin("model.build")) == ("mine.py:frozen", "command line")
    assert len(build_workload(spec).data("test")) == 17
    other = load(tmp_path / "run.yaml", [f"data={MODELS}:data"])
    assert build_workload(other).fingerprint() == build_workload(spec).fingerprint()


def test_a_frozen_part_stays_and_a_loss_is_named_in_the_run_file(tmp_path):
    loss = {"loss": "sparse_categorical_crossentropy", "from_logits": True}
    spec = run({"build": "frozen", **loss, "metrics": ["sparse_categorical_accuracy"]})
    before = {name: p.clone() for name, p in build_workload(spec).model().named_parameters()}
    result = paceline.train(spec, tmp_path, show=False)
    after = result.weights()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"dense_1/kernel", "dense_1/bias"}
    assert result.metrics["sparse_categorical_accuracy"] == pytest.approx(result.metrics["accuracy"])
    assert build_cost_model(spec).trained_params == sum(before[name].numel() for name in moved)


def test_a_loss_of_ones_own_weights_and_a_model_without_shapes(tmp_path):
    spec = run({"build": "Unbuilt", "loss": f"{MODELS}:squared", "metrics": ["mae", "r2_score"]}, f"{MODELS}:numbers")
    result = paceline.train(spec, tmp_path, show=False)
    loaded = paceline.open(result.path)
    x, y, _ = build_workload(spec).data("test").columns
    predicted = loaded.predict(list(x.numpy()))["output"]
    residual, spread = ((y.numpy() - predicted) ** 2).sum(), ((y - y.mean()) ** 2).sum()
    assert result.metrics["loss"] == pytest.approx(residual / len(y), rel=1e-5)
    assert result.metrics["r2_score"] == pytest.approx(1 - residual / float(spread), rel=1e-4)


COMPILED = {"focal": "yes_or_no", "questions": "three_answers", "by_number": "yes_or_no", "difference": "yes_or_no"}


@pytest.mark.parametrize(("model", "data"), COMPILED.items())
def test_compiled_losses_and_metrics_are_those_of_evaluate(model, data):
    """Accuracy means what the shapes say, and (n,) is compared with (n, 1)."""
    workload = build_workload(run(model, f"{MODELS}:{data}"))
    module, samples = workload.model().eval(), workload.data("test")
    everything = np.arange(len(samples))
    with torch.no_grad():
        ours = workload.metrics(workload.evaluate(module, samples.batch(everything, everything)))
    x, y, *weight = load_user_function(f"{MODELS}:{data}", "")("test")
    theirs = module.original.evaluate(x, y, 32, 0, *weight, return_dict=True)
    found = {name: float(ours[name]) for name in theirs}
    assert sorted(found.values()) == pytest.approx(sorted(theirs.values()), rel=1e-5)


def test_a_plan_sees_the_real_model():
    spec = run()
    subject = build_cost_model(spec)
    assert subject.params == sum(p.numel() for p in build_workload(spec).model().parameters())
    assert [(m.inner, m.outer) for m in subject.blocks[1].matmuls] == [(4, 3), (27, 8), (8, 3)]
    found = paceline.plan(spec.replace({"parallel.strategy": "auto", "cluster": "1x8xH100"}))
    prices = [price for row in found.rows for price in row.found.prices]
    assert {price.layout.strategy for price in prices} == set(UNSHARDED_STRATEGIES)
    assert prices[0].memory.weights_bytes == 4 * subject.params


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ({"build": "noisy"}, [("gaussian_noise (GaussianNoise)",)]),
        ({"build": "build", "arguments": {"dropout": 0.5, "norm": True}}, []),
    ],
)
def test_causes_name_layers_and_dropout_is_none(model, names):
    assert [cause.names for cause in find_layout_causes(run(model))] == names


def test_what_a_mask_leaves_out_does_not_count():
    """The mean is over the tokens of all texts, as a pass over all of them has it, however they are divided."""
    workload = build_workload(run("tokens", f"{MODELS}:texts"))
    module, samples = workload.model(), workload.data("train")
    with torch.no_grad():
        parts = [workload.evaluate(module, samples.batch(ids, ids)) for ids in np.array_split(np.arange(14), 3)]
    words, classes = samples.columns
    assert sum(int(part["count"]) for part in parts) == int((words > 0).sum())
    assert sum(int(part["confusion"].sum()) for part in parts) == int((words > 0).sum())
    module.original.compile(loss=module.original.loss)
    mean = sum(float(part["loss"]) for part in parts) / int((words > 0).sum())
    assert mean == pytest.approx(module.original.evaluate(words, classes, batch_size=14, verbose=0), rel=1e-5)


@pytest.mark.parametrize("row", yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text("utf-8")), ids=str)
def test_a_mistake_is_one_line_before_anything_starts(row, tmp_path):
    model = {"build": "build", **row["model"]}
    if ":" in model.get("loss", ""):
        model["loss"] = f"{MODELS}{model['loss']}"
    data = f"{MODELS}:{row['data']}" if "data" in row else None
    with pytest.raises(UserError, match=row["message"]) as said:
        paceline.train(run(model, data), tmp_path, show=False)
    assert "\n" not in str(said.value).partition("\n\n")[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["parallel.strategy=fsdp", "parallel.pipeline=2", "train.precision=fp64"])
def test_what_keras_cannot_do_is_refused(words, tmp_path):
    key, _, value = words.partition("=")
    with pytest.raises(UserError, match=words):
        paceline.train(run().replace({key: value, "parallel.ranks": 2}), tmp_path, show=False)


def test_a_model_is_needed_and_the_library_with_the_backend_of_torch(monkeypatch):
    with expect_error("missing-value", "model.build"):
        build_workload(build_spec({"workload": "keras"}))
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(UserError, match="KERAS_BACKEND"):
        build_workload(run())
    monkeypatch.setitem(sys.modules, "keras", None)
    with expect_error("not-installed"):
        build_workload(run())


def test_compile_says_what_is_not_used():
    said = []
    build_workload(run("focal", f"{MODELS}:yes_or_no")).prepare(said.append)
    assert all(word in said[0] for word in ("adam ", "0.001", "adamw", "0.01"))


def test_the_page_says_what_becomes_of_every_argument_callback_and_optimiser():
    page = "\n".join(line for line in (DOCS / "keras.md").read_text().splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([A-Za-z_0-9]+)`", page))
    modules = (keras.callbacks, keras.optimizers, keras.optimizers.schedules)
    wanted = {name for module in modules for name, value in vars(module).items() if isinstance(value, type)}
    for method in (keras.Model.compile, keras.Model.fit):
        wanted |= set(inspect.signature(method).parameters) - {"self"}
    wanted |= set(inspect.signature(keras.optimizers.SGD).parameters) - {"kwargs", "name", "ema_overwrite_frequency"}
    assert wanted - named == set()
    sections = {"train": Train, "parallel": Parallel, "model": KerasModel}
    keys = [key.split(".") for key in re.findall(r"`((?:train|parallel|model)\.[a-z_0-9]+)", page)]
    assert len(keys) > 20
    assert [key for key in keys if key[1] not in sections[key[0]].model_fields] == []


DOCS = Path(__file__).resolve().parents[4] / "docs"
EXAMPLES = DOCS / "examples" / "moving"
PAGE = (DOCS / "moving" / "keras.md").read_text(encoding="utf-8")


def test_before_and_after_learn_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "keras_before.py"), run_name="__main__")
    before = float(re.findall(r"val_accuracy: (\S+)", capsys.readouterr().out)[-1])
    result = paceline.train(paceline.load(EXAMPLES / "keras_after.yaml", ["parallel.threads=1"]), tmp_path, show=False)
    assert keras.saving.load_model("digits.keras").count_params() == result.summary.parameters
    assert min(before, result.metrics["accuracy"]) > 0.9
    before_lines = (EXAMPLES / "keras_before.py").read_text(encoding="utf-8")
    gone = before_lines[before_lines.index('if __name__ == "__main__":') :]
    assert f"```python\n{gone}```" in PAGE
