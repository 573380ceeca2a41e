"""Launch files for Kubernetes (a ConfigMap and a JobSet) and for SkyPilot (a managed job).

JobSet gives pods stable names and restarts all of them when one fails; `train --resume-or-start` then resumes the run.
The image and the volume for run folders are the user's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import join_names

POD_RESTARTS = 20
GRACE_S = 120
"""Between the warning and the end of a pod: time to save."""
IMAGE = "registry.example.com/paceline:latest"
CLAIM = "paceline-runs"
POD_RUN_FILE = "/paceline/run.yaml"
POD_RUNS = "/runs"
PORT = 29500
SHARED_MEMORY = "16Gi"
"""Most that /dev/shm may take: it counts as memory of the pod only as it fills."""


@dataclass(frozen=True)
class PodSpec:
    """What a manifest says; `command` is of each rank, after the run file."""

    name: str
    note: str
    run_file: str
    """Its content."""
    command: Sequence[str]
    nodes: int
    per_node: int
    gpus: int
    """Of a pod; 0 on cores."""
    memory_bytes: float
    """Of a pod, where it is known what it takes; else 0."""
    reads: Sequence[str] = ()
    """Files and folders of the user's, as a pod sees them."""


def build_manifest(pods: PodSpec) -> str:
    """Two documents of YAML."""
    name = to_dns_name(pods.name)
    head = (
        f"# {pods.note}\n"
        f"# Two values are yours: the image, which has Paceline, and the volume claim {CLAIM} for run folders.\n"
    )
    if pods.reads:
        named = join_names([repr(path) for path in pods.reads])
        head += f"# The run reads {named}: put this into the image, or mount it there.\n"
    run_file = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"run.yaml": pods.run_file},
    }
    return head + dump_yaml_documents(run_file, build_jobset(pods, name))


def build_jobset(pods: PodSpec, name: str) -> dict[str, Any]:
    job = {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": 0,
        "template": {"spec": _build_pod(pods, name)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": POD_RESTARTS},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _build_pod(pods: PodSpec, name: str) -> dict[str, Any]:
    wants: dict[str, Any] = {"nvidia.com/gpu": pods.gpus} if pods.gpus else {"cpu": str(pods.per_node)}
    if pods.memory_bytes:
        wants["memory"] = f"{pods.memory_bytes / 2**20:.0f}Mi"
    limits = {key: value for key, value in wants.items() if key != "cpu"}
    container = {
        "name": "ranks",
        "image": IMAGE,
        "command": ["bash", "-c", _pod_command(pods, name)],
        "resources": {"requests": wants, **({"limits": limits} if limits else {})},
        "volumeMounts": [
            {
                "name": "run-file",
                "mountPath": POD_RUN_FILE,
                "subPath": "run.yaml",
            },  # what the image has beside it stays
            {"name": "runs", "mountPath": POD_RUNS},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "run-file", "configMap": {"name": name}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": CLAIM}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
        ],
    }


def _pod_command(pods: PodSpec, name: str) -> str:
    where = f"--standalone --nproc-per-node {pods.per_node}"
    if pods.nodes > 1:
        where = (
            f"--nnodes {pods.nodes} --nproc-per-node {pods.per_node} --node-rank $JOB_COMPLETION_INDEX "
            f"--master-addr {name}-node-0-0.{name} --master-port {PORT}"
        )
    command = shlex.join(["train", POD_RUN_FILE, *pods.command, "--out", POD_RUNS, "--resume-or-start"])
    return f"exec torchrun {where} -m paceline {command}"


def to_dns_name(name: str) -> str:
    """A name as Kubernetes takes it: small letters, digits and dashes, with room for what it adds."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")


def dump_yaml_documents(*documents: dict[str, Any]) -> str:
    """As people write it: a text of several lines stands line by line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_str(self, text: str) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, Dumper.represent_str)
    found: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return found


TASK_RUN_FILE = "paceline_run.yaml"
"""In the home folder of each machine."""
TASK_RUNS = "/paceline-runs"
TASK_RESTARTS = 3
MEMORY_IN_NAME = ("A100-80GB", "V100-32GB")
"""SkyPilot tells these from smaller ones of the same model."""


@dataclass(frozen=True)
class SkyTask:
    """What a task says; `command` is of each rank, after the run file."""

    name: str
    note: str
    run_file: str
    """Where it is here."""
    command: Sequence[str]
    nodes: int
    per_node: int
    device: str
    """The catalogue's name; empty for cores."""
    reads: Sequence[str] = ()
    """Files and folders of the user's, as a machine sees them."""


def build_sky_file(task: SkyTask) -> str:
    head = f"# {task.note}\n# Send it with  sky jobs launch, which goes on elsewhere when machines are taken away.\n"
    if task.reads:
        named = join_names([repr(path) for path in task.reads])
        head += f"# The run reads {named}: add this to file_mounts.\n"
    return head + dump_yaml_documents(build_sky_task(task))


def build_sky_task(task: SkyTask) -> dict[str, Any]:
    device = {"accelerators": f"{accelerator_name(task.device)}:{task.per_node}"} if task.device else {"cpus": "8+"}
    return {
        "name": to_dns_name(task.name),
        "num_nodes": task.nodes,
        "resources": {**device, "job_recovery": {"max_restarts_on_errors": TASK_RESTARTS}},
        "file_mounts": {
            f"~/{TASK_RUN_FILE}": task.run_file,
            TASK_RUNS: {"name": f"{to_dns_name(task.name)}-runs", "mode": "MOUNT"},
        },
        "setup": "pip install paceline",
        "run": _task_command(task),
    }


def _task_command(task: SkyTask) -> str:
    words = shlex.join([*task.command, "--out", TASK_RUNS, "--resume-or-start"])
    return (
        'HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n1)\n'
        f'exec torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node {task.per_node} \\\n'
        f'  --node-rank "$SKYPILOT_NODE_RANK" --master-addr "$HEAD" --master-port {PORT} \\\n'
        f'  -m paceline train "$HOME/{TASK_RUN_FILE}" {words}\n'
    )


def accelerator_name(device: str) -> str:
    """SkyPilot's name for a device of the catalogue: A100-SXM4-80GB is A100-80GB, RTX-3090 is RTX3090."""
    words = [word for word in device.split("-") if not re.fullmatch(r"(SXM\d?|PCIe|NVL)", word, re.IGNORECASE)]
    if words[0] == "RTX":
        return "".join(words[:2])
    whole = "-".join(words[:2])
    return whole if whole in MEMORY_IN_NAME else words[0]
