"""The cluster that a plan is for, at any number of its devices, with the physics that hold there."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.hardware.catalogue import LOCAL, Cluster, find_device, match_driver_name, parse_cluster
from paceline.io.arguments import option_error
from paceline.planner.calibration.calibration import Calibration, default_calibration_path, read_calibration
from paceline.planner.formulas.placement import CPU_PHYSICS, GPU_PHYSICS, Physics
from paceline.planner.links import apply_measured_links
from paceline.runlog.machine import list_gpu_names

MAX_LOCAL_RANKS = 4
HOST_BYTES = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
NOMINAL_CORES = 8  # of the catalogue's CPU


@dataclass(frozen=True)
class PricedCluster:
    """A cluster with as many devices as a layout has ranks, and its physics."""

    cluster: Cluster
    physics: Physics


@dataclass(frozen=True)
class TargetCluster:
    """What `cluster` in a run file or `--cluster` names."""

    name: str
    whole: Cluster
    shared: bool = False  # the ranks share one machine's cores
    calibration: Calibration | None = None
    note: str = ""  # what a user would not expect of the choice
    links: str = ""  # where its links were measured; "" if they are assumed

    @property
    def calibrated(self) -> str:
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
            "links": self.links or None,
            "source": whole.device.source,
            "date": whole.device.date,
        }

    def at(self, devices: int) -> PricedCluster:
        if devices < 1 or (devices > self.devices and not self.shared):
            raise option_error("--devices", f"{self.name} has {self.devices} devices, not {devices}")
        if self.calibration is not None and self.shared:
            return PricedCluster(*self.calibration.at(devices, self.whole))
        if self.calibration is not None and self.calibration.gpu is not None:
            return PricedCluster(*self.calibration.gpu.apply(self.whole.resized(devices)))
        physics = CPU_PHYSICS if self.whole.device.synchronous else GPU_PHYSICS
        if (fraction := self.whole.device.attention_fraction) is not None:  # published rows have older kernels
            physics = replace(physics, attention_efficiency=fraction)
        if not self.shared:
            return PricedCluster(self.whole.resized(devices), physics)
        device = self.whole.device
        part = replace(device.slower(devices), memory_bytes=device.memory_bytes / devices, watts=device.watts / devices)
        return PricedCluster(replace(self.whole, device=part, nodes=1, per_node=devices), physics)


def resolve_target(text: str, calibration: str | Path | None = None) -> TargetCluster:
    """Resolve `local`, a short form such as `2x8xH100`, or a cluster file, with links that were measured."""
    target = _resolve_local(calibration) if text == LOCAL else _resolve_given(text, calibration)
    if target.calibration is not None and target.shared:  # it measured the links too
        return target
    whole, links = apply_measured_links(target.whole, text == LOCAL)
    return replace(target, whole=whole, links=links)


def _resolve_given(text: str, calibration: str | Path | None) -> TargetCluster:
    """Resolve a short form such as `2x8xH100`, or a cluster file; one of this machine is read with its calibration."""
    cluster = parse_cluster(text)
    if cluster.device.name != LOCAL:
        if calibration is not None:
            problem = f"it is of the machine it was made on, and {text} is another; leave one of them out"
            raise option_error("--calibration", problem, "conflict")
        return TargetCluster(text, cluster)
    found = _read_calibration_if_any(calibration)
    if found is None or not found.measured:
        raise option_error("--calibration", "no calibration of this machine; type  paceline calibrate", "not-found")
    return TargetCluster(text, cluster, shared=True, calibration=found)


def _read_calibration_if_any(file: str | Path | None) -> Calibration | None:
    path = Path(file) if file is not None else default_calibration_path()
    return None if file is None and not path.is_file() else read_calibration(path)


def _resolve_local(file: str | Path | None) -> TargetCluster:
    """Take this machine's CUDA devices if it has any, else its cores, as calibrated or by rule of thumb."""
    gpus, found = list_gpu_names(), _read_calibration_if_any(file)
    gpu = found.gpu if found is not None else None
    here = match_driver_name(gpus[0]) if gpus else None
    notes = []
    if found is not None and gpu is not None:
        known = match_driver_name(gpu.name)  # links and power are not measured
        if known is not None and (known == here or (not gpus and file is not None)):
            return _local_gpus(max(1, len(gpus)), known.name, found)
        seen = f"this machine has {gpus[0]}" if gpus else "no GPU can be seen here"
        notes.append(f"calibration of {gpu.name} not used ({found.file}): {seen}")
    if gpus and (file is None or gpu is not None):
        if here is not None:
            return _local_gpus(len(gpus), here.name, note="; ".join(notes))
        notes.append(f"{gpus[0]} is not in the catalogue, so this plans the cores")
    note = "; ".join(notes)
    if found is not None and found.measured:
        return TargetCluster(LOCAL, found.machine(MAX_LOCAL_RANKS), True, found, note)
    cores = len(os.sched_getaffinity(0))
    nominal = find_device("CPU")
    rates = {name: rate * cores / NOMINAL_CORES for name, rate in nominal.flops_s.items()}
    watts = nominal.watts * cores / NOMINAL_CORES
    device = replace(nominal, name=f"{cores} CPU cores", memory_bytes=HOST_BYTES, flops_s=rates, watts=watts)
    ranks = max(1, min(cores, MAX_LOCAL_RANKS))
    machine = Cluster(device, 1, ranks, device.link_bytes_s, device.node_bits_s / 8)
    return TargetCluster(LOCAL, machine, shared=True, note=note)


def _local_gpus(count: int, name: str, calibration: Calibration | None = None, note: str = "") -> TargetCluster:
    """Return devices of the catalogue in this machine, whose host memory is known."""
    machine = replace(parse_cluster(f"1x{count}x{name}"), host_bytes=HOST_BYTES)
    return TargetCluster(f"local ({count}x{name})", machine, calibration=calibration, note=note)
