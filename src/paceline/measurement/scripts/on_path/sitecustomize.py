"""Python runs this file when it starts: `paceline measure -- COMMAND` puts its folder first on PYTHONPATH.

Nothing happens until the script imports torch. Then hooks are set, once, that note its steps (`hooks.py`).
"""

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[2]


class _WhenTorchIsImported(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_attach(module: ModuleType) -> None:
            execute(module)
            _attach()

        spec.loader.exec_module = execute_and_attach  # type: ignore[method-assign]
        return spec


def _attach() -> None:
    try:
        _find_paceline()
        from paceline.measurement.scripts.hooks import install_hooks

        install_hooks()
    except Exception as error:
        print(f"paceline: this process cannot be measured: {type(error).__name__}: {error}", file=sys.stderr)


def _find_paceline() -> None:
    """Put paceline into `sys.modules`: a script's environment may lack it, and hooks need nothing else."""
    if importlib.util.find_spec("paceline") is not None:
        return
    spec = importlib.util.spec_from_file_location(
        "paceline", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    if spec is not None and spec.loader is not None:
        sys.modules["paceline"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _run_the_next_one() -> None:
    """Run the next file of this name on the path, which this one hides."""
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != HERE]
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _WhenTorchIsImported())
    _run_the_next_one()
