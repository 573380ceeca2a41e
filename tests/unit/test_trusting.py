"""The code of a run folder is executed for who made the folder, and for who said so once."""

import json

import pytest

from paceline.config import build_spec, load
from paceline.config import trust as trusting
from paceline.runlog.run_dir import RunDir, trust
from results import expect_error

OWN = """
from paceline import Workload
from pathlib import Path

Path(__file__).with_suffix(".mark").touch()


class Own(Workload):
    pass
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(run folder, mark of its code): made by this user, whose state is in a folder of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "own.py").write_text(OWN)
    run = RunDir.claim(tmp_path / "runs", "made", build_spec({"workload": f"{tmp_path}/own.py:Own"}))
    forget(tmp_path)
    return run.path, tmp_path / "own.mark"


def forget(folder):
    """As a new process would: nothing of the code is imported yet."""
    import sys

    for name in [n for n in sys.modules if n.startswith("paceline_own_own_")]:
        del sys.modules[name]
    (folder / "own.mark").unlink(missing_ok=True)


def test_a_run_of_ones_own_goes_on(made):
    run, mark = made
    assert RunDir.open(run).spec().workload.endswith("own.py:Own")
    assert mark.exists()
    assert set(json.loads((run / "origin.json").read_text())) == {"user", "host", "code", "mark"}
    moved = run.rename(run.with_name("moved"))
    assert RunDir.open(moved).spec().name == "run"


@pytest.mark.parametrize("verb", ["train --resume", "train --from", "train", "check", "predict", "export", "measure"])
def test_a_run_from_elsewhere_needs_a_word(verb, made, tmp_path, monkeypatch, ask):
    run, mark = made
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody else"))
    words = {"predict": [str(run), "a"], "export": [str(run), "--out", str(tmp_path / "out")]}
    spec = [str(run / "spec.yaml")] if verb in ("train", "check", "measure") else [str(run)]
    answer = ask(*verb.split(), *words.get(verb, spec))
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert answer.error.code == "not-trusted"
    assert "own.py:Own" in answer.err
    assert not mark.exists()


def test_trust_is_said_once_and_kept_outside_of_the_run(made, tmp_path, monkeypatch, ask):
    run, mark = made
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody else"))
    before = sorted(run.iterdir())
    answer = ask("predict", run, "a", "--trust")  # it has no checkpoint, which is said after the code was read
    assert f"executing {tmp_path / 'own.py'}" in answer.err
    assert sorted(run.iterdir()) == before
    forget(tmp_path)
    assert load(run / "spec.yaml").workload.endswith("own.py:Own")  # without a word
    assert mark.exists()
    named = run / "spec.yaml"
    named.write_text(named.read_text().replace("own.py:Own", "another.py:Own"))
    with expect_error("not-trusted", match="another"):  # the word was for other code
        RunDir.open(run).spec()
    trust(run)
    with expect_error("not-found"):
        RunDir.open(run).spec()


def test_an_origin_cannot_be_made_up(made, tmp_path):
    """Not by other code under a mark that was seen, nor by a mark without the key."""
    run, mark = made
    origin = json.loads((run / "origin.json").read_text())
    marked = [json.dumps({**origin, "mark": forged}) for forged in ("0" * 64, "\ud800", 1)]
    for forged in (json.dumps({**origin, "code": ["evil.py:W"]}), *marked, "[]", "[" * 100_000):
        (run / "origin.json").write_text(forged)
        with expect_error("not-trusted"):
            RunDir.open(run).spec()
    assert not mark.exists()


def test_which_code_a_spec_names():
    assert trusting.find_user_code({"workload": "classifier"}) == []
    assert trusting.find_user_code({"workload": "x/train.py"}) == ["x/train.py"]
    keras = {"workload": "keras", "model": {"build": "m.py:f", "loss": "mse"}, "data": {"source": "d.py:g"}}
    assert trusting.find_user_code(keras) == ["m.py:f", "d.py:g"]
    assert trusting.find_user_code({"workload": "keras", "model": {"build": "saved.keras"}}) == ["saved.keras"]
    assert trusting.find_user_code({"workload": "keras", "model": "m.py:f", "data": "d.py:g"}) == ["m.py:f", "d.py:g"]


def test_code_of_run_files_that_a_spec_names(tmp_path):
    (tmp_path / "own.py").touch()
    files = {
        "workload: own.py:W": [f"{tmp_path}/own.py:W"],
        "workload: trees\nmodel: {max_depth: 3}": [],
        f"workload: ensemble\nmodel: {{members: [{tmp_path}/run.yaml]}}": [f"{tmp_path}/run.yaml"],
        "a: [": [],
    }
    for text, code in files.items():
        (tmp_path / "run.yaml").write_text(text)
        members = {"members": ["run.yaml", "gone.yaml"]}
        assert trusting.find_user_code({"workload": "ensemble", "model": members}, tmp_path) == code


def test_a_workload_that_is_typed_does_not_let_the_rest_pass(made, tmp_path, monkeypatch):
    run, _ = made
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "somebody else"))
    (run / "spec.yaml").write_text("workload: evil.py:W\nmodel: {metric: evil.py:f}\n")
    with expect_error("not-trusted", "evil.py:f"):
        load(run / "spec.yaml", ["workload=trees"])


@pytest.mark.parametrize("named", ["", "state", None])
def test_nothing_in_the_current_folder_is_taken_for_this_users_own(named, tmp_path, monkeypatch):
    """Neither where no home is known, nor where it is given as a relative name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", named or "")
    if named is None:
        monkeypatch.setenv("HOME", "")
    assert trusting.get_state_folder().is_absolute()
    assert not trusting.get_state_folder().is_relative_to(tmp_path)
