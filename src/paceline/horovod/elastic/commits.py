"""Committed states as files: tensors as safetensors, all else as JSON in their metadata. Nothing is pickled."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from paceline.errors import UserError
from paceline.io.files import write_atomic
from paceline.io.safe_open import check_regular

KEY = "paceline"
NUMBERS = "biufc"  # the kinds of numpy that torch has too


def default_commit_file() -> Path:
    """Return the file of the running script, in the current folder."""
    return Path(f"elastic-{Path(sys.argv[0]).stem or 'state'}.safetensors")


def write_commit(file: Path, state: dict[str, Any]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    packed = {name: _pack(value, f"state.{name}", tensors) for name, value in state.items()}
    about = {"state": packed, "command": shlex.join(sys.argv), "time_s": time.time()}
    write_atomic(file, save(tensors, metadata={KEY: json.dumps(about)}))


def check_commit(state: dict[str, Any]) -> None:
    """Raise UserError if a value of the state cannot be written."""
    for name, value in state.items():
        _pack(value, f"state.{name}", {})


def read_commit(file: Path) -> tuple[dict[str, Any], str]:
    """Return the state and a description of its origin."""
    try:
        check_regular(file)
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {})[KEY])
            state = {name: _unpack(value, opened) for name, value in about["state"].items()}
            age_s = max(0.0, time.time() - about["time_s"])
            return state, f"{file}, committed {age_s:.0f} s ago by  {about['command']}"
    except (
        SafetensorError,
        OSError,
        KeyError,
        ValueError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UserError(f"{file} is not a committed state ({error}); remove it to start anew") from None


def _pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value as JSON; types that JSON lacks become lists that begin with their name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return ["tensor", key]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in NUMBERS:
        packed = _pack(torch.as_tensor(value), name, tensors)
        return ["array", packed[1], bool(value.shape)]
    if isinstance(value, dict):
        return [
            "dict",
            *([_pack(key, name, tensors), _pack(v, f"{name}[{key!r}]", tensors)] for key, v in value.items()),
        ]
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_pack(inner, f"{name}[{i}]", tensors) for i, inner in enumerate(value))]
    raise UserError(
        f"{name} is a {type(value).__name__}; an elastic state holds numbers, text, tensors, lists and dicts of them, "
        "and objects with state_dict() and load_state_dict()"
    )


def _unpack(value: Any, opened: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    match kind:
        case "tensor":
            return opened.get_tensor(rest[0])
        case "array":
            array = opened.get_tensor(rest[0]).numpy()
            return array if rest[1] else array[()]
        case "dict":
            return {_unpack(key, opened): _unpack(inner, opened) for key, inner in rest}
        case "tuple":
            return tuple(_unpack(inner, opened) for inner in rest)
        case _:
            return [_unpack(inner, opened) for inner in rest]
