"""The cost model of a topic model: a step is a pass over all documents, which ranks divide among them.

A pass reads the counts once, makes three products of each, updates rows of L, and sums k × terms over ranks.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from paceline.config import RunSpec
from paceline.errors import InvalidValue, UserError
from paceline.hardware.catalogue import Device
from paceline.hardware.failures import find_slowest
from paceline.io.format import duration, format_quantity, size
from paceline.layout import Layout
from paceline.planner.advice import advise_few_devices, format_times
from paceline.planner.candidates import PricedLayout
from paceline.planner.cost_model import TIME_TERMS, PassCostModel, PlanWording, rows_per_rank
from paceline.planner.formulas.compute import matmul_rate
from paceline.planner.formulas.memory import DeviceMemory
from paceline.planner.formulas.placement import DTYPE_SIZES, Physics
from paceline.planner.formulas.step_time import StepTime, all_reduce_s, build_group, exposed_s
from paceline.planner.target import PricedCluster
from paceline.workloads.topics import sizes

if TYPE_CHECKING:
    from paceline.planner.plan import Plan

ASSUMED_TERMS = 100_000  # where neither the counts nor data.max_terms say
SPECIAL_FLOPS = 16.0
"""Plain operations in whose time a GPU makes one reciprocal or one logarithm."""
SPECIALS = 2.0
CACHED_BANDWIDTH = 1.35
"""Times the memory's bandwidth at which a GPU reads rows of F and adds to rows of S: most are in its cache."""
CORE_COUNT_FLOPS = 160.0
"""Plain operations in whose time a core converts a dense count, divides it and takes its logarithm."""
CORE_NONZERO_FLOPS = 300.0
CORE_GATHERED = 0.16  # fraction of its peak that a core reaches in the products of a nonzero, which are k long
UPDATE_BYTES = 80.0
"""Read and written per element of L and F to find the next point: ratio, power, clamps and sums."""
LAUNCHES = 30.0  # kernels of a pass that no other kernel hides: the loss is waited for
START_S = 1.0
STORAGE_BYTES_S = 6.7e9
"""That one host's storage gave all its devices together: 40 GB in 6 s, published for 4 H100 and for 8 A100."""
HOST_MEMORY = 2.0  # host memory per device, in its own memory, where it is not known: as servers are sold


@dataclass(frozen=True, kw_only=True)
class CountsShape(sizes.CountsSize):
    k: int

    @property
    def per_document(self) -> float:
        return self.nonzeros / self.documents

    @property
    def document_bytes(self) -> float:
        if self.sparse:
            return sizes.POINTER_BYTES + self.per_document * (sizes.INDEX_BYTES + self.element_bytes)
        return float(self.terms * self.element_bytes)

    def describe(self) -> str:
        nonzeros = f"{format_quantity(self.nonzeros, 'G')} nonzeros"
        kept = nonzeros if self.sparse else f"dense, {8 * self.element_bytes} bits each"
        kept += f", {size(self.documents * self.document_bytes)}"
        return f"{self.documents:,} documents × {self.terms:,} terms ({kept}), {self.k} topics"


@dataclass(frozen=True)
class TopicsMemory(DeviceMemory):
    counts_bytes: float
    mixtures_bytes: float
    topics_bytes: float
    operands_bytes: float
    context_bytes: float
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    by_terms_bytes: float = 0.0

    terms: ClassVar[Mapping[str, str]] = {
        "counts_bytes": "counts",
        "by_terms_bytes": "counts by terms, sorting",
        "mixtures_bytes": "L and its copies",
        "topics_bytes": "F, its copies and sums",
        "operands_bytes": "operands, blocks",
        "context_bytes": "driver, libraries",
    }
    divided: ClassVar[Mapping[str, int]] = {"counts_bytes": 0, "by_terms_bytes": 0, "mixtures_bytes": 0}

    @property
    def tier(self) -> str:
        """The lowest place that counts are read from in every pass, and how many of them are there."""
        lowest, place = (self.disk_bytes, "disk") if self.disk_bytes else (self.host_bytes, "host")
        if not lowest:
            return "in memory"
        share = lowest / (self.counts_bytes + self.host_bytes + self.disk_bytes)
        return f"{max(1, round(100 * share))} % on {place}"


def padded_topic_count(k: int, device: Device) -> int:
    """Return the topics of the operands, as the fit on that kind of device pads them."""
    return sizes.pad_core_topics(k) if device.synchronous else sizes.pad_device_topics(k)


def estimate_pass_memory(counts: CountsShape, documents: float, ranks: int, where: PricedCluster) -> TopicsMemory:
    device, physics = where.cluster.device, where.physics
    K, m = padded_topic_count(counts.k, device), counts.terms
    context = physics.context_bytes + (physics.communicator_bytes if ranks > 1 else 0.0)
    held = documents * counts.document_bytes
    operands = 8.0 * m * K
    on_device, on_host, on_disk = held, 0.0, 0.0
    by_terms = 0.0  # beside each byte of the counts on the device
    if device.synchronous:
        if counts.resident:
            on_device = counts.documents * counts.document_bytes  # every rank has read all of them
        else:
            on_device, on_disk = 0.0, held
            operands += float(sizes.BLOCKS * (sizes.CORE_BLOCK_BYTES if counts.sparse else sizes.SCANNED_BYTES))
    else:
        if not counts.sparse:
            held = on_device = documents * counts.element_bytes * math.ceil(m / sizes.PAD) * sizes.PAD
            operands = (documents + m) * K * 6.0
        else:
            by_terms = sizes.SORT_BYTES
        on_device = min(held, sizes.DEVICE_SHARE * max(0.0, device.memory_bytes - context) / (1 + by_terms))
        cluster, host_bytes = where.cluster, HOST_MEMORY * device.memory_bytes
        if cluster.host_bytes is not None:
            host_bytes = cluster.host_bytes / min(ranks, cluster.per_node)
        on_host = min(held - on_device, math.inf if counts.resident else sizes.HOST_SHARE * host_bytes)
        on_disk = held - on_device - on_host
        operands += 2.0 * sizes.BLOCK_BYTES * (1 + by_terms) if on_device < held else 0.0
    return TopicsMemory(
        counts_bytes=on_device,
        mixtures_bytes=4.0 * sizes.L_COPIES * documents * counts.k,
        topics_bytes=4.0 * sizes.F_COPIES * m * counts.k,
        operands_bytes=operands,
        context_bytes=context,
        host_bytes=on_host,
        disk_bytes=on_disk,
        by_terms_bytes=on_device * by_terms,
    )


def estimate_pass_time(
    counts: CountsShape, documents: float, ranks: int, where: PricedCluster, memory: TopicsMemory
) -> StepTime:
    """Estimate the time of a rank's pass. Counts of lower tiers come while those before them are worked on."""
    device, physics = where.cluster.device, where.physics
    work = estimate_pass_work_s(counts, documents, device, physics)
    bandwidth = device.bandwidth_bytes_s * physics.bandwidth_efficiency
    of_rows, of_topics = (UPDATE_BYTES * n * counts.k / bandwidth for n in (documents, counts.terms))
    members = build_group(ranks, 1, where.cluster, physics)
    comm = all_reduce_s(4.0 * counts.k * counts.terms, members, physics, 2)
    exposed = exposed_s(comm, of_rows, physics)  # the next rows of L are found while sums travel
    overhead = LAUNCHES * physics.launch_s
    stored = counts.stored_bytes / (counts.documents * counts.document_bytes)  # of a byte that is worked on
    streamed = memory.host_bytes / (device.pcie_bytes_s * physics.link_efficiency)
    streamed += memory.disk_bytes * stored / disk_bytes_s(members.in_node, physics)
    busy = max(work, streamed) + of_rows + of_topics + overhead
    return StepTime(
        compute_s=work,
        comm_s=comm,
        exposed_s=exposed,
        update_s=of_rows + of_topics,
        overhead_s=overhead,
        waiting_s=physics.spread * find_slowest(ranks) * (busy + exposed) if ranks > 1 else 0.0,
        data_s=max(0.0, streamed - work),
    )


def estimate_pass_work_s(counts: CountsShape, documents: float, device: Device, physics: Physics) -> float:
    """Estimate the arithmetic of a pass over counts that are at hand: three products of each, 6 K operations."""
    n, K = documents * counts.per_document, padded_topic_count(counts.k, device)
    plain = device.peak_flops_s("fp32")
    bandwidth = device.bandwidth_bytes_s * physics.bandwidth_efficiency
    if counts.sparse:
        if device.synchronous:
            return n * (CORE_NONZERO_FLOPS + 6.0 * K / CORE_GATHERED) / plain
        touched = documents * counts.document_bytes + n * 8.0 * K
        return touched / (CACHED_BANDWIDTH * device.bandwidth_bytes_s)
    moved = documents * counts.document_bytes
    if device.synchronous:
        products = 6.0 * counts.k / matmul_rate(device, "fp32", physics)
        return max(n * (products + CORE_COUNT_FLOPS / plain), moved / bandwidth)
    reads = 2 if K > sizes.FUSED_TOPICS else 1
    kind = "fp16" if counts.element_bytes == 1 else "tf32"
    products = (4.0 + 2.0 * reads) * K / matmul_rate(device, kind, physics)
    others = SPECIALS * SPECIAL_FLOPS * (1 + reads) / 2 / plain
    return max(n * (products + others), reads * moved / bandwidth)


def disk_bytes_s(in_node: int, physics: Physics) -> float:
    """Return the rate that a rank reads with: its own, or its part of the host's."""
    return min(physics.input_bytes_s, STORAGE_BYTES_S / in_node)


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
        own = 1.0 if self.counts.resident else documents / self.counts.documents
        in_node = build_group(layout.ranks, 1, where.cluster, where.physics).in_node
        read_s = own * self.counts.stored_bytes / disk_bytes_s(in_node, where.physics)
        return PricedLayout(layout, where, time, memory, START_S + read_s + time.step_s)  # rows of L take a pass

    def details(self) -> dict[str, Any]:
        return {"counts": asdict(self.counts)}

    def advice(self, plan: "Plan") -> Iterator[str]:
        assert plan.chosen is not None
        chosen, slow, counts = plan.chosen, plan.rows[-1].price.time, self.counts
        p, fixed = chosen.price, duration(slow.comm_s + slow.update_s + slow.overhead_s)
        lost = f"spend {fixed} on what does not shrink: sums over ranks, topics, launches"
        yield from advise_few_devices(plan, "device", "a pass over all documents", lost)
        if chosen.devices > 1:
            part = size(counts.documents * counts.document_bytes / chosen.devices)
            sums = f"{size(4.0 * counts.k * counts.terms)} with the others in {duration(p.time.comm_s)}"
            does = f"reads {part} of counts, works {duration(p.time.compute_s)}, and adds up {sums}"
            yield f"{chosen.devices} devices will run at {format_times(chosen.speedup)}: in each pass one {does}."
        if p.waits_for_data:
            where = "disk" if p.memory.disk_bytes else "host memory"
            amount = size(p.memory.disk_bytes or p.memory.host_bytes)
            yield (
                f"Counts do not fit: {amount} of each rank come from {where} in every pass, which waits "
                f"{duration(p.time.data_s)} for them. More devices hold more; shards are smaller to read than .npy."
            )


def build_topics_cost_model(spec: RunSpec, samples: int | None, tokens: float | None) -> TopicsCostModel:
    counts, assumptions = describe_counts(spec, samples, tokens)
    return TopicsCostModel(
        name=spec.name,
        workload=spec.workload,
        global_batch=counts.documents,
        numbers=DTYPE_SIZES["fp32"],
        steps=spec.train.steps or spec.train.epochs or sizes.DEFAULT_PASSES,
        samples=counts.documents,
        unit="documents",
        assumptions=tuple(assumptions),
        counts=counts,
    )


def describe_counts(spec: RunSpec, documents: int | None, words: float | None) -> tuple[CountsShape, list[str]]:
    """Return the counts of a run file and what was assumed; `documents` and their mean `words` replace data."""
    parallel, model = spec.parallel, cast(Any, spec.model)
    split = parallel.tensor * parallel.pipeline > 1 or parallel.offload
    if parallel.strategy not in ("auto", "single", "ddp") or split or parallel.reduce != "exact":
        message = "workload=topics only spreads documents over ranks: of the section parallel give ranks alone"
        raise UserError(message, code="not-supported", key="parallel")
    if documents is not None:
        return _assume_counts(spec, documents, words)
    if words is not None:
        message = "--tokens: words are counted in the data; give --samples DOCUMENTS too, to plan without them"
        raise UserError(message, code="conflict", key="--tokens")
    found, assumed = _inspect_counts(spec.data)
    if model.k > min(found.documents, found.terms):
        most = f"at most {min(found.documents, found.terms)}"
        message = f"model.k={model.k} topics for {found.documents:,} documents and {found.terms:,} terms: give {most}"
        raise InvalidValue(message, key="model.k")
    counts = CountsShape(**asdict(found), k=model.k)
    return counts, [assumed] if assumed else []


def _inspect_counts(data: Any) -> tuple[sizes.CountsSize, str]:
    from paceline.workloads.topics.files.probe import probe_counts
    from paceline.workloads.topics.files.reading import read_counts
    from paceline.workloads.topics.files.texts import TextOptions

    if data.path is None:
        message = "data.path is missing: give  data.path=counts.npz,  or  --samples DOCUMENTS [--tokens WORDS]"
        raise UserError(message, code="missing-value", key="data.path")
    options = TextOptions(**data.text_options())
    if (looked := probe_counts(data.path.expanduser(), options)) is not None:
        return looked
    found = read_counts(data.path, fractional=data.fractional, text=options)
    facts: Any = {name: getattr(found, name) for name in ("documents", "terms", "sparse", "resident")}
    facts |= {"nonzeros": float(found.weights().sum()), "stored_bytes": float(found.stored_bytes)}
    return sizes.CountsSize(**facts, element_bytes=found.block(0, 1).parts[-1].itemsize), ""


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
    sparse = share < sizes.SPARSE_BELOW
    found = CountsShape(
        documents=documents,
        terms=terms,
        k=model.k,
        nonzeros=documents * (terms * share if sparse else float(terms)),
        sparse=sparse,
        element_bytes=1,
        stored_bytes=0.0,
        resident=False,
    )
    return replace(found, stored_bytes=documents * found.document_bytes), assumed
