"""The verb adopt: a row for every key, one run file from several sources, contradictions, and invalid files."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.convert.rules import Outcome
from paceline.errors import UserError
from results import expect_error

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
MICRO = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
ZERO = {**MICRO, "zero_optimization": {"stage": 2}, "optimizer": ADAMW}
LISTS = "".join(f"l{n}: &l{n} [*l{n - 1}, *l{n - 1}, *l{n - 1}]\n" for n in range(1, 40))
ALIASES = "\n".join(
    ["num_processes: 2", "l0: &l0 {a: 1, b: 1}"]
    + [f"l{n}: &l{n} {{a: *l{n - 1}, b: *l{n - 1}, c: *l{n - 1}}}" for n in range(1, 40)]
)
"""A small file that would expand to billions of keys."""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(name, content):
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write_file


def row(adopted, key):
    return next(row for row in adopted.rows if row.key == key)


def test_a_file_and_a_command_make_one_run_file(write):
    adopted = paceline.adopt(write("ds.json", ZERO), command="torchrun --nproc_per_node=4 --nnodes=2 train.py")
    assert adopted.values["parallel"] == {"strategy": "zero2", "ranks": 8, "micro_batch": 8}
    assert adopted.values["train"]["global_batch"] == 8 * 2 * 8
    assert adopted.values["workload"] == "train.py"
    assert row(adopted, "train_micro_batch_size_per_gpu").run_keys == ("train.global_batch", "parallel.micro_batch")
    assert row(adopted, "--nnodes").outcome is Outcome.DERIVED


def test_run_file_names_origins(write, tmp_path):
    adopted = paceline.adopt(write("ds.json", ZERO), out="run.yaml")
    text = (tmp_path / "run.yaml").read_text()
    assert yaml.safe_load(text) == adopted.values
    line = next(line for line in text.splitlines() if line.strip().startswith("lr:"))
    assert line.endswith("# ds.json optimizer.params.lr=0.001")


def test_nothing_is_written_over(write, tmp_path):
    write("run.yaml", "mine")
    with expect_error("conflict", "--out"):
        paceline.adopt(write("ds.json", ZERO), out="run.yaml")
    assert (tmp_path / "run.yaml").read_text() == "mine"
    paceline.adopt("ds.json", out="run.yaml", force=True)
    assert "ds.json" in (tmp_path / "run.yaml").read_text()


def test_batch_and_passes_give_the_ranks(write):
    adopted = paceline.adopt(write("ds.json", {**ZERO, "train_batch_size": 64}))
    assert adopted.values["parallel"]["ranks"] == 4
    assert "parallel.ranks" not in adopted.fill_in


def test_defaults_of_trainer_and_deepspeed(write):
    file = write("ds.json", {"zero_optimization": {"stage": 2}, "steps_per_print": 100})
    options = "--logging_steps 1 --per_device_train_batch_size 2 --num_train_epochs 1"
    adopted = paceline.adopt(command=f"deepspeed --num_gpus 2 t.py --deepspeed {file} {options}")
    train = adopted.values["train"]
    assert (train["log_every"], train["clip"], train["schedule"]) == (1, 0.0, "linear")


@pytest.mark.parametrize(
    ("key", "least"), [("offload_param.device", 3), ("cpu_offload_param", 3), ("offload_optimizer.device", 2)]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_sharded_is_offloaded(write, stage, key, least):
    name, dot, _ = key.partition(".")
    value = {"device": "cpu"} if dot else True
    adopted = paceline.adopt(write("ds.json", {"zero_optimization": {"stage": stage, name: value}}))
    assert adopted.values["parallel"].get("offload", False) is (stage >= least)
    outcome = row(adopted, f"zero_optimization.{key}").outcome
    assert outcome is (Outcome.TRANSLATED if stage >= least else Outcome.NOT_SUPPORTED)


def test_unknown_key_suggests_a_known_one(write, ask):
    told = ask("adopt", write("ds.json", {**ZERO, "gradient_cliping": 1.0}))
    assert told.code == 0
    assert "look at: ds.json: gradient_cliping" in told.out
    assert "'gradient_clipping'" in told.out


def test_the_table_as_json(write, ask):
    printed = json.loads(ask("adopt", write("ds.json", ZERO), "--json", "--out", "own.yaml").out)
    assert printed["run_file"]["parallel"]["strategy"] == "zero2"
    assert {key["key"] for key in printed["keys"] if key["given"]} >= {"gradient_accumulation_steps"}
    assert printed["out"] == "own.yaml"


@pytest.mark.parametrize("how", ["--command 'torchrun --nproc_per_node=2 t.py'", "-- torchrun --nproc_per_node=2 t.py"])
def test_command_as_option_or_after_dashes(write, ask, tmp_path, how):
    assert ask(f"adopt {write('ds.json', ZERO)} --out run.yaml {how}").code == 0
    values = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert (values["workload"], values["parallel"]["ranks"]) == ("t.py", 2)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("ds.json", b"\xff\xfe\x00\x01", "invalid-format"),
        ("a.json", "x" * (1 << 20) + "y", "unreadable"),
        ("a.yaml", ALIASES, "unreadable"),
        ("a.yaml", "num_processes: 2\nl0: &l0 [x, y]\n" + LISTS, "unreadable"),
    ],
)
def test_a_bad_file_is_one_line(write, name, content, code):
    write(name, content)
    with expect_error(code) as error:
        paceline.adopt(name)
    assert "\n" not in str(error.value)


def test_secrets_are_not_repeated(write):
    adopted = paceline.adopt(write("hf.json", {"output_dir": "o", "num_train_epochs": 1, "hub_token": "hf_abc"}))
    assert row(adopted, "hub_token").value == "…"
    assert "hf_abc" not in adopted.text + json.dumps(adopted.as_json())
    job = "#SBATCH -p gpu\nexport WANDB_API_KEY=k_abc HF_TOKEN=k_abc AWS_SECRET_ACCESS_KEY=k_abc A=1\ntorchrun train.py"
    adopted = paceline.adopt(write("job.sh", job))
    assert adopted.site["variables"] == {"A": "1"}
    assert "k_abc" not in adopted.text + json.dumps(adopted.as_json())


def test_files_that_are_named_are_read_too(write):
    write("ds.json", ZERO)
    adopted = paceline.adopt(command="deepspeed --num_gpus 2 train.py --deepspeed_config ds.json")
    assert adopted.values["parallel"] == {"strategy": "zero2", "ranks": 2, "micro_batch": 8}
    assert row(adopted, "--deepspeed_config").reason == "read as well"
    missing = paceline.adopt(command="deepspeed --num_gpus 2 train.py --deepspeed_config none.json")
    assert row(missing, "--deepspeed_config").review


def test_script_path_is_relative_to_the_run_file(write, tmp_path):
    (tmp_path / "runs").mkdir()
    adopted = paceline.adopt(command="python src/train.py", out="runs/run.yaml")
    assert "workload: ../src/train.py" in (tmp_path / "runs" / "run.yaml").read_text()
    assert adopted.values["parallel"]["ranks"] == 1


def test_a_script_without_a_run_is_to_be_filled_in(write):
    for text, missing in (("optimizer.step()", True), ("import paceline", False)):
        write("train.py", text)
        assert ("workload" in paceline.adopt(command="python train.py").fill_in) is missing


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


KEYS = (
    *("train_batch_size", "zero_optimization", "fp16", "optimizer", "scheduler", "num_processes", "trainer"),
    *("fsdp_config", "output_dir", "learning_rate", "model", "training", "data", "fsdp", "report_to"),
)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=4))
def test_any_file_is_a_run_file_or_an_error(tmp_path_factory, values):
    file = tmp_path_factory.getbasetemp() / "junk.json"
    file.write_text(json.dumps(values))
    adopted, message = None, ""
    try:
        adopted = paceline.adopt(file)
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert adopted is None or yaml.safe_load(adopted.text) == adopted.values
