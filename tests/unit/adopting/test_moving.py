"""The pages on moving from DeepSpeed and from the Trainer: programs before and after, and what adopt makes of one."""

import difflib
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import hf_models
import pytest
import yaml

import paceline

DOCS = Path(__file__).resolve().parents[3] / "docs"
EXAMPLES = DOCS / "examples" / "moving"
BEFORE = """
import os, runpy
runpy.run_path("hf_trainer_before.py", run_name="__main__")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now, which takes minutes
runpy.run_path("deepspeed_before.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The programs, a tiny model and texts."""
    for library in ("deepspeed", "accelerate", "transformers"):
        pytest.importorskip(library)
    folder = tmp_path_factory.mktemp("moving")
    for file in (*EXAMPLES.glob("deepspeed_*"), *EXAMPLES.glob("hf_trainer_*")):
        shutil.copy(file, folder)
    hf_models.save("llama", folder / "models" / "llama")
    (folder / "texts.txt").write_text("\n".join(hf_models.TEXTS * 8))
    return folder


def losses(text):
    return [float(found) for found in re.findall(r"^loss ([\d.]+)$", text, re.MULTILINE)]


def test_the_programs_run_before_and_after(folder, monkeypatch, capsys):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run([sys.executable, "-c", BEFORE], cwd=folder, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    trainer, deepspeed = losses(ended.stdout)
    monkeypatch.chdir(folder)
    runpy.run_path("hf_trainer_after.py", run_name="__main__")
    assert losses(capsys.readouterr().out)[-1] == pytest.approx(trainer, rel=0.15)
    spec = paceline.load("deepspeed_after.yaml", ["parallel.ranks=1", "parallel.threads=1"])
    assert paceline.train(spec, show=False).summary.loss_last == pytest.approx(deepspeed, rel=0.2)


@pytest.mark.parametrize(
    ("origin", "command"), [("deepspeed", "deepspeed --num_gpus 2 deepspeed_after.py"), ("hf_trainer", "")]
)
def test_the_run_files_are_what_adopt_writes(origin, command):
    adopted = paceline.adopt(EXAMPLES / f"{origin}_before.json", command=command)
    shown = yaml.safe_load((EXAMPLES / f"{origin}_after.yaml").read_text())
    for section in ("workload", "train", "parallel"):
        assert shown[section] == adopted.values[section]
    assert not [row for row in adopted.rows if row.outcome.value == "not supported"]


@pytest.mark.parametrize("origin", ["deepspeed", "hf_trainer"])
def test_the_page_shows_the_lines_that_differ(origin):
    before, after = ((EXAMPLES / f"{origin}_{when}.py").read_text().splitlines() for when in ("before", "after"))
    page = (DOCS / "moving" / f"{origin}.md").read_text()
    differ = [line for line in difflib.ndiff(before, after) if line[:1] in "+-" and line[2:].strip()]
    for line in differ if origin == "deepspeed" else (line for line in differ if line[0] == "+"):
        assert line[2:].strip().strip('"') in page, line
    assert len(page.splitlines()) <= 90
