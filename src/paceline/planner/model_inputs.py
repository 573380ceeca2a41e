"""Facts that cost models are built from: frozen parameters of a model, lengths of labelled texts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.config import ParameterGroup
from paceline.data.corpora.labelled import LabelledCorpus
from paceline.errors import UserError
from paceline.planner.formulas.shape import BlockShape
from paceline.planner.training_cost import LengthStats
from paceline.workload import find_repeated_layers

if TYPE_CHECKING:
    from torch import nn

MAX_LAYERS = 2000  # of a model that is built to see which of its parameters are frozen
USUAL_DEVIATION = 0.4  # of the lengths of texts, over their mean
ASSUMED_FILL = 0.5  # mean length over that of the longest text, if nothing is known of the data


def apply_frozen_groups(
    blocks: tuple[BlockShape, ...], groups: Mapping[str, ParameterGroup], build: "Callable[[], nn.Module]"
) -> tuple[BlockShape, ...]:
    """Set what `groups` freeze of embedding, layer and head; the model is built, on the meta device, only if they do.

    Parameters before the layers count for the embedding, those after for the head.
    """
    if not any(group.frozen for group in groups.values()):
        return blocks
    import torch

    from paceline.parallel.parameters import ParameterGroups

    embedding, layer, head = blocks
    if layer.repeat > MAX_LAYERS:  # a run file may ask for any number
        message = f"train.groups: {layer.repeat:,} layers are too many for a plan; give {MAX_LAYERS:,} or fewer"
        raise UserError(message, code="not-supported", key="train.groups")
    with torch.device("meta"):
        model = build()
    repeated = {id(p) for block in find_repeated_layers(model) for p in block.parameters()}
    held, place, rules = [0, 0, 0], 0, ParameterGroups(groups)
    for name, parameter in model.named_parameters():
        place = 1 if id(parameter) in repeated else 2 if place else 0
        held[place] += parameter.numel() * rules[rules.pattern(name)].frozen
    shares = (held[0], held[1] / layer.repeat, held[2])
    return tuple(
        replace(block, frozen_params=max(block.frozen_params, float(share)))
        for block, share in zip((embedding, layer, head), shares, strict=True)
    )


@dataclass(frozen=True)
class TextStatistics:
    """Labelled texts as they are in the cache or, if they are not, as they usually are."""

    count: int | None
    mean: float
    longest: int
    deviation: float = 0.0
    classes: int = 0
    held_out: int | None = None
    assumptions: tuple[str, ...] = ()

    @classmethod
    def of(cls, corpus: LabelledCorpus, samples: int | None, tokens: float | None) -> "TextStatistics":
        """Return those of a corpus; a number of samples and their mean length replace what was counted."""
        lengths = corpus.train.offsets[1:] - corpus.train.offsets[:-1]
        mean, longest = tokens or float(lengths.mean()), int(lengths.max())
        count, classes = samples or len(corpus.train), len(corpus.classes)
        return cls(count, min(mean, longest), longest, float(lengths.std()), classes, len(corpus.test))

    @property
    def lengths(self) -> LengthStats:
        return LengthStats(self.longest / self.mean, self.deviation / self.mean)

    def estimate_padded_length(self, batch: int, step: int) -> int:
        """Estimate to how many tokens a batch is padded: its longest text, as a multiple of `step`."""
        if self.longest <= self.mean:
            return self.longest
        deviation = self.deviation or USUAL_DEVIATION * self.mean
        longest = self.mean + deviation * math.sqrt(2 * math.log(batch))
        return min(self.longest, math.ceil(longest / step) * step)


def assume_mean_length(longest: int) -> float:
    return max(1.0, ASSUMED_FILL * longest)
