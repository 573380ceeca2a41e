"""What the usual files and commands of each tool become."""

import json
from pathlib import Path

import pytest
import yaml

import paceline
from paceline.config import build_spec
from paceline.layout import layout_of
from paceline.slurm.site_file import read_site
from paceline.trainer.engines.deepspeed_config import check_deepspeed
from results import expect_error

TABLES = yaml.safe_load(Path(__file__).with_name("tools.yaml").read_text(encoding="utf-8"))
TEXTS, CONFIGURATIONS = TABLES["texts"], TABLES["configurations"]
MISSING = TABLES["same names"][-1]["text"]


def adopted_of(tmp_path, name, text, **options):
    (tmp_path / name).write_text(text)
    return paceline.adopt(tmp_path / name, **options)


def holds(adopted, expected):
    """Whether the run file has these values, given as YAML or as values."""
    values = yaml.safe_load(expected) if isinstance(expected, str) else expected
    for section, value in values.items():
        found = adopted.values.get(section)
        assert (found | value if isinstance(value, dict) and found else value) == found
    return True


def became(adopted, key):
    return next(row for row in adopted.rows if row.key == key).outcome.value


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration(tmp_path, name):
    adopted = adopted_of(tmp_path, "any.name", CONFIGURATIONS[name]["text"])
    assert holds(adopted, CONFIGURATIONS[name]["run"])
    assert not [row for row in adopted.rows if row.review]


def test_training_arguments(tmp_path):
    text, command = TEXTS["training arguments"], "torchrun --nproc_per_node 2 train.py"
    adopted = adopted_of(tmp_path, "args.json", text, command=command)
    expected = """
        workload: transformers
        train: {steps: 500, global_batch: 16, lr: 2.0e-5, schedule: cosine, warmup_steps: 50, evaluate_every: 100,
                checkpoint_every: 200, precision: bf16, seed: 42}
        parallel: {strategy: fsdp, ranks: 2, micro_batch: 4, activation_checkpointing: full}
    """
    assert holds(adopted, expected)
    assert "epochs" not in adopted.values["train"]
    outcomes = [became(adopted, key) for key in ("num_train_epochs", "neftune_noise_alpha", "script")]
    assert outcomes == ["replaced", "not supported", "replaced"]
    assert list(adopted.fill_in) == ["model.init_from", "data.path"]


def test_a_job_script(tmp_path):
    adopted = adopted_of(tmp_path, "job", TEXTS["job"])
    expected = """
        name: my_job
        workload: src/train.py
        cluster: 2x2xa100
        parallel: {ranks: 4, threads: 8, timeout_s: 7200.0}
        train: {global_batch: 256}
        data: {arguments: [--batch_size, "32", --accumulation_steps, "2"]}
    """
    assert holds(adopted, expected)
    for key in ("--time", "--partition", "module", "export NCCL_IB_DISABLE"):
        assert became(adopted, key) == "noted"
    assert "# For the scheduler" in adopted.text


def test_a_script_is_read_and_not_run(tmp_path):
    adopted = adopted_of(tmp_path, "train.py", TEXTS["script"])
    train = "{precision: fp16, optimizer: sgd, momentum: 0.8, global_batch: 16}"
    assert holds(adopted, f"{{workload: {tmp_path}/train.py, parallel: {{strategy: zero2}}, train: {train}}}")
    assert became(adopted, "SGD(lr)") == "noted"


@pytest.mark.parametrize(("command", "expected"), map(dict.values, TABLES["commands"]))
def test_a_command(command, expected):
    adopted = paceline.adopt(command=command)
    assert holds(adopted, expected)
    assert command.endswith("paceline train") or adopted.values["workload"] == "t.py"
    assert not [row for row in adopted.rows if row.review]


@pytest.mark.parametrize(("ranks", "text"), map(dict.values, TABLES["scripts"]))
def test_a_shell_script(tmp_path, text, ranks):
    adopted = adopted_of(tmp_path, "start.sh", text)
    assert (adopted.values["workload"], adopted.values.get("parallel", {}).get("ranks")) == ("t.py", ranks)


@pytest.mark.parametrize(("option", "ranks"), [("", 1), (" --multi_gpu", 8)])
@pytest.mark.parametrize("kind", ["'NO'", "NO"])
def test_accelerate_without_distribution_is_one_process(tmp_path, kind, option, ranks):
    (tmp_path / "a.yaml").write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nnum_processes: 8\nmixed_precision: no\n"
    )
    command = f"accelerate launch --config_file {tmp_path}/a.yaml{option} t.py"
    adopted = paceline.adopt(command=command)
    assert adopted.values["parallel"]["ranks"] == ranks
    assert ("parallel.ranks" in adopted.fill_in) == (ranks == 1)
    assert became(adopted, "mixed_precision") == "kept"


@pytest.mark.parametrize("name", TABLES["jobs"])
def test_unknown_values_are_to_review(tmp_path, name):
    job = TABLES["jobs"][name]
    adopted = adopted_of(tmp_path, "job.sh", f"#!/bin/sh\n{job['script']}\n")
    assert holds(adopted, job["run"])
    assert {row.key for row in adopted.rows if row.review} == {*job["review"]}
    assert not job["fill_in"] or job["fill_in"] in adopted.fill_in


def test_own_configuration_is_left_to_the_script(tmp_path):
    (tmp_path / "own.yaml").write_text("general: {seed: 1}\nstages: [a, b]\n")
    adopted = adopted_of(tmp_path, "job.sh", "#!/bin/sh\ntorchrun --nproc_per_node=2 t.py --config own.yaml --lr 0.1\n")
    assert holds(adopted, "{workload: t.py, train: {lr: 0.1}, parallel: {ranks: 2}}")
    assert [row.key for row in adopted.rows if row.review] == ["--config"]
    with expect_error("invalid-format"):
        paceline.adopt(tmp_path / "own.yaml")


@pytest.mark.parametrize("options", ["--gpus=6", "--gpus-per-task=a100:3 --ntasks=2"])
def test_devices_in_the_site_file(tmp_path, options):
    adopted = adopted_of(tmp_path, "job.sh", f"#!/bin/sh\n#SBATCH -N 2 {options}\nsrun torchrun t.py\n")
    assert adopted.site["gpus_per_node"] == 3


def test_nothing_of_a_job_is_dropped_in_silence(tmp_path):
    text = "#PBS -l select=2\npython prepare.py\nmpiexec -n 8 python t.py --lr $LR --o ${O:-x}\npython test.py\n"
    adopted = adopted_of(tmp_path, "job.pbs", f"#!/bin/sh\n{text}")
    assert became(adopted, "#PBS") == "noted"
    assert [row.value for row in adopted.rows if row.key == "command"] == ["python prepare.py", "python test.py"]
    assert [row.value for row in adopted.rows if row.key == "assumed"] == ["O=x"]
    assert [row.key for row in adopted.rows if row.review] == ["--lr"]


def test_a_job_script_makes_a_site_file_too(tmp_path):
    text = TEXTS["job"] + "#SBATCH --mem=64GB -A me\nconda activate x\n"
    adopted = adopted_of(tmp_path, "job", text, out=tmp_path / "run.yaml")
    site = read_site(adopted.site_out)
    assert (site.partition, site.account, site.memory, site.hours) == ("gpu", "me", "64G", 4)
    assert (site.gpus_per_node, site.gpu_type, site.modules) == (2, "a100", ("cuda/12.6.3",))
    assert site.variables == {"NCCL_IB_DISABLE": "0"}
    assert site.setup == ("conda activate x",)
    with expect_error("conflict"):
        adopted_of(tmp_path, "job", text, out=tmp_path / "run.yaml")


@pytest.mark.parametrize(("name", "text", "expected"), map(dict.values, TABLES["same names"]))
def test_same_names_of_other_meaning(tmp_path, name, text, expected):
    adopted = adopted_of(tmp_path, name, f"#!/bin/sh\n{text}\n" if name.endswith("sh") else text)
    assert holds(adopted, expected)
    assert ("parallel.strategy" in adopted.fill_in) == (text is MISSING)
    assert "strategy" in adopted.values["parallel"] or "FSDP" not in text
    assert "global_batch" not in adopted.values.get("train", {}) or name == "megatron.sh"


def test_arguments_of_a_replaced_script():
    adopted = paceline.adopt(command="python run_clm.py --output_dir o --save_strategy no --max_train_samples 500")
    assert adopted.values["workload"] == "transformers"
    assert became(adopted, "--max_train_samples") == "not supported"


def test_warmup_longer_than_the_run(tmp_path):
    scheduler = '{"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}'
    optimizer = '{"type": "Adam", "params": {"lr": 0.1}}'
    adopted = adopted_of(tmp_path, "ds.json", f'{{"optimizer": {optimizer}, "scheduler": {scheduler}}}')
    assert "train.warmup_steps" in adopted.fill_in
    assert became(adopted, "optimizer.params.lr") == "replaced"


def test_accelerate_options_replace_file(tmp_path):
    (tmp_path / "acc.yaml").write_text(CONFIGURATIONS["accelerate with deepspeed"]["text"])
    command = f"accelerate launch --config_file {tmp_path / 'acc.yaml'} --num_processes 2 t.py"
    adopted = paceline.adopt(command=command)
    assert adopted.values["parallel"]["ranks"] == 2
    assert became(adopted, "num_processes") == "replaced"


WARM = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 100}
LONG = {"total_num_steps": 9999}
LONG_WARM = {"warmup_num_steps": 10}


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        ({"type": "SGD"}, {"type": "WarmupDecayLR", "params": WARM}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, {"type": "WarmupDecayLR", "params": LONG}),
        ({"type": "AdamW", "params": {"lr": 1e-3}}, {"type": "WarmupCosineLR", "params": LONG}),
        ({"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.9]}}, {"type": "WarmupLR", "params": LONG_WARM}),
    ],
)
def test_an_adopted_file_agrees_with_deepspeeds_own(tmp_path, optimizer, scheduler):
    """The same file given to the engine finds nothing in the run file that it contradicts."""
    fp16 = {"enabled": True, "initial_scale_power": 12, "hysteresis": 2}
    config = {"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler, "fp16": fp16}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    adopted = paceline.adopt(file)
    assert yaml.safe_load(adopted.text) == adopted.values
    values = {key: value for key, value in adopted.values.items() if key != "workload"}
    spec = build_spec({**values, "parallel": {"engine": "deepspeed", "engine_config": str(file)}})
    check_deepspeed(spec, layout_of(spec))
