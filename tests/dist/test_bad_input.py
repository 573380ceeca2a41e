"""Wrong requests and failures on several ranks: one message, the right exit code, nothing half-written."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from paceline.cli.main import main
from paceline.io.files import read_json
from paceline.launch.local import reserve_port
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("warm_ranks")

RUN = """\
workload: own.py:Own
train: {steps: 4, global_batch: 4, checkpoint_every: 1, keep: 9}
parallel: {threads: 1, ranks: 2}
"""
OWN = """\
import os
import torch
from torch import nn
from paceline import Workload

class Numbers:
    def __len__(self): return 20
    def cost(self, ids): return ids * 0 + 1
    def batch(self, ids, keys): return torch.from_numpy(ids).float()[:, None]

class Own(Workload):
    def model(self): return nn.Linear(1, WIDTH)
    def data(self, split): return Numbers() if split == "train" else None
    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)
"""

# what `loss` does instead, the exit code, what is said, and whether a run folder stays
RANK_1 = "if os.environ['RANK'] == '1': "
FAILS = f"{RANK_1}raise ValueError('oops')"
ROWS = {
    "one rank fails": (FAILS, 1, ("rank 1: the workload failed: ValueError: oops", "Traceback", "in loss"), True),
    "every rank fails": ("{}['oops']", 1, ("the workload failed: KeyError: 'oops'", "in loss"), True),
    "loss is a mean": ("return model(batch).square().mean()", 2, ("loss returned Tensor", "how many"), False),
    "loss is a mean on one rank": (f"{RANK_1}return 0.5", 2, ("loss returned float", "how many"), False),
    "loss is not finite": ("return model(batch).sum() / 0, 1", 1, ("at step 1", "train.nonfinite=skip"), True),
    "a rank dies": (f"{RANK_1}os.kill(os.getpid(), 9)", 1, ("rank 1 was killed by SIGKILL",), True),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    write_own(tmp_path)
    return tmp_path


def write_own(folder, loss="", width=1):
    text = OWN.replace("WIDTH", str(width)).replace("batch):\n", f"batch):\n        {loss or 'pass'}\n")
    (folder / "own.py").write_text(text)


@pytest.fixture
def ask(capfd):
    """(exit code, what was said); `--quiet` leaves nothing but errors."""

    def ask(words):
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main(shlex.split(words))
        said = capfd.readouterr()
        return left.value.code, said.out + said.err

    return ask


@pytest.mark.parametrize("name", ROWS)
def test_failure_on_two_ranks(name, folder, ask):
    loss, code, says, stays = ROWS[name]
    write_own(folder, loss)
    found, err = ask("train run.yaml --quiet")
    assert found == code, err
    assert all(part in err for part in says), err
    assert err.count("paceline: ") == 1, "one message for all ranks"
    assert ("Traceback" in err) == ("the workload failed" in says[0] or "workload failed" in err)
    assert "/paceline/" not in err, "their code alone is shown"
    assert [path.name for path in (folder / "runs").iterdir()] == (["run"] if stays else [])
    assert not list(folder.rglob("*.writing")) + list(folder.rglob("*.tmp"))
    if stays:
        run = RunDir(folder / "runs" / "run")
        (end,) = read_events(run.events_file(0), "end")
        why = "another rank failed" if "os.environ" in loss else ""
        assert end["status"] == read_json(run.summary_file)["status"] == "failed"
        assert why in end["why"]


def test_a_parameter_that_takes_no_part_is_named(folder, ask):
    spare = """
class Spare(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.spare, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
"""
    text = (folder / "own.py").read_text().replace("return nn.Linear(", "return Spare(")
    (folder / "own.py").write_text(text + spare)
    code, err = ask("train run.yaml --quiet")
    assert code == 1
    assert "spare.weight, spare.bias had no gradient" in err
    assert "requires_grad_(False)" in err
    assert err.count("paceline: ") == 1
    assert "frozen" not in err
    assert ask("train run.yaml --quiet parallel.ranks=1")[0] == 0, "one rank waits for nobody"


def test_a_finished_run_is_said_to_be_finished_on_any_number_of_ranks(folder, ask):
    assert ask("train run.yaml --quiet")[0] == 0
    run = RunDir(folder / "runs" / "run")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    for ranks in (3, 1):
        code, err = ask(f"train --resume runs/run parallel.ranks={ranks}")
        assert code == 0
        assert "runs/run is finished: all of its 4 steps are done" in err
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before} == before
    assert all(not after[path] for path in after.keys() - before.keys())

    run.summary_file.unlink()
    for checkpoint in run.checkpoints.iterdir():
        shutil.rmtree(checkpoint)
    code, err = ask("train --resume runs/run")
    assert code == 0
    assert "starting from the beginning" in err
    assert read_json(run.summary_file)["steps"] == 4


def test_under_a_launcher_the_main_rank_speaks_for_all(folder):
    """A request that is wrong is wrong on every rank, and said once; a rank that fails alone speaks for itself."""

    def start(*words):
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        with reserve_port() as port:
            place["MASTER_PORT"] = str(port)
            started = [
                subprocess.Popen(
                    [sys.executable, "-m", "paceline", "train", "run.yaml", "--quiet", *words],
                    env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank, "GLOO_SOCKET_IFNAME": "lo"},
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in ("0", "1")
            ]
            errors = [process.communicate(timeout=180)[1] for process in started]
        return [process.returncode for process in started], errors

    codes, errors = start("train.global_batch=1")
    assert codes == [2, 2]
    assert "train.global_batch=1 is smaller than parallel.ranks=2" in errors[0]
    assert not errors[1]
    codes, errors = start("parallel.ranks=4")
    assert codes == [2, 2]
    assert "parallel.ranks=4 (command line), but torchrun started 2" in errors[0]
    assert not errors[1]
    write_own(folder, FAILS)
    codes, errors = start()
    assert codes == [1, 1]
    assert errors[0].startswith("paceline: rank 0: another rank failed or cannot be reached (")
    assert "Traceback" not in errors[0]
    assert "paceline: rank 1: the workload failed: ValueError: oops" in errors[1]
