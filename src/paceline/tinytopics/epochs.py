"""The fit behind `fit_model`: an epoch is a pass of Paceline's accelerated EM over all documents."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import UserError
from paceline.launch.process_group import broadcast_from_main
from paceline.tinytopics.counts import choose_engine_device, open_counts
from paceline.tinytopics.models import NeuralPoissonNMF
from paceline.workloads.topics.fitting.engine import AcceleratedEM
from paceline.workloads.topics.fitting.passes import ReadPasses
from paceline.workloads.topics.fitting.problem import MOST_TOPICS, FitProblem, build_problem
from paceline.workloads.topics.in_process import use_device
from paceline.workloads.topics.sections import FitOptions

SCATTER = 0.2  # of the logarithms of the first topics, so that each seed begins elsewhere
OF_ADAM: dict[str, float] = {"base_lr": 0.01, "max_lr": 0.05, "T_0": 20, "T_mult": 1, "weight_decay": 1e-5}
"""What `fit_model` takes for an optimiser that is not there, with the values that its users leave as they are."""
Seen = Callable[[int, float], None]
"""Told the number of an epoch, from 1, and its loss."""
Watch = Callable[[ReadPasses, int], ReadPasses]
"""Given the passes over so many documents, the same passes with somebody looking on."""


@dataclass(frozen=True)
class FitRequest:
    """What is to be fitted, and how long."""

    X: Any
    k: int
    num_epochs: int
    batch_size: int

    def check(self, **of_adam: float) -> None:
        """Refuse what no fit can be made with, and say what has no effect."""
        for name, least in (("k", 1), ("num_epochs", 0), ("batch_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise UserError(f"{name}={value}: give a whole number, {least} or more")
        if self.k > MOST_TOPICS:
            raise UserError(f"k={self.k} topics: give at most {MOST_TOPICS}")
        for name, number in of_adam.items():
            if not number >= (name in ("T_0", "T_mult")):
                raise UserError(f"{name}={number}: give {OF_ADAM[name]:g}, or leave it out; it has no effect")
        changed = [f"{name}={value:g}" for name, value in of_adam.items() if value != OF_ADAM[name]]
        if changed:
            warnings.warn(f"no effect of {', '.join(changed)}: this fit has no learning rate", stacklevel=3)


@dataclass
class Epochs:
    """One rank's part of a fit, or the whole of it where the rank is `alone`."""

    request: FitRequest
    device: torch.device
    alone: bool = True

    def run(self, seen: Seen, watch: Watch | None = None) -> tuple[NeuralPoissonNMF, list[float]]:
        """The model, and for every epoch the loss that its pass found, as a mean over batches.

        A fit that converges does no more passes: for the rest of the epochs, its loss stays what it is.
        """
        ranks = 1 if self.alone else dist.get_world_size()
        counts = open_counts(self.request.X, on_device=self.device.type == "cuda", ranks=ranks)
        model = NeuralPoissonNMF(counts.documents, counts.terms, self.request.k, self.device)
        losses: list[float] = []
        if not self.request.num_epochs:
            return model, losses
        batches = math.ceil(counts.documents / self.request.batch_size)
        where = getattr(counts, "device", choose_engine_device(self.device))
        with use_device(where):
            problem = build_problem(counts, where, fractional=True, alone=self.alone)
            found = self._begin(problem)
            if watch is not None:
                found.documents = watch(problem.documents, len(found.L))
            while found.end is None:
                losses.append(found.step().loss / batches)
                seen(len(losses), losses[-1])
            found.documents = problem.documents
            if left := self.request.num_epochs - len(losses):
                losses += [found.final_loss() / batches] * left
            L, Ft = found.result()
            model.take(self._all_rows(L, counts.documents), Ft.T)
        return model, losses

    def _begin(self, problem: FitProblem) -> AcceleratedEM:
        """At topics that are near the optimum for every seed, scattered, so that seeds differ as people expect."""
        drawn = int(torch.randint((1 << 31) - 1, ()))
        seed = drawn if self.alone else broadcast_from_main(lambda: drawn)
        options = FitOptions(seed=seed, passes=self.request.num_epochs, fractional=True)
        first = problem.begin(self.request.k, options)
        noise = torch.randn(first.Ft.shape, generator=torch.Generator().manual_seed(seed)).to(first.Ft.device)
        Ft = first.Ft * (SCATTER * noise).exp()
        found = problem.at(first.L, Ft / Ft.sum(0), options)
        found.check = 1  # people plot the loss of every epoch
        return found

    def _all_rows(self, L: Tensor, documents: int) -> Tensor:
        """The rows of all ranks, each of which has the next ones."""
        if self.alone:
            return L
        most = -(-documents // dist.get_world_size())
        own = torch.ones(most, L.shape[1], device=L.device)
        own[: len(L)] = L
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts)[:documents]
