"""Wrong requests: each ends with the right exit code and one clear message, and leaves nothing half-written."""

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.io.files import read_json
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir

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


def own(*changes: str) -> dict[str, str | bytes]:
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
    """"" for an error of argparse, which prints the usage."""
    key: str = ""
    exit: int = 2
    files: dict[str, str | bytes] = field(default_factory=dict)
    """Written beside a good run.yaml and rows.csv, or over them."""
    environ: dict[str, str] = field(default_factory=dict)
    theirs: bool = False
    """The fault is in the user's own code: their traceback is shown."""


def yaml(text: str | bytes) -> dict[str, str | bytes]:
    return {"run.yaml": text}


def data(line: str, path: str = "rows.csv") -> dict[str, str | bytes]:
    return {path: line}


TRAIN = "train run.yaml --quiet"

TABLE = {
    # the command line
    "no verb": Row("", ""),
    "unknown verb": Row("tarin run.yaml", ""),
    "unknown flag": Row("train run.yaml --rank 2", ""),
    "unknown flag of export": Row("export was --quick --out w.safetensors", ""),
    "flag without its value": Row("train run.yaml --out", ""),
    "nothing to measure": Row("measure", "missing-value"),
    "no run file": Row("train", "missing-value"),
    "no run file but an override": Row("explain train.lr=1", "missing-value"),
    "two run files": Row("train run.yaml run.yaml", "invalid-value", "run.yaml"),
    "export without a target": Row("export was", ""),
    # overrides
    "override without =": Row("explain run.yaml foo", "invalid-value", "foo"),
    "override behind a flag": Row("train run.yaml --quiet foo", "invalid-value", "foo"),
    "override without key": Row("explain run.yaml =1", "invalid-value", "=1"),
    "override without value": Row("explain run.yaml train.lr=", "missing-value", "train.lr"),
    "two dots": Row("explain run.yaml train..lr=3", "invalid-value", "train..lr=3"),
    "section given a number": Row("explain run.yaml train=3", "invalid-value", "train"),
    "section and key": Row("explain run.yaml train=3 train.lr=1", "conflict", "train.lr"),
    "too deep": Row("explain run.yaml train.lr.x=3", "invalid-value", "train.lr"),
    # keys and values
    "misspelt key": Row("explain run.yaml train.optimiser=sgd", "unknown-key", "train.optimiser"),
    "misspelt section": Row("explain run.yaml", "unknown-key", "trian", files=yaml("trian: {lr: 1}")),
    "key of another section": Row("explain run.yaml train.ranks=2", "unknown-key", "train.ranks"),
    "key without section": Row("explain run.yaml ranks=2", "unknown-key", "ranks"),
    "name from another tool": Row("explain run.yaml learning_rate=2", "unknown-key", "learning_rate"),
    "key like nothing": Row("explain run.yaml train.zzz=2", "unknown-key", "train.zzz"),
    "key that is a number": Row("explain run.yaml", "invalid-value", "1", files=yaml("1: 2\n")),
    "word for a number": Row("explain run.yaml train.lr=fast", "invalid-value", "train.lr"),
    "ranks not a number": Row("train run.yaml parallel.ranks=two", "invalid-value", "parallel.ranks"),
    "half a rank": Row("explain run.yaml parallel.ranks=1.5", "invalid-value", "parallel.ranks"),
    "no ranks": Row("explain run.yaml parallel.ranks=0", "invalid-value", "parallel.ranks"),
    "negative batch": Row("explain run.yaml train.global_batch=-8", "invalid-value", "train.global_batch"),
    "infinite lr": Row("explain run.yaml train.lr=.inf", "invalid-value", "train.lr"),
    "warm-up of the whole run": Row("explain run.yaml train.warmup=1", "invalid-value", "train.warmup"),
    "truth for a number": Row("explain run.yaml train.steps=true", "invalid-value", "train.steps"),
    "neither true nor false": Row("explain run.yaml data.lowercase=maybe", "invalid-value", "data.lowercase"),
    "list for a word": Row("explain run.yaml data.text=[a]", "invalid-value", "data.text"),
    "word for a list": Row("explain run.yaml train.loggers=wandb", "invalid-value", "train.loggers"),
    "number for a path": Row("explain run.yaml data.path=3", "invalid-value", "data.path"),
    "home of nobody": Row("explain run.yaml data.path=~no.such.user/x", "invalid-value", "data.path"),
    "unknown optimizer": Row("explain run.yaml train.optimizer=adan", "invalid-value", "train.optimizer"),
    "unknown source": Row("train run.yaml data.source=imdb", "invalid-value", "data.source"),
    "unknown logger": Row("explain run.yaml train.loggers=[visdom]", "invalid-value", "train.loggers.0"),
    "heads do not divide width": Row("explain run.yaml model.heads=3", "conflict", "model"),
    "two lengths": Row("explain run.yaml", "conflict", "train", files=yaml("train: {epochs: 1, steps: 2}")),
    "vocabulary too small": Row("explain run.yaml data.vocab=100", "invalid-value", "data.vocab"),
    "name with a slash": Row("train run.yaml name=a/b", "invalid-value", "name"),
    "name of dots": Row("train run.yaml name=..", "invalid-value", "name"),
    "batch smaller than ranks": Row("train run.yaml parallel.ranks=9", "conflict", "train.global_batch"),
    "single on two ranks": Row(
        "explain run.yaml parallel.strategy=single parallel.ranks=2", "conflict", "parallel.strategy"
    ),
    "several at once": Row("explain run.yaml train.lr=x model.width=y", "invalid-value", "model.width"),
    # the run file
    "missing run file": Row("train runn.yaml", "not-found", "runn.yaml"),
    "run file in a missing folder": Row("train no/run.yaml", "not-found", "no/run.yaml"),
    "folder as run file": Row("explain .", "unreadable", "."),
    "run folder as run file": Row("train was", "unreadable", "was"),
    "unreadable run file": Row("explain /proc/self/mem", "unreadable", "/proc/self/mem"),
    "empty run file": Row("explain run.yaml", "invalid-format", "run.yaml", files=yaml("")),
    "list as run file": Row("explain run.yaml", "invalid-format", "run.yaml", files=yaml("- name: x\n")),
    "binary run file": Row("explain run.yaml", "invalid-format", "run.yaml", files=yaml(b"\x80\x02}q\x00.")),
    "run file with a null": Row("explain run.yaml", "invalid-format", "run.yaml", files=yaml(b"name: a\0b\n")),
    "tab": Row("explain run.yaml", "invalid-format", "run.yaml", files=yaml("train:\n\tlr: 1\n")),
    "open brace": Row("explain run.yaml", "invalid-format", "run.yaml", files=yaml("train: {lr: 1\nname: x\n")),
    "two documents": Row("explain run.yaml", "invalid-format", "run.yaml", files=yaml("name: x\n---\nname: y\n")),
    "endless run file": Row("explain run.yaml", "unreadable", "run.yaml", files=yaml("train: &t {lr: *t}\n")),
    "key given twice": Row("explain run.yaml", "conflict", "train.lr", files=yaml("train:\n  lr: 1\n  lr: 2\n")),
    "section given twice": Row("explain run.yaml", "conflict", "train", files=yaml("train: {}\ntrain: {}\n")),
    "section that is a word": Row("explain run.yaml", "invalid-value", "parallel", files=yaml("parallel: fast")),
    "section that is a list": Row("explain run.yaml", "invalid-value", "model", files=yaml("model: [1]")),
    # data
    "no data file": Row(TRAIN + " data.path=rowz.csv", "not-found", "data.path"),
    "no data path": Row(TRAIN + " data.path=null", "missing-value", "data.path"),
    "folder for data": Row(TRAIN + " data.path=.", "invalid-data", "data.path"),
    "empty csv": Row(TRAIN, "invalid-data", "data.path", files=data("")),
    "header alone": Row(TRAIN, "invalid-data", files=data("text,label\n")),
    "row with too few columns": Row(TRAIN, "invalid-format", files=data(ROWS + "alone\n")),
    "open quote": Row(TRAIN, "invalid-format", files=data('text,label\na,x\n"b,y\nc,x\n')),
    "no such column": Row(TRAIN + " data.label=labels", "unknown-name", "data.label"),
    "empty label": Row(TRAIN, "invalid-data", "data.label", files=data(ROWS + "words,\n")),
    "one class": Row(TRAIN, "invalid-data", "data.label", files=data("text,label\na,x\nb,x\n")),
    "not UTF-8": Row(TRAIN, "invalid-format", files=data(ROWS.encode() + b"caf\xe9,warm\n")),
    "unknown test label": Row(
        TRAIN + " data.test_path=test.csv",
        "invalid-data",
        "data.test_path",
        files=data("text,label\na,tepid\n", "test.csv"),
    ),
    "empty test file": Row(
        TRAIN + " data.test_path=test.csv", "invalid-data", "data.test_path", files=data("", "test.csv")
    ),
    "jsonl that is not": Row(TRAIN + " data.source=jsonl", "invalid-format"),
    "ag_news without a folder": Row(TRAIN + " data.source=ag_news data.path=no", "not-found", "data.path"),
    "label out of range": Row(
        TRAIN + " data.source=ag_news data.path=ag",
        "invalid-data",
        files={"ag/train.csv": "1,a,b\n5,c,d\n", "ag/test.csv": "1,a,b\n"},
    ),
    "docstrings from a path": Row(TRAIN + " data.source=docstrings", "conflict", "data.path"),
    "parquet that is not": Row(TRAIN + " data.source=parquet", "unreadable"),
    "unwritable cache": Row(TRAIN + " data.cache=/proc/nowhere", "not-writable", "data.cache"),
    # places and devices
    "unwritable out": Row(TRAIN + " --out /proc/nowhere", "not-writable", "--out"),
    "out is a file": Row(TRAIN + " --out rows.csv", "not-writable", "--out"),
    "no CUDA": Row(TRAIN + " parallel.device=cuda", "unavailable", "parallel.device"),
    "logger not installed": Row(TRAIN + " train.loggers=[mlflow]", "not-installed", "train.loggers"),
    "RANK without WORLD_SIZE": Row(TRAIN, "unavailable", "WORLD_SIZE", environ={"RANK": "3"}),
    "RANK is a word": Row(TRAIN, "unavailable", "RANK", environ={"RANK": "main", "WORLD_SIZE": "2"}),
    "WORLD_SIZE without RANK": Row(TRAIN, "unavailable", "WORLD_SIZE", environ={"WORLD_SIZE": "2"}),
    # check
    "check of one layout": Row("check run.yaml --ranks 1", "missing-value", "--layouts"),
    "check on words": Row("check run.yaml --ranks 1,two", "invalid-value", "--ranks"),
    "check on no ranks": Row("check run.yaml --ranks 0,1", "invalid-value", "--ranks"),
    "check on equal ranks": Row("check run.yaml --ranks 2,2", "invalid-value", "--ranks"),
    "check on nothing": Row("check run.yaml --ranks ,", "invalid-value", "--ranks"),
    "check with odd passes": Row("check run.yaml --accumulate 1,x", "invalid-value", "--accumulate"),
    "check with too many passes": Row("check run.yaml --accumulate 1,9", "conflict", "--accumulate"),
    "check on too many ranks": Row("check run.yaml --ranks 1,9", "conflict", "train.global_batch"),
    "check of no steps": Row("check run.yaml --steps 0", "invalid-value", "--steps"),
    "check of many steps": Row("check run.yaml --steps many", ""),
    "check without run file": Row("check --ranks 1,2", "missing-value"),
    "check into a file": Row("check run.yaml --out rows.csv", "not-writable", "--out"),
    # export
    "export of nothing": Row("export ws --out w.safetensors", "not-found", "ws"),
    "export of a file": Row("export run.yaml --out w.safetensors", "not-found", "run.yaml"),
    "export to another format": Row("export was --out w.pt", "invalid-value", "--out"),
    "export to a missing folder": Row("export was --out no/w.safetensors", "invalid-value", "--out"),
    "export to an unwritable place": Row(
        "export was --out /proc/w.safetensors", "not-writable", "/proc/w.safetensors", exit=1
    ),
    # resume
    "resume of nothing": Row("train --resume wos", "not-found", "wos"),
    "resume of a folder": Row("train --resume .", "not-found", "."),
    "resume of a file": Row("train --resume run.yaml", "not-found", "run.yaml"),
    "resume with another model": Row("train --resume was model.width=32", "conflict", "model.width"),
    "resume with another lr": Row("train --resume was train.lr=0.5", "conflict", "train.lr"),
    "resume with another batch": Row("train --resume was train.global_batch=4", "conflict", "train.global_batch"),
    "resume that counts otherwise": Row("train --resume was train.epochs=9", "conflict", "train.epochs"),
    "resume for less": Row("train --resume was train.steps=1", "conflict", "train.steps"),
    "resume for more of no number": Row("train --resume was train.steps=+a", "invalid-value", "train.steps"),
    "more of a run that is not there": Row("train run.yaml train.epochs=+2", "conflict", "train.epochs"),
    # weights to begin with
    "weights from nowhere": Row("train run.yaml model.init_from=ws", "not-found", "model.init_from"),
    "weights from a folder": Row("train run.yaml model.init_from=.", "invalid-data", "model.init_from"),
    "weights from a table": Row("train run.yaml model.init_from=rows.csv", "invalid-data", "model.init_from"),
    "weights from a pickle": Row(
        "train run.yaml model.init_from=w.pt", "not-trusted", "model.init_from", files={"w.pt": "0123456789"}
    ),
    "weights from a folder of pickles": Row(
        "train run.yaml model.init_from=hf", "not-trusted", "model.init_from", files={"hf/pytorch_model.bin": "0"}
    ),
    "weights from a broken index": Row(
        "train run.yaml model.init_from=hf",
        "invalid-data",
        "model.init_from",
        files={"hf/model.safetensors.index.json": '{"weight_map": {"a": "b.safetensors"}}'},
    ),
    "weights from no index": Row(
        "train run.yaml model.init_from=hf",
        "invalid-data",
        "model.init_from",
        files={"hf/model.safetensors.index.json": "[1]"},
    ),
    "from and resume": Row("train --from was --resume was", "conflict"),
    "from a folder": Row("train --from .", "not-found", "."),
    "resume with another vocabulary": Row("train --resume was data.vocab=400", "conflict", "data.vocab"),
    "resume with another workload": Row(
        "train other.yaml --resume was", "conflict", "workload", files={"other.yaml": OWN, "own.py": OWN_PY}
    ),
    "resume with other data": Row(
        "train --resume was --quiet data.path=rows2.csv",
        "conflict",
        "data.path",
        files={"rows2.csv": ROWS + "hail,cold\n"},
    ),
    "resume with an unknown key": Row("train --resume was train.lrr=1", "unknown-key", "train.lrr"),
    "resume of a damaged spec": Row("train --resume was", "damaged", "was/spec.yaml", files={"was/spec.yaml": "{"}),
    "resume of an empty spec": Row("train --resume was", "damaged", "was/spec.yaml", files={"was/spec.yaml": ""}),
    "resume of another program's spec": Row(
        "train --resume was", "unknown-key", "modle", files={"was/spec.yaml": "modle: 1"}
    ),
    # one's own workload
    "workload unknown": Row("explain run.yaml workload=clasifier", "unknown-name", "workload"),
    "workload is a number": Row("explain run.yaml workload=3", "unknown-name", "workload"),
    "workload file missing": Row("explain run.yaml workload=on.py:Own", "not-found", "workload"),
    "workload module missing": Row("explain run.yaml workload=no_such:Own", "not-found", "workload"),
    "workload class missing": Row(
        "explain run.yaml workload=own.py:Mine", "unknown-name", "workload", files={"own.py": OWN_PY}
    ),
    "workload class is something else": Row(
        "explain run.yaml workload=own.py:Numbers", "unknown-name", "workload", files={"own.py": OWN_PY}
    ),
    "workload not Python": Row(
        "explain run.yaml", "invalid-format", "workload", files=own("from paceline import", "from from")
    ),
    "workload needs a package": Row(
        "explain run.yaml", "not-installed", "workload", files=own("import torch\n", "import no_such_package\n")
    ),
    "workload without a loss": Row(TRAIN, "invalid-workload", "workload", files=own("def loss(", "def lose(")),
    "workload with odd options": Row(
        "explain run.yaml",
        "invalid-workload",
        "workload",
        files=own("    def prepare", "    Model = dict\n    def prepare"),
    ),
    "workload option not given": Row(
        "explain run.yaml",
        "missing-value",
        "model.depth",
        files=own(
            "from paceline import Workload",
            "from paceline import Workload\nfrom paceline.config import Section\nclass M(Section):\n    depth: int",
            "    def prepare",
            "    Model = M\n    def prepare",
        ),
    ),
    "workload fails at import": Row(
        "explain run.yaml", "user-code-failed", "workload", theirs=True, files=own("import torch\n", "1 / 0\n")
    ),
    "workload exits at import": Row(
        "explain run.yaml",
        "user-code-failed",
        "workload",
        theirs=True,
        files=own("import torch\n", "raise SystemExit(0)\n"),
    ),
    "loss is a mean": Row(
        TRAIN, "invalid-workload", "workload", files=own("square().sum(), len(batch)", "square().mean()")
    ),
    "loss is a float": Row(
        TRAIN, "invalid-workload", "workload", files=own("model(batch).square().sum(), len(batch)", "0.5")
    ),
    "loss of three": Row(TRAIN, "invalid-workload", "workload", files=own("len(batch)", "1, 2")),
    "loss per sample": Row(TRAIN, "invalid-workload", "workload", files=own("square().sum()", "square()")),
    "loss without gradient": Row(
        TRAIN, "invalid-workload", "workload", files=own("square().sum()", "square().sum().detach()")
    ),
    "model is no module": Row(TRAIN, "invalid-workload", "model", files=own("nn.Linear(1, 1)", "{}")),
    "model without parameters": Row(TRAIN, "invalid-workload", "model", files=own("nn.Linear(1, 1)", "nn.Identity()")),
    "no samples": Row(TRAIN, "invalid-workload", files=own("return 20", "return 0")),
    "data is a number": Row(TRAIN, "invalid-workload", files=own("return Numbers()", "return 3")),
    # failures of a run
    "workload fails in prepare": Row(
        TRAIN, "user-code-failed", exit=1, theirs=True, files=own("say): pass", "say): {}['oops']")
    ),
    "workload fails in model": Row(
        TRAIN, "user-code-failed", exit=1, theirs=True, files=own("return nn.Linear(1, 1)", "raise ValueError('oops')")
    ),
    "workload fails in batch": Row(
        TRAIN, "run-failed", exit=1, theirs=True, files=own("return torch.from_numpy", "[][7]; return torch.from_numpy")
    ),
    "workload fails in loss": Row(
        TRAIN,
        "user-code-failed",
        exit=1,
        theirs=True,
        files=own("return model(batch).square().sum(), len(batch)", "raise ValueError('oops')"),
    ),
    "score is not measured": Row(
        TRAIN,
        "invalid-workload",
        "workload",
        exit=1,
        files=own("    def prepare", "    score = 'accuracy'\n    def prepare"),
    ),
    "loss is not finite": Row(TRAIN + " train.lr=1e38 train.clip=0 train.warmup=0", "nonfinite", "loss", exit=1),
    "no memory": Row(TRAIN + " model.width=1000000000000", "out-of-memory", exit=1),
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


@dataclass(frozen=True)
class Answer:
    code: object
    out: str
    err: str
    error: BaseException | None = None


@pytest.fixture
def ask(capsys) -> Callable[[str], Answer]:
    def ask(words: str) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(shlex.split(words))
        return Answer(left.value.code, *capsys.readouterr(), left.value.__context__)

    return ask


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check_answer(row: Row, answer: Answer) -> None:
    assert answer.code == row.exit, answer.err
    if row.theirs:
        assert "Traceback" in answer.err
        assert "paceline/" not in answer.err.replace("paceline/workload.py", ""), "their code alone is shown"
    else:
        assert "Traceback" not in answer.err + answer.out
        assert len(answer.err.strip().splitlines()) <= SHOWN_LINES, answer.err


def check_folder(name: str, folder: Path, before: set[str]) -> None:
    row = TABLE[name]
    new = {path for path in written(folder) - before if not path.startswith(("cache", "__pycache__"))}
    if row.exit == 2 or "prepare" in name or "export" in row.words:
        assert new <= {"runs"}, "nothing is left of a wrong request"
    else:
        (run,) = (folder / "runs").iterdir()
        check_run(RunDir(run))
    assert not [path for path in written(folder) if ".part-" in path or path.endswith((".tmp", ".writing"))]


def check_run(run: RunDir) -> None:
    """A failed run is whole: its spec, its events up to the end, and checkpoints that can be read."""
    from paceline.trainer.checkpoint.reader import find_newest

    assert run.spec()
    assert [event["status"] for event in read_events(run.events_file(0), "end")][-1:] == ["failed"]
    said: list[str] = []
    find_newest(run.checkpoints, said.append)
    assert not said


@pytest.mark.parametrize("name", TABLE)
def test_wrong_request(name, folder, ask, monkeypatch):
    row = TABLE[name]
    if name == "logger not installed" and importlib.util.find_spec("mlflow"):
        pytest.skip("mlflow is installed here")
    if name == "no CUDA":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for path, content in row.files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
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

PROCESSES = (
    "no verb",
    "misspelt key",
    "tab",
    "row with too few columns",
    "RANK without WORLD_SIZE",
    "workload fails in batch",
)


@pytest.mark.parametrize("name", PROCESSES)
def test_wrong_request_in_a_process_of_its_own(name, folder, monkeypatch):
    row = TABLE[name]
    for path, content in row.files.items():
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    before = written(folder)
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *shlex.split(row.words)],
        capture_output=True,
        text=True,
        env={**os.environ, **row.environ},
    )
    check_answer(row, Answer(done.returncode, done.stdout, done.stderr))
    check_folder(name, folder, before)


def test_a_signal_before_the_start_leaves_nothing(folder):
    files = own("say): pass", "say): print('preparing', flush=True); import time; time.sleep(300)")
    for path, content in files.items():
        (folder / path).write_text(str(content))
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


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError):
        (disk / "filler").write_bytes(bytes(1 << 20))


def test_disk_full_at_a_checkpoint(folder, ask, small_disk):
    answer = ask(f"{TRAIN} --out {small_disk} train.steps=20")
    assert answer.code == 1
    assert "no space left" in answer.err.lower()
    assert str(small_disk) in answer.err
    assert "Traceback" not in answer.err
    assert len(answer.err.splitlines()) == 1
    run = RunDir(small_disk / "small")
    said: list[str] = []
    from paceline.trainer.checkpoint.reader import find_newest

    assert find_newest(run.checkpoints, said.append) is not None
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


def test_disk_full_at_the_run_folder(folder, ask, small_disk):
    fill(small_disk)
    answer = ask(f"{TRAIN} --out {small_disk}")
    assert answer.code == 2
    assert isinstance(answer.error, PacelineError)
    assert answer.error.code == "not-writable"
    assert written(small_disk) == {"filler"}


def test_disk_full_at_the_corpus(folder, ask, small_disk):
    fill(small_disk)
    answer = ask(f"{TRAIN} data.cache={small_disk}/cache")
    assert answer.code == 1
    assert f"{small_disk}/cache" in answer.err
    assert not (folder / "runs").exists()


def test_disk_full_at_an_export(folder, ask, small_disk):
    fill(small_disk)
    answer = ask(f"export was --out {small_disk}/w.safetensors")
    assert answer.code == 1
    assert f"{small_disk}/w.safetensors" in answer.err
    assert written(small_disk) == {"filler"}


# ------------------------------------------------------------------------- requests that are odd but not wrong


def test_a_finished_run_is_not_trained_again(folder, finished, ask):
    shutil.copytree(finished, folder / "done")
    before = {path: path.read_bytes() for path in (folder / "done").rglob("*") if path.is_file()}
    answer = ask("train --resume done")
    assert answer.code == 0
    assert {path: path.read_bytes() for path in (folder / "done").rglob("*") if path.is_file()} == before


def test_a_finished_run_that_was_killed_before_its_summary_gets_one(folder, finished, ask):
    shutil.copytree(finished, folder / "done")
    (folder / "done" / "summary.json").unlink()
    assert ask("train --resume done --quiet").code == 0
    ours, theirs = (read_json(run / "summary.json") for run in (folder / "done", finished))
    assert ours["status"] == "finished"
    assert ours["metrics"] == theirs["metrics"]
    assert ours["steps"] == theirs["steps"] == 4


def test_an_unfinished_run_goes_on(folder, ask):
    assert ask("train --resume was train.keep=1 train.checkpoint_every=2").code == 0
    assert [event["step"] for event in read_events(RunDir(folder / "was").events_file(0), "resume")] == [2]
    assert read_json(folder / "was" / "summary.json")["status"] == "finished"


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


def test_export_without_a_checkpoint(folder, ask):
    shutil.rmtree(folder / "was" / "checkpoints" / "step-00000001")
    file = next((folder / "was" / "checkpoints" / "step-00000002").glob("*.distcp"))
    file.write_bytes(b"")
    answer = ask("export was --out w.safetensors")
    assert answer.code == 2
    assert "step-00000002" in answer.err
    assert not (folder / "w.safetensors").exists()


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
    assert answer.code == 0
    shown = {key: value for key, value, *_ in map(str.split, filter(str.strip, answer.out.splitlines()))}
    assert shown["train.compile"] == "off"
    assert shown["data.lowercase"] == "True"
    assert shown["name"] == "2024-01-01"
    assert shown["data.label"] == "7"
