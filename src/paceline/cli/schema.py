"""The command `schema`: JSON schemas of run, cluster and site files, for editors."""

from __future__ import annotations

import argparse
from typing import Any

from paceline.config.schema import build_run_schema, build_section_schema, build_table_schema
from paceline.io.files import print_json

USD = {"type": ["number", "null"], "minimum": 0}
COUNT = {"type": "integer", "minimum": 1}
POSITIVE = {"type": "number", "exclusiveMinimum": 0}
CLUSTER_KEYS: dict[str, dict[str, Any]] = {
    "device": {"type": "string", "description": "name in the catalogue, as H100-SXM5-80GB"},
    "nodes": {**COUNT, "description": "equal nodes (1)"},
    "per_node": {**COUNT, "description": "devices of a node (1)"},
    "link": {"type": "string", "description": "between devices of a node: pcie, host, nvlink, or a speed as 32GB/s"},
    "network": {"type": "string", "description": "of a node, in bits per second: 25Gb, 8x400Gb, 100Mb"},
    "price": {**USD, "description": "per device and hour [USD]"},
    "spot_price": {**USD, "description": "per preemptible device and hour [USD]"},
    "host_memory_gb": {**POSITIVE, "description": "host memory of a node [GB]"},
    "catalogue": {"type": "string", "description": "CSV with devices of your own, relative to this file"},
    "tflops": {"type": "object", "additionalProperties": POSITIVE, "description": "rate per type, as {bf16: 312}"},
    "watts": {**POSITIVE, "description": "of a device [W]"},
    "memory_gb": {**POSITIVE, "description": "of a device [GB]"},
    "bandwidth_gbs": {**POSITIVE, "description": "of a device's memory [GB/s]"},
    "pcie_gbs": {**POSITIVE, "description": "of a device's PCIe link, one direction [GB/s]"},
}


def build_schema(kind: str) -> dict[str, Any]:
    """Return the schema of one kind of file: run, cluster or site."""
    if kind == "cluster":
        return build_table_schema("A cluster file of Paceline", CLUSTER_KEYS, ["device"])
    if kind == "site":
        from paceline.slurm.site_file import SiteFile

        return build_section_schema("A site file of Paceline", SiteFile)
    return build_run_schema()


def run_schema(arguments: argparse.Namespace) -> int:
    print_json(build_schema(arguments.kind))
    return 0
