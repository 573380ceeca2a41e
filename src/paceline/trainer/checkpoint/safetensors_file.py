"""A checkpoint in one safetensors file (`train.checkpoint_format=full`): `model.…`, `optim.…`, `scaler.…`.

Ranks write their parts as usual, and the main rank joins them, in host memory that holds all of it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import RunFailed
from paceline.io.files import sync_file
from paceline.io.safe_open import check_regular
from paceline.parallel.parameters import is_sharded

STATE_FILE = "state.safetensors"
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""As safetensors names them."""
TensorTypes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def write_safetensors(folder: Path, tensors: Mapping[str, Tensor], step: int) -> Path:
    """Write whole tensors, forced to the disk."""
    from safetensors.torch import save_file

    path = folder / STATE_FILE
    save_file(dict(tensors), path, {"format": "pt", "step": str(step)})
    with path.open("rb+") as stream:
        sync_file(stream)
    return path


def read_tensor_types(path: Path) -> TensorTypes:
    """(shape, type) of every tensor in the file, by its name."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (tuple(one.get_shape()), TYPES[one.get_dtype()]) for name, one in slices.items()}
    except SafetensorError as error:
        raise RunFailed(f"{path} is not a whole safetensors file: {error}") from None


@torch.no_grad()
def read_safetensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors in place; of a divided tensor what this rank holds.

    The file is opened for each of them: what was read is then no longer mapped into this process.
    """
    from safetensors import safe_open

    for name, tensor in into.items():
        with safe_open(path, framework="pt") as opened:
            for local, place in locate_local_part(tensor):
                local.copy_(opened.get_slice(name)[place] if place else opened.get_tensor(name))


def locate_local_part(tensor: Tensor) -> list[tuple[Tensor, tuple[slice, ...]]]:
    """What this rank holds of a tensor, and where that lies in the whole."""
    if not is_sharded(tensor):
        return [(tensor, ())]
    local, chunks = tensor.to_local(), tensor.__create_chunk_list__()
    assert len(chunks) == 1, "one rank holds one part"
    if not local.numel():
        return []
    place = zip(chunks[0].offsets, chunks[0].sizes, strict=True)
    return [(local, tuple(slice(begin, begin + size) for begin, size in place))]
