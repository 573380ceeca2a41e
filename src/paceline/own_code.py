"""A user's own code: found by path or module, and named when something in it fails."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
import zlib
from pathlib import Path
from typing import Any

from paceline.errors import UserError


def class_of(reference: str, base: type) -> type[Any]:
    """The subclass of `base` behind `file.py:Class` or `package.module:Class`."""
    place, _, name = reference.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise UserError(f"workload: there is no file {place!r}; write it as  workload: path/to/file.py:Class")
    try:
        module = _module_from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and place.split(".")[0] == error.name.split(".")[0]:
            raise UserError(f"workload: there is no module {place!r}; write it as  workload: file.py:Class") from None
        raise UserError(f"workload: {place!r} needs {error.name!r}, which is not installed") from None
    except SyntaxError as error:
        file = error.filename or place
        raise UserError(f"workload: {file!r} is not valid Python: {error.msg} (line {error.lineno})") from None
    except (Exception, SystemExit) as error:
        said = f"workload: {place!r} fails when it is imported: {one_line(error)}"
        raise UserError(f"{said}\n\n{own_trace(error, reference)}".rstrip()) from error
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    classes = {n: v for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, base)}
    have = [n for n, kind in classes.items() if kind.__module__ == module.__name__]
    raise UserError(
        f"workload: {place!r} has no Workload class {name!r}; "
        + (f"it has {', '.join(have)}" if have else "subclass paceline.Workload there")
    )


def own_trace(error: BaseException, reference: str) -> str:
    """The traceback of an error from where it entered the folder of the user's workload; empty if it never did."""
    place = reference.rpartition(":")[0]
    folder = Path(getattr(sys.modules.get(place), "__file__", None) or place).resolve().parent
    trace = error.__traceback__ if place else None
    while trace is not None and Path("/", trace.tb_frame.f_code.co_filename).resolve().parent != folder:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip() if trace else ""


def one_line(error: BaseException) -> str:
    """`ValueError: what it says`, without what it says after that."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _module_from_file(file: Path) -> Any:
    """A file as a module; like a script, it may import what lies beside it."""
    name = f"paceline_own_{file.stem}_{zlib.crc32(bytes(file.resolve())):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if (folder := str(file.resolve().parent)) not in sys.path:
            sys.path.append(folder)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
