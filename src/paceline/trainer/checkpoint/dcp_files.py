"""Read and write checkpoints by PyTorch's DCP, which takes seconds to import, without running what they say."""

import math
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from paceline.errors import UserError, get_first_line
from paceline.io.files import open_regular
from paceline.trainer.checkpoint import staging

__all__ = ["CheckpointException"]
METADATA = ".metadata"
# One process without a group is a layout like any other, not worth a warning.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def write_dcp(staged: staging.Staging, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write this rank's part into the folder, forced to the disk; on every rank of the group."""
    dcp.save(
        dict(staged.shapes),
        storage_writer=_Writer(folder, sync_files=True, per_thread_copy_ahead=0, overwrite=False),
        planner=_Planner(staged.copies),
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
    """Raises the error of the disk, where the serialiser says only that its position was unexpected."""

    def storage_meta(self) -> None:
        return None

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


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
    """Read the names, shapes and places of all tensors of a checkpoint, from a file that is not trusted."""
    if (folder / staging.STATE_FILE).exists():
        types = staging.read_tensor_types(folder / staging.STATE_FILE).items()
        kind, properties = TensorStorageMetadata, TensorProperties
        return Metadata({name: kind(properties(dtype=dtype), torch.Size(shape), []) for name, (shape, dtype) in types})
    path = folder / METADATA
    try:
        with open_regular(path) as file:
            metadata: Metadata = _Unpickler(file).load()
        for value in metadata.state_dict_metadata.values():
            if not isinstance(value, TensorStorageMetadata):
                raise pickle.UnpicklingError("it describes something that is not a tensor")
            torch.empty(value.size, dtype=value.properties.dtype, device="meta")  # raises if a part is missing
        _check_size(path, metadata.state_dict_metadata)
        for place in (metadata.storage_data or {}).values():
            if Path(place.relative_path).name != place.relative_path:
                raise pickle.UnpicklingError(f"it points outside of its folder, to {place.relative_path}")
            if getattr(place, "transform_descriptors", None):
                raise pickle.UnpicklingError("its files are transformed")
    except (OSError, UserError):
        raise
    except Exception as error:
        raise reject_metadata(path, error) from None
    return metadata


def _check_size(path: Path, described: Mapping[str, Any]) -> None:
    """Raise UserError if tensors claim to be larger than their files, before memory is allocated for them."""
    claimed = sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in described.values())
    if claimed > (held := sum(file.stat().st_size for file in path.parent.glob("*.distcp"))):
        message = f"{path} is damaged: its tensors would take {claimed:,} bytes, and its files have {held:,}"
        raise UserError(message, code="damaged")


def reject_metadata(path: Path, error: BaseException) -> UserError:
    """Return the error for a checkpoint that holds something else than tensors."""
    reason = get_first_line(error) if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: {error}"
    message = f"{path} is rejected: a checkpoint holds tensors and nothing that could run, but {reason}"
    return UserError(message, code="not-trusted")


@torch.no_grad()
def read_dcp(folder: Path, metadata: Metadata, into: dict[str, Tensor]) -> None:
    """Fill tensors in place, each rank on its own: it reads what it holds, whichever rank wrote that."""
    if (folder / staging.STATE_FILE).exists():
        staging.read_safetensors(dict.fromkeys(into, folder / staging.STATE_FILE), into)
        return
    reader: Any = dcp.FileSystemReader(folder)
    reader.read_metadata = lambda *_, **__: metadata  # what `read_metadata` let through
    dcp.load(
        dict(into),
        storage_reader=reader,
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )


def join_dcp(folder: Path, step: int) -> Path:
    """Join the parts that all ranks have written into the folder in one file, and remove them."""
    metadata = read_metadata(folder)
    described: dict[str, Any] = metadata.state_dict_metadata
    whole = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in described.items()}
    read_dcp(folder, metadata, whole)
    path = staging.write_safetensors(folder, whole, step)
    for part in (folder / METADATA, *folder.glob("*.distcp")):
        part.unlink()
    return path
