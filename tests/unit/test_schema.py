"""Schemas of run, cluster and site files: they accept what Paceline accepts, and name what is wrong."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from paceline.cli.keys import build_schema

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = {
    "run": [*REPOSITORY.glob("recipes/*.yaml"), *REPOSITORY.glob("docs/examples/*.yaml")],
    "cluster": [*REPOSITORY.glob("recipes/clusters/*.yaml")],
    "site": [*REPOSITORY.glob("recipes/sites/*.yaml")],
}
WRONG = [
    ("run", "trian: {lr: 1}", "trian"),
    ("run", "train: {lr: fast}", "fast"),
    ("run", "train: {lr: 0}", "0"),
    ("run", "train: {optimizer: adamm}", "adamm"),
    ("run", "workload: clasifier", "clasifier"),
    ("run", "workload: lm\nmodel: {colour: blue}", "colour"),
    ("cluster", "nodes: 2", "device"),
    ("cluster", "device: H100\nnode: 2", "node"),
    ("site", "partitions: gpu", "partitions"),
    ("site", "gpus_per_node: 0", "0"),
]


class EditorLoader(yaml.SafeLoader):
    """YAML 1.2, as editors read it: 1e-3 is a number."""


EditorLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?e[-+]?\d+"), "0123456789-+")


def load_yaml(text):
    return yaml.load(text, EditorLoader)


@pytest.mark.parametrize("kind", FILES)
def test_the_schema_in_the_repository_is_that_of_the_code(kind):
    recorded = json.loads((REPOSITORY / "docs" / "schema" / f"{kind}.json").read_text(encoding="utf-8"))
    assert recorded == build_schema(kind), f"run  paceline schema {kind} > docs/schema/{kind}.json"


@pytest.mark.parametrize(("kind", "file"), [(k, f) for k, files in FILES.items() for f in files])
def test_files_of_the_repository_are_valid(kind, file):
    jsonschema.validate(load_yaml(file.read_text(encoding="utf-8")), build_schema(kind))


@pytest.mark.parametrize(("kind", "text", "named"), WRONG)
def test_wrong_files_are_rejected_by_what_is_wrong(kind, text, named):
    errors = list(jsonschema.Draft7Validator(build_schema(kind)).iter_errors(load_yaml(text)))
    assert errors
    assert any(named in error.message for error in errors)


def test_every_key_of_a_run_file_is_described():
    sections = [*build_schema("run")["$defs"].values(), build_schema("cluster"), build_schema("site")]
    described = [field for section in sections for field in section["properties"].values()]
    assert len(described) > 100
    assert all(field.get("description") for field in described)
