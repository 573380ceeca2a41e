"""A manifest for Kubernetes: the run file as a ConfigMap, and a JobSet with one pod per node that torchrun joins.

JobSet gives pods stable names and starts all of them again when one fails; `train --again` then goes on where the run
stands. The image and the volume for run folders are the user's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import listed

RESTARTS = 20
GRACE_S = 120
"""Between the warning and the end of a pod: time to save."""
IMAGE = "registry.example.com/paceline:latest"
CLAIM = "paceline-runs"
FILE = "/paceline/run.yaml"
RUNS = "/runs"
PORT = 29500
SHARED_MEMORY = "16Gi"
"""Most that /dev/shm may take: it counts as memory of the pod only as it fills."""


@dataclass(frozen=True)
class Pods:
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


def manifest(pods: Pods) -> str:
    """Two documents of YAML."""
    name = dns_name(pods.name)
    head = (
        f"# {pods.note}\n"
        f"# Two values are yours: the image, which has Paceline, and the volume claim {CLAIM} for run folders.\n"
    )
    if pods.reads:
        named = listed([repr(path) for path in pods.reads])
        head += f"# The run reads {named}: put this into the image, or mount it there.\n"
    run_file = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"run.yaml": pods.run_file},
    }
    return head + as_yaml(run_file, jobset(pods, name))


def jobset(pods: Pods, name: str) -> dict[str, Any]:
    job = {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": 0,
        "template": {"spec": _pod(pods, name)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": RESTARTS},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(pods: Pods, name: str) -> dict[str, Any]:
    wants: dict[str, Any] = {"nvidia.com/gpu": pods.gpus} if pods.gpus else {"cpu": str(pods.per_node)}
    if pods.memory_bytes:
        wants["memory"] = f"{pods.memory_bytes / 2**20:.0f}Mi"
    limits = {key: value for key, value in wants.items() if key != "cpu"}
    container = {
        "name": "ranks",
        "image": IMAGE,
        "command": ["bash", "-c", _command(pods, name)],
        "resources": {"requests": wants, **({"limits": limits} if limits else {})},
        "volumeMounts": [
            {"name": "run-file", "mountPath": FILE, "subPath": "run.yaml"},  # what the image has beside it stays
            {"name": "runs", "mountPath": RUNS},
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


def _command(pods: Pods, name: str) -> str:
    where = f"--standalone --nproc-per-node {pods.per_node}"
    if pods.nodes > 1:
        where = (
            f"--nnodes {pods.nodes} --nproc-per-node {pods.per_node} --node-rank $JOB_COMPLETION_INDEX "
            f"--master-addr {name}-node-0-0.{name} --master-port {PORT}"
        )
    command = shlex.join(["train", FILE, *pods.command, "--out", RUNS, "--again"])
    return f"exec torchrun {where} -m paceline {command}"


def dns_name(name: str) -> str:
    """A name as Kubernetes takes it: small letters, digits and dashes, with room for what it adds."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")


def as_yaml(*documents: dict[str, Any]) -> str:
    """As people write it: a text of several lines stands line by line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_str(self, text: str) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, Dumper.represent_str)
    found: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return found
