"""Exported folders load without Paceline, and give the same numbers."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import paceline
from paceline import export, train
from paceline.config import build_spec
from results import expect_error

TEXTS = ["goal team match", "star", "bank market " * 30, ""]
ALONE = "import sys; sys.modules['paceline'] = None; import json, torch; from load import load; load(); model = load()"


def in_folder(folder, code):
    """What a process prints that has the folder and no Paceline."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-B", "-c", f"{ALONE}; {code}"]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def news(classifier_run, tmp_path_factory):
    return export(classifier_run.path, tmp_path_factory.mktemp("exported") / "news", onnx=True)


@pytest.fixture(scope="module")
def circle(circle_run, tmp_path_factory):
    return export(circle_run.path, tmp_path_factory.mktemp("exported") / "circle", onnx=True)


def test_a_classifier_gives_the_same_logits_by_its_own_loader_and_by_onnx(classifier_run, news):
    import onnxruntime

    wanted = paceline.open(classifier_run.path).predict(TEXTS)
    found = in_folder(
        news,
        f"ids, mask = model.encode({TEXTS!r}); "
        f"print(json.dumps([model(ids, mask).tolist(), model.predict({TEXTS!r}), ids.tolist(), mask.tolist()]))",
    )
    logits, answers, ids, mask = found
    assert np.abs(np.array(logits) - wanted["logits"]).max() < 1e-6
    assert [label for label, _ in answers] == wanted.labels
    session = onnxruntime.InferenceSession(str(news / "model.onnx"))
    (by_onnx,) = session.run(None, {"ids": np.array(ids), "mask": np.array(mask)})
    assert np.abs(by_onnx - wanted["logits"]).max() < 1e-5


def test_a_model_of_ones_own_gives_the_same_by_its_own_file_and_by_onnx(circle_run, circle):
    import onnxruntime

    points = [[0.1, -0.2], [3.0, 1.0], [0.5, 0.5]]
    wanted = paceline.open(circle_run.path).predict(points).probabilities
    found = in_folder(circle, f"print(json.dumps(model(torch.tensor({points})).softmax(1).tolist()))")
    assert np.array(found) == pytest.approx(wanted, abs=1e-7)
    session = onnxruntime.InferenceSession(str(circle / "model.onnx"))
    (logits,) = session.run(None, {"points": np.array(points, np.float32)})
    assert torch.from_numpy(logits).softmax(1).numpy() == pytest.approx(wanted, abs=1e-6)
    assert sorted(file.name for file in circle.iterdir()) == [
        *("circle.py", "config.json", "kept", "load.py", "model.onnx", "model.safetensors")
    ]


def test_a_language_model_gives_the_same_logits_by_its_own_loader(lm_run, tmp_path):
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        wanted = paceline.open(lm_run.path).model(ids)
    folder = export(lm_run.path, tmp_path / "lm")
    logits, text = in_folder(
        folder, f"print(json.dumps([model(torch.tensor({ids.tolist()})).tolist(), model.write('A', 3)]))"
    )
    assert np.abs(np.array(logits) - wanted.numpy()).max() < 1e-6
    assert text.startswith("A")


def test_a_model_without_a_loader_has_onnx_beside_its_weights(tmp_path):
    values = {
        "workload": "noisy_data:NoisyData",
        "train": {"steps": 1, "global_batch": 2},
        "parallel": {"device": "cpu"},
    }
    folder = export(train(build_spec({"name": "plain", **values}), tmp_path, show=False).path, tmp_path / "out")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "kept", "model.onnx", "model.safetensors"]


def test_the_best_weights_as_one_file(classifier_run, tmp_path):
    from safetensors.torch import load_file

    file = export(classifier_run.path, tmp_path / "w.safetensors", "best")
    found, wanted = load_file(file), classifier_run.weights()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("out", "onnx"),
    [(".", False), ("taken.txt", False), ("no/model", False), ("w.safetensors", True)],
)
def test_a_bad_target_is_rejected_and_nothing_is_left(classifier_run, out, onnx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.txt").write_text("mine", encoding="utf-8")
    with expect_error("invalid-value", "--out"):
        export(classifier_run.path, out, onnx=onnx)
    assert [file.name for file in tmp_path.iterdir()] == ["taken.txt"]


def test_a_model_that_torch_cannot_export_is_refused_in_one_line(circle_run, circle_file, tmp_path):
    odd = tmp_path / "circle.py"
    text = circle_file.read_text(encoding="utf-8")
    line = "return self.layers(points)"
    odd.write_text(text.replace(line, f"{line} if points.sum().item() > 0 else points"), encoding="utf-8")
    with expect_error("not-supported", "--onnx"):
        export(circle_run.path, tmp_path / "model", onnx=True, code=odd)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("end", ["", ".safetensors"])
def test_an_export_is_the_same_bytes_each_time(classifier_run, end, tmp_path):
    written = []
    for name in ("a", "b"):
        whole = export(classifier_run.path, tmp_path / f"{name}{end}")
        files = sorted(whole.iterdir()) if whole.is_dir() else [whole]
        written.append([file.read_bytes() for file in files])
    assert written[0] == written[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_export_leaves_nothing(classifier_run, number, tmp_path):
    code = "import sys, time; from paceline.inference import export\nexport.write_weights = lambda file, *_, **__: ("
    code += "file.write_text('half'), print('writing', flush=True), time.sleep(300))\nexport.export(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(classifier_run.path), str(tmp_path / "m.safetensors")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    assert list(tmp_path.rglob("m.safetensors"))
    process.send_signal(number)
    assert process.wait() == -number
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
