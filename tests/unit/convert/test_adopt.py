"""The verb: rows for every key, one run file of several sources, contradictions, and files that are none."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.cli.main import main
from paceline.convert.rules import Outcome
from paceline.errors import UserError

ZERO = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a file into the folder in which the test stands."""
    monkeypatch.chdir(tmp_path)

    def write(name, content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
        return name

    return write


def row(adopted, key):
    (found,) = [row for row in adopted.rows if row.key == key]
    return found


def test_a_file_and_a_command_make_one_run_file(written):
    adopted = paceline.adopt(written("ds.json", ZERO), command="torchrun --nproc_per_node=4 --nnodes=2 train.py")
    assert adopted.values["parallel"] == {"strategy": "zero2", "ranks": 8, "micro_batch": 8}
    assert adopted.values["train"]["global_batch"] == 8 * 2 * 8
    assert adopted.values["workload"] == "train.py"
    assert row(adopted, "train_micro_batch_size_per_gpu").where == ("train.global_batch", "parallel.micro_batch")
    assert row(adopted, "--nnodes").outcome is Outcome.DERIVED


def test_the_run_file_is_what_the_values_say_and_names_where_they_came_from(written, tmp_path):
    adopted = paceline.adopt(written("ds.json", ZERO), out="run.yaml")
    text = (tmp_path / "run.yaml").read_text()
    assert yaml.safe_load(text) == adopted.values
    line = next(line for line in text.splitlines() if line.strip().startswith("lr:"))
    assert line.endswith("# ds.json optimizer.params.lr=0.001")


def test_nothing_is_written_over(written, tmp_path):
    written("run.yaml", "mine")
    with pytest.raises(UserError, match=r"run\.yaml exists; type  --force"):
        paceline.adopt(written("ds.json", ZERO), out="run.yaml")
    assert (tmp_path / "run.yaml").read_text() == "mine"
    paceline.adopt("ds.json", out="run.yaml", force=True)
    assert "ds.json" in (tmp_path / "run.yaml").read_text()


@pytest.mark.parametrize(
    ("values", "command", "said"),
    [
        (
            {**ZERO, "train_batch_size": 100},
            "torchrun --nproc_per_node=4 t.py",
            r"train_batch_size=100 is not 8 per pass × 2 accumulated × 4 ranks = 64",
        ),
        ({**ZERO, "train_batch_size": 100}, "", r"train_batch_size=100 is not a multiple of 16"),
        (
            {"train_batch_size": 30, "gradient_accumulation_steps": 4},
            "torchrun --nproc_per_node=2 t.py",
            "train_batch_size=30 is not a multiple of 8",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}, "zero_optimization": {}}, "", "contradict each other"),
        ({"train_batch_size": "many"}, "", "ds.json: train_batch_size: 'many' is not a number"),
        ({"train_batch_size": 0}, "", "it must be 1 or more"),
        ({**ZERO, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": True}}}, "", "is not a number"),
        ({"train_batch_size": 2}, "torchrun --nproc_per_node=4 t.py", "train.global_batch=2 is smaller"),
    ],
)
def test_a_contradiction_is_one_line_and_nothing_is_written(written, tmp_path, values, command, said):
    with pytest.raises(UserError, match=said) as error:
        paceline.adopt(written("ds.json", values), command=command, out="run.yaml")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run.yaml").exists()


def test_batch_and_passes_give_the_ranks(written):
    adopted = paceline.adopt(written("ds.json", {**ZERO, "train_batch_size": 64}))
    assert adopted.values["parallel"]["ranks"] == 4
    assert "parallel.ranks" not in adopted.fill_in


@pytest.mark.parametrize(("stage", "offload"), [(0, None), (1, None), (2, True), (3, True)])
def test_what_cannot_be_offloaded_is_said(written, stage, offload):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    adopted = paceline.adopt(written("ds.json", {"zero_optimization": zero}))
    assert adopted.values["parallel"].get("offload") is offload
    outcome = row(adopted, "zero_optimization.offload_optimizer.device").outcome
    assert outcome is (Outcome.TRANSLATED if offload else Outcome.NOT_SUPPORTED)


def test_an_unknown_key_has_a_row_and_the_nearest_name(written, capsys):
    written("ds.json", {**ZERO, "gradient_cliping": 1.0})
    with pytest.raises(SystemExit) as end:
        main(["adopt", "ds.json"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert (
        "look at: ds.json: gradient_cliping 1.0: DeepSpeed has no such key, did you mean 'gradient_clipping'?" in shown
    )


def test_the_table_as_json(written, capsys):
    written("ds.json", ZERO)
    with pytest.raises(SystemExit):
        main(["adopt", "ds.json", "--json", "--out", "own.yaml"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["run_file"]["parallel"]["strategy"] == "zero2"
    assert {key["key"] for key in printed["keys"] if key["given"]} >= {"gradient_accumulation_steps"}
    assert printed["out"] == "own.yaml"


@pytest.mark.parametrize(
    "how", [["--command", "torchrun --nproc_per_node=2 t.py"], ["--", "torchrun", "--nproc_per_node=2", "t.py"]]
)
def test_a_command_is_given_as_one_word_or_after_two_dashes(written, tmp_path, how):
    written("ds.json", ZERO)
    with pytest.raises(SystemExit) as end:
        main(["adopt", "ds.json", "--out", "run.yaml", *how])
    assert end.value.code == 0
    values = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert (values["workload"], values["parallel"]["ranks"]) == ("t.py", 2)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", '{"train_batch_size": 1, "train_batch_size": 2}', "'train_batch_size' is given twice"),
        ("a.json", '{"train_batch_size": 1', r"a.json is not JSON: .*line 1"),
        ("a.json", "[1]", "a.json holds a list"),
        ("a.json", '{"colour": "red"}', r"not recognised by its keys \(colour\)"),
        ("a.yaml", "num_processes: 1\nnum_processes: 2\n", r"num_processes is given twice \(line 2\)"),
        ("a.yaml", "a: [1\nb: }", "a.yaml is not recognised"),
        ("a.yaml", "num_processes: !!python/object/apply:os.system ['touch x']", "not recognised"),
        ("a.txt", "   \n", "a.txt is empty"),
        ("a.txt", "print('hello')\n", "a.txt is not recognised; adopt reads DeepSpeed's JSON"),
        ("a.sh", "#!/bin/bash\necho hello\n", "starts no command that adopt knows"),
        ("a.sh", "torchrun --nproc_per_node=2 a.py\ntorchrun --nproc_per_node=4 b.py\n", "2 different commands"),
        ("a.sh", "#!/bin/bash\n#SBATCH --gres=gpu:2\ntorchrun --nproc_per_node=4 a.py\n", "gives them 2 devices"),
        ("a.json", "x" * (1 << 20) + "y", "larger than 1 MB"),
    ],
)
def test_a_bad_file_is_one_line(written, name, content, said):
    written(name, content)
    with pytest.raises(UserError, match=said) as error:
        paceline.adopt(name)
    assert "\n" not in str(error.value)


def test_a_folder_a_missing_and_a_binary_file_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe\x00\x01")
    for given_, said in (
        ("ds.json", "not a text in UTF-8"),
        (".", "is a folder"),
        ("dss.json", "did you mean 'ds.json'"),
    ):
        with pytest.raises(UserError, match=said):
            paceline.adopt(given_)
    with pytest.raises(UserError, match="adopt what"):
        paceline.adopt()


def test_aliases_of_yaml_do_not_fill_the_memory(written):
    steps = ["num_processes: 2", "l0: &l0 {a: 1, b: 1}"]
    steps += [f"l{n}: &l{n} {{a: *l{n - 1}, b: *l{n - 1}, c: *l{n - 1}}}" for n in range(1, 40)]
    with pytest.raises(UserError, match="more than 5000 keys"):
        paceline.adopt(written("bomb.yaml", "\n".join(steps)))


def test_secrets_are_not_repeated(written):
    adopted = paceline.adopt(written("hf.json", {"output_dir": "o", "num_train_epochs": 1, "hub_token": "hf_abc"}))
    assert row(adopted, "hub_token").value == "…"
    assert "hf_abc" not in adopted.text + json.dumps(adopted.as_json())


def test_files_that_are_named_are_read_too(written):
    written("ds.json", ZERO)
    adopted = paceline.adopt(command="deepspeed --num_gpus 2 train.py --deepspeed_config ds.json")
    assert adopted.values["parallel"] == {"strategy": "zero2", "ranks": 2, "micro_batch": 8}
    assert row(adopted, "--deepspeed_config").why == "read as well"
    missing = paceline.adopt(command="deepspeed --num_gpus 2 train.py --deepspeed_config none.json")
    assert row(missing, "--deepspeed_config").ask


def test_a_script_beside_another_folder_is_found_from_the_run_file(written, tmp_path):
    (tmp_path / "runs").mkdir()
    adopted = paceline.adopt(command="python src/train.py", out="runs/run.yaml")
    assert "workload: ../src/train.py" in (tmp_path / "runs" / "run.yaml").read_text()
    assert adopted.values["parallel"]["ranks"] == 1


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *(
                    "train_batch_size",
                    "zero_optimization",
                    "fp16",
                    "optimizer",
                    "scheduler",
                    "num_processes",
                    "trainer",
                ),
                *("fsdp_config", "output_dir", "learning_rate", "model", "training", "data", "fsdp", "report_to"),
            ]
        ),
        JUNK,
        min_size=1,
        max_size=4,
    )
)
def test_whatever_a_file_holds_it_is_a_run_file_or_one_line(tmp_path_factory, values):
    file = tmp_path_factory.getbasetemp() / "junk.json"
    file.write_text(json.dumps(values))
    adopted, said = None, ""
    try:
        adopted = paceline.adopt(file)
    except UserError as error:
        said = str(error)
    assert "\n" not in said
    assert adopted is None or yaml.safe_load(adopted.text) == adopted.values
