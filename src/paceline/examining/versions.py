"""The software: what is installed, whether its parts go together, and whether all nodes have the same."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.examining.results import EVERYWHERE, CheckResult, Health, Surroundings
from paceline.record.environment import environment

TOPIC = "versions"
COMPARED = ("paceline", "python", "torch", "numpy", "tokenizers", "cuda", "nccl", "driver")
DRIVER = Path("/proc/driver/nvidia/version")
PRELOADED = ("LD_PRELOAD", "LD_LIBRARY_PATH")


def facts() -> dict[str, str]:
    """What nodes compare; empty where there is no such thing."""
    import torch

    here = environment()
    found = {name: str(here.get(name) or "") for name in COMPARED}
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else ()
    return found | {"cuda": torch.version.cuda or "", "nccl": ".".join(map(str, nccl)), "driver": driver_version()}


def driver_version() -> str:
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def software(here: Surroundings) -> Iterator[CheckResult]:
    known = facts()
    yield CheckResult(TOPIC, "software", ", ".join(f"{name} {known[name]}" for name in COMPARED[:5] if known[name]))


def cuda(here: Surroundings) -> Iterator[CheckResult]:
    """torch, the driver and NCCL, which all must know each other's CUDA."""
    import torch

    driver, built = driver_version(), torch.version.cuda
    if built is None:
        if driver:
            found = f"torch {torch.__version__} is made for CPUs, and this machine has NVIDIA driver {driver}"
            yield CheckResult(
                TOPIC, "CUDA", found, "a torch for CUDA", Health.LOOK, "pip install --force-reinstall torch"
            )
        else:
            yield CheckResult(TOPIC, "CUDA", "no NVIDIA driver, and a torch for CPUs", "", Health.NOT_HERE)
        return
    if not driver:
        yield CheckResult(TOPIC, "CUDA", f"torch is made for CUDA {built}; no NVIDIA driver", "", Health.NOT_HERE)
        return
    known = facts()
    found = f"driver {driver}, torch for CUDA {built}, NCCL {known['nccl'] or 'absent'}"
    if why := _why_not():
        remedy = (
            f"nvidia-smi  says up to which CUDA this driver goes; install a torch for that, or a driver for {built}"
        )
        yield CheckResult(TOPIC, "CUDA", f"{found}: {why}", "devices that torch can use", Health.WRONG, remedy)
        return
    others = [name for name in PRELOADED if "nccl" in here.environ.get(name, "").lower()]
    yield CheckResult(
        *(TOPIC, "CUDA", found + "".join(f", another by {name}" for name in others), "each goes with the others"),
        *(Health.LOOK if others else Health.OK, f"unset {' '.join(others)}  unless it is meant"),
    )


def _why_not() -> str:
    """Why torch cannot use a device, in its own words; empty where it can."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    try:
        torch.cuda.init()
    except Exception as error:  # of the driver: too old, no fabric manager (802), no permission
        return str(error).strip().splitlines()[0]
    return str(said[0].message).splitlines()[0] if said else "torch sees no device"


def compared(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[CheckResult]:
    """Of several nodes, by host: which one is not like the rest."""
    different = False
    for name in COMPARED:
        values = {host: str(known.get(name, "")) for host, known in nodes.items()}
        usual, times = Counter(values.values()).most_common(1)[0]
        for host, value in values.items():
            if value != usual:
                different = True
                of = f"as {times} other node{'s' * (times > 1)} have" if times > 1 else "as the other has"
                yield CheckResult(
                    *(TOPIC, f"{name} everywhere", f"{value or 'none'} on {host}", f"{usual or 'none'}, {of}"),
                    *(Health.WRONG, "use one environment on a shared file system, or one image, on all nodes"),
                    host,
                )
    if not different:
        yield CheckResult(
            TOPIC, "versions everywhere", f"the same on all {len(nodes)} nodes", "the same", host=EVERYWHERE
        )
