"""Read files of Kubernetes and SkyPilot: machines, and the command that starts ranks there."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.convert.job_script import read_job
from paceline.convert.key_tables import load_table
from paceline.convert.rules import keep
from paceline.convert.sources import Settings, parse_yaml
from paceline.errors import UserError

KUBERNETES = re.compile(r"^apiVersion:.*\n(?:.*\n)*?kind:", re.MULTILINE)


def is_kubernetes(text: str) -> bool:
    return KUBERNETES.search(text) is not None


def is_skypilot(values: Mapping[str, Any]) -> bool:
    return isinstance(values.get("run"), str) and bool({"resources", "num_nodes"} & values.keys())


def read_skypilot(values: dict[str, Any], name: str, folder: Path) -> list[Settings]:
    """Return the machines of a task of SkyPilot, and the settings of its `run` script."""
    mounts = values.get("file_mounts") or {}
    nodes, resources = values.get("num_nodes") or 1, dict(values.get("resources") or {})
    if isinstance(devices := resources.get("accelerators"), Mapping):
        resources["accelerators"] = ",".join(f"{device}:{count}" for device, count in devices.items())
    own = {**values, "resources": resources}
    sources = [Settings(name, load_table("skypilot"), own, folder)]
    sources += read_job(values["run"], name, folder, {"SKYPILOT_NUM_NODES": str(nodes), "HOME": "~"})
    return [_follow_mounts(source, {str(at): str(file) for at, file in mounts.items()}) for source in sources]


def _follow_mounts(source: Settings, mounts: Mapping[str, str]) -> Settings:
    """Return the source with files as they are called here, not on the machines."""
    rows = ((key, value, replace(one, file=mounts.get(one.file, one.file))) for key, value, one in source.extra)
    return replace(source, extra=tuple(rows))


def read_kubernetes(text: str, name: str, folder: Path) -> list[Settings]:
    """Return the machines and the command of the first container with one, and run files in ConfigMaps."""
    parts = [parse_yaml(part, name) for part in re.split(r"^---\s*$", text, flags=re.MULTILINE)]
    documents = [part for part in parts if isinstance(part, dict)]
    files: dict[str, str] = {}
    for document in documents:
        if document.get("kind") == "ConfigMap":
            files |= {key: value for key, value in (document.get("data") or {}).items() if isinstance(value, str)}
    for document in documents:
        for container in _find_containers(document):
            words = [str(word) for key in ("command", "args") for word in container.get(key) or ()]
            if words:
                job = read_job(shlex.join(words), name, folder)
                machines = Settings(name, load_table("kubernetes"), _read_machines(document, container), folder)
                return [machines, *(part for source in job for part in _replace_config_maps(source, files))]
    raise UserError(f"{name} has no container with a command", code="invalid-format", key=name)


def _find_containers(value: Any) -> Iterator[Mapping[str, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        if key == "containers" and isinstance(inner, list):
            yield from (container for container in inner if isinstance(container, Mapping))
        else:
            yield from _find_containers(inner)


def _read_machines(document: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any]:
    """Return nodes and devices: of a Job and a JobSet their completions, of a PyTorchJob all its replicas."""
    spec = document.get("spec") or {}
    replicas = [part.get("replicas", 1) for part in (spec.get("pytorchReplicaSpecs") or {}).values()]
    jobs = [job["template"]["spec"] for job in spec.get("replicatedJobs") or ()] or [spec]
    values = {"kind": document.get("kind"), "name": (document.get("metadata") or {}).get("name")}
    values["nodes"] = sum(replicas) if replicas else jobs[0].get("completions")
    resources = container.get("resources") or {}
    values |= {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return {key: value for key, value in (values | {"image": container.get("image")}).items() if value is not None}


def _replace_config_maps(source: Settings, files: Mapping[str, str]) -> Iterator[Settings]:
    """Yield the source, then the run files of a ConfigMap that it names."""
    found = {item[2].file: files[Path(item[2].file).name] for item in source.extra if Path(item[2].file).name in files}
    extra = [(key, value, keep("read as well") if item.file in found else item) for key, value, item in source.extra]
    yield replace(source, extra=tuple(extra))
    for file, content in found.items():
        if isinstance(values := parse_yaml(content, file), dict):
            yield Settings(f"{source.name} {Path(file).name}", load_table("paceline"), values, source.folder)
