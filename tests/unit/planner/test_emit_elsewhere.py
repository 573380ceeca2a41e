"""Files for other schedulers: what their own schemas say of them, and what their shells make of our words."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

import paceline
from paceline.cli.main import build_parser
from paceline.planner.emit import build_launch_files, to_dns_name, to_skypilot_name
from paceline.planner.plan import plan

LM = """name: LM_1.b
workload: lm
model: {preset: 1b}
data: {sequence: 1024, vocab: 32000}
train: {steps: 1000, global_batch: 64, precision: bf16}
"""
WORDS = ("data.path=/tmp/a 'b' $HOME `id`", "parallel.tensor=1", "parallel.pipeline=1")


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    """Kind and cluster to the documents of the file; plans are made once."""
    file = tmp_path_factory.mktemp("it's") / "run file.yaml"
    file.write_text(LM)
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
def test_kubernetes_models_take_every_key_of_the_manifest(emitted, where):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (config, jobset), _ = emitted("kubernetes", where)
    read = models.IoK8sApiCoreV1ConfigMap.from_dict(config), models.JobsetV1alpha2JobSet.from_dict(jobset)
    assert [one.to_dict() for one in read] == [config, jobset]  # a key that is not theirs would be missing
    assert config["data"]["run.yaml"] == LM
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
def test_skypilots_schemas_accept_the_task(emitted, where):
    validate = pytest.importorskip("jsonschema").validate
    schemas = json.loads(Path(__file__).with_name("skypilot_schemas.json").read_text())
    (task,), file = emitted("skypilot", where)
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


OWN = """import torch
from paceline import Workload

class Own(Workload):
    def model(self):
        return torch.nn.Linear(2, 1)

    def data(self, split):
        return torch.zeros(8, 2)

    def loss(self, model, batch):
        return model(batch).sum(), len(batch)
"""


@pytest.mark.parametrize(
    ("text", "pod", "machine"),
    [
        ("workload: own.py:Own\ntrain: {steps: 3, global_batch: 4}\n", "/paceline/own.py", "~/own.py"),
        (LM.replace("data: {", "data: {source: text, path: ../texts, "), "/texts", "~/../texts"),
        (LM.replace("data: {", "data: {source: text, path: /shared/texts, "), "/shared/texts", "/shared/texts"),
    ],
)
def test_what_the_run_reads_is_named_as_the_machines_see_it(tmp_path, text, pod, machine):
    (tmp_path / "own.py").write_text(OWN)
    file = tmp_path / "run.yaml"
    file.write_text(text)
    found = plan(paceline.load(file), "1xH100")
    in_pod, on_machine = (
        *build_launch_files(found, file, "kubernetes").values(),
        *build_launch_files(found, file, "skypilot").values(),
    )
    assert f"# The run reads {pod!r}: put this into the image" in in_pod
    assert f"# The run reads {machine!r}: add this to file_mounts" in on_machine


def test_names_become_what_others_can_take():
    assert [to_dns_name(name) for name in ("LM_7.b", "7b", "a" * 90, "x-")] == ["lm-7-b", "run-7b", "a" * 40, "x"]
    names = {"A100-SXM4-40GB": "A100", "V100-SXM2-32GB": "V100-32GB", "H100-SXM5-80GB": "H100", "RTX-3090": "RTX3090"}
    assert {name: to_skypilot_name(name) for name in names} == names


def test_a_script_must_be_in_the_image(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("")
    (tmp_path / "run.yaml").write_text(LM)
    found = plan(paceline.load(tmp_path / "run.yaml"), "1xH100")
    with pytest.raises(paceline.UserError, match=r"train\.py is a script"):
        build_launch_files(found, file, "kubernetes")
