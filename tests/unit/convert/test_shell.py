"""Shell scripts: what their words become, and what stays unknown."""

import pytest

from paceline.convert.shell import evaluate_script
from paceline.errors import UserError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("N=4; run $N ${N} x$N '$N'", ["run", "4", "4", "x4", "$N"]),
        ('B="x y"; run $B "$B" "${B}z"', ["run", "x", "y", "x y", "x yz"]),
        ('A=1 B=2; run "$A $B\n  $A"', ["run", "1 2\n  1"]),
        (
            'B=1; A="--m $B "; A+="--n ${B}  "; A+="o"; run $A "[$A]"',
            ["run", "--m", "1", "--n", "1", "o", "[--m 1 --n 1  o]"],
        ),
        ('B=1; run "\n$B\n" a \\\n', ["run", "\n1\n", "a"]),
        ('B=1; A="$B \\\n  $B \\\n  "; run $A', ["run", "1", "1"]),
        ('run ${N:-3} ${N:-3 4} "${N:-3 4}" ${N-5}', ["run", "3", "3", "4", "3 4", "5"]),
        ("run ${N:=2} $N", ["run", "2", "2"]),
        ("N=4; run $((N * 2)) $(( ($N - 1) / 3 ))", ["run", "8", "1"]),
        ('A=(--a 1 "b c"); A+=(d); run "${A[@]}" ${A[1]}', ["run", "--a", "1", "b c", "d", "1"]),
        ('A=; run "$A" x$A $A', ["run", "", "x"]),
        ('f() { run "$1" "$@"; }; f a b', ["run", "a", "a", "b"]),
        ("f() { shift; run $1; }; f a b", ["run", "$1"]),
        ('CMD="run --n $N"; eval $CMD', ["run", "--n", "$N"]),
        ("CMD='run a'; $CMD b", ["run", "a", "b"]),
        ("if x; then N=1; else N=1; fi; run $N", ["run", "1"]),
        ("mkdir x && N=3; run $N", ["run", "3"]),
        ("run nvcr.io#nvidia/x a\\ b \\\n  c  # a comment", ["run", "nvcr.io#nvidia/x", "a b", "c"]),
        ("run a > log b 2>&1", ["run", "a", "b"]),
        ("A=1 run a", ["A=1", "run", "a"]),
        ("run 'it'\\''s' \"\\$N\"", ["run", "it's", "$N"]),
        ("run $A/$B/x$C --o=${D}/%x_$E.log", ["run", "$A/$B/x$C", "--o=$D/%x_$E.log"]),
        ('run "$(cd "$(dirname "$0")" && pwd)/a b" ${P:-29555 }', ["run", "$(…)/a b", "29555"]),
        ("A='$B/$C'; run $A \\$D", ["run", "$B/$C", "$D"]),
        # known only at run time: as written
        ("run $N ${A%.py} ${#A[@]} ${!B} $1 $@", ["run", "$N", "${A%.py}", "${#A[@]}", "${!B}", "$1", "$@"]),
        ("N=$(nproc --all); run --n=$N `hostname`", ["run", "--n=$(…)", "$(…)"]),
        ('run x=$(f "$(g)"):1 $((N + 1))', ["run", "x=$(…):1", "$(…)"]),
        ('[ -z "$N" ] && N=4; run $N', ["run", "$N"]),
        ("N=1; [ -f x ] && N=4; run $N", ["run", "$N"]),
        ("x || N=2; run $N", ["run", "$N"]),
        ("if x; then N=1; else N=2; fi; run $N", ["run", "$N"]),
        ("A=(a b); if x; then A+=(c); fi; run ${A[@]}", ["run", "a", "b", "${A[@]}"]),
        ("case $x in a) N=1;; b) N=2;; esac; run $N", ["run", "$N"]),
        ("N=1; while x; do N=2; done; run $N", ["run", "$N"]),
        ("for N in 1 2; do run $N; done", ["run", "$N"]),
        ("(N=3); run $N", ["run", "$N"]),
        ("N=1; ((N*=2)); run $N", ["run", "$N"]),
        ("N=1; let N=2; run $N", ["run", "$N"]),
        ("N=1; read N < file; run $N", ["run", "$N"]),
        ("N=1; unset N; run $N", ["run", "$N"]),
        ("A=(1 2); A[0]=3; run ${A[@]}", ["run", "$A"]),
        ("run x{1..3} {a,b}.py $'a\\n'", ["run", "x$(…)", "$(…)", "$'a\\n'"]),
        ("run $((1 / 0)) $((2 ** 3))", ["run", "$(…)", "$(…)"]),
    ],
)
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
