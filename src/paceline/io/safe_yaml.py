"""YAML from anywhere, read with care: no object is made but plain values, and a few lines never stand for billions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from paceline.io.safe_open import open_regular

MOST_BYTES = 100_000
"""Of a document that a person writes; reading more would take seconds."""
MOST_VALUES = 100_000
"""In a document; a few lines of aliases to aliases can stand for billions."""
LONG_WORD = 100
"""Letters that count as one more value: what is repeated by aliases may be long."""
MOST_DEPTH = 50
"""Of sections inside of each other."""
MOST_BITS = 1000
"""Of a whole number; longer ones cannot be shown."""
OPEN = -1
"""In place of the number of values of a node that is being counted."""


class YamlLimitError(ValueError):
    """More than anybody writes, as the end of a sentence."""


class SafeYamlLoader(yaml.SafeLoader):
    """YAML as people write it: `off`, `no` and 2024-01-01 are words, and true and false the only truth values.

    24:00:00 is a word, which YAML 1.1 takes for 86400, and `+2`: it adds to something. What is nested deeper than
    anybody writes ends the reading.
    """

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        self._go_deeper(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        self._go_deeper(len(self.indents))
        return bool(super().add_indent(column))

    def _go_deeper(self, level: int) -> None:
        if level > MOST_DEPTH:
            raise YamlLimitError("is nested without end")

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            found = super().construct_object(node, deep)
            if type(found) is int and found.bit_length() > MOST_BITS:
                raise ValueError("no number that anybody means")
            return found
        except (ValueError, OverflowError, TypeError, KeyError) as error:
            shown = f"{node.value:.40}" if isinstance(node.value, str) else "this"
            why = f"{shown!r} cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(problem=why, problem_mark=node.start_mark) from error


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


def _expanded(node: Any, known: dict[int, int]) -> int:
    """How many values a node stands for, with its aliases followed; each is counted once, so this takes no time."""
    if node is None:
        return 0
    if known.get(id(node)) == OPEN:
        raise YamlLimitError(f"holds itself, at line {node.start_mark.line + 1}")
    if id(node) not in known:
        known[id(node)] = OPEN
        inside = node.value if isinstance(node.value, list) else []
        parts = [part for item in inside for part in (item if isinstance(item, tuple) else (item,))]
        long = len(node.value) // LONG_WORD if isinstance(node.value, str) else 0
        known[id(node)] = 1 + long + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


def read_yaml_text(file: Path) -> str:
    """The text of a file, if it is not longer than `parsed` would read."""
    with open_regular(file) as content:
        text = content.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise YamlLimitError(f"has more than {MOST_BYTES:,} bytes")
    return text.decode("utf-8-sig")


def load_yaml(text: str, look: Callable[[Any], None] = lambda node: None) -> Any:
    """The values of a document. Of one that stands for too much, nothing is made.

    `look` is given the root node as it is written; merged mappings are one once the values are made.
    """
    loader = SafeYamlLoader(text)
    node = loader.get_single_node()
    if _expanded(node, {}) > MOST_VALUES:
        raise YamlLimitError(f"has more than {MOST_VALUES:,} values once its aliases are followed")
    look(node)
    return loader.construct_document(node) if node else None
