"""Launch files: words are quoted, numbers are those of the plan, and the run would accept them."""

import json
import shlex
import subprocess

import pytest
import yaml

import paceline
from paceline.cli.main import build_parser
from paceline.layout import layout_of
from paceline.planner.emit import build_launch_files
from paceline.planner.emit_slurm import REQUEUE_CODE, BatchJob, build_batch_script
from paceline.planner.plan import plan
from paceline.trainer.engines import accelerate_config, deepspeed_config

LM = """name: lm
workload: lm
model: {preset: 1b}
data: {sequence: 1024, vocab: 32000}
train: {steps: 1000, global_batch: 64, precision: bf16}
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    (folder / "run file.yaml").write_text(LM)
    return folder


def emitted(folder, kind, where, *words):
    file = folder / "run file.yaml"
    found = plan(paceline.load(file, list(words)), where)
    files = build_launch_files(found, file, kind, words)
    for name, text in files.items():
        (folder / name).write_text(text)
        if name.endswith((".sh", ".sbatch")):
            subprocess.run(["bash", "-n", str(folder / name)], check=True)
    return found, files


def last_command(text):
    """The words of the command that starts the ranks, from `train` on."""
    words = shlex.split(text.split("\nexec " if "\nexec " in text else "\nsrun ", 1)[1], comments=True)
    words = words[: words.index("&")] if "&" in words else words
    return words[words.index("train") :]


@pytest.mark.parametrize("kind", ["torchrun", "slurm", "deepspeed"])
@pytest.mark.parametrize("where", ["4xA100", "2x8xA100"])
def test_a_script_trains_the_run_file_in_the_chosen_layout(folder, kind, where):
    words = ("data.path=/tmp/a 'b' $HOME", "parallel.tensor=1", "parallel.pipeline=1")
    found, files = emitted(folder, kind, where, *words)
    script = next(text for name, text in files.items() if name.endswith((".sh", ".sbatch")))
    arguments = build_parser(["train"]).parse_args(last_command(script))
    assert arguments.words[0] == str(folder / "run file.yaml")
    own = [w for w in arguments.words[1:] if not w.startswith("parallel.engine")]
    assert words[0] in own
    spec = paceline.load(arguments.words[0], own)
    assert layout_of(spec) == found.chosen.price.layout


def test_an_attempt_that_fails_is_requeued_whatever_the_setup_has_set(tmp_path):
    """The folder, here a program that asks for another attempt, decides; `set -e` would end the script before."""
    for name, code in (("srun", 1), ("ask", REQUEUE_CODE), ("squeue", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/requeued\n')
    for name in ("srun", "ask", "squeue", "scontrol"):
        (tmp_path / name).chmod(0o755)
    job = BatchJob("lm", "a note", ("train", "run"), "run", "1", 1, setup=("set -euo pipefail",), python=("ask",))
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "12"}
    done = subprocess.run(["bash"], input=build_batch_script(job), text=True, env=environ, check=False)
    assert (done.returncode, (tmp_path / "requeued").read_text()) == (REQUEUE_CODE, "requeue 12\n")


def test_slurm_asks_for_nodes_devices_and_time(folder):
    found, files = emitted(folder, "slurm", "2x8xA100", "parallel.tensor=1", "parallel.pipeline=1")
    text = files["lm.sbatch"]
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in text
    minutes = found.chosen.hours * 60
    days, clock = text.split("--time=")[1].splitlines()[0].split("-")
    hours, mins, _ = map(int, clock.split(":"))
    assert minutes < (int(days) * 24 + hours) * 60 + mins < 2 * minutes + 6
    assert "\nsrun --kill-on-bad-exit=1 python -m paceline train" in text


def test_a_cpu_cluster_asks_for_no_gpus(folder):
    _, files = emitted(folder, "slurm", "4x1xCPU+10Gb", "model.preset=tiny", "data.sequence=64", "model.vocab=32000")
    assert "gpus" not in files["lm.sbatch"]


def test_several_nodes_need_to_know_the_first(folder):
    _, files = emitted(folder, "torchrun", "2x8xA100")
    assert "--nnodes 2 --nproc-per-node 8" in files["lm.sh"]
    done = subprocess.run(["bash", "-c", files["lm.sh"]], capture_output=True, text=True, check=False)
    assert "HEAD=NAME_OF_THE_FIRST_NODE" in done.stderr
    _, files = emitted(folder, "torchrun", "4xA100")
    assert "--standalone --nproc-per-node 4" in files["lm.sh"]


def test_deepspeed_accepts_the_json_for_the_run(folder):
    found, files = emitted(folder, "deepspeed", "4x24GB", "parallel.strategy=zero2", "parallel.tensor=1")
    values = json.loads(files["lm_deepspeed.json"])
    assert values["zero_optimization"]["stage"] == 2
    each = values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"]
    assert each * found.chosen.devices >= values["train_batch_size"] == 64
    words = {**found.overrides(), "parallel.engine": "deepspeed"}
    words["parallel.engine_config"] = str(folder / "lm_deepspeed.json")
    spec = found.spec.replace(words)
    deepspeed_config.check_deepspeed(spec, layout_of(spec))


def test_accelerate_is_for_data_parallelism(folder):
    found, files = emitted(folder, "accelerate", "2x4xA100", "parallel.strategy=ddp", "train.global_batch=4096")
    values = yaml.safe_load(files["lm_accelerate.yaml"])
    assert values["num_processes"] == found.chosen.devices == 8
    assert (values["distributed_type"], values["mixed_precision"]) == ("MULTI_GPU", "bf16")
    assert "--machine_rank" in files["lm.sh"]
    (folder / "own.yaml").write_text("compute_environment: LOCAL_MACHINE\ndebug: true\n")
    own = f"parallel.engine_config={folder / 'own.yaml'}"
    _, files = emitted(folder, "accelerate", "2x4xA100", "parallel.strategy=ddp", "train.global_batch=4096", own)
    assert yaml.safe_load(files["lm_accelerate.yaml"])["debug"] is True
    with pytest.raises(paceline.UserError, match="does not support"):
        emitted(folder, "accelerate", "4xA100", "parallel.tensor=2")
    with pytest.raises(paceline.UserError, match="zero1"):
        emitted(folder, "accelerate", "4xA100", "parallel.strategy=zero1")


@pytest.mark.parametrize(("strategy", "reshards"), [("fsdp", "true"), ("zero2", "false")])
def test_what_accelerate_makes_of_its_file_is_what_the_run_asks_for(folder, strategy, reshards):
    """Read by Accelerate's own launcher, up to the environment of the processes that it would start."""
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils.launch import prepare_multi_gpu_env

    found, files = emitted(folder, "accelerate", "4xA100", f"parallel.strategy={strategy}")
    config = str(folder / "lm_accelerate.yaml")
    assert "accelerate launch --config_file lm_accelerate.yaml" in files["lm.sh"]
    words = ["--config_file", config, "-m", "paceline", "train"]
    asked, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    environ = {**prepare_multi_gpu_env(asked), "RANK": "0"}
    assert (asked.num_processes, environ["FSDP_VERSION"]) == (4, "2")
    assert environ["FSDP_RESHARD_AFTER_FORWARD"] == reshards
    engine = {"parallel.engine": "accelerate", "parallel.engine_config": config, "parallel.device": "cuda"}
    spec = found.spec.replace({**found.overrides(), **engine})
    accelerate_config.check_accelerate(spec, layout_of(spec), environ)


def test_an_engine_says_what_it_cannot_do(folder):
    with pytest.raises(paceline.UserError, match=r"train\.precision=fp64"):
        emitted(folder, "deepspeed", "4xA100", "train.precision=fp64", "parallel.strategy=ddp")
    with pytest.raises(paceline.UserError, match="nothing to launch"):
        emitted(folder, "torchrun", "1xK80", "parallel.strategy=ddp", "model.preset=7b")
