"""A workload from an installed package goes through every verb, as those that come with Paceline do."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.config import registry

PACKAGE = Path(__file__).parents[1] / "plugin"
RUN = "name: line\nworkload: line\ndata: {points: 64}\ntrain: {steps: 6, global_batch: 16, lr: 0.1}\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = ["wheel", "--no-build-isolation", "--no-deps", "-w", str(folder / "dist"), str(PACKAGE)]
    subprocess.run([*pip, *build], check=True, timeout=120)
    (wheel,) = (folder / "dist").glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True, timeout=120
    )
    return folder / "site"


@pytest.fixture
def found(site, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.chdir(tmp_path)
    registry.find_installed.cache_clear()
    yield
    registry.find_installed.cache_clear()


def says(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main([*map(str, words)])
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    return out


def test_all_verbs_take_a_workload_of_an_installed_package(found, capsys, tmp_path):
    run = tmp_path / "line.yaml"
    run.write_text(RUN)
    assert "line" in registry.list_workloads()
    assert "model.width" in says(capsys, "explain", run, "--data", "--all")
    assert "line" in says(capsys, "plan", run, "--cluster", "2xA100")
    assert "finished" in says(capsys, "train", run)
    assert "the answer is the same" in says(capsys, "check", run, "--ranks", "1,2", "--steps", 3)
    assert "2" in says(capsys, "measure", run, "--ranks", "1,2", "--steps", 4, "--repeats", 1)
    says(capsys, "report", "runs/line", "runs/line-measure", "--out", "page")
    assert "line" in (tmp_path / "page" / "report.html").read_text()
