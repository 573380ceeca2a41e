"""Experts of a mixture: one tensor of all of them in a model, and in the files of most models a matrix of each."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor

from paceline.parallel.parameters import is_sharded

NUMBERED_TWICE = re.compile(r"\.\d+\..*\.\d+\.")  # by layer and expert


@dataclass(frozen=True)
class ExpertMatrix:
    """Where a matrix of a file lies in a tensor of the model."""

    tensor: str
    expert: int
    part: int  # of `parts` of equal rows that lie below each other, as gate and up
    parts: int

    def select(self, experts: Any) -> Any:
        """Return what is read into: a view of the tensor, or of the shard that a rank holds."""
        return ExpertShard(experts, self) if is_sharded(experts) else experts[self.expert, slice(*self.rows(experts))]

    def rows(self, experts: Tensor) -> tuple[int, int]:
        each = experts.shape[1] // self.parts
        return self.part * each, (self.part + 1) * each


class ExpertShard:
    """The part of one expert's matrix that this rank holds, as what is read into it sees it."""

    def __init__(self, experts: Any, matrix: ExpertMatrix) -> None:
        self.experts, self.expert, self.device_mesh = experts, matrix.expert, experts.device_mesh
        self.first, self.end = matrix.rows(experts)
        self.shape = (self.end - self.first, experts.shape[2])
        (chunk,) = experts.__create_chunk_list__()
        self.offsets, ends = chunk.offsets, [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        self.begin, self.stop = max(self.first, self.offsets[1]), min(self.end, ends[1])
        self.held = self.offsets[0] <= self.expert < ends[0] and self.begin < self.stop and ends[2] > self.offsets[2]

    def to_local(self) -> Tensor:
        local: Tensor = self.experts.to_local()
        if not self.held:
            return local.new_empty((0, 0))
        return local[self.expert - self.offsets[0], self.begin - self.offsets[1] : self.stop - self.offsets[1]]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        local = self.to_local()
        return [ChunkStorageMetadata(Size([self.begin - self.first, self.offsets[2]]), local.shape)]


def find_expert_matrices(model: Any, names: Iterable[str]) -> dict[str, ExpertMatrix]:
    """Return the matrices of single experts in a file, which the library stacks."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes, found = get_model_conversion_mapping(model), {}
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    stacks = [change for change in changes if isinstance(change, WeightConverter) and _stacks(change)]
    prefix, state = model.base_model_prefix, model.state_dict()
    for name in names if stacks else ():
        tensor, pattern = rename_source_key(name, renamings, stacks, prefix, state)
        if pattern is None or tensor not in state or name in state:
            continue
        patterns = next(change.source_patterns for change in stacks if pattern in change.source_patterns)
        expert = int(re.findall(r"\.(\d+)\.", name)[-1])  # the number of the layer comes first
        found[name] = ExpertMatrix(tensor, expert, patterns.index(pattern), len(patterns))
    return found


def _stacks(change: Any) -> bool:
    """Return whether it stacks matrices of experts, after those of one were put below each other."""
    kinds = [(type(one).__name__, getattr(one, "dim", 0)) for one in change.operations]
    return kinds in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
