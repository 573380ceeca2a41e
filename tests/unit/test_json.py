"""`--json`: what a verb prints, for other programs. Nothing else stands on standard output."""

import json
import sys
from pathlib import Path

import pytest

from paceline.cli.main import build_parser, list_verbs, main

RUN = Path(__file__).resolve().parents[2] / "docs" / "examples" / "own_model.yaml"


def answer(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main([*map(str, words), "--json"])
    assert end.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("verb", list_verbs())
def test_every_verb_has_it(verb):
    (verbs,) = (action for action in build_parser([verb])._actions if action.dest == "verb")
    assert "--json" in verbs.choices[verb]._option_string_actions


def test_a_run_from_the_first_word_to_the_page(capsys, tmp_path):
    short = ("train.epochs=null", "train.steps=3", "parallel.device=cpu", "parallel.threads=1")
    values = {row["key"]: row for row in answer(capsys, "explain", RUN, *short)["values"]}
    assert values["train.steps"] == {"key": "train.steps", "value": 3, "unit": "steps", "from": "command line"}
    trained = answer(capsys, "train", RUN, *short, "--out", tmp_path)
    assert (trained["status"], trained["steps"]) == ("finished", 3)
    seen = answer(capsys, "watch", trained["path"])
    assert (seen["status"], seen["step"]) == ("finished", 3)
    (listed,) = answer(capsys, "runs", tmp_path)
    assert listed["metrics"] == seen["evaluation"]


def test_how_a_command_ended_and_what_it_printed_elsewhere(capfd):
    with pytest.raises(SystemExit) as end:
        main(["launch", "--ranks", "2", "--json", "--", sys.executable, "-c", "print('mine')"])
    told = capfd.readouterr()
    found = json.loads(told.out)
    assert (end.value.code, found["exit_code"], found["ranks"], found["said"]) == (0, 0, 2, [])
    assert told.err.count("mine") == 2


def test_what_a_shell_completes_as_data(capsys):
    found = answer(capsys, "completion")
    assert "--repeats" in found["verbs"]["measure"]["options"]
    assert "train.lr" in found["keys"]
