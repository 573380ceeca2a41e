"""Accelerated EM: each step is one read of all documents.

A pass makes the EM step of L at a point (L, F) and the statistic of F, which the ranks sum: the point's image, whose
loss is never higher. The next point lies beyond the image, on the line from the image before, in logarithms (Nesterov's
momentum). Where the loss rises, the fit returns to the last good image and takes smaller leaps.
"""

import math
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import InvalidData
from paceline.workload import FitEnd
from paceline.workloads.topics.fitting.passes import ReadPasses
from paceline.workloads.topics.sections import FitOptions

Tensor = Any  # torch is not typed here
LEAST = 1e-20  # of any share: keeps products and quotients within float32
FARTHEST = 10.0  # factor by which a share may change in one leap, before the momentum's power is taken
WINDOW = 10
FAR_APART = 50  # passes between two measurements of how much the topics have moved
BACK = 0.25  # of its momentum that a fit keeps after a leap that was too long


@dataclass(frozen=True)
class PassResult:
    loss: float
    residual: float
    accepted: bool
    flagged: bool
    step_s: float
    data_s: float
    comm_s: float
    exposed_s: float


class AcceleratedEM:
    """The state of a fit and its step. `L` holds this rank's documents; F is transposed, (terms, k)."""

    def __init__(self, documents: ReadPasses, L: Tensor, Ft: Tensor, options: FitOptions, everyone: int = 0) -> None:
        """Begin at a point. `everyone`: the documents of all ranks, if there are others."""
        self.documents, self.L, self.Ft, self.options = documents, L, Ft, options
        self.accelerate = True
        self.check = 1  # passes per loss: on some devices the loss takes half as long as the rest of a pass
        self.losses: list[float] = []
        self.passes = 0
        self.momentum = self.residual = self.moved = self.drifted = 1.0
        self.drift = 1.0  # share of the topics' mass that moved between two measurements, agreed on by all ranks
        self.alone = not everyone
        self.leads = self.alone or dist.get_rank() == 0
        self.all_documents = everyone or len(L)
        self.L_before, self.Ft_before = L.clone(), Ft.clone()
        self.L_safe, self.Ft_safe = self.L_before, self.Ft_before
        self.has_before = self.leaped = False
        self.turned = 0.0  # above 0 where a step points back: the leap was too long
        self.S = torch.zeros_like(self.Ft)
        self.Ft_earlier = self.Ft_before

    @property
    def end(self) -> FitEnd | None:
        if self.passes >= self.options.passes:
            return FitEnd.MOST_PASSES
        if len(self.losses) <= self.window or self.residual > self.options.residual:
            return None
        return FitEnd.CONVERGED if self._gains_nothing or self.drift <= self.options.steady else None

    @property
    def _gains_nothing(self) -> bool:
        return self.gain(self.window) <= self.options.tolerance

    def end_words(self) -> str:
        if self.end is FitEnd.MOST_PASSES:
            gained = f", and the last ones still gained {self.gain(1):.1e} each" if len(self.losses) > 1 else ""
            return f"not converged: {self.options.passes:,} passes were done{gained}"
        if self._gains_nothing:
            return f"converged: gain {self.gain(self.window):.1e} a pass, residual {self.residual:.1e}"
        return f"the topics no longer change: {100 * self.drift:.2g} % of their mass moved in {FAR_APART} passes"

    @property
    def window(self) -> int:
        return max(1, WINDOW // self.check)

    @property
    def converged(self) -> bool:
        return self.end is FitEnd.CONVERGED

    def gain(self, losses: int, before: int = 0) -> float:
        """Return the mean relative gain per pass over so many losses, up to the one `before` the last."""
        first, last = self.losses[-1 - losses - before], self.losses[-1 - before]
        return (first - last) / (losses * self.check) / abs(self.losses[-1])

    @property
    def first_gain(self) -> float:
        few = self.losses[: self.window + 1]
        return (few[0] - few[-1]) / (self.window * self.check) / abs(self.losses[-1])

    def step(self, flag: bool = False) -> PassResult:
        """Run one pass over all documents, all-reduced over ranks; a flag set on one rank is returned on all."""
        began = perf_counter()
        data_s = 0.0
        state = (self.moved, self.turned, self.drifted)  # of one rank, so that all decide the same
        state = state if self.leads else (0.0, 0.0, 0.0)
        sums = torch.tensor([0.0, flag, *state], dtype=torch.float64, device=self.Ft.device)
        self.S.zero_()
        checked = not self.losses or self.passes % self.check == 0
        waiting = perf_counter()
        for first, last, work in self.documents():
            data_s += perf_counter() - waiting
            sums[0] += work(self.L[first:last], self.Ft, self.S, loss=checked)
            waiting = perf_counter()
        data_s += perf_counter() - waiting
        self.L.clamp_min_(LEAST)
        sent = perf_counter()
        pending = [] if self.alone else [dist.all_reduce(part, async_op=True) for part in (self.S, sums)]
        leap = self._compute_leap()  # overlaps with the all-reduce
        beyond = self._extrapolate(self.L, self.L_before, 1, leap) if leap else None
        waited = perf_counter()
        for work in pending:
            work.wait()
        landed = perf_counter()
        total, flags, self.residual, turned, self.drift = sums.tolist()
        if turned > 0 and not checked:  # the loss is not known: restart the momentum
            self.momentum = 1.0
        found, accepted = self._accept_or_go_back(total + self.all_documents if checked else None, leap, beyond)
        if self.passes % FAR_APART == 0:
            if self.passes > FAR_APART:  # the first topics were only a start
                self.drifted = float((self.Ft_before - self.Ft_earlier).abs().sum() / (2 * self.Ft_before.shape[1]))
            self.Ft_earlier = self.Ft_before
        comm_s, exposed_s = (landed - sent, landed - waited) if pending else (0.0, 0.0)
        step_s = perf_counter() - began
        return PassResult(found, self.residual, accepted, flags > 0, step_s, data_s, comm_s, exposed_s)

    def result(self) -> tuple[Tensor, Tensor]:
        return self.L_before, self.Ft_before

    def final_loss(self) -> float:
        """Return the loss of the result, by one more read; a result above the last loss is dropped."""
        loss = self._compute_loss()
        if self.check > 1 and not loss <= self.losses[-1]:
            self._restore_safe()
            loss = self._compute_loss()
        return loss

    def _compute_loss(self) -> float:
        L, Ft = self.result()
        total = torch.zeros((), dtype=torch.float64, device=Ft.device)
        for first, last, work in self.documents():
            total += work(L[first:last].clone(), Ft, self.S)
        if not self.alone:
            dist.all_reduce(total)
        return float(total) + self.all_documents

    def _accept_or_go_back(self, loss: float | None, leap: float, beyond: Tensor | None) -> tuple[float, bool]:
        """Accept the image and leap, or return to the last image whose loss is known and was accepted."""
        self.passes += 1
        if loss is not None:
            if self.leaped and not loss <= self.losses[-1]:
                self._restore_safe()
                return self.losses[-1], False
            if not math.isfinite(loss):
                raise InvalidData("the loss is not finite: divide the counts by their largest value")
            self.losses.append(loss)
        expected = self.S.mul_(self.Ft).clamp_min_(LEAST)
        image = expected.div(expected.sum(0, keepdim=True))
        step = image - self.Ft
        self.moved = float(step.abs().sum() / (2 * self.Ft.shape[1]))
        self.turned = -float((step * (image - self.Ft_before) / image).sum()) if self.check > 1 else 0.0
        self.momentum = self._next_momentum()
        F_beyond = image if beyond is None else self._extrapolate(image, self.Ft_before, 0, leap)
        self.L, self.L_before = (self.L_before.copy_(self.L) if beyond is None else beyond), self.L
        self.Ft, self.Ft_before = F_beyond.clone() if F_beyond is image else F_beyond, image
        self.has_before, self.leaped = True, beyond is not None
        if self.check == 1:
            self.L_safe, self.Ft_safe = self.L_before, self.Ft_before
        elif loss is not None:
            self.L_safe, self.Ft_safe = self.L_before.clone(), image
        return self.losses[-1], True

    def _restore_safe(self) -> None:
        self.L.copy_(self.L_safe)
        self.Ft.copy_(self.Ft_safe)
        self.L_before.copy_(self.L_safe)
        self.Ft_before = self.Ft_safe
        self.has_before = self.leaped = False
        self.momentum = max(1.0, self.momentum * BACK)

    def _compute_leap(self) -> float:
        return (self.momentum - 1) / self._next_momentum() if self.accelerate and self.has_before else 0.0

    def _next_momentum(self) -> float:
        return (1 + math.sqrt(1 + 4 * self.momentum**2)) / 2

    @staticmethod
    def _extrapolate(image: Tensor, before: Tensor, over: int, leap: float) -> Tensor:
        """Return the point beyond the image, on the line from the image before."""
        point = (image / before).clamp_(1 / FARTHEST, FARTHEST).pow_(leap).mul_(image).clamp_min_(LEAST)
        return point.div_(point.sum(over, keepdim=True))
