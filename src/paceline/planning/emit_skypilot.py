"""A task for SkyPilot: it finds the machines, and starts them again elsewhere when they are taken away."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import listed
from paceline.planning.emit_kubernetes import PORT, as_yaml, dns_name

FILE = "paceline_run.yaml"
"""In the home folder of each machine."""
RUNS = "/paceline-runs"
RESTARTS = 3
MEMORY_IN_NAME = ("A100-80GB", "V100-32GB")
"""SkyPilot tells these from smaller ones of the same model."""


@dataclass(frozen=True)
class CloudTask:
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


def task_file(task: CloudTask) -> str:
    head = f"# {task.note}\n# Send it with  sky jobs launch, which goes on elsewhere when machines are taken away.\n"
    if task.reads:
        named = listed([repr(path) for path in task.reads])
        head += f"# The run reads {named}: add this to file_mounts.\n"
    return head + as_yaml(as_values(task))


def as_values(task: CloudTask) -> dict[str, Any]:
    device = {"accelerators": f"{accelerator(task.device)}:{task.per_node}"} if task.device else {"cpus": "8+"}
    return {
        "name": dns_name(task.name),
        "num_nodes": task.nodes,
        "resources": {**device, "job_recovery": {"max_restarts_on_errors": RESTARTS}},
        "file_mounts": {
            f"~/{FILE}": task.run_file,
            RUNS: {"name": f"{dns_name(task.name)}-runs", "mode": "MOUNT"},
        },
        "setup": "pip install paceline",
        "run": _command(task),
    }


def _command(task: CloudTask) -> str:
    words = shlex.join([*task.command, "--out", RUNS, "--again"])
    return (
        'HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n1)\n'
        f'exec torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node {task.per_node} \\\n'
        f'  --node-rank "$SKYPILOT_NODE_RANK" --master-addr "$HEAD" --master-port {PORT} \\\n'
        f'  -m paceline train "$HOME/{FILE}" {words}\n'
    )


def accelerator(device: str) -> str:
    """SkyPilot's name for a device of the catalogue: A100-SXM4-80GB is A100-80GB, RTX-3090 is RTX3090."""
    words = [word for word in device.split("-") if not re.fullmatch(r"(SXM\d?|PCIe|NVL)", word, re.IGNORECASE)]
    if words[0] == "RTX":
        return "".join(words[:2])
    whole = "-".join(words[:2])
    return whole if whole in MEMORY_IN_NAME else words[0]
