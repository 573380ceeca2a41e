"""A run folder is made once, holds every value with its origin, and gives the same spec back."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

import paceline
from paceline.config import DEFAULT, build_spec, load
from paceline.errors import UserError
from paceline.runlog.run_dir import RunDir
from results import expect_error

EVERYTHING = yaml.safe_load("""
name: all-2.0_x
workload: classifier
model: {width: 96, heads: 6, layers: 3, ffn: 200, dropout: 0.1, word_dropout: 0.25, label_smoothing: 0.1,
        class_weights: {"a: b": 2.0, c: 0.5}, init_from: /runs/one, match: some}
data: {source: csv, path: "/data/a b #1.csv", test_path: "/data/tést: x.csv", test_fraction: 0.2, text: "null",
       label: "yes # no", max_length: 77, vocab: 999, lowercase: true, limit: 12, cache: /tmp/cache,
       tokenizer: /tmp/tokenizer.json}
train: {steps: 77, epochs: null, global_batch: 96, optimizer: sgd, lr: 3.0e-05, lr_scaling: sqrt, base_batch: 32,
        schedule: linear, warmup: 0.0123456789012345, warmup_steps: 10, warmup_from: 0.1, warmup_shape: log,
        final_lr: 1.0e-12, weight_decay: 0.3, decay: all, beta1: 0.8, beta2: 0.95, eps: 1.0e-7, momentum: 0.5,
        nesterov: true, clip: 0.0, clip_value: 0.5, ema: 0.99,
        groups: {"layers.*: x": {lr: 1.0e-05}, "head.*": {weight_decay: 0.0}, "z.*": {frozen: true}},
        precision: bf16, loss_scale: 128.0, loss_scale_start: 64.0, loss_scale_window: 100, nonfinite: skip,
        on_oom: retry, seed: 2147483647, evaluate_every: 5, evaluate_on: 500, patience: 4, checkpoint_every: 6,
        checkpoint_format: full, keep: 7, log_every: 1, compile: "off", loggers: [tensorboard, mlflow],
        batchnorm_group: 16, optimizer_state: 8bit, weights: bf16}
parallel: {strategy: hsdp, ranks: 32, replicate: 2, tensor: 2, sequence: true, pipeline: 4, schedule: zero_bubble,
           micro_batch: 3, activation_checkpointing: full, offload: true, reduce: diloco, local_steps: 9,
           engine: deepspeed, engine_config: /tmp/own.json, device: cpu, threads: 1, timeout_s: 1.0e+7,
           bucket_mb: 1.0e+22, wrap: 1000, backend: gloo, context: 2, expert: 2, least_ranks: 16}
cluster: local
""")


def test_every_field_survives(tmp_path):
    spec = build_spec(
        EVERYTHING, {"train.lr": "my file.yaml line 3", "data": "a#b.yaml line 9", "data.label": "command line"}
    )
    unchanged = [
        key
        for (key, value, _, _), (_, default, _, _) in zip(spec.fields(), build_spec({}).fields(), strict=True)
        if value == default and key not in ("workload", "cluster", "train.epochs")
    ]
    assert not unchanged, "give these a value in EVERYTHING that is not their default"
    run = RunDir.claim(tmp_path, "x", spec)
    assert run.spec() == spec
    assert run.spec().dump() == spec.dump()
    assert load(run.spec_file).dump() == spec.dump()
    made = build_spec({}).replace({"train.lr": 0.1})
    assert RunDir.claim(tmp_path, "y", made).spec() == made


def test_origins_survive(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("name: mine\ntrain: {lr: 3e-4,\n  loggers: [tensorboard]}\ndata:\n  source: csv\n  path: x.csv\n")
    spec = load(file, ["train.seed=3", "parallel=auto"])
    run = RunDir.claim(tmp_path / "my runs", spec.name, spec)
    assert f"#   paceline train '{tmp_path}/my runs/mine/spec.yaml'\n" in run.spec_file.read_text()
    assert yaml.safe_load(run.spec_file.read_text())["data"]["path"] == f"{tmp_path}/x.csv"
    assert run.spec() == spec
    assert run.spec().origins == spec.origins
    origins = [run.spec().origin(key) for key in ("train.lr", "train.seed", "train.loggers", "model.width")]
    assert origins == ["my.yaml line 2", "command line", "my.yaml line 3", DEFAULT]
    run.origins_file.unlink()
    assert run.spec().train == spec.train
    assert load(run.spec_file).origin("train.seed").startswith("spec.yaml line")


def test_relative_paths_mean_the_same_from_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = build_spec({"data": {"source": "csv", "path": "x.csv"}})
    run = RunDir.claim(Path("runs"), "x", spec)
    assert yaml.safe_load(run.spec_file.read_text())["data"]["path"] == str(tmp_path / "x.csv")
    assert str(load(run.spec_file).model_dump()["data"]["path"]) == str(tmp_path / "x.csv")
    assert yaml.safe_load(run.spec_file.read_text())["data"]["cache"] == "~/.cache/paceline"


MINE = """
from typing import Any
from paceline.config import Section
from paceline.workload import Workload
class Model(Section):
    tree: dict[str, Any] = {}
    names: list[str] = []
    note: str = ""
class Mine(Workload):
    Model = Model
"""


def test_a_workload_of_ones_own_with_nested_values(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    model = {"tree": {"a": {"b": 1, "no": [1, 2.5]}, "c d": {}}, "names": ["a\nb", "#x", "1"]}
    model["note"] = "two\nlines: \u2028 \x07"
    spec = build_spec({"workload": f"{tmp_path}/mine.py:Mine", "model": model})
    assert RunDir.claim(tmp_path, "x", spec).spec() == spec


def test_the_workload_is_read_from_its_line_or_from_all_of_the_spec(tmp_path):
    run = RunDir.claim(tmp_path, "a", build_spec({"workload": "lm"}))
    assert run.recorded_workload() == "lm"
    run.spec_file.write_text("{workload: lm}")
    assert run.recorded_workload() == "lm"


def test_names_are_numbered(tmp_path):
    (tmp_path / "a-2").write_text("a file, not a run")
    runs = [RunDir.claim(tmp_path, "a", build_spec({})) for _ in range(3)]
    assert [run.path.name for run in runs] == ["a", "a-3", "a-4"]
    assert all(run.events.is_dir() and run.checkpoints.is_dir() for run in runs)
    assert RunDir.open(runs[0].path) == RunDir.open(runs[0].spec_file) == runs[0]


def test_two_processes_never_share_a_folder(tmp_path):
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from paceline.runlog.run_dir import RunDir
        from paceline.config import build_spec
        spec = build_spec({})
        sys.stdin.readline()
        for _ in range(30):
            print(RunDir.claim(Path(sys.argv[1]), "same", spec).path.name)
        """)
    command, pipes = [sys.executable, "-c", code, str(tmp_path)], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    both = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    names = [name for process in both for name in process.communicate(timeout=300)[0].split()]
    assert len(names) == 60
    assert set(names) == {"same", *(f"same-{i}" for i in range(2, 61))}


def test_a_place_that_cannot_be_written_is_rejected_and_left_as_it_was(tmp_path, monkeypatch):
    for name in ("", "..", "a/b"):
        with expect_error("invalid-value", "name"):
            RunDir.claim(tmp_path, name, build_spec({}))
    (tmp_path / "file").write_text("")
    with expect_error("not-writable", "--out"):
        RunDir.claim(tmp_path / "file" / "runs", "x", build_spec({}))
    (tmp_path / "file").unlink()

    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with expect_error("not-writable", "--out"):
        RunDir.claim(tmp_path, "x", build_spec({}))
    assert not list(tmp_path.iterdir())


def test_open_says_what_is_missing_and_what_there_is(tmp_path):
    runs = tmp_path / "runs"
    for number in range(14):
        run = RunDir.claim(runs, f"run{number:02}", build_spec({}))
        os.utime(run.spec_file, (number, number))
    (runs / "empty").mkdir()
    (runs / "notes.txt").write_text("")
    for place, said in (
        *(("runs/run0x", r"/runs/run..'.*run13.*run04 and 4 older$"), ("runs/empty", r"spec.yaml.*: run13, ")),
        *(("runs/notes.txt", "is a file"), ("runs", "; runs in .*/runs: "), ("elsewhere/x", "there are no runs in")),
    ):
        with pytest.raises(UserError, match=said):
            RunDir.open(tmp_path / place)


@pytest.mark.parametrize(
    ("text", "why"),
    [("a: [1", "damaged at line"), ("", "no sections"), ("train: {lr: -1}", "train.lr"), ("\x00", "damaged")],
)
def test_a_damaged_spec_is_a_user_error(tmp_path, text, why):
    run = RunDir.claim(tmp_path, "a", build_spec({}))
    run.spec_file.write_text(text)
    with pytest.raises(UserError, match=rf"(?s)spec\.yaml.*{why}"):
        run.spec()


def test_reading_a_run_needs_neither_torch_nor_rich(tmp_path):
    code = "import sys, paceline.runlog.run_dir, paceline.runlog.events; print({'torch', 'rich'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize("name", ["checkpoints", "events"])
def test_a_folder_of_a_run_may_lie_elsewhere_but_not_in_another_run(name, tmp_path):
    one, other = (RunDir.claim(tmp_path, "r", build_spec({})) for _ in range(2))
    (one.path / name).rename(tmp_path / name)
    (one.path / name).symlink_to(tmp_path / name)
    with one.lock(print):
        pass
    (one.path / name).unlink()
    (one.path / name).symlink_to(other.path / name)
    with pytest.raises(UserError, match=f"another run, {other.path};"), one.lock(print):
        pass


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("paceline.runlog.run_dir.PATIENCE_S", 0.1)


def test_one_process_trains_a_run_at_a_time(tmp_path, impatient):
    run = RunDir.claim(tmp_path, "r", build_spec({}))
    said = []
    with run.lock(said.append), expect_error("busy"), run.lock(said.append):
        pass
    with run.lock(said.append):
        assert len(said) == 1


def test_a_run_that_is_being_trained_is_rejected_before_a_rank_starts(small, tmp_path, impatient):
    run = RunDir.claim(tmp_path, "r", small.replace({"parallel.ranks": 2, "parallel.timeout_s": 0.1}))
    with run.lock(print) as held, expect_error("busy"):
        paceline.resume(run.path, show=False)
    assert not run.heartbeats.exists()
    assert not list(run.events.iterdir())
    run.heartbeats.mkdir()
    (run.heartbeats / "rank7.json").write_text("{}")
    run.rewrite(small.replace({"train.steps": 1, "model.layers": 1}))
    assert paceline.resume(run.path, show=False).status == "finished"
    assert not run.heartbeats.exists(), "those of an earlier attempt are gone"
    assert held.lock_fds, "its ranks inherit the lock, and hold it if their launcher is killed"
    assert held == run
