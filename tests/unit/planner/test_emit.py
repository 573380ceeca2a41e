"""Launch files: words are quoted, numbers are those of the plan, and schemas, shells and the run accept them."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

import paceline
from paceline.cli.main import build_parser
from paceline.layout import layout_of
from paceline.planner import emit
from paceline.planner.emit import HERE_CODE, REQUEUE_CODE, BatchJob, build_batch_script, build_launch_files
from paceline.planner.plan import plan
from paceline.trainer.engines import accelerate_config, deepspeed_config
from plan_specs import LM_FILE
from results import expect_error

LM = LM_FILE.format(preset="1b", sequence=1024)


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


def run_job(folder, programs, nodes, per_node, **job):
    """Run the script of a job with these programs in place of Slurm's and of Paceline; return its exit code."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    script = build_batch_script(BatchJob("lm", "", ("train", "run"), "run", nodes, per_node, python=("ask",), **job))
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "3"}
    return subprocess.run(["bash"], input=script, text=True, env=environ, cwd=folder, check=False).returncode


def test_an_attempt_that_fails_is_requeued_whatever_the_setup_has_set(tmp_path):
    """The folder, here a program that asks for another attempt, decides; `set -e` would end the script before."""
    programs = {"srun": "exit 1", "ask": f"exit {REQUEUE_CODE}", "squeue": "exit 0"}
    code = run_job(tmp_path, {**programs, "scontrol": 'echo "$@" > requeued'}, "1", 1, setup=("set -euo pipefail",))
    assert (code, (tmp_path / "requeued").read_text()) == (REQUEUE_CODE, "requeue 12\n")


def test_an_elastic_job_starts_its_ranks_again(tmp_path):
    again = f"[ $(wc -l < started) = 1 ] && exit {HERE_CODE} || exit 0"
    assert run_job(tmp_path, {"srun": 'echo "$@" >> started; exit 1', "ask": again}, "1-3", 2) == 0
    started = (tmp_path / "started").read_text().splitlines()
    assert [re.findall(r"ranks=(\d+)", line) for line in started] == [["6"], ["6"]]


def test_slurm_asks_for_nodes_devices_and_time(folder):
    found, files = emitted(folder, "slurm", "2x8xA100", "parallel.tensor=1", "parallel.pipeline=1")
    text = files["lm.sbatch"]
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in text
    minutes = found.chosen.hours * 60
    days, clock = text.split("--time=")[1].splitlines()[0].split("-")
    hours, mins, _ = map(int, clock.split(":"))
    assert minutes < (int(days) * 24 + hours) * 60 + mins < 2 * minutes + 6
    assert "\nsrun --kill-on-bad-exit=1 python -m paceline train" in text
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


CLOUD_LM = LM.replace("name: lm", "name: LM_1.b")
WORDS = ("data.path=/tmp/a 'b' $HOME `id`", "parallel.tensor=1", "parallel.pipeline=1")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Kind and cluster to the YAML documents of the file; plans are made once."""
    file = tmp_path_factory.mktemp("it's") / "run file.yaml"
    file.write_text(CLOUD_LM)
    plans = {where: plan(paceline.load(file, list(WORDS)), where) for where in ("2x8xA100", "1xH100", "2x1xCPU+10Gb")}

    def make(kind, where):
        ((_, text),) = build_launch_files(plans[where], file, kind, WORDS).items()
        return list(yaml.safe_load_all(text)), file

    return make


def trained(command, file):
    """The words after `-m paceline`, which the command line must understand."""
    words = shlex.split(command.replace("\\\n", " "))
    arguments = build_parser(["train"]).parse_args(words[words.index("paceline") + 1 :])
    assert arguments.resume_or_start
    assert WORDS[0] in arguments.words
    assert arguments.words[0] == file
    return words


@pytest.mark.parametrize("where", ["2x8xA100", "1xH100", "2x1xCPU+10Gb"])
def test_kubernetes_models_take_every_key_of_the_manifest(documents, where):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (config, jobset), _ = documents("kubernetes", where)
    read = models.IoK8sApiCoreV1ConfigMap.from_dict(config), models.JobsetV1alpha2JobSet.from_dict(jobset)
    assert [one.to_dict() for one in read] == [config, jobset]  # a key that is not theirs would be missing
    assert config["data"]["run.yaml"] == CLOUD_LM
    assert config["metadata"]["name"] == jobset["metadata"]["name"] == "lm-1-b"
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    words = trained(container["command"][2], "/paceline/run.yaml")
    nodes = 1 if where == "1xH100" else 2
    assert job["completions"] == job["parallelism"] == nodes
    assert ("--standalone" in words) == (nodes == 1)
    gpus = container["resources"]["requests"].get("nvidia.com/gpu")
    assert gpus == {"2x8xA100": 8, "1xH100": 1}.get(where)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}


@pytest.mark.parametrize("where", ["2x8xA100", "1xH100", "2x1xCPU+10Gb"])
def test_skypilots_schemas_accept_the_task(documents, where):
    validate = pytest.importorskip("jsonschema").validate
    schemas = json.loads(Path(__file__).with_name("skypilot_schemas.json").read_text())
    (task,), file = documents("skypilot", where)
    validate(task, schemas["task"])
    validate(task["resources"], schemas["resources"])
    *_, bucket = task["file_mounts"].values()
    validate(bucket, schemas["storage"])
    assert task["file_mounts"]["~/paceline_run.yaml"] == str(file)
    assert task["num_nodes"] == (1 if where == "1xH100" else 2)
    assert task["resources"].get("accelerators") == {"2x8xA100": "A100-80GB:8", "1xH100": "H100:1"}.get(where)
    trained(task["run"].split("\n", 1)[1], "$HOME/paceline_run.yaml")
    with pytest.raises(Exception, match="num_node"):
        validate({**task, "num_node": 2}, schemas["task"])


def test_a_script_must_be_in_the_image(folder):
    found, _ = emitted(folder, "torchrun", "1xH100")
    with expect_error("not-supported", "--emit"):
        build_launch_files(found, folder / "train.py", "kubernetes")


def test_names_become_what_others_can_take():
    assert [emit.to_dns_name(name) for name in ("LM_7.b", "7b", "a" * 90, "x-")] == ["lm-7-b", "run-7b", "a" * 40, "x"]
    names = {"A100-SXM4-40GB": "A100", "V100-SXM2-32GB": "V100-32GB", "H100-SXM5-80GB": "H100", "RTX-3090": "RTX3090"}
    assert {name: emit.to_skypilot_name(name) for name in names} == names
