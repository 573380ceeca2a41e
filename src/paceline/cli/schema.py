"""The command `schema`: JSON schemas of run, cluster and site files, for editors."""

from __future__ import annotations

import argparse
from typing import Any

from paceline.config.schema import build_run_schema, build_section_schema
from paceline.io.files import print_json


def build_schema(kind: str) -> dict[str, Any]:
    """Return the schema of one kind of file: run, cluster or site."""
    if kind == "cluster":
        from paceline.hardware.catalogue import ClusterFile

        return build_section_schema("A cluster file of Paceline", ClusterFile)
    if kind == "site":
        from paceline.slurm.site_file import SiteFile

        return build_section_schema("A site file of Paceline", SiteFile)
    return build_run_schema()


def run_schema(arguments: argparse.Namespace) -> int:
    print_json(build_schema(arguments.kind))
    return 0
