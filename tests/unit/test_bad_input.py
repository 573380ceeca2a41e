"""Wrong requests: each ends with the right exit code and one clear message, and leaves nothing half-written."""

import contextlib
import importlib.util
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.io.files import read_json
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint.reader import find_newest
from results import Answer

GOOD = """\
name: small
model: {width: 16, heads: 2, layers: 1, ffn: 16}
data: {source: csv, path: rows.csv, vocab: 300, max_length: 16, cache: cache}
train: {steps: 4, global_batch: 8, checkpoint_every: 1, keep: 9}
parallel: {threads: 1}
"""
ROWS = "text,label\n" + "".join(
    f"{'red sun' if i % 2 else 'blue ice'} number {i},{'warm' if i % 2 else 'cold'}\n" for i in range(40)
)
OWN = """\
workload: own.py:Own
train: {steps: 3, global_batch: 4}
parallel: {threads: 1}
"""
OWN_PY = """\
import torch
from torch import nn
from paceline import Workload

class Numbers:
    def __len__(self): return 20
    def cost(self, ids): return ids * 0 + 1
    def batch(self, ids, keys): return torch.from_numpy(ids).float()[:, None]

class Own(Workload):
    def prepare(self, say): pass
    def model(self): return nn.Linear(1, 1)
    def data(self, split): return Numbers()
    def loss(self, model, batch): return model(batch).square().sum(), len(batch)
"""


def own(*changes):
    """A workload with some of its text replaced: old, new, old, new …"""
    text = OWN_PY
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    return {"run.yaml": OWN, "own.py": text}


@dataclass(frozen=True)
class Row:
    words: str
    code: str
    key: str = ""
    exit: int = 2
    files: dict = field(default_factory=dict)
    own: list = field(default_factory=list)
    environ: dict = field(default_factory=dict)
    theirs: bool = False

    def write_files(self, folder):
        for path, content in {**(own(*self.own) if self.own else {}), **self.files}.items():
            for name, text in (("{ROWS}", ROWS), ("{OWN}", OWN), ("{OWN_PY}", OWN_PY)):
                content = content.replace(name, text)
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(content.encode("latin-1"))


def build_row(words, code, key="", more=None):
    return Row(words.replace("{TRAIN}", TRAIN), code, key, **(more or {}))


TRAIN = "train run.yaml --quiet"
TABLE = {
    name: build_row(*row)
    for name, row in yaml.safe_load(Path(__file__).with_name("bad_input.yaml").read_text(encoding="utf-8")).items()
}
SHOWN_LINES = 8


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "run.yaml").write_text(GOOD)
    (folder / "rows.csv").write_text(ROWS)
    with pytest.raises(SystemExit) as left:
        main(["train", str(folder / "run.yaml"), "--quiet", "--out", str(folder / "runs")])
    assert left.value.code == 0
    return folder / "runs" / "small"


@pytest.fixture
def folder(tmp_path, monkeypatch, finished):
    """The current folder: a good run file with its data, and an unfinished run in `was`."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.yaml").write_text(GOOD)
    (tmp_path / "rows.csv").write_text(ROWS)
    shutil.copytree(finished, tmp_path / "was")
    (tmp_path / "was" / "summary.json").unlink()
    for step in (3, 4):
        shutil.rmtree(tmp_path / "was" / "checkpoints" / f"step-{step:08}")
    return tmp_path


def written(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check_answer(row, answer):
    assert answer.code == row.exit, answer.err
    if row.theirs:
        assert "Traceback" in answer.err
        assert "paceline/" not in answer.err.replace("paceline/workload.py", ""), "their code alone is shown"
    else:
        assert "Traceback" not in answer.err + answer.out
        assert len(answer.err.strip().splitlines()) <= SHOWN_LINES, answer.err


def check_folder(name, folder, before):
    row = TABLE[name]
    new = {path for path in written(folder) - before if not path.startswith(("cache", "__pycache__"))}
    if row.exit == 2 or "prepare" in name or "export" in row.words:
        assert new <= {"runs"}, "nothing is left of a wrong request"
    else:
        (run,) = (folder / "runs").iterdir()
        check_run(RunDir(run))
    assert not [path for path in written(folder) if ".part-" in path or path.endswith((".tmp", ".writing"))]


def check_run(run):
    """A failed run is whole: its spec, its events up to the end, and checkpoints that can be read."""
    assert run.spec()
    assert [event["status"] for event in read_events(run.events_file(0), "end")][-1:] == ["failed"]
    said = []
    find_newest(run.checkpoints, said.append)
    assert not said


@pytest.mark.parametrize("name", TABLE)
def test_wrong_request(name, folder, ask, monkeypatch):
    row = TABLE[name]
    if name == "logger not installed" and importlib.util.find_spec("mlflow"):
        pytest.skip("mlflow is installed here")
    if name == "no CUDA":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    row.write_files(folder)
    for key, value in row.environ.items():
        monkeypatch.setenv(key, value)
    before = written(folder)
    answer = ask(row.words)
    check_answer(row, answer)
    check_folder(name, folder, before)
    if row.code:
        assert isinstance(answer.error, PacelineError)
        assert (answer.error.code, answer.error.key.replace(f"{folder}/", "")) == (row.code, row.key), answer.err
    if not row.code:
        assert answer.err.startswith("usage: ")


# ------------------------------------------------------------------------------------ as a person would see it


@pytest.mark.parametrize("name", ["no verb", "row with too few columns", "workload fails in batch"])
def test_wrong_request_in_a_process_of_its_own(name, folder):
    row = TABLE[name]
    row.write_files(folder)
    before = written(folder)
    command = [sys.executable, "-m", "paceline", *shlex.split(row.words)]
    done = subprocess.run(command, capture_output=True, text=True)
    check_answer(row, Answer(done.returncode, done.stdout, done.stderr))
    check_folder(name, folder, before)


def test_a_signal_before_the_start_leaves_nothing(folder):
    files = own("say): pass", "say): print('preparing', flush=True); import time; time.sleep(300)")
    for path, content in files.items():
        (folder / path).write_text(content)
    command = [sys.executable, "-m", "paceline", "train", "run.yaml"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "preparing\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGTERM
    assert err == f"executing {folder / 'own.py'}\n"
    assert not (folder / "runs").exists()


def test_ctrl_c_before_the_start_is_quiet(folder, ask, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.api.open_run", interrupted)
    answer = ask("train run.yaml")
    assert (answer.code, answer.out, answer.err) == (130, "", "")


# ------------------------------------------------------------------------------------------------- full disks


@pytest.fixture
def small_disk(tmp_path_factory):
    disk = tmp_path_factory.mktemp("disk")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_disk_full_at_a_checkpoint(folder, ask, small_disk):
    answer = ask(f"{TRAIN} --out {small_disk} train.steps=20")
    assert (answer.code, answer.error.code) == (1, "disk-full")
    assert str(small_disk) in answer.err
    assert len(answer.err.splitlines()) == 1
    said = []
    assert find_newest(RunDir(small_disk / "small").checkpoints, said.append) is not None
    assert not said, "what is there is whole"
    assert not [path for path in written(small_disk) if path.endswith((".tmp", ".writing"))]


LOSES_ITS_FOLDER = """
import os, torch
from paceline import Workload

class W(Workload):
    def model(self): return torch.nn.Linear(2, 1)
    def data(self, split): return (torch.ones(64, 2),) if split == "train" else None
    def loss(self, model, batch): return model(batch[0]).sum(), len(batch[0])
    def on_step(self, step, values):
        if step == 3: os.system({command!r})
"""


@pytest.mark.parametrize("command", ["rm -r runs", "mv runs elsewhere"])
def test_a_run_whose_folder_is_taken_away_is_not_finished(folder, ask, command):
    (folder / "own.py").write_text(LOSES_ITS_FOLDER.format(command=command))
    (folder / "own.yaml").write_text("name: own\nworkload: own.py:W\ntrain: {steps: 40, checkpoint_every: 5}\n")
    answer = ask("train own.yaml --quiet")
    assert answer.code == 1
    assert "runs/own" in answer.err
    assert not (folder / "runs").exists(), "no half of a run"


@pytest.mark.parametrize(
    ("words", "code"),
    [(f"{TRAIN} --out DISK", 2), (f"{TRAIN} data.cache=DISK/cache", 1), ("export was --out DISK/w.safetensors", 1)],
)
def test_a_full_disk_is_named_and_nothing_is_left(words, code, folder, ask, small_disk):
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(bytes(1 << 20))
    answer = ask(words.replace("DISK", str(small_disk)))
    assert answer.code == code
    assert str(small_disk) in answer.err
    assert "Traceback" not in answer.err
    assert not list(small_disk.rglob("*safetensors*"))
    assert not (folder / "runs").exists()


# ------------------------------------------------------------------------- requests that are odd but not wrong


def test_a_finished_run_that_was_killed_before_its_summary_gets_one(folder, finished, ask):
    shutil.copytree(finished, folder / "done")
    (folder / "done" / "summary.json").unlink()
    assert ask("train --resume done --quiet").code == 0
    ours, theirs = (read_json(run / "summary.json") for run in (folder / "done", finished))
    assert ours["status"] == "finished"
    assert ours["metrics"] == theirs["metrics"]
    assert ours["steps"] == theirs["steps"] == 4


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_run_without_a_whole_checkpoint_begins_again(folder, ask, damage):
    run = RunDir(folder / "was")
    for checkpoint in run.checkpoints.iterdir():
        if damage == "gone":
            shutil.rmtree(checkpoint)
        else:
            file = next(checkpoint.glob("*.distcp"))
            file.write_bytes(bytes(file.stat().st_size))
    answer = ask("train --resume was")
    assert answer.code == 0
    assert answer.out.count("step-0000000") == (2 if damage == "damaged" else 0), "those that are skipped are named"
    assert [event["step"] for event in read_events(run.events_file(0), "resume")] == [0]
    assert read_json(run.summary_file)["steps"] == 4


def test_steps_that_are_not_finite_are_passed_over_if_asked(folder, ask):
    hot = "train.lr=1e38 train.clip=0 train.warmup=0"
    assert ask(f"{TRAIN} {hot}").code == 1
    answer = ask("train --resume runs/small --quiet train.nonfinite=skip")
    assert answer.code == 0, "what the message advised is allowed"
    assert read_json(folder / "runs" / "small" / "summary.json")["skipped_steps"] == 3


def test_an_evaluation_that_is_not_finite_is_not_the_best(folder, ask):
    (folder / "run.yaml").write_text(OWN)
    (folder / "own.py").write_text(OWN_PY.replace("square()", "mul(float('nan'))"))
    assert ask(f"{TRAIN} train.nonfinite=skip").code == 0
    summary = read_json(folder / "runs" / "run" / "summary.json")
    assert summary["best"] is None
    assert summary["skipped_steps"] == 3


def test_words_that_yaml_would_take_for_something_else(folder, ask):
    (folder / "run.yaml").write_text("train: {steps: 1}")
    answer = ask("explain run.yaml train.compile=off data.lowercase=yes name=2024-01-01 data.label=7")
    shown = {key: value for key, value, *_ in map(str.split, filter(str.strip, answer.out.splitlines()))}
    wanted = {"train.compile": "off", "data.lowercase": "True", "name": "2024-01-01", "data.label": "7"}
    assert wanted.items() <= shown.items()
