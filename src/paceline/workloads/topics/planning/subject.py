"""The planning subject of a topic model: a step is a pass over all documents, and ranks divide nothing but those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.layout import Layout
from paceline.planning.advice import times
from paceline.planning.formulas.numbers import NUMBERS
from paceline.planning.passes import PassSubject, rows_per_rank
from paceline.planning.price import Price
from paceline.planning.site import Where
from paceline.planning.subject import TIMES, Wording
from paceline.record.units import duration, size
from paceline.spec import RunSpec
from paceline.workloads.topics.planning.counted import Counted, counted
from paceline.workloads.topics.planning.pricing import PassMemory, pass_memory, pass_time, start_s
from paceline.workloads.topics.sizes import MOST_PASSES

if TYPE_CHECKING:
    from paceline.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class TopicsSubject(PassSubject):
    counts: Counted

    model: ClassVar[str] = "a topic model"
    wording: ClassVar[Wording] = replace(
        PassSubject.wording,
        layout="counts",
        batch="these counts",
        times={
            **TIMES,
            "data_s": "waiting for counts",
            "compute_s": "one read of the counts",
            "update_s": "the next point",
        },
        to_fit="Take more devices or larger ones, or a smaller model.k: L and F must fit, counts need not.",
    )

    @property
    def params(self) -> float:
        return self.counts.k * (self.counts.documents + self.counts.terms)

    @property
    def flops_per_sample(self) -> float:
        """Three products of each count."""
        return 6.0 * self.counts.k * round(self.counts.per_document)

    def headline(self) -> str:
        return f"{self.name}: {self.counts.words()}; {self.steps:,} passes, fewer if converged before"

    def layout_name(self, price: Price) -> str:
        """Where its counts come from."""
        assert isinstance(price.memory, PassMemory)
        return price.memory.tier

    def memory(self, layout: Layout, where: Where) -> PassMemory:
        return pass_memory(self.counts, rows_per_rank(layout), layout.ranks, where)

    def price(self, layout: Layout, where: Where) -> Price:
        documents, memory = rows_per_rank(layout), self.memory(layout, where)
        time = pass_time(self.counts, documents, layout.ranks, where, memory)
        return Price(layout, where, time, memory, start_s(self.counts, documents, layout.ranks, where, time.step_s))

    def details(self) -> dict[str, Any]:
        return {"counts": asdict(self.counts)}

    def advice(self, plan: Plan) -> Iterator[str]:
        """Whether more devices pay, and what the passes wait for."""
        assert plan.chosen is not None
        chosen, most, counts = plan.chosen, plan.rows[-1], self.counts
        p = chosen.price
        if most.devices == 1:
            yield f"One device: a pass over all documents takes {duration(p.step_s)}."
        elif chosen.devices == 1:
            slow = most.price.time
            yield (
                f"Stay on one device, where a pass takes {duration(p.step_s)}: {most.devices} would run at "
                f"{times(most.speedup)}. Each would work {duration(slow.compute_s)} and spend "
                f"{duration(slow.comm_s + slow.update_s + slow.overhead_s)} on what does not shrink: sums over ranks, "
                "topics, launches."
            )
        else:
            yield (
                f"{chosen.devices} devices will run at {times(chosen.speedup)}: in each pass one reads "
                f"{size(counts.documents * counts.document_bytes / chosen.devices)} of counts, works "
                f"{duration(p.time.compute_s)}, and adds up {size(4.0 * counts.k * counts.terms)} with the others in "
                f"{duration(p.time.comm_s)}."
            )
        if p.waits_for_data:
            where = "disk" if p.memory.disk_bytes else "host memory"
            amount = size(p.memory.disk_bytes or p.memory.host_bytes)
            yield (
                f"Counts do not fit: {amount} of each rank come from {where} in every pass, which waits "
                f"{duration(p.time.data_s)} for them. More devices hold more; compact shards are smaller to read than "
                ".npy."
            )


def subject(spec: RunSpec, samples: int | None, tokens: float | None) -> TopicsSubject:
    counts, assumptions = counted(spec, samples, tokens)
    return TopicsSubject(
        name=spec.name,
        workload=spec.workload,
        global_batch=counts.documents,
        numbers=NUMBERS["fp32"],
        steps=spec.train.steps or spec.train.epochs or MOST_PASSES,
        samples=counts.documents,
        unit="documents",
        assumptions=tuple(assumptions),
        counts=counts,
    )
