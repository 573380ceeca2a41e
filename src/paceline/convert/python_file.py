"""Python scripts as text: configurations that they write as literals. No line of them is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.convert.rules import Outcome, Ruling
from paceline.convert.sources import KeyTable, Settings
from paceline.convert.tables.accelerate import ACCELERATE
from paceline.convert.tables.deepspeed import DEEPSPEED
from paceline.convert.tables.lightning import LIGHTNING
from paceline.convert.tables.lightning import TRAINER as LIGHTNING_TRAINER
from paceline.convert.tables.torch_calls import CALLS, TORCH, claims_of_call
from paceline.convert.tables.trainer import TRAINER

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
CALLS_RUN = "once it calls paceline.run()"
LATER = "known only when the script runs"


def parse_python(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def read_python(tree: ast.Module, name: str, folder: Path) -> list[Settings]:
    """Dictionaries that are DeepSpeed's, and calls whose arguments are settings."""
    found: list[Settings] = []
    calls = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and (values := _dictionary(node)) and DEEPSPEED.likeness(values):
            found.append(Settings(name, DEEPSPEED, values, folder))
        elif isinstance(node, ast.Call) and (node.keywords or claims_of_call(_function(node))):
            function = _function(node)
            found += _call(node, function, Settings(name, TORCH, {}, folder, -calls))
            calls += 1  # a second loader is for evaluation, a second optimiser for another case: the first counts
    if found and name.endswith(".py"):
        claims = {"workload": str(folder / name)}
        found.append(
            Settings(
                name, TORCH, {}, folder, -1, extra=(("script", name, Ruling(Outcome.TRANSLATED, claims, CALLS_RUN)),)
            )
        )
    return found


def _dictionary(node: ast.Dict) -> dict[str, Any] | None:
    """Of literals alone."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else None


def _function(node: ast.Call) -> str:
    """The name of what is called, or of what `partial` will call."""
    name = _name(node.func).split(".")[-1]
    return _name(node.args[0]).split(".")[-1] if name == "partial" and node.args else name


def _call(node: ast.Call, function: str, around: Settings) -> Iterator[Settings]:
    given = {word.arg: word.value for word in node.keywords if word.arg is not None}
    table, above = _table(function, given)
    if table is None:
        return
    values: dict[str, Any] = {}
    extra: list[tuple[str, Any, Ruling]] = []
    for key, value in given.items():
        literal = _literal(value)
        if literal is None and not (isinstance(value, ast.Constant) and value.value is None):
            text = ast.unparse(value)
            if not isinstance(value, ast.Call):  # which is read where it stands
                extra.append((f"{function}({key})", text[:60], Ruling(Outcome.NOTED, why=LATER)))
        elif isinstance(literal, dict):
            values |= {f"{above}{key}.{inner}": item for inner, item in literal.items()}
        else:
            values[f"{above}{key}"] = literal
    if claims := claims_of_call(function):
        extra.insert(0, (function, "…", Ruling(Outcome.TRANSLATED, claims, weight=-1)))
    yield replace(around, table=table, values=values, extra=tuple(extra))


def _table(function: str, given: dict[str, Any]) -> tuple[KeyTable | None, str]:
    """Whose settings the arguments of a call are, and what stands before their names in the table."""
    if function == "Accelerator":
        return ACCELERATE, ""
    if function in ARGUMENTS:
        return TRAINER, ""
    if function == "Trainer" and LIGHTNING_TRAINER.keys() & given.keys() - {"callbacks"}:
        return LIGHTNING, "trainer."
    return (TORCH, f"{function}.") if function in CALLS else (None, "")


def _literal(node: ast.expr) -> Any:
    """A literal, or a dotted name as text (torch.bfloat16, ShardingStrategy.FULL_SHARD); None for the rest."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    name = _name(node)
    return name if name.startswith("torch.") or (name[:1].isupper() and "." in name) else None


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""
