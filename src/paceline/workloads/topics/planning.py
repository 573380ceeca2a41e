"""The cost model of a topic model: a step is a pass over all documents, which ranks divide among them."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.config import RunSpec
from paceline.errors import InvalidValue, UserError
from paceline.io.format import duration, size
from paceline.layout import Layout
from paceline.planner.advice import format_times
from paceline.planner.candidates import PricedLayout
from paceline.planner.cost_model import TIME_TERMS, PassCostModel, PlanWording, rows_per_rank
from paceline.planner.formulas.placement import DTYPE_SIZES
from paceline.planner.rows import EQUALLY_FAST
from paceline.planner.target import PricedCluster
from paceline.workloads.topics.pricing import (
    CountsShape,
    TopicsMemory,
    estimate_pass_memory,
    estimate_pass_time,
    estimate_start_s,
)
from paceline.workloads.topics.sizes import DEFAULT_PASSES, SPARSE_BELOW

if TYPE_CHECKING:
    from paceline.planner.plan import Plan
    from paceline.workloads.topics.files.probe import CountsProbe

ASSUMED_TERMS = 100_000  # where neither the counts nor data.max_terms say


@dataclass(frozen=True, kw_only=True)
class TopicsCostModel(PassCostModel):
    counts: CountsShape

    model: ClassVar[str] = "a topic model"
    wording: ClassVar[PlanWording] = replace(
        PassCostModel.wording,
        layout="counts",
        batch="these counts",
        times={
            **TIME_TERMS,
            "data_s": "waiting for counts",
            "compute_s": "one read of the counts",
            "update_s": "the next point",
        },
        to_fit="Take {devices}, or a smaller model.k: L and F must fit, counts need not.",
    )

    @property
    def params(self) -> float:
        return self.counts.k * (self.counts.documents + self.counts.terms)

    @property
    def flops_per_sample(self) -> float:
        return 6.0 * self.counts.k * round(self.counts.per_document)

    def headline(self) -> str:
        return f"{self.name}: {self.counts.describe()}; {self.steps:,} passes, fewer if converged before"

    def layout_name(self, price: PricedLayout) -> str:
        assert isinstance(price.memory, TopicsMemory)
        return price.memory.tier

    def memory(self, layout: Layout, where: PricedCluster) -> TopicsMemory:
        return estimate_pass_memory(self.counts, rows_per_rank(layout), layout.ranks, where)

    def price(self, layout: Layout, where: PricedCluster) -> PricedLayout:
        documents, memory = rows_per_rank(layout), self.memory(layout, where)
        time = estimate_pass_time(self.counts, documents, layout.ranks, where, memory)
        start_s = estimate_start_s(self.counts, documents, layout.ranks, where, time.step_s)
        return PricedLayout(layout, where, time, memory, start_s)

    def details(self) -> dict[str, Any]:
        return {"counts": asdict(self.counts)}

    def advice(self, plan: "Plan") -> Iterator[str]:
        assert plan.chosen is not None
        chosen, most, counts = plan.chosen, plan.rows[-1], self.counts
        p = chosen.price
        if most.devices == 1:
            yield f"One device: a pass over all documents takes {duration(p.step_s)}."
        elif chosen.devices == 1:
            slow = most.price.time
            as_long = most.speedup > 1 and most.run_s * EQUALLY_FAST >= chosen.run_s
            sooner = ", and the whole fit would end less than 5 % sooner" if as_long else ""
            yield (
                f"Stay on one device, where a pass takes {duration(p.step_s)}: {most.devices} would run at "
                f"{format_times(most.speedup)}{sooner}. Each would work {duration(slow.compute_s)} and spend "
                f"{duration(slow.comm_s + slow.update_s + slow.overhead_s)} on what does not shrink: sums over ranks, "
                "topics, launches."
            )
        else:
            yield (
                f"{chosen.devices} devices will run at {format_times(chosen.speedup)}: in each pass one reads "
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


def build_topics_cost_model(spec: RunSpec, samples: int | None, tokens: float | None) -> TopicsCostModel:
    counts, assumptions = describe_counts(spec, samples, tokens)
    return TopicsCostModel(
        name=spec.name,
        workload=spec.workload,
        global_batch=counts.documents,
        numbers=DTYPE_SIZES["fp32"],
        steps=spec.train.steps or spec.train.epochs or DEFAULT_PASSES,
        samples=counts.documents,
        unit="documents",
        assumptions=tuple(assumptions),
        counts=counts,
    )


def describe_counts(spec: RunSpec, documents: int | None, words: float | None) -> tuple[CountsShape, list[str]]:
    """Return the counts of a run file and what was assumed; `documents` and their mean `words` replace data."""
    _check_parallel(spec)
    model: Any = spec.model
    if documents is not None:
        return _assume_counts(spec, documents, words)
    if words is not None:
        message = "--tokens: words are counted in the data; give --samples DOCUMENTS too, to plan without them"
        raise UserError(message, code="conflict", key="--tokens")
    found = _inspect_counts(spec.data)
    if model.k > min(found.documents, found.terms):
        most = f"at most {min(found.documents, found.terms)}"
        message = f"model.k={model.k} topics for {found.documents:,} documents and {found.terms:,} terms: give {most}"
        raise InvalidValue(message, key="model.k")
    sizes = (found.documents, found.terms, model.k, found.nonzeros, found.sparse, found.element_bytes)
    counts = CountsShape(*sizes, found.stored_bytes, found.resident, model.rows == "newton")
    return counts, [found.assumed] if found.assumed else []


def _inspect_counts(data: Any) -> "CountsProbe":
    from paceline.workloads.topics.files.probe import CountsProbe, probe_counts
    from paceline.workloads.topics.files.reading import read_counts
    from paceline.workloads.topics.files.texts import TextOptions

    if data.path is None:
        message = "data.path is missing: give  data.path=counts.npz,  or  --samples DOCUMENTS [--tokens WORDS]"
        raise UserError(message, code="missing-value", key="data.path")
    options = TextOptions(**data.text_options())
    if (looked := probe_counts(data.path.expanduser(), options)) is not None:
        return looked
    found = read_counts(data.path, fractional=data.fractional, text=options)
    values: Any = found.block(0, 1).values
    element = (getattr(values, "data", values) if found.sparse else values).dtype.itemsize
    nonzeros = float(found.weights().sum()) if found.sparse else float(found.documents) * found.terms
    sizes = (found.documents, found.terms, nonzeros, found.sparse, element)
    return CountsProbe(*sizes, float(found.stored_bytes), found.resident)


def _assume_counts(spec: RunSpec, documents: int, words: float | None) -> tuple[CountsShape, list[str]]:
    model: Any = spec.model
    data: Any = spec.data
    terms = data.max_terms or ASSUMED_TERMS
    assumed = [] if data.max_terms else [f"{terms:,} terms (set by data.max_terms=N)"]
    share = 1.0
    if words is None:
        assumed.append("dense counts of 8 bits; short documents have fewer: give  --tokens WORDS")
    else:
        share = 1 - math.exp(-words / terms)  # if all terms were equally likely; real text has fewer
        assumed.append(f"{terms * share:,.0f} different terms in a document of {words:,.0f} words, at most")
    sparse = share < SPARSE_BELOW
    nonzeros, newton = documents * (terms * share if sparse else float(terms)), model.rows == "newton"
    found = CountsShape(documents, terms, model.k, nonzeros, sparse, 1, stored_bytes=0.0, resident=False, newton=newton)
    return replace(found, stored_bytes=documents * found.document_bytes), assumed


def _check_parallel(spec: RunSpec) -> None:
    parallel = spec.parallel
    split = parallel.tensor * parallel.pipeline > 1 or parallel.offload
    if parallel.strategy not in ("auto", "single", "ddp") or split or parallel.reduce != "exact":
        message = "workload=topics only spreads documents over ranks: of the section parallel give ranks alone"
        raise UserError(message, code="not-supported", key="parallel")
