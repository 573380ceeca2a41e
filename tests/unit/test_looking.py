"""Looking at a run executes nothing of it, wherever the run came from."""

import base64
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from paceline.cli.main import list_verbs
from paceline.errors import UserError
from paceline.inference.export import export
from paceline.reports.report import report
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint.writer import CheckpointWriter
from report_runs import make_run


@pytest.fixture
def hostile(tmp_path):
    """A copied run that names code, which leaves a mark if it is ever executed."""
    run = make_run(tmp_path, "copied", 2)
    for name, mark in (("evil.py", "imported"), ("evil/__init__.py", "package imported")):
        file = run / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"open({str(tmp_path / 'mark')!r}, 'w').write('{mark}')\n")
    text = RunDir(run).spec_file.read_text()
    return run, text, tmp_path / "mark"


WORKLOADS = ["{run}/evil.py:W", "evil:W", "{run}/evil.py", "not_installed"]
LOOK = {
    "watch": "{run} --once",
    "explain": "{run}",
    "runs": "{run}/..",
    "jobs": "{run}",
    "logs": "{run}",
    "report": "{run} --out {run}/../page",
    "cancel": "{run}",
}
"""Verbs that look at a run."""
ASK = {
    "train": "--resume {run}",
    "check": "{run}/spec.yaml",
    "plan": "{run}/spec.yaml",
    "measure": "{run}/spec.yaml",
    "predict": "{run} x",
    "sample": "{run} x",
    "export": "{run} --out {run}/../out",
    "submit": "{run}/spec.yaml",
    "sweep": "{run}/spec.yaml train.lr=1,2",
    "doctor": "{run}/spec.yaml",
    "topics": "{run}/spec.yaml",
}
"""Verbs that execute what a run names: of a run from elsewhere not without a word."""
OF_NO_RUN = ("calibrate", "launch", "keys", "completion", "adopt", "schema", "mcp")


def test_every_verb_looks_or_asks():
    assert {*LOOK, *ASK, *OF_NO_RUN} == {*list_verbs()}


@pytest.fixture
def copied(hostile, monkeypatch):
    """The same with its code named in each of the ways that there are."""
    run, text, mark = hostile
    monkeypatch.setenv("XDG_STATE_HOME", str(mark.parent / "state"))
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(str(run))
    trees = f"name: copied\nworkload: trees\nmodel: {{metric: '{run}/evil.py:f'}}\ntrain: {{steps: 3}}\n"
    own = text.replace("workload: classifier", f"workload: {run}/evil.py:W")
    word = f"name: copied\nworkload: keras\nmodel: {run}/evil.py:f\n"
    for name in ("a", "b"):
        (run / f"{name}.yaml").write_text(f"workload: evil.py:W\nname: {name}\n")
    (run / "rows.csv").write_text("x,label\n" + "1,0\n2,1\n" * 40)
    files = f"model: {{members: [{run}/a.yaml, {run}/b.yaml]}}\ndata: {{path: {run}/rows.csv}}\n"
    members = f"name: copied\nworkload: ensemble\n{files}"
    return run, {"metric": trees, "workload": own, "word": word, "members": members}, mark


@pytest.mark.parametrize("named", ["metric", "workload", "word", "members"])
@pytest.mark.parametrize("verb", [*LOOK, *ASK])
def test_no_verb_executes_what_a_copied_run_names(verb, named, copied, ask):
    run, specs, mark = copied
    RunDir(run).spec_file.write_text(specs[named])
    answer = ask(verb, *{**LOOK, **ASK}[verb].format(run=run).split())
    assert not mark.exists()
    assert answer.code == 2 or (answer.code == 0 and verb in LOOK)
    assert verb in LOOK or verb in ("sample", "topics") or "--trust" in answer.err  # these are of one workload each


@pytest.mark.parametrize(
    "names", ["summary.json events/rank0.jsonl jobs.jsonl origin.json pictures/x-1.png heartbeats/rank0", "spec.yaml"]
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(names, hostile, ask, in_time):
    run, _, _ = hostile
    for name in names.split():
        (run / name).unlink(missing_ok=True)
        (run / name).parent.mkdir(exist_ok=True)
        os.mkfifo(run / name)
    for verb, words in LOOK.items():
        assert ask(verb, *words.format(run=run).split()).code in (0, 2)


def test_files_of_another_machine_are_not_asked_for(hostile, ask, in_time):
    """A record names its cluster by a file, which may be gone or a pipe."""
    run, text, _ = hostile
    os.mkfifo(run / "c.yaml")
    for name in ("gone.yaml", "c.yaml"):
        RunDir(run).spec_file.write_text(text.replace("cluster: local", f"cluster: {run / name}"))
        for verb, words in (LOOK if name == "c.yaml" else {"explain": "{run}"}).items():
            code = ask(verb, *words.format(run=run).split()).code
            assert code == 0 or verb in ("logs", "cancel")  # it was not submitted
    assert str(run / "c.yaml") in (run.parent / "page" / "report.html").read_text()


PNG = b"\x89PNG\r\n\x1a\n"


def test_a_page_shows_no_file_that_a_link_leads_to(hostile, tmp_path):
    run, _, _ = hostile
    secret, pictures = tmp_path / "secret", run / "pictures"
    secret.write_bytes(PNG + b"of somebody else")
    pictures.mkdir()
    (pictures / "linked-1.png").symlink_to(secret)
    (pictures / "text-1.png").write_bytes(b"no picture")
    (pictures / "own-1.png").write_bytes(PNG + b"of the run")
    page = report([run], tmp_path / "report").page.read_text()
    contents = (PNG + b"of the run", secret.read_bytes(), b"no picture")
    assert [base64.b64encode(one).decode() in page for one in contents] == [True, False, False]


def test_a_link_out_of_what_a_run_kept_is_not_followed(hostile, tmp_path):
    """An export would hand out what it leads to."""
    run, _, _ = hostile
    (tmp_path / "secret").write_text("{}")
    (run / "kept").mkdir()
    (run / "kept" / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"kept/tokenizer.json is a"):
        export(run, tmp_path / "out")


def test_a_file_that_claims_more_than_anybody_writes_is_not_read(hostile, ask):
    run, _, _ = hostile
    for name in ("summary.json", "events/rank0.jsonl", "jobs.jsonl"):
        with (run / name).open("r+b" if (run / name).exists() else "wb") as file:
            file.truncate(1 << 40)
    for verb, words in LOOK.items():
        assert ask(verb, *words.format(run=run).split()).code in (0, 2)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_report_and_watch_read_the_spec_as_data(workload, hostile, monkeypatch, ask, tmp_path):
    run, text, mark = hostile
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(str(run))
    workload = workload.format(run=run)
    lines = [f"workload: {json.dumps(workload)}" if line.startswith("workload:") else line for line in text.split("\n")]
    at = next(i for i, line in enumerate(lines) if line.startswith("model:"))
    RunDir(run).spec_file.write_text("\n".join([*lines[: at + 1], "  wings: [1, 2]", *lines[at + 1 :]]))
    made = report([run], tmp_path / "report")
    assert {("workload", workload), ("model.wings", "[1, 2]"), ("model.width", "64")} <= set(made.contents.spec)
    for words in (["watch", run, "--once"], ["explain", run], ["explain", run / "spec.yaml"]):
        answer = ask(*words)
        assert (answer.code, "copied" in answer.out) == (0, True)
    assert not mark.exists()


def test_weights_are_written_without_the_code(hostile, tmp_path):
    run, text, mark = hostile
    saved = CheckpointWriter(run / "checkpoints", keep=1)
    saved.save({"model": {"weight": torch.arange(3.0)}}, {"step": 60, "evaluation": {}, "best": None})
    saved.close()
    RunDir(run).spec_file.write_text(text.replace("workload: classifier", f"workload: {run}/evil.py:W"))
    export(run, tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert file.get_tensor("weight").tolist() == [0, 1, 2]
        assert json.loads(file.metadata()["paceline_spec"])["workload"].endswith("evil.py:W")
    assert not mark.exists()


def test_no_settings_in_the_current_folder_have_latex_called(hostile, tmp_path, monkeypatch, capfd, in_time):
    """matplotlib would read them before those of the user; a process of its own has not imported it yet."""
    run, _, mark = hostile
    monkeypatch.chdir(run)
    settings, page = run / "matplotlibrc", tmp_path / "page"
    settings.write_text("text.usetex: True\nbackend: module://evil\n\x1b[31mwrong: 1\n")
    command = [sys.executable, "-m", "paceline", "report", str(run), "--out", str(page)]
    environ = {**os.environ, "PYTHONSAFEPATH": "1", "PATH": str(tmp_path)}
    assert subprocess.run(command, env=environ, check=False).returncode == 0
    assert not mark.exists()
    assert "\x1b" not in capfd.readouterr().err
    assert any("<text" in figure.read_text() for figure in page.rglob("*.svg"))
