"""A Slurm for all tests of this folder, and a run on it. `make test-cluster` installs what it takes."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml
from slurm_lab import Lab, missing, until

import paceline

SOURCES = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="session")
def lab():
    if why := missing():
        pytest.skip(f"no Slurm can be started here: {why}")
    root = Path(tempfile.mkdtemp(prefix="paceline-slurm-"))  # short: sockets have short names
    found = Lab(root)
    try:
        found.start()
        os.environ["SLURM_CONF"] = str(root / "slurm.conf")
        os.environ["PYTHONPATH"] = str(SOURCES)
        yield found
    finally:
        found.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def run_file(lab, tmp_path, monkeypatch):
    """Makes a run file whose steps take `step_s`, in a folder whose name must be quoted."""
    folder = tmp_path / "it's a $HOME folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))

    def make(steps=60, step_s=0.1, **train):
        values = {
            "name": "line",
            "workload": f"{Path(__file__).with_name('slow_line.py')}:SlowLine",
            "data": {"step_s": step_s},
            "train": {"steps": steps, "global_batch": 16, "lr": 0.01, "checkpoint_every": 10, **train},
            "parallel": {"threads": 1},
        }
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    until("no job is left", lambda: not lab.ask("squeue", "-h").strip(), 120)
    lab.until_ready()
    return make


@pytest.fixture(scope="session")
def lm_file(tiny_lm, tmp_path_factory):
    """A language model that every layout divides, and six steps of it."""
    file = tmp_path_factory.mktemp("run") / "run.yaml"
    file.write_text(yaml.safe_dump(tiny_lm.replace({"name": "nodes", "train.steps": 6}).dump()))
    return file


@pytest.fixture(scope="session")
def alone(lm_file, tmp_path_factory):
    return paceline.train(lm_file, tmp_path_factory.mktemp("alone"), show=False)
