"""Characters that cannot be seen are escaped wherever text is shown; letters and emoji stay."""

import json
import re
import sys
import unicodedata
from pathlib import Path

import pytest
import yaml

from hostile_pages import PAGES, UNSEEN
from paceline.io.escape import HIDDEN, escape_cell, escape_hidden, escape_values
from paceline.io.files import print_json
from paceline.io.html_page import dump_page_data
from paceline.runlog.events import EventWriter
from report_runs import make_run

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline"
SIGNS = yaml.safe_load(Path(__file__).with_name("signs.yaml").read_text(encoding="utf-8"))
TEXTS, HIDING = SIGNS["stays"], SIGNS["hides"]
SEEN = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13440)}
"""Of the signs that format others, those that have a form of their own."""


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_any_language_stays(name):
    assert escape_hidden(TEXTS[name]) == TEXTS[name]


@pytest.mark.parametrize("text", HIDING)
def test_what_hides_is_spelt_out(text):
    assert escape_hidden(text) == HIDING[text]
    assert escape_hidden(escape_hidden(text)) == HIDING[text]


def test_no_sign_without_a_form_is_left():
    for number in range(sys.maxunicode + 1):
        unseen = unicodedata.category(chr(number)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and number not in SEEN
        if unseen and chr(number) not in "\n\t":
            assert HIDDEN.match(chr(number)), hex(number)


def test_json_is_the_same_when_it_is_read_back(capsys):
    told = {UNSEEN: [UNSEEN, *TEXTS.values(), *HIDING]}
    print_json(told)
    out = capsys.readouterr().out
    assert (json.loads(out), escape_hidden(out)) == (told, out)
    assert json.loads(dump_page_data([UNSEEN, "\b<", float("nan")])) == [escape_hidden(UNSEEN), "\\x08<", None]


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_shows_all_that_was_read(kind, tmp_path):
    """tests/soak/test_hostile_pages.py looks at them in a browser."""
    page = PAGES[kind](tmp_path)
    page_text, _, data = page.read_text(encoding="utf-8").partition('<script type="application/json" id="data">')
    data = json.loads(data.split("</script>")[0]) if data else []
    assert "\\u202e\\u2067" in page_text
    assert escape_hidden(page_text) == page_text
    assert escape_values(data) == data


def test_all_that_was_read_is_seen_in_the_other_forms_of_a_report(tmp_path):
    made = PAGES["report"](tmp_path).parent
    for file in (made / "report.md", made / "report.tex", *made.glob("figures/*.svg")):
        text = file.read_text(encoding="utf-8")
        assert "window.hit" in text or file.suffix == ".svg"
        assert escape_hidden(text) == text, file
    assert r"\textbackslash{}u202e" in (made / "report.tex").read_text()


def test_all_that_was_read_is_seen_on_the_terminal(tmp_path, ask):
    run = make_run(tmp_path / f"runs{UNSEEN}", "made", 2, steps=8)
    run = run.rename(run.with_name(f"made{UNSEEN}"))
    with EventWriter(run / "events" / "rank0.jsonl") as events:
        events.write("notice", text=UNSEEN)
        events.write("start", host=UNSEEN, cpu=UNSEEN, gpus=[UNSEEN], device=UNSEEN, ranks=2)
        events.write("evaluate", step=8, metrics={UNSEEN: 1.0})
        events.write("end", status=UNSEEN, why=UNSEEN)
    (run.parent / f"other{UNSEEN}").mkdir()
    (run.parent / f"other{UNSEEN}" / "spec.yaml").write_text("name: [")
    asked = (
        ["watch", run, "--once"],
        ["watch", run, "--once", "--json"],
        ["explain", run / "spec.yaml", f"train.lr{UNSEEN}=1"],
        ["keys", UNSEEN],
        ["runs", run.parent],
        ["runs", run.parent, "--json"],
        ["report", run, "--out", tmp_path / f"report{UNSEEN}"],
        ["jobs", run.parent],
        ["train", f"{UNSEEN}.yaml"],
        ["plan", run, "--cluster", UNSEEN],
    )
    for words in asked:
        answer = ask(*words)
        text = answer.out + answer.err
        assert answer.code in (0, 2), answer.err
        assert "202e" in text, words
        assert escape_hidden(text) == text, words


def test_nothing_is_printed_around_it():
    """Templates of pages are made in one place, and so are lines for a terminal."""
    own = {"io/terminal.py", "io/html_page.py"}
    without_us = {"tinytopics", "standalone.py", "user_model_loader.py", "sitecustomize.py"}
    for file in SOURCE.rglob("*.py"):
        if str(file.relative_to(SOURCE)) not in own and not without_us & {*file.parts}:
            around = re.search(r"(?<![.\w])(print|Environment|Console)\(|\(print,", file.read_text(encoding="utf-8"))
            assert not around, file


def test_a_cell_is_no_formula():
    given = ["=1", "@x", "-a", "+cmd|x", "-", "-4 %", "+0.6 ± 1", "-.5", "a=1", -3, None]
    assert [escape_cell(value) for value in given] == ["'=1", "'@x", "'-a", "'+cmd|x", *given[4:]]
