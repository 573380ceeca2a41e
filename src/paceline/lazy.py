"""Public names that are imported when first used, so that `import paceline` costs nothing.

A package lists them once, in the `__init__.pyi` beside its `__init__.py`: type checkers read it, and so does `attach`.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """(`__getattr__`, `__dir__`, `__all__`) of a package whose stub has lines `from module import name as name`."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    found = [(alias, node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    home = {alias.name: module for alias, module in found if alias.asname}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(str(home[name])), name)

    return get, lambda: sorted(home), sorted(home)
