"""Shell scripts: what their words become, and what stays unknown."""

from pathlib import Path

import pytest
import yaml

from paceline.convert.shell import evaluate_script
from paceline.errors import UserError

WORDS = yaml.safe_load(Path(__file__).with_name("shell_words.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("text", "words"), WORDS)
def test_expand_words(text, words):
    assert evaluate_script(text).commands[-1].words == words


def test_commands_have_their_lines():
    functions = "f() {\n  one\n}\nif x; then\n  f\nelse two; fi\n"
    heredoc = "cat <<EOF | four\nnot this $(nor that)\nEOF\n"
    found = [(command.line, command.words) for command in evaluate_script(functions + heredoc).commands]
    assert found == [(4, ["x"]), (2, ["one"]), (6, ["two"]), (7, ["cat"]), (7, ["four"])]


def test_an_inner_shell_sees_what_is_exported():
    script = evaluate_script("A=1\nexport B=$A C D=$(x)\nA=2 run\n", {"B": "0", "E": "5"})
    assert script.commands[0].env == {"B": "1", "E": "5", "C": "$C", "D": "$(…)", "A": "2"}
    assert script.exports == {"B": "1", "C": "$C", "D": "$(…)"}


def test_assumed_defaults_are_listed():
    script = evaluate_script(": ${N:=8}\nB=${B:-16}; C=1; run ${C:-2} ${D:-$E} ${1:-3} $B")
    assert script.assumed == {"N": "8", "B": "16"}
    assert script.commands[-1].words == ["run", "1", "$E", "3", "16"]


def test_invalid_bash_is_listed():
    script = evaluate_script('one a\ntwo "unclosed\nthree b\n')
    assert [command.words for command in script.commands][:1] == [["one", "a"]]
    assert [line for line, _ in script.errors] == [2]
    assert not [command for command in script.commands if "three" in command.words]


@pytest.mark.parametrize(
    "text",
    [
        "A=aaaaaaaaaa\n" + "A=$A$A\n" * 60 + "run $A",
        "N=9\n" + "N=$((N*N))\n" * 60 + "run $N",
        "f() { f; g; }\ng() { f; }\nf",
        'X=\'eval "$X"\'\neval "$X"',
        "(" * 5000,
        "\0\udcff".encode("utf-8", "replace").decode(),
    ],
)
def test_endless_script_is_unreadable(text):
    commands, code = [], "unreadable"
    try:
        commands = evaluate_script(text).commands
    except UserError as error:
        code = error.code
    assert code == "unreadable"
    assert all(len(word) < 1 << 18 for command in commands for word in command.words)
