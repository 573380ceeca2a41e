"""The devices a plan can name, and the clusters made of them.

`hardware.csv` holds one row of published facts per device, with its source and date. A cluster is written in a short
form (`4xA100`, `2x8xH100`, `4xA100-40GB@pcie+25Gb`, `4x24GB`, `8xCPU`) or in a small YAML file.
"""

from __future__ import annotations

import csv
import functools
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import UserError, did_you_mean
from paceline.io.safe_open import read_text
from paceline.io.safe_yaml import load_yaml, read_yaml_text

GB = 1e9
TERA = 1e12
FORM = "[NODESx]DEVICESxNAME[@LINK][+NETWORK],  for example 4xA100, 2x8xH100 or 4xA100-40GB@pcie+25Gb"
FALLBACK = {"fp8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32"}
"""Where a device has no rate of its own for a type, its products run at the rate of the next one."""
MOST_BYTES = 1 << 20
"""Of a catalogue."""
LOCAL = "local"
"""The name of the machine at hand, which must be calibrated."""
FP64_SHARE = 0.5
"""Of the fp32 rate, where a data sheet says nothing of fp64."""
FACTS = {"memory_gb": "memory_bytes", "bandwidth_gbs": "bandwidth_bytes_s", "pcie_gbs": "pcie_bytes_s"}
"""Facts of a device that a cluster file may replace, in GB."""
COLUMNS = {**FACTS, "link_gbs": "link_bytes_s", "node_gbps": "node_bits_s"}
"""All facts of the data file in GB or Gbit."""
HOST = "host_memory_gb"
"""Of a node, in a cluster file."""
PRICES = ("price", "spot_price")
CLUSTER_KEYS = ("device", "nodes", "per_node", "link", "network", *PRICES, HOST, "catalogue", "tflops", "watts", *FACTS)
SAYS_NOTHING = r"\b(hbm3e?|generation|480gb)\b"
"""Words of a driver's name that the catalogue does not have; 480 GB is the host memory of a GH200."""
MAY_BE_LEFT_OUT = r"(sxm\d?|pcie|\d+gb)"
"""Words of the catalogue's name that drivers do not always say."""


@dataclass(frozen=True)
class Device:
    """One accelerator, as its data sheet and the price lists state it."""

    name: str
    memory_bytes: float
    bandwidth_bytes_s: float
    flops_s: Mapping[str, float]
    matmul_fraction: float | None
    """Largest fraction of the peak that anybody measured in a bare matrix product; None where nobody did."""
    link: str
    link_bytes_s: float
    """In-node link, one direction, per device."""
    pcie_bytes_s: float
    per_node: int
    node_bits_s: float
    """Network per node that these devices are usually sold with."""
    watts: float
    usd_per_hour: float | None
    source: str
    date: str
    synchronous: bool = False
    """Kernels run on the host itself (a CPU), so that the time to start them adds to theirs."""
    update_bytes_s: float | None = None
    """Bandwidth that an optimiser's update was measured to reach."""
    host_bytes: float | None = None
    """Host memory of a node that these devices are sold in; None where they are sold in many."""
    spot_usd_per_hour: float | None = None
    """Where they may be taken away at any time."""
    older_fraction: float = 1.0
    """Of its rate in products, what kernels reach that use the instructions of the generation before."""

    def peak_flops_s(self, dtype: str) -> float:
        """Peak dense rate for a type; types that the device lacks run as the next wider one."""
        if dtype == "fp64" and dtype not in self.flops_s:
            return FP64_SHARE * self.flops_s["fp32"]
        while dtype not in self.flops_s:
            if dtype not in FALLBACK:
                raise UserError(f"{self.name} has no rate for {dtype!r}; known: {', '.join(self.flops_s)}")
            dtype = FALLBACK[dtype]
        return self.flops_s[dtype]

    def slower(self, times: float) -> Device:
        """With arithmetic and memory that take so many times as long: a whole layer never costs just its parts."""
        rates = {name: rate / times for name, rate in self.flops_s.items()}
        return replace(self, flops_s=rates, bandwidth_bytes_s=self.bandwidth_bytes_s / times)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices, the links inside a node and the network between nodes."""

    device: Device
    nodes: int = 1
    per_node: int = 1
    link_bytes_s: float = 0.0
    """In-node, one direction, per device."""
    node_bytes_s: float = 0.0
    """Between nodes, one direction, per node."""
    usd_per_device_hour: float | None = None
    host_bytes: float | None = None
    """Host memory of a node; None where it is not known."""
    spot_usd_per_device_hour: float | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def resized(self, devices: int) -> Cluster:
        """The same kind of cluster with another number of devices: whole nodes, or a part of one."""
        if devices < 1:
            raise UserError(f"a cluster of {devices} devices cannot train; give 1 or more")
        if devices <= self.per_node:
            return replace(self, nodes=1, per_node=devices)
        if devices % self.per_node:
            raise UserError(
                f"{devices} devices are not whole nodes of {self.per_node}; "
                f"try {devices // self.per_node * self.per_node} or {-(-devices // self.per_node) * self.per_node}"
            )
        return replace(self, nodes=devices // self.per_node)


@functools.cache
def load_catalogue(own: Path | None = None) -> dict[str, Device]:
    """Every device by name: of the data file and, before them, of a user's own file with the same columns."""
    found: dict[str, Device] = {}
    for path in filter(None, (own, Path(__file__).parent / "hardware.csv")):
        try:
            for row in csv.DictReader(io.StringIO(read_text(path, MOST_BYTES), newline="")):
                found.setdefault(row["name"], _device(row))
        except OSError as error:
            raise UserError(f"catalogue {str(path)!r} cannot be read: {error.strerror}") from None
        except (KeyError, ValueError, TypeError, AttributeError, csv.Error) as error:
            raise UserError(
                f"catalogue {str(path)!r} is not a table of devices ({type(error).__name__}: {error}); "
                f"its columns are those of {Path(__file__).parent / 'hardware.csv'}"
            ) from None
    return found


def _device(row: Mapping[str, str]) -> Device:
    if not row["name"].isprintable():  # it is written into launch files
        raise ValueError(f"{row['name']!r} cannot name a device")
    rates = {t: float(row[f"{t}_tflops"]) * TERA for t in ("fp8", "bf16", "fp16", "tf32", "fp32") if row[f"{t}_tflops"]}
    facts: dict[str, Any] = {name: row[name] for name in ("name", "link", "source", "date")}
    facts |= {name: float(row[name]) if row[name] else None for name in ("matmul_fraction", "usd_per_hour")}
    facts |= {name: float(row[column]) * GB for column, name in COLUMNS.items()}
    return Device(
        **facts,
        flops_s=rates,
        per_node=int(row["per_node"]),
        watts=float(row["watts"]),
        synchronous=row["name"].upper().startswith("CPU"),
        host_bytes=float(row["host_gb"]) * GB if row.get("host_gb") else None,
        spot_usd_per_hour=float(row["spot_usd_per_hour"]) if row.get("spot_usd_per_hour") else None,
        older_fraction=float(row["older_fraction"]) if row.get("older_fraction") else 1.0,
    )


def find_device(name: str, own: Path | None = None) -> Device:
    """A device by its name or an unambiguous part of it: `A100` is the largest A100 with a fast link.

    A size alone (`24GB`) is the first device of the catalogue with that much memory; `local` is the calibrated machine.
    """
    known = load_catalogue(own)
    if name.strip().lower() == LOCAL:
        return replace(known["CPU"], name=LOCAL)
    if name.strip() in known:
        return known[name.strip()]
    wanted = _words(name)
    if not wanted:
        raise UserError(f"{name!r} names no device; known: {', '.join(known)}")
    fits = [d for key, d in known.items() if wanted <= _words(key) | {f"{d.memory_bytes / GB:.0f}gb"}]
    if not fits:
        near = {k.lower(): k for k in known}
        hint = did_you_mean(name.lower(), near, cutoff=0.3, shown=near)
        raise UserError(f"device {name!r} is not in the catalogue{hint}; known: {', '.join(known)}")
    if all(re.fullmatch(r"\d+gb", word) for word in wanted):
        return fits[0]
    return max(fits, key=lambda d: (d.link_bytes_s, d.memory_bytes))


def match_driver_name(name: str) -> Device | None:
    """A device by the name that its driver has for it; None where the catalogue does not have that very model."""
    said = re.sub(SAYS_NOTHING, " ", name.lower())
    try:
        found = find_device(said)
    except UserError:
        return None
    words = set(re.split(r"[^a-z0-9]+", said))
    model = [word for word in found.name.lower().split("-") if not re.fullmatch(MAY_BE_LEFT_OUT, word)]
    return found if words.issuperset(model) else None  # `RTX 4070` is a part of `RTX-4070-Ti-SUPER`, and is another


def _words(name: str) -> set[str]:
    """The parts of a device name, without case, so that `A100 80GB SXM4` and `a100-80g` are `A100-SXM4-80GB`."""
    text = re.sub(r"\b(nvidia|tesla|geforce|quadro|amd|instinct|radeon)\b", " ", name.lower().replace("_", " "))
    text = re.sub(r"\brtx(?=[a\d])", "rtx ", text)  # RTX4090, RTXA6000
    text = re.sub(r"(?<=\d)\s*(ti|super|ada|sxm|pcie)(?=\d|\b|super)", r" \1", text)  # 4070TiSuper, H100SXM
    text = re.sub(r"(ti)(?=super)", r"\1 ", re.sub(r"\b(\d+)\s*(gb?|gib)\b", r"\1gb", text))
    text = re.sub(r"sxm\d?", "sxm", text)
    return {word for word in re.split(r"[^a-z0-9]+", text) if word}


def parse_cluster(text: str) -> Cluster:
    """A cluster from its short form, or from a YAML file where the text ends in .yaml or .yml."""
    if text.endswith((".yaml", ".yml")):
        return read_cluster_file(Path(text))
    form = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\d+)\s*x\s*([^@+]+?)(?:@([^+]+))?(?:\+(.+))?", text.strip(), re.IGNORECASE)
    if form is None:
        raise UserError(f"cluster {text!r} is not understood; write it as  {FORM}")
    nodes_text, count_text, name, link, network = form.groups()
    kind = find_device(name)
    count, nodes = int(count_text), int(nodes_text) if nodes_text else 1
    if count < 1 or nodes < 1:
        raise UserError(f"cluster {text!r} has no devices; give 1 or more")
    if nodes_text is None and count > kind.per_node:
        if count % kind.per_node:
            raise UserError(
                f"cluster {text!r}: {count} devices are not whole nodes of {kind.per_node}; "
                f"write the nodes too, for example 2x{count // 2}x{name.strip()}"
            )
        nodes, count = count // kind.per_node, kind.per_node
    return _cluster(kind, nodes, count, link, network)


def _cluster(kind: Device, nodes: int, per_node: int, link: str | None, network: str | None) -> Cluster:
    """Of a kind of device; links as they are usually sold with it, unless others are named."""
    return Cluster(
        device=kind,
        nodes=nodes,
        per_node=per_node,
        link_bytes_s=_link(link, kind) if link else kind.link_bytes_s,
        node_bytes_s=(_network(network) if network else kind.node_bits_s) / 8,
        usd_per_device_hour=kind.usd_per_hour,
        host_bytes=kind.host_bytes,
        spot_usd_per_device_hour=kind.spot_usd_per_hour,
    )


def _link(text: str, kind: Device) -> float:
    word = text.strip().lower()
    if word in ("pcie", "host"):
        return kind.pcie_bytes_s / (2 if word == "host" else 1)
    if word == "nvlink" and "nvlink" in kind.link.lower():
        return kind.link_bytes_s
    speed = re.fullmatch(r"([\d.]+)\s*gb(/s|ps)?", word)
    if speed is None or float(speed[1]) <= 0:
        raise UserError(
            f"link {text!r} of {kind.name} is not known; use pcie, host, a speed as 32GB/s, or leave it out"
        )
    return float(speed[1]) * GB


def _network(text: str) -> float:
    speed = re.fullmatch(r"(?:(\d+)\s*x\s*)?([\d.]+)\s*([gm])b(?:it|ps|/s|it/s)?", text.strip().lower())
    if speed is None or float(speed[2]) <= 0:
        raise UserError(
            f"network {text!r} is not understood; write bits per second and node, as 25Gb, 8x400Gb or 100Mb"
        )
    return int(speed[1] or 1) * float(speed[2]) * (GB if speed[3] == "g" else 1e6)


def read_cluster_file(path: Path) -> Cluster:
    """A cluster file: a device of the catalogue (any of its facts may be replaced), counts, links and price."""
    import yaml

    try:
        values = load_yaml(read_yaml_text(path))
    except FileNotFoundError:
        raise UserError(f"cluster file {str(path)!r} does not exist") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"cluster file {str(path)!r} cannot be read: {why}") from None
    if not isinstance(values, dict) or "device" not in values:
        raise UserError(f"cluster file {str(path)!r} names no device; start it with  device: A100-SXM4-80GB")
    for key in values:
        if key not in CLUSTER_KEYS:
            hint = did_you_mean(key, CLUSTER_KEYS, cutoff=0.6) or f"; known: {', '.join(CLUSTER_KEYS)}"
            raise UserError(f"{path.name}: there is no key {key!r}{hint}")
    own = path.parent / str(values["catalogue"]) if "catalogue" in values else None
    kind = _edited(find_device(str(values["device"]), own), values, path.name)
    nodes, count = (_positive(values.get(key, 1), key, path.name) for key in ("nodes", "per_node"))
    usual = {"price": kind.usd_per_hour, "spot_price": kind.spot_usd_per_hour if "price" not in values else None}
    price, spot = (_usd(values.get(key, known), key, path.name) for key, known in usual.items())
    link, network = (str(values[key]) if key in values else None for key in ("link", "network"))
    found = replace(
        _cluster(kind, nodes, count, link, network), usd_per_device_hour=price, spot_usd_per_device_hour=spot
    )
    return replace(found, host_bytes=_amount(values[HOST], HOST, path.name) * GB) if HOST in values else found


def _edited(kind: Device, values: Mapping[str, Any], file: str) -> Device:
    changes: dict[str, Any] = {
        name: _amount(values[key], key, file) * GB for key, name in FACTS.items() if key in values
    }
    if "watts" in values:
        changes["watts"] = _amount(values["watts"], "watts", file)
    if "tflops" in values:
        rates = values["tflops"]
        if not isinstance(rates, dict):
            raise UserError(f"{file}: tflops: write a rate per type, as  tflops: {{bf16: 312, fp32: 19.5}}")
        changes["flops_s"] = {**kind.flops_s, **{str(t): _amount(v, "tflops", file) * TERA for t, v in rates.items()}}
    return replace(kind, source=f"{kind.source}; edited in {file}", **changes) if changes else kind


def _usd(value: Any, key: str, file: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
        raise UserError(f"{file}: {key}: {value!r} is not an amount of USD per device and hour; use 0 or more")
    return value


def _amount(value: Any, key: str, file: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(f"{file}: {key}: {value!r} is not a positive number")
    return float(value)


def _positive(value: Any, key: str, file: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{file}: {key}: {value!r} is not a whole number of 1 or more")
    return value
