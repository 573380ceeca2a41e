"""`paceline keys`, completion, and the hint after an option that a verb does not have."""

import json
import shutil
import subprocess

import pytest

from paceline.cli.keys import build_completion_script, list_keys, suggest_key
from paceline.cli.main import build_parser, list_verbs
from paceline.config import build_spec
from results import expect_error


def test_every_key_of_a_spec_is_known_with_its_default():
    known = {key.name: key for key in list_keys()}
    spec = {key: value for key, value, *_ in build_spec({}).fields()}
    assert spec.keys() <= known.keys()
    assert known["train.lr"].default == str(spec["train.lr"])
    assert all(key.meaning for key in known.values())


def test_a_section_a_key_and_a_word(ask):
    out = ask("keys train.lr").out
    assert [line.split()[0] for line in out.splitlines()] == ["train.lr", "peak"]
    assert "> 0" in out
    rows = json.loads(ask("keys parallel --json").out)
    assert all(row["name"].startswith("parallel.") for row in rows)
    assert "model.k" in ask("keys model --workload topics").out
    for slip, meant in (("trian.lr", "train.lr"), ("dta", "data")):
        answer = ask("keys", slip)
        assert answer.code == 2
        assert f"did you mean {meant!r}?" in answer.err
    assert ask("keys warm").code == 0
    (lora,) = json.loads(ask("keys lora_rank --json").out)
    assert (lora["name"], lora["workload"]) == ("model.lora_rank", "transformers")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--ranks", "2"], "parallel.ranks=2"),
        (["--batch-size=64"], "train.global_batch=64"),
        (["--learning_rate", "1e-3"], "train.lr=1e-3"),
        (["--lr", "--quiet"], "train.lr=VALUE"),
    ],
)
def test_an_option_that_is_a_key_is_answered_with_the_key(words, meant, ask):
    answer = ask("train", "run.yaml", *words)
    assert (answer.code, f"typed as  {meant}" in answer.err) == (2, True)
    assert suggest_key("--zzzzqq") == ""


@pytest.mark.parametrize(
    ("section", "old", "new"),
    [
        ("model", "start", "model.init_from"),
        ("train", "checkpoint", "train.checkpoint_format"),
        ("parallel", "checkpointing", "parallel.activation_checkpointing"),
    ],
)
def test_a_key_of_an_earlier_version_is_answered_with_the_new_one(section, old, new):
    with expect_error("unknown-key", match=f"'{new}'"):
        build_spec({"workload": "lm", section: {old: "x"}})


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_that_its_shell_takes(shell):
    text = build_completion_script(shell, build_parser(list(list_verbs())), [key.name for key in list_keys()])
    assert "train.lr" in text
    assert all(verb in text for verb in list_verbs())
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=text, text=True, capture_output=True).stderr == ""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_verbs_options_and_keys(tmp_path):
    text = build_completion_script("bash", build_parser(list(list_verbs())), [key.name for key in list_keys()])
    ask = 'COMP_WORDS=({}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _paceline 2>/dev/null; echo "${{COMPREPLY[@]}}"\n'
    asked = "".join(map(ask.format, ("paceline exp", "paceline measure --rep", "paceline train train.warmup_s")))
    out = subprocess.run(["bash"], input=text + asked, text=True, capture_output=True, cwd=tmp_path).stdout
    assert out.splitlines() == ["explain export", "--repeats", "train.warmup_steps= train.warmup_shape="]
