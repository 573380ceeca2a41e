"""Where a run would go: a cluster at any number of its devices, and the physics that hold there.

Devices of a catalogue are whole and equal. The ranks of one CPU machine are not: they share its cores, its memory and
its bandwidth, so each added rank makes the others slower. A calibration says by how much.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.hardware.catalogue import LOCAL, Cluster, cluster, device, known
from paceline.planning.calibrating.calibration import Calibration, catalogued, read_calibration, usual_file
from paceline.planning.formulas.physics import CORES, Physics
from paceline.record.environment import gpu_names

MOST_LOCAL_RANKS = 4
CORES_OF_NOMINAL = 8
"""Of the catalogue's CPU."""


@dataclass(frozen=True)
class Where:
    """A cluster with as many devices as a layout has ranks."""

    cluster: Cluster
    physics: Physics


@dataclass(frozen=True)
class Site:
    name: str
    """As the user wrote it."""
    whole: Cluster
    shared: bool = False
    """The ranks share one machine's cores."""
    calibration: Calibration | None = None
    note: str = ""
    """What a user would not expect of the choice."""

    @property
    def calibrated(self) -> str:
        """The file that the calibration came from."""
        return self.calibration.file if self.calibration is not None else ""

    @property
    def devices(self) -> int:
        return self.whole.devices

    def as_json(self, usd_per_device_hour: float | None) -> dict[str, Any]:
        whole = self.whole
        return {
            "name": self.name,
            "device": whole.device.name,
            **{name: getattr(whole, name) for name in ("nodes", "per_node", "link_bytes_s", "node_bytes_s")},
            "usd_per_device_hour": usd_per_device_hour,
            "calibration": self.calibrated or None,
            "note": self.note or None,
            "source": whole.device.source,
            "date": whole.device.date,
        }

    def at(self, devices: int) -> Where:
        """The site with that many devices; a number that is not possible is said."""
        if devices < 1:
            raise UserError(f"{devices} devices cannot train; give 1 or more")
        if devices > self.devices and not self.shared:
            raise UserError(f"{self.name} has {self.devices} devices, and {devices} are asked for")
        if self.calibration is not None and self.shared:
            return Where(*self.calibration.at(devices, self.whole))
        if self.calibration is not None and self.calibration.gpu is not None:
            return Where(*self.calibration.gpu.applied(self.whole.resized(devices)))
        physics = CORES if self.whole.device.synchronous else Physics()
        if not self.shared:
            return Where(self.whole.resized(devices), physics)
        kind = self.whole.device
        part = replace(kind.slower(devices), memory_bytes=kind.memory_bytes / devices, watts=kind.watts / devices)
        return Where(replace(self.whole, device=part, nodes=1, per_node=devices), physics)


def site_of(text: str, calibration: str | Path | None = None) -> Site:
    """The site that `cluster` in a run file or `--cluster` names: local, a short form, or a file."""
    if text == LOCAL:
        return _local(calibration)
    where = cluster(text)
    if calibration is not None and where.device.name != LOCAL:
        raise UserError(f"--calibration is of the machine it was made on, and {text} is another; leave one of them out")
    if where.device.name == LOCAL:
        found = _calibration(calibration)
        if found is None or not found.measured:
            raise UserError("there is no calibration of this machine yet; make one with  paceline calibrate")
        return Site(text, where, shared=True, calibration=found)
    return Site(text, where)


def _calibration(file: str | Path | None) -> Calibration | None:
    path = Path(file) if file is not None else usual_file()
    return None if file is None and not path.is_file() else read_calibration(path)


def _local(file: str | Path | None) -> Site:
    """This machine: its CUDA devices where it has any, else its cores, as calibrated or by rule of thumb."""
    gpus, found = gpu_names(), _calibration(file)
    gpu = found.gpu if found is not None else None
    notes = []
    if found is not None and gpu is not None:
        if _same(gpu.name, gpus[0]) if gpus else file is not None:
            name, count = catalogued(gpu).name, max(1, len(gpus))
            return Site(f"local ({count}x{name})", _here(count, name), calibration=found)
        unseen = "no GPU can be seen here; --calibration with that file plans it"
        here = f"this machine has {gpus[0]}" if gpus else unseen
        notes.append(f"calibration of {gpu.name} not used ({found.file}): {here}")
    if gpus and (file is None or gpu is not None):
        kind = known(gpus[0])
        if kind is not None:
            return Site(f"local ({len(gpus)}x{kind.name})", _here(len(gpus), kind.name), note="; ".join(notes))
        notes.append(f"{gpus[0]} is not in the catalogue, so this plans the cores")
    note = "; ".join(notes)
    if found is not None and found.measured:
        return Site(LOCAL, found.machine(MOST_LOCAL_RANKS), True, found, note)
    cores = len(os.sched_getaffinity(0))
    nominal = device("CPU")
    rates = {name: rate * cores / CORES_OF_NOMINAL for name, rate in nominal.flops_s.items()}
    memory, watts = _memory_bytes() or nominal.memory_bytes, nominal.watts * cores / CORES_OF_NOMINAL
    kind = replace(nominal, name=f"{cores} CPU cores", memory_bytes=memory, flops_s=rates, watts=watts)
    ranks = max(1, min(cores, MOST_LOCAL_RANKS))
    return Site(LOCAL, Cluster(kind, 1, ranks, kind.link_bytes_s, kind.node_bits_s / 8), shared=True, note=note)


def _here(count: int, name: str) -> Cluster:
    """Devices of the catalogue in this machine, whose host memory is known."""
    return replace(cluster(f"1x{count}x{name}"), host_bytes=_memory_bytes() or None)


def _memory_bytes() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return 0.0


def _same(name: str, other: str) -> bool:
    """Whether two drivers' names are of one model."""
    return name == other or (known(name) is not None and known(name) == known(other))
