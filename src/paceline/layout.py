"""How one global batch is spread over ranks and passes: the value that the planner prices and the runtime applies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import UserError
from paceline.spec import RunSpec


@dataclass(frozen=True)
class Layout:
    strategy: str
    replicate: int
    global_batch: int
    micro_batch: int

    @property
    def ranks(self) -> int:
        return self.replicate

    def passes(self, samples: int) -> int:
        """Forward and backward passes each rank makes over a global batch of that many samples; the same on all."""
        return max(1, math.ceil(math.ceil(samples / self.ranks) / self.micro_batch))

    def equation(self) -> str:
        """The global batch as a product of what each rank does, or as a sum where it does not divide."""
        passes = self.passes(self.global_batch)
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        each, left = divmod(self.global_batch, self.ranks * passes)
        per_pass = f"{each} per pass" if not left else f"{each} to {each + 1} per pass"
        sign = "=" if not left else "≈"
        return f"{self.global_batch} global {sign} {per_pass} × {ranks} × {passes} accumulated"


def layout_of(spec: RunSpec) -> Layout:
    """The layout a run file asks for; whatever cannot work is said here, before a process starts."""
    parallel, batch = spec.parallel, spec.train.global_batch
    strategy = parallel.strategy
    if strategy == "auto":
        strategy = "ddp" if parallel.ranks > 1 else "single"
    if strategy == "single" and parallel.ranks > 1:
        raise UserError(
            f"parallel.strategy=single runs on 1 rank, but parallel.ranks={parallel.ranks}; use parallel.strategy=ddp"
        )
    if batch < parallel.ranks:
        raise UserError(
            f"train.global_batch={batch} is smaller than parallel.ranks={parallel.ranks}: "
            f"each rank needs a sample; use train.global_batch={parallel.ranks} or more, or parallel.ranks={batch}"
        )
    per_rank = math.ceil(batch / parallel.ranks)
    return Layout(strategy, parallel.ranks, batch, min(parallel.micro_batch or per_rank, per_rank))
