"""Read Python scripts as text: configurations that they write as literals. Nothing is executed."""

import ast
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.convert.key_tables import KeyTable, load_table
from paceline.convert.rules import Outcome, Translation, Unreadable, accept, note
from paceline.convert.sources import Extra, Settings
from paceline.io.files import flatten_keys

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
NOT_LITERAL = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


def parse_python(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except NOT_LITERAL:
        return None


def read_python(tree: ast.Module, name: str, folder: Path) -> list[Settings]:
    """Return dictionaries that are DeepSpeed's, and calls whose arguments are settings."""
    found: list[Settings] = []
    deepspeed, torch = load_table("deepspeed"), load_table("torch")
    calls = 0
    for node in ast.walk(tree):
        values = _read_dictionary(node) if isinstance(node, ast.Dict) else {}
        if deepspeed.marks & {*values, *flatten_keys(values)}:
            found.append(Settings(name, deepspeed, values, folder))
        elif isinstance(node, ast.Call) and (node.keywords or _function_of(node) in torch.calls):
            found += _read_call(node, Settings(name, torch, folder=folder, priority=-calls))
            calls += 1  # a second loader is for evaluation, a second optimiser for another case: the first counts
    if found and name.endswith(".py"):
        translation = accept({"workload": str(folder / name)}, "once it calls paceline.run()")
        found.append(Settings(name, torch, folder=folder, priority=-1, extra=(("script", name, translation),)))
    return found


def _read_dictionary(node: ast.Dict) -> dict[str, Any]:
    """Return a dictionary of literals with text keys; any other is empty."""
    value = _read_literal(node) or {}
    return value if all(isinstance(key, str) for key in value) else {}


def _function_of(node: ast.Call) -> str:
    """Return the name of what is called, or of what `partial` will call."""
    name = _name_of(node.func).split(".")[-1]
    return _name_of(node.args[0]).split(".")[-1] if name == "partial" and node.args else name


def _read_call(node: ast.Call, source: Settings) -> Iterator[Settings]:
    function = _function_of(node)
    given = {word.arg: word.value for word in node.keywords if word.arg is not None}
    table, section = _choose_table(function, given)
    if table is None:
        return
    values: dict[str, Any] = {}
    extra: list[Extra] = []
    if claims := source.table.calls.get(function):
        extra.append((function, "…", accept(claims, priority=-1)))
    for key, value in given.items():
        literal = _read_literal(value)
        if literal is None and not (isinstance(value, ast.Constant) and value.value is None):
            if not isinstance(value, ast.Call) or _choose_table(_function_of(value), {})[0] is None:
                text = ast.unparse(value)[:60]
                extra.append((f"{function}({key})", text, _translate_expression(table, f"{section}{key}", text)))
        elif isinstance(literal, dict):
            values |= {f"{section}{key}.{inner}": item for inner, item in literal.items()}
        else:
            values[f"{section}{key}"] = literal
    yield replace(source, table=table, values=values, extra=tuple(extra))


def _translate_expression(table: KeyTable, key: str, text: str) -> Translation:
    """Translate an argument that is not a literal: its rule counts if it does not look at the value."""
    rule = table.rule(key)
    if rule is not None:
        with suppress(Unreadable):
            if (translation := rule(text)).outcome in (Outcome.KEPT, Outcome.NOTED):
                return translation
    return note("known only when the script runs")


def _choose_table(function: str, given: dict[str, ast.expr]) -> tuple[KeyTable | None, str]:
    """Return the table for the arguments of a call, and the section that they have in it."""
    if function == "Accelerator":
        return load_table("accelerate"), ""
    if function in ARGUMENTS:
        return load_table("training_arguments"), ""
    lightning, torch = load_table("lightning"), load_table("torch")
    if function == "Trainer" and any(f"trainer.{key}" in lightning.marks for key in given if key != "callbacks"):
        return lightning, "trainer."
    return (torch, f"{function}.") if any(key.startswith(f"{function}.") for key in torch.rules) else (None, "")


def _read_literal(node: ast.expr) -> Any:
    """Return a literal, or a dotted name as text (torch.bfloat16); None for the rest."""
    with suppress(*NOT_LITERAL):
        return ast.literal_eval(node)
    name = _name_of(node)
    return name if name.startswith("torch.") or (name[:1].isupper() and "." in name) else None


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name_of(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""
