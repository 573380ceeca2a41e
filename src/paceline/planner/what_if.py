"""Options that a plan can price although training does not support them (yet)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import Code, UserError, did_you_mean
from paceline.io.arguments import option_error
from paceline.planner.cost_model import CostModel
from paceline.planner.formulas.placement import DTYPE_SIZES
from paceline.planner.training_cost import TrainingCostModel, moments_of

STATE_BLOCK = 256  # values of an 8-bit state that share one scale in fp32
WHAT_IF_OPTIONS = {
    "pure-bf16": "weights, gradients and optimiser states in bf16, with no copy in fp32",
    "8bit-states": "optimiser states in 8 bits",
    "context=N": "each sequence divided among N devices",
}

FLAGS = {"pure-bf16": "pure_bf16", "8bit-states": "states_8bit"}


def _reject(problem: str, code: Code = "not-supported") -> UserError:
    return option_error("--what-if", problem, code)


@dataclass(frozen=True)
class WhatIf:
    pure_bf16: bool = False
    states_8bit: bool = False
    context: int = 1

    def __bool__(self) -> bool:
        return self != WhatIf()

    def describe(self) -> str:
        chosen = {"pure-bf16": self.pure_bf16, "8bit-states": self.states_8bit, "context=N": self.context > 1}
        words = (text for option, text in WHAT_IF_OPTIONS.items() if chosen[option])
        return "; ".join(words).replace(" N ", f" {self.context} ")

    def apply(self, cost_model: CostModel) -> CostModel:
        if not self:
            return cost_model
        if not isinstance(cost_model, TrainingCostModel):
            raise _reject(f"{cost_model.workload} is not trained by gradients; leave it out")
        train, numbers, blocks = cost_model.train, cost_model.numbers, cost_model.blocks
        if self.pure_bf16:
            if train.precision != "bf16":
                raise _reject(f"pure-bf16: train.precision is {train.precision}; type  train.precision=bf16")
            numbers = DTYPE_SIZES["pure_bf16"]
            blocks = tuple(replace(block, half_params=0.0) for block in blocks)  # all are, and none more than others
        moments, averages = moments_of(train)
        each = 1 + 4 / STATE_BLOCK if self.states_8bit else numbers.weight_bytes
        numbers = replace(numbers, state_bytes=moments * each + averages * numbers.weight_bytes)
        if self.context > 1 and not any(block.attention for block in blocks):
            raise _reject(f"context: {cost_model.workload} has no sequences to divide")
        return replace(cost_model, blocks=blocks, numbers=numbers, context=self.context)


def parse_what_if(text: str) -> WhatIf:
    """Parse `pure-bf16,8bit-states,context=4`."""
    found: dict[str, Any] = {}
    for word in filter(None, (word.strip().lower() for word in text.split(","))):
        name, _, value = word.partition("=")
        if name == "context":
            if not value.isdecimal() or int(value) < 2:
                raise _reject(f"{word!r} is not possible; give 2 or more, as  context=4", "invalid-value")
            found["context"] = int(value)
        elif word in FLAGS:
            found[FLAGS[word]] = True
        else:
            hint = did_you_mean(word, WHAT_IF_OPTIONS) or f"; known: {', '.join(WHAT_IF_OPTIONS)}"
            raise _reject(f"{word!r} is not known{hint}", "invalid-value")
    if not found:
        raise _reject("give one, as  --what-if pure-bf16,8bit-states,context=4", "missing-value")
    return WhatIf(**found)
