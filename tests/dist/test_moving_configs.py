"""The pages on moving from DeepSpeed and from the Trainer: programs before and after, and what adopt makes of one."""

import difflib
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from programs import loss_after, losses_before, save_model

import hf_models
import paceline
from paceline.launch.local import run_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = DOCS / "examples" / "moving"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, warm_ranks):
    if missing := [name for name in ("deepspeed", "accelerate", "transformers") if find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    folder = tmp_path_factory.mktemp("moving")
    for file in (*EXAMPLES.glob("deepspeed_*"), *EXAMPLES.glob("hf_trainer_*")):
        shutil.copy(file, folder)
    run_ranks(save_model, (folder,), 1)
    (folder / "texts.txt").write_text("\n".join(hf_models.TEXTS * 8))
    return folder


@pytest.fixture(scope="module")
def before(folder):
    ((trainer, deepspeed),) = run_ranks(losses_before, (folder,), 1)
    return {"hf_trainer": trainer, "deepspeed": deepspeed}


def test_the_trainers_program_runs_before_and_after(folder, before):
    (after,) = run_ranks(loss_after, (folder,), 1)
    assert after == pytest.approx(before["hf_trainer"], rel=0.15)


def test_deepspeeds_program_runs_before_and_after(folder, before, monkeypatch):
    monkeypatch.chdir(folder)
    result = paceline.train(paceline.load("deepspeed_after.yaml", ["parallel.threads=1"]), show=False)
    assert result.status == "finished"
    assert result.summary.loss_last == pytest.approx(before["deepspeed"], rel=0.2)


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
