"""What `run.step` may be given, and what is certainly wrong."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor

from paceline.errors import UserError

LINE = 'run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))'
MEAN = 1
"""The number by which torch's losses remember that they are means."""
PASSED_ON = ("ToCopyBackward", "CloneBackward", "ViewBackward", "SqueezeBackward", "AliasBackward", "_DDPSink")


def check_loss(total: Any, count: Any) -> None:
    """Refuse what is not the sum of losses that depend on the model, and their number."""
    wrong = ""
    if not isinstance(total, Tensor):
        wrong = f"the loss is {type(total).__name__}, not a tensor"
    elif total.ndim:
        wrong = f"the loss has the shape {list(total.shape)}"
    elif not total.requires_grad:
        wrong = "the loss does not depend on the model's parameters"
    elif isinstance(count, bool) or not (isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1)):
        shape = f" of shape {list(count.shape)}" if isinstance(count, Tensor) else ""
        wrong = f"the count is {type(count).__name__}{shape}, not a number"
    if wrong:
        raise UserError(f"run.step(loss_sum, count): {wrong}; give it a sum and how many losses are in it:  {LINE}")


def refuse_mean(total: Tensor, samples: int) -> None:
    """A mean over several samples shows in what torch noted of its last operation."""
    node: Any = total.grad_fn
    while node is not None and node.name().startswith(PASSED_ON) and node.next_functions:
        node = node.next_functions[0][0]
    if node is None or samples < 2:
        return
    if node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == MEAN:
        raise UserError(
            f"run.step got a mean over the {samples} samples of a pass ({node.name()}); a mean of means depends on how "
            f"the batch is divided, so give it the sum and the count:  {LINE}"
        )
