"""What `train.groups` freezes of a model that is priced by formulas, whose blocks have no names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import translate
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import UserError
from paceline.planning.formulas.shape import BlockShape
from paceline.spec import ParameterGroup
from paceline.workload import repeated_layers

if TYPE_CHECKING:
    from torch import nn

MOST_COMPARED = 300_000
"""Names with patterns."""


class NamedWeight(NamedTuple):
    name: str
    numbers: int
    repeated: bool
    """It is part of one of the equal layers."""


def weights_of(model: nn.Module) -> list[NamedWeight]:
    """Of a model, which need not have memory."""
    inside = {id(p) for layer in repeated_layers(model) for p in layer.parameters()}
    return [NamedWeight(name, p.numel(), id(p) in inside) for name, p in model.named_parameters()]


def with_frozen(
    blocks: tuple[BlockShape, ...],
    groups: Mapping[str, ParameterGroup],
    weights: Callable[[], Iterable[NamedWeight]],
) -> tuple[BlockShape, ...]:
    """Embedding, layer and head, with what is frozen of each; only then are the `weights` asked for.

    They come in the order of the model: those before the layers count for the embedding, those after for the head.
    """
    if not any(group.frozen for group in groups.values()):
        return blocks
    embedding, layer, head = blocks
    held, place = [0, 0, 0], 0
    patterns = [(re.compile(translate(pattern)), group) for pattern, group in groups.items()]
    for count, (name, numbers, repeated) in enumerate(weights()):
        if count * len(patterns) > MOST_COMPARED:
            raise UserError(
                f"train.groups: the model has more than {MOST_COMPARED // len(patterns):,} parameters by name, too "
                "many for a plan to find those that are frozen; give a model of fewer layers, or fewer patterns"
            )
        place = 1 if repeated else 2 if place else 0
        first = next((group for pattern, group in patterns if pattern.match(name)), None)
        held[place] += numbers if first is not None and first.frozen else 0
    shares = (held[0], held[1] / layer.repeat, held[2])
    return tuple(
        replace(block, frozen_params=max(block.frozen_params, float(share)))
        for block, share in zip((embedding, layer, head), shares, strict=True)
    )
