"""Copy tensors aside, choose which of them a rank writes, and keep all in one safetensors file."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import RunFailed
from paceline.io.files import check_regular, sync_file
from paceline.parallel.parameters import is_sharded

STATE_FILE = "state.safetensors"
TensorTypes = dict[str, tuple[tuple[int, ...], Any]]


def flatten_state(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Flatten nested dicts of tensors to one dict with dotted names."""
    flat: dict[str, Tensor] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        inner = flatten_state(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
        for leaf, tensor in inner.items():
            assert isinstance(tensor, Tensor), f"{leaf} is a {type(tensor).__name__}; only tensors are saved as state"
            assert leaf not in flat, f"two tensors of the state are called {leaf}"
            flat[leaf] = tensor
    return flat


class Staging:
    """A copy of what this rank writes, in host memory that is kept between saves."""

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}
        self.shapes: dict[str, Tensor] = {}  # how the parts of this rank form whole tensors
        self.bytes_share = 0  # summed over the ranks: the size of the checkpoint

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], ranks: int) -> None:
        """Copy what this rank writes; when this returns, the tensors may change."""
        before, self.copies, self.shapes, self.bytes_share = self.copies, {}, {}, 0
        for name, tensor in tensors.items():
            sharded = is_sharded(tensor)
            local = tensor.to_local() if is_sharded(tensor) else tensor.detach()
            copy = before.get(name)
            if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            copy.copy_(local, non_blocking=local.is_cuda)
            self.copies[name] = copy
            self.shapes[name] = tensor if sharded else copy
            self.bytes_share += tensor.nbytes // (ranks if sharded else 1)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()


def select_own_tensors(flat: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[str]:
    """Return what this rank writes: its share of what all ranks hold, and all others."""
    if group is None:
        return list(flat)
    whole = {name: tensor for name, tensor in flat.items() if not is_sharded(tensor)}
    described = sorted((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in whole.items())
    digest = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if extremes[0] != -extremes[1]:
        return list(flat)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in whole.items()}
    mine = divide_by_size(sizes, dist.get_world_size(group))[dist.get_rank(group)]
    return [name for name in flat if name not in whole or name in mine]


def divide_by_size(sizes: Mapping[str, int], ranks: int) -> list[set[str]]:
    """Divide names so that ranks get about the same number of bytes, the same way on each."""
    shares: list[set[str]] = [set() for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = loads.index(min(loads))
        shares[lightest].add(name)
        loads[lightest] += sizes[name]
    return shares


def write_safetensors(folder: Path, tensors: Mapping[str, Tensor], step: int) -> Path:
    """Write whole tensors (`train.checkpoint_format=full`), forced to the disk."""
    from safetensors.torch import save_file

    path = folder / STATE_FILE
    save_file(dict(tensors), path, {"format": "pt", "step": str(step)})
    with path.open("rb+") as stream:
        sync_file(stream)
    return path


def read_tensor_types(path: Path) -> TensorTypes:
    """Return (shape, type) of every tensor in a safetensors file, by name."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import _TYPES

    try:
        check_regular(path)
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (tuple(part.get_shape()), _TYPES[part.get_dtype()]) for name, part in slices.items()}
    except SafetensorError as error:
        raise RunFailed(f"{path} is not a whole safetensors file: {error}", code="damaged") from None


@torch.no_grad()
def read_safetensors(files: Mapping[str, Path], into: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, each from its file, opened anew so that it does not stay mapped."""
    from safetensors import safe_open

    for name, tensor in into.items():
        with safe_open(files[name], framework="pt") as opened:
            if not is_sharded(tensor):
                tensor.copy_(opened.get_tensor(name))
                continue
            local, chunks = tensor.to_local(), tensor.__create_chunk_list__()
            assert len(chunks) == 1, "one rank holds one part"
            if local.numel():
                place = zip(chunks[0].offsets, chunks[0].sizes, strict=True)
                local.copy_(opened.get_slice(name)[tuple(slice(begin, begin + size) for begin, size in place)])
