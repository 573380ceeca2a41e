"""Group parameters by name, and find what one rank updates of each, as plain tensors."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from paceline.config import ParameterGroup, Train
from paceline.errors import UserError, did_you_mean, invalid_workload, join_names
from paceline.nn.nf4 import count_elements
from paceline.workload import Workload

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DEFAULT_GROUP = ParameterGroup()


@dataclass(frozen=True)
class ParameterGroups:
    """Patterns, in the order in which they are tried."""

    table: Mapping[str, ParameterGroup] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Parameters of the whole model by pattern; "" matches the rest."""
    frozen: int = 0
    ends: frozenset[str] = frozenset()
    """Names of embeddings and of the last matrix, which muon leaves to adamw."""

    def pattern(self, name: str) -> str:
        """Return the pattern that decides for a parameter; "" if none matches."""
        return next((pattern for pattern in self.table if fnmatchcase(name, pattern)), "")

    def __getitem__(self, pattern: str) -> ParameterGroup:
        return self.table.get(pattern, DEFAULT_GROUP)

    def freeze(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if self[self.pattern(name)].frozen:
                p.requires_grad_(False)

    def words(self) -> Iterator[str]:
        for pattern, group in self.table.items():
            given = {"lr": group.lr, "weight_decay": group.weight_decay}
            changes = [f"{key} {value:g}" for key, value in given.items() if value is not None]
            text = "frozen" if group.frozen else ", ".join(changes) or "as the rest"
            yield f"{self.sizes[pattern]:,} parameters {pattern!r}: {text}"
        if self.frozen:
            total = sum(self.sizes.values())
            yield f"{total - self.frozen:,} parameters to train = {total:,} - {self.frozen:,} frozen"


def resolve_groups(workload: Workload, train: Train, model: nn.Module) -> ParameterGroups:
    """Return the groups of a model, and freeze; raise UserError for an idle pattern."""
    names, given = [name for name, _ in model.named_parameters()], ParameterGroups(train.groups)
    table = {**train.groups, **_read_workload_groups(workload, model), **train.groups}
    for pattern in [pattern for pattern in table if pattern not in train.groups]:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if matched and all(map(given.pattern, matched)):  # the run file decides for all of them
            del table[pattern]
    groups = ParameterGroups(table)
    sizes = dict.fromkeys([*table, ""], 0)
    for name, p in model.named_parameters():
        sizes[groups.pattern(name)] += count_elements(p)
    for pattern in table:
        if not pattern or not sizes[pattern]:
            _reject_pattern(pattern, groups, names)
    groups.freeze(model)
    frozen = sum(count_elements(p) for p in model.parameters() if not p.requires_grad)
    if frozen == sum(sizes.values()):
        kind = f"the model ({type(model).__name__})"
        what = f"all {frozen:,} parameters of {kind} are frozen" if frozen else f"{kind} has no parameters"
        raise invalid_workload("model", f"{what}; there must be one to train")
    return ParameterGroups(table, sizes, frozen, find_ends(model))


def find_ends(model: nn.Module) -> frozenset[str]:
    """Return the names of embeddings and of the last matrix."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    found = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, tables)]
    return frozenset([*found, *[name for name, p in model.named_parameters() if p.ndim > 1][-1:]])


def _read_workload_groups(workload: Workload, model: nn.Module) -> dict[str, ParameterGroup]:
    found: Any = workload.groups(model)
    if not isinstance(found, Mapping):
        returned = f"groups(model) returned {type(found).__name__}"
        raise invalid_workload("groups", f'{returned}; return a dict as  {{"encoder.*": {{"lr": 1e-4}}}}')
    groups = {}
    for pattern, values in found.items():
        try:
            groups[str(pattern)] = ParameterGroup.model_validate(values)
        except ValidationError as error:
            key, problem = error.errors()[0]["loc"][0], error.errors()[0]["msg"]
            known = ", ".join(ParameterGroup.model_fields)
            reason = f"groups(model): {pattern!r}: {key}: {problem}; keys are {known}"
            raise invalid_workload("groups", reason) from None
    return groups


def _reject_pattern(pattern: str, groups: ParameterGroups, names: list[str]) -> None:
    first = next((groups.pattern(name) for name in names if fnmatchcase(name, pattern)), "")
    near = did_you_mean(pattern, [f"{name.rpartition('.')[0]}.*" for name in names] + names, cutoff=0.65)
    reason = f"no parameter has a name like {pattern!r}{near or '; names are ' + join_names(names)}"
    if first:
        reason = f"all that {pattern!r} matches is matched by {first!r} before it; put the narrower one first"
    raise UserError(f"train.groups: {reason}", code="invalid-value", key="train.groups")


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether it is a DTensor, without importing them, which takes seconds."""
    return hasattr(tensor, "device_mesh")


@dataclass(frozen=True)
class LocalParameter:
    name: str
    param: nn.Parameter
    data: Tensor  # plain, and in the memory of the parameter
    copies: int  # ranks of a stage that hold the same numbers, this one included
    cut: Callable[[Tensor], Tensor] = lambda like: like
    """Returns this rank's part of a tensor like the parameter, as a plain tensor."""
    whole: Callable[[Tensor], Tensor] = lambda local: local
    """Returns a tensor like `data` as a checkpoint sees it: with its place in the whole."""
    stages: int = 1  # of a pipeline, that hold it

    def gather(self, like: Tensor) -> Tensor:
        """Return the whole of a tensor of which this rank has a part."""
        whole = self.whole(like)
        if not is_sharded(whole):
            return whole
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # two gathers are no fault
        return whole.full_tensor()

    def divide(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        like = self.whole(self.data)
        return _distribute_like(like, whole).to_local() if is_sharded(like) else whole


class LocalParameters(Sequence[LocalParameter]):
    """All that a rank updates, in the order of the model."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        group: Any = None,
        after_update: Callable[[], None] = lambda: None,
        after_gradients: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep parameters, which are divided in the `group`, and what completes updates and gradients."""
        self._all = list(parameters)
        self._by_data = {id(part.data): part for part in parameters}
        self.group, self.after_update, self._after_gradients = group, after_update, after_gradients

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    @property
    def divided(self) -> bool:
        return self.group is not None

    def attach_gradients(self) -> None:
        """Set `.grad` of each local part from the gradient of its parameter."""
        for part in self._all:
            if part.data is not part.param and part.param.grad is not None:
                part.data.grad = part.cut(part.param.grad)
        self._after_gradients()

    def complete_gradients(self) -> None:
        """Set a gradient of 0 on parameters that took no part in the loss."""
        for part in self._all:
            if part.data.grad is None:
                part.data.grad = torch.zeros_like(part.data)

    def clear_gradients(self) -> None:
        for part in self._all:
            part.param.grad = part.data.grad = None

    def sum_squared_gradients(self) -> Tensor:
        """Return this rank's share of the squared gradient norm, in fp64."""
        by_copies: dict[int, list[Tensor]] = {}
        for part in self._all:
            if part.data.grad is not None:
                by_copies.setdefault(part.copies * part.stages, []).append(part.data.grad)
        squares = []
        for copies, grads in by_copies.items():
            kind = torch.promote_types(grads[0].dtype, torch.float32) if grads[0].is_cuda else torch.float64
            norms = torch.stack(torch._foreach_norm(grads, 2, dtype=kind))
            square = torch.linalg.vector_norm(norms, dtype=torch.float64).square()
            squares.append(square if copies == 1 else square / copies)
        if len(squares) == 1:
            return squares[0]
        return sum(squares, torch.zeros((), dtype=torch.float64, device=self._all[0].data.device))

    def find(self, data: Tensor) -> LocalParameter:
        return self._by_data[id(data)]

    def norms(self, of: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the norm of each whole tensor, by this rank's part, which is like that in `of`."""
        found = list(torch._foreach_norm(list(tensors)))
        if self.group is None:
            return found
        copies = found[0].new_tensor([self.find(data).copies for data in of], dtype=torch.float64)
        squares = torch.stack(found).double().square() / copies
        dist.all_reduce(squares, group=self.group)
        return list(squares.sqrt().to(found[0].dtype).unbind())


def collect_local_parameters(modules: Sequence[nn.Module], ranks: int, group: Any = None) -> LocalParameters:
    """Collect what this rank updates: tensors, or local parts of DTensors over `ranks`."""
    found = [
        _wrap_dtensor(name, p, ranks) if is_sharded(p) else LocalParameter(name, p, p, ranks)
        for module in modules
        for name, p in module.named_parameters()
        if p.requires_grad
    ]
    divided = any(part.copies != ranks for part in found)
    return LocalParameters(found, group if divided else None)


def _wrap_dtensor(name: str, param: Any, ranks: int) -> LocalParameter:
    """Wrap the local part of a DTensor, with functions to cut its gradient and to place it."""
    mesh, placements = param.device_mesh, param.placements
    parts = math.prod(mesh.size(axis) for axis, placement in enumerate(placements) if not placement.is_replicate())

    def cut(like: Any) -> Tensor:
        assert is_sharded(like), f"the gradient of {name} is a {type(like).__name__}"
        if like.placements != placements:  # a sum that is still to be taken
            like = like.redistribute(placements=placements)
        return like.to_local()

    data = param.detach().to_local()
    whole = partial(place_in_whole, mesh, placements, data, param)
    return LocalParameter(name, param, data, ranks // parts, cut, whole)


def place_in_whole(mesh: Any, placements: Any, data: Tensor, param: Tensor, local: Tensor) -> Tensor:
    """Return a local part as a DTensor, smaller than the parameter if a value serves several."""
    from torch.distributed.tensor import DTensor

    if local.ndim != data.ndim:  # a number that is the same for all of it
        return local
    each = zip(local.shape, data.shape, param.shape, strict=True)
    shape = torch.Size(mine * size // held if held else size for mine, held, size in each)
    stride = param.stride() if shape == param.shape else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def find_shared_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, index of a module, index of another that has the same parameter)."""
    owner: dict[int, int] = {}
    for index, module in enumerate(modules):
        for name, p in module.named_parameters():
            if owner.setdefault(id(p), index) != index:
                yield name, owner[id(p)], index


def copy_whole(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter, or its part into a shard."""
    parameter.copy_(_distribute_like(parameter, whole.to(parameter.device)) if is_sharded(parameter) else whole)


def _distribute_like(like: "DTensor", whole: Tensor) -> "DTensor":
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
