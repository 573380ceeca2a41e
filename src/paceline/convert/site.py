"""Derive a site file from a job script: what its cluster needs in every job, apart from the run itself."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.convert.draft import SECRET
from paceline.convert.key_tables import load_table
from paceline.convert.shell import is_unknown
from paceline.convert.sources import Settings
from paceline.io.arguments import format_slurm_time, parse_slurm_time

SAME = ("partition", "account", "qos", "constraint")
OPTIONS = (
    *("reservation", "exclusive", "exclude", "hint", "gpu_bind", "mail_type", "mail_user", "licenses", "nice"),
    *("wckey", "cluster", "clusters", "switches"),
)
"""Options of sbatch that a site file has as they are; others belong to the run or its log."""
CONTAINERS = ("apptainer", "singularity")
SETUP = ("source", ".", "conda", "mamba", "spack")


def build_site(sources: Sequence[Settings], ranks_per_task: int) -> dict[str, Any]:
    """Return the keys of a site file; none if no `#SBATCH` line is among the sources."""
    asked = next((source.values for source in sources if source.table is load_table("slurm") and source.values), None)
    if asked is None:
        return {}
    known = {key: value for key, value in asked.items() if not is_unknown(value) and not isinstance(value, list)}
    site: dict[str, Any] = {key: str(known[key]) for key in SAME if key in known}
    site["options"] = {
        key.replace("_", "-"): "" if known[key] is True else str(known[key]) for key in OPTIONS if key in known
    }
    site |= _read_devices(known)
    cores = str(known.get("cpus_per_task"))
    if cores.isdecimal() and int(cores) % ranks_per_task == 0:
        site["cpus_per_rank"] = int(cores) // ranks_per_task
    if memory := re.fullmatch(r"(\d+[KMGT]?)B?", str(known.get("mem")), re.IGNORECASE):
        site["memory"] = memory[1].upper()
    if (hours := _parse_time(str(known.get("time", "")))) is not None:
        site["time_limit"] = format_slurm_time(hours)
    return {key: value for key, value in (site | _read_shell(sources)).items() if value not in (None, {}, [])}


def _parse_time(text: str) -> float | None:
    try:
        return parse_slurm_time(text) if re.fullmatch(r"[\d:-]+", text) else None
    except ValueError:
        return None


def _read_devices(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return number and kind of the GPUs of a node."""
    for key in ("gres", "gpus_per_node"):
        rule = load_table("slurm").rule(key)
        claims = rule(known[key]).claims if rule is not None and key in known else {}
        if "gpus_per_node" in claims:
            return {"gpus_per_node": claims["gpus_per_node"], "gpu_type": claims.get("device_name")}
    return {}


def _read_shell(sources: Sequence[Settings]) -> dict[str, Any]:
    """Return modules, variables, the words of a container, and lines that prepare the shell."""
    rows = [(key, str(value)) for source in sources for key, value, _ in source.extra if not is_unknown(value)]
    modules = [name for key, value in rows if key in ("module", "ml") for name in _parse_modules(value)]
    setup = [value for key, value in rows if key in SETUP and "\n" not in value]
    exports = {key.removeprefix("export "): value for key, value in rows if key.startswith("export ")}
    variables = {name: value for name, value in exports.items() if value.isprintable() and not SECRET.search(name)}
    container = next((value for key, value in rows if key in CONTAINERS), None)
    return {"modules": modules, "setup": setup, "variables": variables, "container": container}


def _parse_modules(line: str) -> list[str]:
    """Return the modules that `module load a b` and `ml a b` load."""
    words = shlex.split(line)[1:]
    if words[:1] and words[0] in ("load", "add"):
        return words[1:]
    return words if line.startswith("ml ") and words[:1] and words[0] not in ("purge", "unload", "use", "list") else []
