"""The tensors of a checkpoint as files: copied aside while training waits, written while it goes on, read with care.

PyTorch's distributed checkpoint (DCP) divides tensors among one file per rank and puts them together again for any
number of ranks. Added here: the copies are made into memory that is kept from one save to the next, a tensor that
every rank holds is copied and written by one of them, and nothing that a file says is ever run.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from paceline.errors import UserError

METADATA = ".metadata"
# One process without a group is a layout like any other, not worth a warning.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Nested dicts of tensors as one dict with dotted names."""
    flat: dict[str, Tensor] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        inner = flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
        for leaf, tensor in inner.items():
            assert isinstance(tensor, Tensor), f"{leaf} is a {type(tensor).__name__}; only tensors are saved as state"
            assert leaf not in flat, f"two tensors of the state are called {leaf}"
            flat[leaf] = tensor
    return flat


class Staging:
    """One copy of what this rank writes, in host memory kept between saves: fresh memory costs several copies."""

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}
        self.shapes: dict[str, Tensor] = {}
        """How the parts of this rank form whole tensors."""
        self.bytes_share = 0
        """Summed over the ranks: the size of the checkpoint."""

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], ranks: int) -> None:
        """Copy what this rank writes; when this returns, the tensors may change."""
        before, self.copies, self.shapes, self.bytes_share = self.copies, {}, {}, 0
        devices = set()
        for name, tensor in tensors.items():
            sharded = isinstance(tensor, DTensor)
            local = tensor.to_local() if sharded else tensor.detach()
            copy = before.get(name)
            if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            copy.copy_(local, non_blocking=local.is_cuda)
            if local.is_cuda:
                devices.add(local.device)
            self.copies[name] = copy
            self.shapes[name] = tensor if sharded else copy
            self.bytes_share += tensor.nbytes // (ranks if sharded else 1)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def write(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Write this rank's part into the folder, forced to the disk; on every rank of the group."""
        dcp.save(
            dict(self.shapes),
            storage_writer=_Writer(folder, sync_files=True, per_thread_copy_ahead=0, overwrite=False),
            planner=_Planner(self.copies),
            process_group=group,
            no_dist=group is None,
        )


def share(flat: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[str]:
    """The names of what this rank writes: its parts of sharded tensors, and its share of those that all ranks hold.

    So a save costs a rank of a data-parallel run a share of the time and of the memory. Where the ranks hold different
    tensors (pipeline stages), each writes all of its own.
    """
    if group is None:
        return list(flat)
    whole = {name: tensor for name, tensor in flat.items() if not isinstance(tensor, DTensor)}
    described = sorted((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in whole.items())
    digest = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if extremes[0] != -extremes[1]:
        return list(flat)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in whole.items()}
    mine = divide(sizes, dist.get_world_size(group))[dist.get_rank(group)]
    return [name for name in flat if name not in whole or name in mine]


def divide(sizes: Mapping[str, int], ranks: int) -> list[set[str]]:
    """Names shared out so that every rank gets about the same number of bytes; each rank computes the same answer."""
    shares: list[set[str]] = [set() for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = loads.index(min(loads))
        shares[lightest].add(name)
        loads[lightest] += sizes[name]
    return shares


class _Planner(DefaultSavePlanner):
    """Plans with the shapes of the live tensors, writes the values of the copies."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def lookup_object(self, index: Any) -> Tensor:
        return self._copies[index.fqn]


class _Writer(dcp.FileSystemWriter):
    """Says what went wrong with the disk, where the serialiser says only that its position was unexpected."""

    def storage_meta(self) -> None:
        return None

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise next((e for e in _chain(error) if isinstance(e, OSError)), error) from None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_DCP = "torch.distributed.checkpoint"
_HARMLESS = {
    *("torch.Size", "torch.serialization._get_layout", f"{_DCP}.filesystem._StorageInfo"),
    *(f"{_DCP}.metadata.{name}" for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "TensorProperties")),
    *(f"{_DCP}.metadata.{name}" for name in ("TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
}


class _Unpickler(pickle.Unpickler):
    """Builds descriptions of tensors and nothing else: a pickle can name any function, and have it called."""

    def find_class(self, module: str, name: str) -> Any:
        harmless = f"{module}.{name}" in _HARMLESS
        if harmless or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """The names, shapes and places of all tensors of a checkpoint, from a file that is not trusted."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        described, places = metadata.state_dict_metadata, metadata.storage_data
        if not all(isinstance(value, TensorStorageMetadata) for value in described.values()):
            raise pickle.UnpicklingError("it describes something that is not a tensor")
        for place in places.values():
            if Path(place.relative_path).name != place.relative_path:
                raise pickle.UnpicklingError(f"it points outside of its folder, to {place.relative_path}")
            if getattr(place, "transform_descriptors", None):
                raise pickle.UnpicklingError("its files are transformed")
    except OSError:
        raise
    except Exception as error:
        raise refusal(path, error) from None
    return metadata


def refusal(path: Path, error: BaseException) -> UserError:
    why = (
        str(error).split("\n", 1)[0]
        if isinstance(error, pickle.UnpicklingError)
        else f"{type(error).__name__}: {error}"
    )
    return UserError(f"{path} is refused: a checkpoint holds tensors and nothing that could run, but {why}")


class _Reader(dcp.FileSystemReader):
    """Reads the files of a checkpoint with the metadata that `read_metadata` let through."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


@torch.no_grad()
def read(folder: Path, metadata: Metadata, into: dict[str, Tensor]) -> None:
    """Fill tensors in place, each rank by itself: what it holds is read, whoever wrote it."""
    dcp.load(
        dict(into),
        storage_reader=_Reader(folder, metadata),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
