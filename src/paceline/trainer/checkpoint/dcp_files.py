"""The tensors of a checkpoint as files, by PyTorch's distributed checkpoint (DCP): written, and read with care.

DCP divides tensors among one file per rank and puts them together again for any number of ranks. Added here: nothing
that a file says is ever run. To import DCP takes seconds, so it is done by who writes or reads, when it comes to that.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from paceline.errors import UserError
from paceline.io.safe_open import open_regular
from paceline.trainer.checkpoint import safetensors_file
from paceline.trainer.checkpoint.staging import Staging, divide_by_size, flatten_state, select_own_tensors

__all__ = ["CheckpointException", "Staging", "divide_by_size", "flatten_state", "select_own_tensors"]
METADATA = ".metadata"
# One process without a group is a layout like any other, not worth a warning.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def write_dcp(staging: Staging, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write this rank's part into the folder, forced to the disk; on every rank of the group."""
    dcp.save(
        dict(staging.shapes),
        storage_writer=_Writer(folder, sync_files=True, per_thread_copy_ahead=0, overwrite=False),
        planner=_Planner(staging.copies),
        process_group=group,
        no_dist=group is None,
    )


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


def _is_tensor(value: Any) -> bool:
    """Whether a description is whole: of a pickle, any part may be missing."""
    properties = getattr(value, "properties", None)
    return (
        isinstance(value, TensorStorageMetadata)
        and isinstance(getattr(properties, "dtype", None), torch.dtype)
        and isinstance(getattr(value, "size", None), torch.Size)
    )


def read_metadata(folder: Path) -> Metadata:
    """The names, shapes and places of all tensors of a checkpoint, from a file that is not trusted."""
    if (folder / safetensors_file.STATE_FILE).exists():
        return _metadata_of(safetensors_file.read_tensor_types(folder / safetensors_file.STATE_FILE))
    path = folder / METADATA
    try:
        with open_regular(path) as file:
            metadata = _Unpickler(file).load()
        described, places = metadata.state_dict_metadata, metadata.storage_data
        if not all(isinstance(name, str) and _is_tensor(value) for name, value in described.items()):
            raise pickle.UnpicklingError("it describes something that is not a tensor")
        for place in places.values():
            if Path(place.relative_path).name != place.relative_path:
                raise pickle.UnpicklingError(f"it points outside of its folder, to {place.relative_path}")
            if getattr(place, "transform_descriptors", None):
                raise pickle.UnpicklingError("its files are transformed")
    except OSError:
        raise
    except Exception as error:
        raise reject_metadata(path, error) from None
    return metadata


def _metadata_of(types: safetensors_file.TensorTypes) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            for name, (shape, dtype) in types.items()
        }
    )


def reject_metadata(path: Path, error: BaseException) -> UserError:
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
def read_dcp(folder: Path, metadata: Metadata, into: dict[str, Tensor]) -> None:
    """Fill tensors in place, each rank by itself: what it holds is read, whoever wrote it."""
    if (folder / safetensors_file.STATE_FILE).exists():
        safetensors_file.read_safetensors(folder / safetensors_file.STATE_FILE, into)
        return
    dcp.load(
        dict(into),
        storage_reader=_Reader(folder, metadata),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )


def join_dcp(folder: Path, step: int) -> Path:
    """Put the parts that all ranks have written into the folder together in one file, and remove them."""
    metadata = read_metadata(folder)
    whole = {
        name: torch.empty(described.size, dtype=described.properties.dtype)
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }
    read_dcp(folder, metadata, whole)
    path = safetensors_file.write_safetensors(folder, whole, step)
    for part in (folder / METADATA, *folder.glob("*.distcp")):
        part.unlink()
    return path
