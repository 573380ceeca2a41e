"""Ways to train that a plan can price and training does not do (yet): said as such wherever they are shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.errors import UserError, did_you_mean
from paceline.planner.cost_model import CostModel
from paceline.planner.formulas.placement import DTYPE_SIZES
from paceline.planner.training_cost import TrainingCostModel, moments_of

STATE_BLOCK = 256
"""Values of an 8-bit state that share one scale in fp32."""
WHAT_IF_OPTIONS = {
    "pure-bf16": "weights, gradients and optimiser states in bf16, with no copy in fp32",
    "8bit-states": "optimiser states in 8 bits",
    "context=N": "each sequence divided among N devices",
}
WHAT_IF_EXAMPLE = "--what-if pure-bf16,8bit-states,context=4"


@dataclass(frozen=True)
class WhatIf:
    pure_bf16: bool = False
    states_8bit: bool = False
    context: int = 1
    """Devices that divide a sequence."""

    def __bool__(self) -> bool:
        return self != WhatIf()

    def words(self) -> str:
        said = [WHAT_IF_OPTIONS["pure-bf16"]] * self.pure_bf16 + [WHAT_IF_OPTIONS["8bit-states"]] * self.states_8bit
        said += [f"each sequence divided among {self.context} devices"] * (self.context > 1)
        return "; ".join(said)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def applied(self, subject: CostModel) -> CostModel:
        if not self:
            return subject
        if not isinstance(subject, TrainingCostModel):
            raise UserError(f"--what-if: {subject.workload} is not trained by gradients; leave it out")
        train, numbers, blocks = subject.train, subject.numbers, subject.blocks
        if self.pure_bf16:
            if train.precision != "bf16":
                raise UserError(
                    f"--what-if pure-bf16: train.precision is {train.precision}; type  train.precision=bf16"
                )
            numbers = DTYPE_SIZES["pure_bf16"]
            blocks = tuple(replace(block, half_params=0.0) for block in blocks)  # all are, and none more than others
        moments, averages = moments_of(train)
        each = 1 + 4 / STATE_BLOCK if self.states_8bit else numbers.weight_bytes
        numbers = replace(numbers, state_bytes=moments * each + averages * numbers.weight_bytes)
        if self.context > 1 and not any(block.attention for block in blocks):
            raise UserError(f"--what-if context={self.context}: {subject.workload} has no sequences to divide")
        return replace(subject, blocks=blocks, numbers=numbers, context=self.context)


def parse_what_if(text: str) -> WhatIf:
    """`pure-bf16,8bit-states,context=4`."""
    found: dict[str, Any] = {}
    for word in filter(None, (word.strip().lower() for word in text.split(","))):
        name, _, value = word.partition("=")
        if name == "context":
            if not value.isdecimal() or int(value) < 2:
                raise UserError(f"--what-if: {word!r} is not possible; give a number of 2 or more, as  context=4")
            found["context"] = int(value)
        elif word == "pure-bf16":
            found["pure_bf16"] = True
        elif word == "8bit-states":
            found["states_8bit"] = True
        else:
            hint = did_you_mean(word, WHAT_IF_OPTIONS) or f"; known: {', '.join(WHAT_IF_OPTIONS)}"
            raise UserError(f"--what-if: {word!r} is not known{hint}")
    if not found:
        raise UserError(f"--what-if: nothing was said; write it as  {WHAT_IF_EXAMPLE}")
    return WhatIf(**found)
