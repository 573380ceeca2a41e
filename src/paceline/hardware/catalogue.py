"""The devices a plan can name, and the clusters made of them."""

from __future__ import annotations

import csv
import functools
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import Code, UserError, did_you_mean, get_first_line
from paceline.io.files import read_text
from paceline.io.safe_yaml import load_yaml, read_yaml_text

GB = 1e9
TERA = 1e12
FORM = "[NODESx]DEVICESxNAME[@LINK][+NETWORK],  for example 4xA100, 2x8xH100 or 4xA100-40GB@pcie+25Gb"
FALLBACK = {"fp8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32"}
"""A type without its own rate runs at the rate of the next wider one."""
DATA_FILE = Path(__file__).parent / "hardware.csv"
LOCAL = "local"  # this machine, which must be calibrated
FP64_SHARE = 0.5  # of the fp32 rate, if a data sheet has no fp64
FACTS = {"memory_gb": "memory_bytes", "bandwidth_gbs": "bandwidth_bytes_s", "pcie_gbs": "pcie_bytes_s"}
"""Facts of a device that a cluster file may replace, in GB."""
COLUMNS = {
    **FACTS,
    "link_gbs": "link_bytes_s",
    "node_gbps": "node_bits_s",
    "host_gb": "host_bytes",
    "mtbf_hours": "mtbf_h",
    **{name: name for name in ("watts", "usd_per_hour", "spot_usd_per_hour")},
    **{name: name for name in ("matmul_fraction", "older_fraction", "attention_fraction")},
}
"""Numbers of the catalogue, and the fields of a `Device` that have them."""
HOST = "host_memory_gb"
IGNORED_WORDS = r"\b(hbm3e?|generation|480gb)\b"
"""Words of drivers that the catalogue lacks; 480 GB is the host memory of a GH200."""
OPTIONAL_WORDS = r"(sxm\d?|pcie|\d+gb)"  # words of the catalogue that drivers may leave out


def _error(message: str, key: str = "cluster", code: Code = "invalid-value") -> UserError:
    return UserError(message, code=code, key=key)


@dataclass(frozen=True)
class Device:
    """One accelerator, as its data sheet and the price lists state it."""

    name: str
    memory_bytes: float
    bandwidth_bytes_s: float
    flops_s: Mapping[str, float]
    link: str
    link_bytes_s: float  # in-node link, one direction, per device
    pcie_bytes_s: float
    per_node: int
    node_bits_s: float  # network per node that these devices are usually sold with
    watts: float
    source: str
    date: str
    matmul_fraction: float | None = None
    """Largest fraction of the peak that was measured in a bare matrix product, if any was."""
    usd_per_hour: float | None = None
    synchronous: bool = False  # kernels run on the host (a CPU), so that the time to start them adds to theirs
    update_bytes_s: float | None = None  # measured bandwidth of an optimiser's update
    host_bytes: float | None = None  # host memory of a node, if these devices are sold in one kind of node
    spot_usd_per_hour: float | None = None
    older_fraction: float = 1.0  # of the matmul rate, what kernels for the previous generation reach
    attention_fraction: float | None = None
    """Of a large product, what fused attention reaches here as today's torch runs it, if that was measured."""
    mtbf_h: float | None = None  # mean time between failures of one device that end a run
    mtbf_from: str = ""

    def peak_flops_s(self, dtype: str) -> float:
        """Return the peak dense rate of a type."""
        if dtype == "fp64" and dtype not in self.flops_s:
            return FP64_SHARE * self.flops_s["fp32"]
        while dtype not in self.flops_s:
            if dtype not in FALLBACK:
                known = ", ".join(self.flops_s)
                raise _error(f"{self.name} has no rate for {dtype!r}; known: {known}", "train.precision")
            dtype = FALLBACK[dtype]
        return self.flops_s[dtype]

    def slower(self, times: float) -> Device:
        """Return the device with arithmetic and memory that take so many times as long."""
        rates = {name: rate / times for name, rate in self.flops_s.items()}
        return replace(self, flops_s=rates, bandwidth_bytes_s=self.bandwidth_bytes_s / times)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices, the links inside a node and the network between nodes."""

    device: Device
    nodes: int = 1
    per_node: int = 1
    link_bytes_s: float = 0.0  # one direction, per device
    node_bytes_s: float = 0.0  # one direction, per node
    usd_per_device_hour: float | None = None
    host_bytes: float | None = None
    spot_usd_per_device_hour: float | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def resized(self, devices: int) -> Cluster:
        """Return the cluster with another number of devices: whole nodes, or a part of one."""
        if devices <= self.per_node:
            return replace(self, nodes=1, per_node=devices)
        if devices % self.per_node:
            below = devices // self.per_node * self.per_node
            near = f"try {below} or {below + self.per_node}"
            raise _error(f"{devices} devices are not whole nodes of {self.per_node}; {near}")
        return replace(self, nodes=devices // self.per_node)


@functools.cache
def load_catalogue(own: Path | None = None) -> dict[str, Device]:
    """Load every device by name: of a user's own file with the same columns, then of the data file."""
    found: dict[str, Device] = {}
    for path in filter(None, (own, DATA_FILE)):
        try:
            for row in csv.DictReader(io.StringIO(read_text(path), newline="")):
                found.setdefault(row["name"], _parse_row(row))
        except (OSError, LookupError, ValueError, TypeError, AttributeError, csv.Error) as error:
            problem = f"({type(error).__name__}: {error}); its columns are those of {DATA_FILE}"
            message = f"catalogue {str(path)!r} is not a table of devices {problem}"
            raise _error(message, "catalogue", "invalid-format") from None
    return found


def _parse_row(row: Mapping[str, str]) -> Device:
    if not row["name"].isprintable():  # it is written into launch files
        raise ValueError(f"{row['name']!r} cannot name a device")
    rates = {t: float(row[f"{t}_tflops"]) * TERA for t in ("fp8", "bf16", "fp16", "tf32", "fp32") if row[f"{t}_tflops"]}
    facts: dict[str, Any] = {name: row[name] for name in ("name", "link", "source", "date")}
    for column, name in COLUMNS.items():
        if row.get(column):
            facts[name] = float(row[column]) * _scale(column)
    return Device(
        **facts,
        flops_s=rates,
        per_node=int(row["per_node"]),
        synchronous=row["name"].upper().startswith("CPU"),
        mtbf_from=row.get("mtbf_from") or "",
    )


def _scale(column: str) -> float:
    return GB if "_gb" in column else 1.0


def find_device(name: str, own: Path | None = None) -> Device:
    """Find a device by its name or a part of it: `A100` is the largest A100 with a fast link.

    A size alone (`24GB`) is the first device with that much memory; `local` is this machine.
    """
    known = load_catalogue(own)
    if name.strip().lower() == LOCAL:
        return replace(known["CPU"], name=LOCAL)
    if name.strip() in known:
        return known[name.strip()]
    wanted = _words(name)
    fits = [d for key, d in known.items() if wanted and wanted <= _words(key) | {f"{d.memory_bytes / GB:.0f}gb"}]
    if not fits:
        near = {k.lower(): k for k in known}
        hint = did_you_mean(name.lower(), near, cutoff=0.3, shown=near)
        message = f"device {name!r} is not in the catalogue{hint}; known: {', '.join(known)}"
        raise _error(message, "device", "unknown-name")
    if all(re.fullmatch(r"\d+gb", word) for word in wanted):
        return fits[0]
    return max(fits, key=lambda d: (d.link_bytes_s, d.memory_bytes))


def match_driver_name(name: str) -> Device | None:
    """Find a device by its driver's name; None if the catalogue does not have that very model."""
    said = re.sub(IGNORED_WORDS, " ", name.lower())
    try:
        found = find_device(said)
    except UserError:
        return None
    words = set(re.split(r"[^a-z0-9]+", said))
    model = [word for word in found.name.lower().split("-") if not re.fullmatch(OPTIONAL_WORDS, word)]
    return found if words.issuperset(model) else None  # `RTX 4070` is a part of `RTX-4070-Ti-SUPER`, and is another


def _words(name: str) -> set[str]:
    """Split a device name, so that `A100 80GB SXM4` and `a100-80g` are `A100-SXM4-80GB`."""
    text = re.sub(r"\b(nvidia|tesla|geforce|quadro|amd|instinct|radeon)\b", " ", name.lower().replace("_", " "))
    text = re.sub(r"\brtx(?=[a\d])", "rtx ", text)  # RTX4090, RTXA6000
    text = re.sub(r"(?<=\d)\s*(ti|super|ada|sxm|pcie)(?=\d|\b|super)", r" \1", text)  # 4070TiSuper, H100SXM
    text = re.sub(r"(ti)(?=super)", r"\1 ", re.sub(r"\b(\d+)\s*(gb?|gib)\b", r"\1gb", text))
    text = re.sub(r"sxm\d?", "sxm", text)
    return {word for word in re.split(r"[^a-z0-9]+", text) if word}


def parse_cluster(text: str) -> Cluster:
    """Parse the short form of a cluster, or read its YAML file."""
    if text.endswith((".yaml", ".yml")):
        return read_cluster_file(Path(text))
    count = r"([1-9]\d*)\s*x\s*"
    form = re.fullmatch(rf"(?:{count})?{count}([^@+]+?)(?:@([^+]+))?(?:\+(.+))?", text.strip(), re.IGNORECASE)
    if form is None:
        raise _error(f"cluster {text!r} is not understood; write it as  {FORM}")
    nodes_text, count_text, name, link, network = form.groups()
    kind = find_device(name)
    devices = int(count_text)
    if nodes_text is None and devices > kind.per_node:
        return _build_cluster(kind, 1, kind.per_node, link, network).resized(devices)
    return _build_cluster(kind, int(nodes_text or 1), devices, link, network)


def _build_cluster(kind: Device, nodes: int, per_node: int, link: str | None, network: str | None) -> Cluster:
    """Build a cluster with the links that its devices are usually sold with, unless others are named."""
    return Cluster(
        device=kind,
        nodes=nodes,
        per_node=per_node,
        link_bytes_s=_parse_link(link, kind) if link else kind.link_bytes_s,
        node_bytes_s=(_parse_network(network) if network else kind.node_bits_s) / 8,
        usd_per_device_hour=kind.usd_per_hour,
        host_bytes=kind.host_bytes,
        spot_usd_per_device_hour=kind.spot_usd_per_hour,
    )


def _parse_link(text: str, kind: Device) -> float:
    word = text.strip().lower()
    if word in ("pcie", "host"):
        return kind.pcie_bytes_s / (2 if word == "host" else 1)
    if word == "nvlink" and "nvlink" in kind.link.lower():
        return kind.link_bytes_s
    speed = re.fullmatch(r"([\d.]+)\s*gb(/s|ps)?", word)
    if speed is None or float(speed[1]) <= 0:
        use = "use pcie, host, a speed as 32GB/s, or leave it out"
        raise _error(f"link {text!r} of {kind.name} is not known; {use}", "link")
    return float(speed[1]) * GB


def _parse_network(text: str) -> float:
    speed = re.fullmatch(r"(?:(\d+)\s*x\s*)?([\d.]+)\s*([gm])b(?:it|ps|/s|it/s)?", text.strip().lower())
    if speed is None or float(speed[2]) <= 0:
        use = "write bits per second and node, as 25Gb, 8x400Gb or 100Mb"
        raise _error(f"network {text!r} is not understood; {use}", "network")
    return int(speed[1] or 1) * float(speed[2]) * (GB if speed[3] == "g" else 1e6)


Amount = Annotated[float, Field(gt=0, strict=True)]
Price = Annotated[float, Field(ge=0, strict=True)] | None
Count = Annotated[int, Field(gt=0, strict=True)]


class ClusterFile(BaseModel):
    """A cluster file: a device, whose facts may be replaced, counts, links and prices."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    device: str = Field(description="name in the catalogue, as H100-SXM5-80GB")
    nodes: Count = Field(1, description="equal nodes")
    per_node: Count = Field(1, description="devices of a node")
    link: str | None = Field(None, description="inside a node: pcie, host, nvlink, or a speed as 32GB/s")
    network: str | None = Field(None, description="of a node, in bits per second: 25Gb, 8x400Gb, 100Mb")
    price: Price = Field(None, description="per device and hour [USD]")
    spot_price: Price = Field(None, description="per preemptible device and hour [USD]")
    host_memory_gb: Amount | None = Field(None, description="of a node [GB]")
    catalogue: str | None = Field(None, description="CSV with your own devices, relative to this file")
    tflops: dict[str, Amount] | None = Field(None, description="of a device by type, as {bf16: 312}")
    watts: Amount | None = Field(None, description="of a device [W]")
    memory_gb: Amount | None = Field(None, description="of a device [GB]")
    bandwidth_gbs: Amount | None = Field(None, description="of a device's memory [GB/s]")
    pcie_gbs: Amount | None = Field(None, description="of a device, one direction [GB/s]")

    def build_device(self, path: Path) -> Device:
        """Return the catalogue's device with the facts of the file."""
        device = find_device(self.device, path.parent / self.catalogue if self.catalogue else None)
        given = {key: value for key in (*FACTS, "watts") if (value := getattr(self, key))}
        changes: dict[str, Any] = {COLUMNS[key]: _scale(key) * value for key, value in given.items()}
        if self.tflops:
            changes["flops_s"] = {**device.flops_s, **{kind: rate * TERA for kind, rate in self.tflops.items()}}
        return replace(device, source=f"{device.source}; edited in {path.name}", **changes) if changes else device


def read_cluster_file(path: Path) -> Cluster:
    """Read a cluster file."""
    import yaml

    try:
        values = load_yaml(read_yaml_text(path))
        given = ClusterFile.model_validate(values if isinstance(values, dict) else {})
    except FileNotFoundError:
        raise _error(f"cluster file {str(path)!r} does not exist", str(path), "not-found") from None
    except ValidationError as error:
        raise _name_problem(error.errors()[0], path) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or get_first_line(error)
        raise _error(f"cluster file {str(path)!r} cannot be read: {reason}", str(path), "unreadable") from None
    found = _build_cluster(given.build_device(path), given.nodes, given.per_node, given.link, given.network)
    if "price" in values:  # the catalogue's spot price is that of other people
        found = replace(found, usd_per_device_hour=given.price, spot_usd_per_device_hour=None)
    if "spot_price" in values:
        found = replace(found, spot_usd_per_device_hour=given.spot_price)
    return replace(found, host_bytes=given.host_memory_gb * GB) if given.host_memory_gb else found


def _name_problem(problem: Any, path: Path) -> UserError:
    """Build the error of a cluster file from the first problem that pydantic found."""
    key, codes = str(problem["loc"][0]), {"missing": "missing-value", "extra_forbidden": "unknown-key"}
    code = codes.get(problem["type"], "invalid-value")
    known = list(ClusterFile.model_fields) if code == "unknown-key" else []
    hint = did_you_mean(key, known, cutoff=0.6) or (f"; known: {', '.join(known)}" if known else "")
    return _error(f"cluster file {str(path)!r}: {key}: {problem['msg']}{hint}", key, cast(Code, code))
