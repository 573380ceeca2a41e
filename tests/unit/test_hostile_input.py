"""Files and names of any content are answered in one line: what was given, and what is wrong with it."""

import io
import json
import os
import tempfile
import zipfile
from functools import partial

import numpy as np
import pytest

from paceline.config import build_spec
from paceline.data import files
from paceline.data.tables import iter_columns
from paceline.errors import RunFailed, UserError
from paceline.io import terminal
from paceline.io.files import read_json
from paceline.reports.report import report
from paceline.runlog.events import EventWriter, parse_event, read_steps
from paceline.runlog.run_dir import RunDir
from report_runs import make_run
from results import expect_error

RUN = """
name: r
model: {width: 32, heads: 4, layers: 1, ffn: 32}
data: {source: csv, path: t.csv, vocab: 300, cache: cache}
train: {steps: 2, global_batch: 4}
parallel: {threads: 1}
"""
ROWS = "".join(f"some words {i},{i % 2}\n" for i in range(40))
DIGITS = "9" * 5000
TRAIN = "train run.yaml --quiet"
JSONL = f"{TRAIN} data.source=jsonl data.path=t.jsonl"
ASKED = {
    "tag of another type": ("explain run.yaml", {"run.yaml": RUN + "cluster: !!int abc"}, "invalid-format"),
    "half a number": ("explain run.yaml", {"run.yaml": RUN.replace("steps: 2", "steps: 0x_")}, "invalid-format"),
    "5,000 digits": ("explain run.yaml", {"run.yaml": RUN.replace("steps: 2", f"steps: {DIGITS}")}, "invalid-format"),
    "5,000 digits typed": (f"explain run.yaml train.steps={DIGITS}", {}, "invalid-value"),
    "NUL in data.path": (TRAIN, {"run.yaml": RUN.replace("t.csv", '"t\\0.csv"')}, "invalid-value"),
    "NUL in cluster": ("plan run.yaml --cluster a\0b.yaml", {}, "unreadable"),
    "a home of nobody": ("explain run.yaml workload=~nosuchuser/w.py", {}, "invalid-value"),
    "a name of 5,000 letters": (f"explain {'a' * 5000}.yaml", {}, "unreadable"),
    "sections without end": ("explain run.yaml", {"run.yaml": "- " * 40_000}, "unreadable"),
    "brackets typed": (f"explain run.yaml train.lr={'[' * 50_000}", {}, "invalid-value"),
    "dots typed": (f"explain run.yaml {'.'.join('a' * 3000)}=1", {}, "unknown-key"),
    "a run file of megabytes": ("explain run.yaml", {"run.yaml": "a: 1\n" * 300_000}, "unreadable"),
    "UTF-16 run file": ("explain run.yaml", {"run.yaml": RUN.encode("utf-16")}, "invalid-format"),
    "digits in a cluster": ("plan run.yaml --cluster c.yaml", {"c.yaml": f"nodes: {DIGITS}"}, "unreadable"),
    "brackets in a calibration": ("plan run.yaml --calibration c.json", {"c.json": "[" * 90_000}, "damaged"),
    "nowhere to calibrate to": ("calibrate --ranks 1 --out /proc/nowhere/c.json", {}, "run-failed"),
    "UTF-16 table": (TRAIN, {"t.csv": f"text,label\n{ROWS}".encode("utf-16")}, "invalid-format"),
    "brackets in jsonl": (JSONL, {"t.jsonl": "[" * 90_000}, "invalid-format"),
}


@pytest.mark.parametrize("name", ASKED)
def test_one_line_says_what_is_wrong(name, tmp_path, monkeypatch, ask):
    words, files, code = ASKED[name]
    monkeypatch.chdir(tmp_path)
    for path, content in {"run.yaml": RUN, "t.csv": f"text,label\n{ROWS}", **files}.items():
        (tmp_path / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    answer = ask(*words.split(" "))
    assert (answer.code, answer.error.code) == (1 if "calibrate" in name else 2, code)
    assert (answer.err.count("\n"), answer.out) == (1, "")
    assert not (tmp_path / "runs").exists()


PIPES = {
    "a run file": "explain PIPE.yaml",
    "a cluster": "plan run.yaml --cluster PIPE.yaml",
    "a calibration": "plan run.yaml --calibration PIPE.json",
    "a catalogue": "plan run.yaml --cluster catalogue.yaml",
    "a tokeniser": "plan run.yaml data.tokenizer=PIPE.json",
    "a config": "train run.yaml parallel.engine=accelerate parallel.engine_config=PIPE.yaml",
    "a config of others": "adopt PIPE.json --out new.yaml",
    "times": "report PIPE.csv",
    "a site": "submit run.yaml --site PIPE.yaml",
    "a table": "train run.yaml data.path=PIPE.csv",
    "Parquet": "train run.yaml data.source=parquet data.path=PIPE.parquet",
    "weights": "train run.yaml model.init_from=PIPE.safetensors",
    "counts": "plan topics.yaml data.path=PIPE.npy",
    "packed counts": "plan topics.yaml data.path=PIPE.npz",
}


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_is_refused(name, tmp_path, monkeypatch, ask, in_time):
    """It would be waited for without end."""
    monkeypatch.chdir(tmp_path)
    word = next(word for word in f"{PIPES[name]} PIPE.csv".replace("=", " ").split() if word.startswith("PIPE"))
    os.mkfifo(tmp_path / word)
    (tmp_path / "catalogue.yaml").write_text("device: H100\ncatalogue: PIPE.csv\n")
    (tmp_path / "topics.yaml").write_text("workload: topics\nmodel: {k: 2}\ntrain: {steps: 2}\n")
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "t.csv").write_text(f"text,label\n{ROWS}")
    answer = ask(PIPES[name])
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "it is not a regular file" in answer.err


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_line_without_end_is_not_read(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_CHARACTERS", 1000)
    (tmp_path / f"t.{kind}").write_text('{"a": 1}\n' * 200 if kind == "jsonl" else "a,b\n" + "1,2\n" * 300)
    read = partial(iter_columns, kind=kind, wanted={"": "a"})
    assert len(list(read(tmp_path / f"t.{kind}"))) >= 200
    with (tmp_path / f"t.{kind}").open("a") as file:
        file.truncate(1 << 40)
    with expect_error("invalid-format"):
        list(read(tmp_path / f"t.{kind}"))


def test_parquet_text_that_is_not_utf8(tmp_path, monkeypatch, ask):
    import pyarrow
    import pyarrow.parquet

    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pyarrow.py_buffer(b"\xff\xfeab")]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "label": ["a", "b"]}), tmp_path / "t.parquet")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    assert "a text in it is not UTF-8" in ask(f"{TRAIN} data.source=parquet data.path=t.parquet").err


@pytest.mark.parametrize(("workload", "sections"), [("topics", "model: {k: 2}"), ("trees", "model: {max_depth: 2}")])
def test_arrays_that_unpack_to_more_than_there_is(workload, sections, tmp_path, monkeypatch, ask):
    """Refused by what the file says, before memory is taken."""
    header = io.BytesIO()
    facts = {"descr": "<f8", "fortran_order": False, "shape": (1 << 20, 1 << 18)}
    np.lib.format.write_array_header_1_0(header, facts)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", header.getvalue() + bytes(1 << 16))
    monkeypatch.chdir(tmp_path)
    text = f"workload: {workload}\n{sections}\ndata: {{path: bomb.npz}}\ntrain: {{steps: 2}}\n"
    (tmp_path / "run.yaml").write_text(text)
    answer = ask(TRAIN)
    assert (answer.code, "its shape is [1048576, 262144]" in answer.err) == (2, True)


class Panic(BaseException):
    """As a library in Rust raises it."""


BUGS, REFUSALS = (KeyError("x"), Panic("y")), (BrokenPipeError(), MemoryError(), PermissionError(13, "no", "/x"))


@pytest.mark.parametrize(("error", "code"), [*((bug, 70) for bug in BUGS), *((no, 1) for no in REFUSALS)], ids=repr)
def test_a_bug_of_ours_is_one_line_and_a_file_and_what_the_machine_refuses_is_none(
    error, code, tmp_path, monkeypatch, ask
):
    def fail(arguments):
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("paceline.cli.report.run_watch", fail)
    monkeypatch.setattr(os, "dup2", lambda *handles: None)
    answer = ask("watch x")
    assert answer.code == code
    assert "Traceback" not in answer.err
    if code == 70:
        (written,) = tmp_path.iterdir()
        assert f"({type(error).__name__}: {error})" in answer.err
        assert str(written) in answer.err
        assert answer.err.count("\n") == 1
        assert "Traceback (most recent call last):" in written.read_text()


ESCAPE = "\x1b]0;owned\x07\x1b[31m[red]x[/red]\x9b2J"


def test_nothing_that_was_read_steers_the_terminal(tmp_path, ask):
    run = make_run(tmp_path, "escapes", 2)
    events = run / "events" / "rank0.jsonl"
    with EventWriter(events) as more:
        more.write("evaluate", step=60, metrics={ESCAPE: 1.0})
        more.write("end", status=ESCAPE, why=ESCAPE)
    spec = RunDir(run).spec_file
    spec.write_text(spec.read_text().replace("workload: classifier", f"workload: {json.dumps(ESCAPE)}"))
    for words in (["watch", run, "--once"], ["explain", run]):
        shown = ask(*words).out
        assert "[red]x[/red]" in shown
        assert not set(shown) & {"\x1b", "\x07", "\x9b"}


def test_a_console_on_a_terminal_has_no_escapes_but_its_own():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    terminal.build_console(file=stream, force_terminal=True, color_system="standard").print(ESCAPE, style="bold")
    shown = stream.getvalue()
    assert "\\x1b]0;owned" in shown
    assert "\x1b]" not in shown
    assert shown.startswith("\x1b[1m")


def test_a_dollar_begins_no_formula(tmp_path):
    """matplotlib reads what stands between two of them as one, and fails if it is none."""
    names = (r"$\undefined$", r"\$a$")
    runs = [make_run(tmp_path, f"r{i}", 1 + i, steps=8).rename(tmp_path / name) for i, name in enumerate(names)]
    made = report(runs, tmp_path / "report")
    drawn = "".join(file.read_text() for file in (tmp_path / "report").rglob("*.svg"))
    for name in names:
        assert name in made.page.read_text().replace("\\\\", "\\")
        assert name in drawn


def test_what_was_read_stays_text_in_a_report(tmp_path):
    """Markdown loads pictures from anywhere, a heading begins with any line, and half of a sign is no UTF-8."""
    text = "![x](http://192.0.2.1/x.png)\n# [a][b]\n[b]: http://192.0.2.1 <img src=x>\x1b[2J\u202eback\ud800"
    run = make_run(tmp_path, "made", 2, steps=8)
    with EventWriter(run / "events" / "rank0.jsonl") as events:
        events.write("notice", text=text[:-1])
    with (run / "events" / "rank0.jsonl").open("a") as events:
        events.write(json.dumps({"kind": "notice", "text": text}) + "\n")
    page = report([run], tmp_path / "report", title=text).page
    markdown = (page.parent / "report.md").read_text()
    assert "# ![x]\\(http://192.0.2.1/x.png) # [a]\\[b] [b]\\: http://192.0.2.1 &lt;img src=x>" in markdown
    assert "\\x1b[2J\\u202eback\\ud800" in markdown
    for shown in (markdown, page.read_text()):
        assert not set(shown) & {"\x1b", "\u202e"}


def test_a_folder_of_any_name_is_reported_in_files_of_text(tmp_path):
    """Names need not be UTF-8, and a spreadsheet takes what begins with = for a formula."""
    folders = [os.fsdecode(name) for name in (b"=1+1\x1b[2J", b"half\xff")]
    runs = [make_run(tmp_path, f"r{i}", 1 + i, steps=8).rename(tmp_path / name) for i, name in enumerate(folders)]
    made = report(runs, tmp_path / "report").page
    table = (made.parent / "tables" / "runs.csv").read_text()
    assert "'=1+1\\x1b[2J" in table
    assert "half\\udcff" in table
    assert "half%FF" in made.read_text()
    texts = (file for file in made.parent.rglob("*") if file.suffix in (".csv", ".tex", ".md", ".html", ".svg"))
    assert not any(b"\x1b" in file.read_bytes() for file in texts)


def test_events_are_not_written_through_a_link(tmp_path):
    target = tmp_path / "elsewhere"
    target.write_text("mine\n")
    (tmp_path / "rank0.jsonl").symlink_to(target)
    with pytest.raises(RunFailed, match="is a link"):
        EventWriter(tmp_path / "rank0.jsonl")
    assert target.read_text() == "mine\n"


def test_a_run_folder_that_cannot_be_written_to(tmp_path):
    run = RunDir.claim(tmp_path, "r", build_spec({}))
    (run.path / ".lock").mkdir()  # as a read-only folder would: it cannot be opened
    with pytest.raises(UserError, match="Is a directory"), run.lock(print):
        pass


DAMAGED = [
    '{"kind":"step","step":"3"}',
    '{"kind":"step","loss":[1]}',
    '{"kind":3}',
    '{"kind":"step","t":{}}',
    '{"kind":"start","memory_bytes":"x"}',
    '{"kind":"start","gpus":3}',
    "[" * 9999,
]


@pytest.mark.parametrize("line", [*DAMAGED, '{"kind":"step","step":1e400}', f'{{"kind":"step","step":{DIGITS}}}'])
def test_a_damaged_event_is_passed_over(line, tmp_path):
    assert parse_event(line.encode()) is None
    file = tmp_path / "rank0.jsonl"
    file.write_text(f'{line}\n{{"kind":"step","step":1}}\n')
    assert [step["step"] for step in read_steps(file)] == [1]


@pytest.mark.parametrize("content", ["[" * 99_999, f'{{"a": {DIGITS}}}', "\ud800", "{", "[]", ""])
def test_json_of_any_content_is_read_or_refused(content, tmp_path):
    (tmp_path / "x.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with expect_error("damaged"):
        read_json(tmp_path / "x.json")


def test_learning_tokens_from_a_word_without_end_takes_a_moment():
    from paceline.data.corpora import tokenizer as bpe

    words = ["".join(np.random.default_rng(0).choice(list("abcdefgh"), 2_000_000)), " " * 2_000_000, "7" * 2_000_000]
    learned = list(bpe._take_first([*words, "some words"]))
    assert [len(text) for text in learned] == [1000, 1000, 1000, 10]
    tokenizer = bpe.learn_bpe(["some words " * 9, *words], 300, 8, False, "[MASK]")
    found = bpe.encode_texts(tokenizer, 0, [words[0], "some words"])
    assert found.lengths.tolist()[0] == 8
    assert found.cut_texts == 1
