"""A fit as a safetensors file: arrays, and the words around them as JSON in its header."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

from paceline.errors import UserError
from paceline.record.files import as_json, finite, write_atomic
from paceline.workloads.topics.files.reading import first_line
from paceline.workloads.topics.result.model import TopicFit

MODEL_FILE = "model.safetensors"  # in the folder of a run
FORMAT = "paceline topics 1"
ARRAYS = ("L", "F", "losses")
WORDS = ("terms", "names", "about")
ABOUT = ("loss", "passes", "converged", "stopped_because", "seconds", "settings")
HEADER_BYTES = 8 << 20  # longer lists go beside the arrays: readers refuse a header of 100 MB
AGAIN = "save it again or copy it again"


def save(model: TopicFit, path: Path) -> Path:
    from safetensors.numpy import save as to_bytes

    path = path.expanduser()
    if path.suffix != ".safetensors":
        raise UserError(f"{str(path)!r} does not end in .safetensors; write it as  {path.with_suffix('.safetensors')}")
    arrays: dict[str, np.ndarray] = {
        "L": np.ascontiguousarray(model.L, np.float32),
        "F": np.ascontiguousarray(model.F, np.float32),
        "losses": np.asarray(model.losses, np.float64),
    }
    about = {name: getattr(model, name) for name in ABOUT}
    header = {"format": FORMAT}
    for name, value in zip(WORDS, (model.terms, model.names, about), strict=True):
        text = json.dumps(finite(value) if name == "about" else value, ensure_ascii=True, default=as_json)
        if len(text) <= HEADER_BYTES:
            header[name] = text
        else:
            arrays[name] = np.frombuffer(text.encode(), np.uint8)
    header["sum"] = _sum(arrays, header)
    write_atomic(path, to_bytes(arrays, metadata=header))
    return path


def load(path: Path) -> TopicFit:
    from safetensors import SafetensorError, safe_open

    path = path.expanduser()
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            there = list(file.keys())
            if header.get("format") != FORMAT or not set(ARRAYS) <= set(there):
                raise UserError(f"{path}: holds no topic model (there: {', '.join(there)[:80] or 'nothing'})")
            arrays = {name: file.get_tensor(name) for name in there}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: is damaged or no safetensors file ({first_line(error)}); {AGAIN}") from None
    try:
        if header.get("sum") != _sum(arrays, header):
            raise ValueError("its check sum is another")
        words = {name: json.loads(header.get(name) or bytes(arrays[name]).decode()) for name in WORDS}
        made = words["about"]
        if made["loss"] is None:
            made["loss"] = np.nan
        return TopicFit(*_shaped(arrays), terms=words["terms"], names=words["names"], **made)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({first_line(error)}); {AGAIN}") from None


def _shaped(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, list[float]]:
    if any(arrays[name].dtype.kind != "f" for name in ARRAYS) or arrays["losses"].ndim != 1:
        raise ValueError("its arrays are of another kind")
    return arrays["L"], arrays["F"], arrays["losses"].tolist()


def _sum(arrays: dict[str, np.ndarray], header: dict[str, str]) -> str:
    """Of the contents, so that a flipped bit does not become another model."""
    total = 0
    for name in sorted(arrays):
        told = f"{name} {arrays[name].dtype} {arrays[name].shape}"
        total = zlib.crc32(np.ascontiguousarray(arrays[name]).data, zlib.crc32(told.encode(), total))
    for name in sorted(header):
        if name != "sum":
            total = zlib.crc32(f"{name}={header[name]}".encode(), total)
    return f"{total:08x}"
