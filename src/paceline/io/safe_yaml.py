"""Read YAML from anywhere: plain values only, and no more of them than a person writes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from paceline.io.files import open_regular

MAX_BYTES = 100_000  # of a document that a person writes; reading more would take seconds
MAX_VALUES = 100_000  # with aliases followed, so that a small file cannot expand to gigabytes
MAX_INT_BITS = 1000  # longer integers cannot be printed


class YamlLimitError(ValueError):
    """A document is too large; its message is the end of a sentence."""


class PlainYamlLoader(yaml.SafeLoader):
    """YAML 1.1, as other tools read it; a value that Python cannot hold is a YAMLError."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            found = super().construct_object(node, deep)
            if type(found) is int and found.bit_length() > MAX_INT_BITS:
                raise ValueError("too many digits")
            return found
        except (ValueError, OverflowError, TypeError, KeyError) as error:
            shown = f"{node.value:.40}" if isinstance(node.value, str) else "this"
            problem = f"{shown!r} cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark) from error


class SafeYamlLoader(PlainYamlLoader):
    """YAML as people write it: `off`, 2024-01-01, 24:00:00 and `+2`, which adds to a value, are strings."""


CLOCK = re.compile(r"[-+]?[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?$")
SafeYamlLoader.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", CLOCK)]
    + [
        (tag, form)
        for tag, form in forms
        if not tag.endswith((":bool", ":timestamp")) and not (first == "+" and tag.endswith(":int"))
    ]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
SafeYamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def read_yaml_text(file: Path) -> str:
    """Return the text of a file that `load_yaml` would read."""
    with open_regular(file) as content:
        text = content.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise YamlLimitError(f"has more than {MAX_BYTES:,} bytes")
    return text.decode("utf-8-sig")


def load_yaml(
    text: str, inspect: Callable[[Any], None] = lambda node: None, kind: type[PlainYamlLoader] = SafeYamlLoader
) -> Any:
    """Return the values of a document; `inspect` is called with the root node, before mappings are merged."""
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if _count_values(node, {}) > MAX_VALUES:
            raise YamlLimitError(f"has more than {MAX_VALUES:,} values once its aliases are followed")
        inspect(node)
        return loader.construct_document(node) if node else None
    except RecursionError:
        raise YamlLimitError("is nested too deeply") from None


def read_data_file(file: Path) -> Any:
    """Return the content of a data file of Paceline's own."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has it
    return yaml.load(file.read_text(encoding="utf-8"), loader)


def _count_values(node: Any, counted: dict[int, int]) -> int:
    """Count the values below a node with aliases followed; each node is visited once."""
    if node is None or not isinstance(node.value, list):
        return 1
    if id(node) not in counted:
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        counted[id(node)] = 1 + sum(_count_values(part, counted) for part in parts)
    return counted[id(node)]
