"""What a script keeps in checkpoints beside model and optimiser: objects with `state_dict` and `load_state_dict`.

Tensors are saved as all others are, plain values beside them; anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from paceline.errors import UserError
from paceline.training.checkpoints.saved import Checkpoint, restore

KEPT = "kept"
"""Their entry in a checkpoint."""


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


def kept_tensors(kept: Mapping[str, Stateful]) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in _leaves(kept) if isinstance(leaf, Tensor)}


def kept_values(kept: Mapping[str, Stateful]) -> dict[str, Any]:
    return {name: leaf for name, leaf in _leaves(kept) if not isinstance(leaf, Tensor)}


def restore_kept(checkpoint: Checkpoint, kept: Mapping[str, Stateful]) -> None:
    """Give each object the state that it had when the checkpoint was saved."""
    if not kept:
        return
    if KEPT not in checkpoint.meta:
        raise UserError(f"{checkpoint.path} was saved by a script that kept nothing; leave run.keep out, or begin anew")
    values: dict[str, Any] = dict(checkpoint.meta[KEPT])
    if tensors := {name: leaf.clone() for name, leaf in kept_tensors(kept).items()}:
        restore(checkpoint, {KEPT: tensors})
    for name, thing in kept.items():
        leaves, form = tree_flatten_with_path(thing.state_dict())
        names = [_name(name, path) for path, _ in leaves]
        if missing := [leaf for leaf in names if leaf not in tensors and leaf not in values]:
            raise UserError(f"{checkpoint.path} does not hold {missing[0]}, which run.keep(…) asks for")
        found = [tensors[leaf] if leaf in tensors else values[leaf] for leaf in names]
        thing.load_state_dict(tree_unflatten(found, form))


def _leaves(kept: Mapping[str, Stateful]) -> Iterator[tuple[str, Any]]:
    for name, thing in kept.items():
        for path, leaf in tree_flatten_with_path(thing.state_dict())[0]:
            if not isinstance(leaf, Tensor | bool | int | float | str | None):
                raise UserError(
                    f"run.keep: {_name(name, path)} is {type(leaf).__name__}; a checkpoint holds tensors and numbers"
                )
            yield _name(name, path), leaf


def _name(name: str, path: Any) -> str:
    return f"{name}{keystr(path)}"
