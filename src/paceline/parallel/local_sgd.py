"""Models that train alone and are joined now and then: local SGD and DiLoCo.

Each rank updates its own model with its own share of the batch. Every `parallel.local_steps` steps, and before every
evaluation and checkpoint, the models become one again:

    local_sgd   the mean of all models
    diloco      the last common model, moved towards that mean by an outer optimiser: SGD with Nesterov momentum
                (Douillard et al., 2023)

Between two joins nothing is sent but a few numbers for the log. The optimisers' moments stay each rank's own; before a
checkpoint they are averaged, on all ranks, so that a resumed run finds what the run that goes on has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.flat import average
from paceline.record.timers import CollectiveTimer

OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
"""Both as the authors of DiLoCo chose them."""


class LocalSGD:
    """The models of all ranks: apart between two joins, one after each."""

    entry = "outer"
    hook: Callable[..., torch.futures.Future[Tensor]] | None = None

    def __init__(
        self,
        model: nn.Module,
        every: int,
        timer: CollectiveTimer,
        outer: bool,
        lr: float = OUTER_LR,
        momentum: float = OUTER_MOMENTUM,
    ) -> None:
        """`outer`: DiLoCo. All ranks begin with the main rank's model."""
        self.every, self.timer, self.lr, self.momentum = every, timer, lr, momentum
        self.params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self.own_models = dist.is_initialized()
        if self.own_models:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        self.anchor = {name: p.clone() for name, p in self.params.items()} if outer else {}
        """The last common model."""
        self.velocity = {name: torch.zeros_like(p) for name, p in self.anchor.items()}
        self._joined_at = -1

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"anchor": self.anchor, "velocity": self.velocity} if self.anchor else {}

    def average_models(self, step: int, now: bool) -> None:
        """Make the models one where that is due, and once after a step however often it is asked for."""
        if step == self._joined_at or not (now or step % self.every == 0):
            return
        self._joined_at = step
        with self.timer.blocking():
            average(self.params.values())
        if self.anchor:
            self._outer_step()

    @torch.no_grad()
    def _outer_step(self) -> None:
        """The way from the mean back to the last common model is the gradient of the outer optimiser."""
        params, anchors, velocities = (list(d.values()) for d in (self.params, self.anchor, self.velocity))
        gradients = torch._foreach_sub(anchors, params)
        torch._foreach_mul_(velocities, self.momentum)
        torch._foreach_add_(velocities, gradients)
        torch._foreach_add_(gradients, velocities, alpha=self.momentum)
        torch._foreach_add_(anchors, gradients, alpha=-self.lr)
        torch._foreach_copy_(params, anchors)

    def average_state(self, moments: Iterable[Tensor]) -> None:
        """The moments of the ranks' optimisers become their mean."""
        average(moments)
