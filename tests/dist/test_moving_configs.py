"""The pages on moving from DeepSpeed and from the Trainer: programs before and after, and what adopt makes of one."""

import contextlib
import difflib
import io
import os
import re
import runpy
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import hf_models
import paceline
from paceline.launch.local import run_ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = DOCS / "examples" / "moving"
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def losses_before(folder):
    """The losses that the programs before moving print last. One process, as each library takes seconds to import."""
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    place = {name: os.environ.pop(name) for name in PLACE}
    trainer = _last_loss("hf_trainer_before.py")  # as `python program.py` would start it
    os.environ.update(place)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now, which takes minutes
    return trainer, _last_loss("deepspeed_before.py")


def _last_loss(program):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(program, run_name="__main__")
    return float(re.findall(r"^loss ([\d.]+)$", said.getvalue(), re.MULTILINE)[-1])


def loss_after(folder):
    os.chdir(folder)
    for name in PLACE:
        os.environ.pop(name)
    return _last_loss("hf_trainer_after.py")


def save_model(folder):
    hf_models.save("llama", folder / "models" / "llama")


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


@pytest.mark.parametrize("origin", ["deepspeed", "hf_trainer", "accelerate", "lightning", "pytorch", "ddp", "horovod"])
def test_the_page_shows_the_lines_that_differ(origin):
    before, after = ((EXAMPLES / f"{origin}_{when}.py").read_text().splitlines() for when in ("before", "after"))
    page = (DOCS / "moving" / f"{origin}.md").read_text()
    differ = [line for line in difflib.ndiff(before, after) if line[:1] in "+-" and line[2:].strip()]
    if origin == "hf_trainer":
        differ = [line for line in differ if line[0] == "+"]
    elif origin in ("accelerate", "lightning"):
        differ = [line for line in differ if "import" not in line and '"""' not in line]
    for line in differ:
        assert line[2:].strip().strip('"') in page, line
    run_file = EXAMPLES / f"{origin}_after.yaml"
    assert origin not in ("accelerate", "lightning", "pytorch") or run_file.read_text().strip() in page
    assert len(page.splitlines()) <= 90
    if origin == "pytorch":
        assert len([line for line in differ if line[0] == "+"]) <= 8
