"""Programs for Horovod's TensorFlow and Keras: the same losses on one rank and on two. By  make test-tensorflow."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed; type  make test-tensorflow", allow_module_level=True)


def run(tmp_path, ranks, *words):
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paceline", "launch", "--ranks", str(ranks), "--", sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line.split("] ")[-1].split() for line in done.stdout.splitlines()]
    return {name: [float(n) for n in numbers] for name, *numbers in filter(None, lines) if name.isupper()}


def through(program):
    return ("-m", "paceline.horovod", str(HERE / program))


def test_a_tape_inside_a_function_and_eager(tmp_path):
    one = run(tmp_path, 1, *through("tape.py"))["LOSSES"]
    assert len(one) == 20
    assert one[-1] < one[0] - 0.1
    assert run(tmp_path, 2, *through("tape.py"))["LOSSES"] == pytest.approx(one, abs=2e-5)
    assert run(tmp_path, 2, *through("tape.py"), "eager")["LOSSES"] == pytest.approx(one, abs=2e-5)
    assert run(tmp_path, 2, *through("tape.py"), "fp16")["LOSSES"] == pytest.approx(one, abs=5e-3)


def test_fit_with_the_optimiser_and_the_callbacks(tmp_path):
    one, two = run(tmp_path, 1, *through("fit.py")), run(tmp_path, 2, *through("fit.py"))
    assert two["LOSSES"] == pytest.approx(one["LOSSES"], abs=2e-5)
    assert one["RATES"] == pytest.approx([0.02, 0.02, 0.02])
    assert two["RATES"] == pytest.approx([0.015, 0.02, 0.02])


def test_collectives_eager_and_in_a_function(tmp_path):
    assert run(tmp_path, 2, str(HERE / "collectives.py")).keys() == {"ANSWERS"}
