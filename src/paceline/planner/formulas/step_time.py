"""Time of collectives, and of one optimiser step by term: passes, communication, bubble, update."""

import math
from dataclasses import dataclass

from paceline.hardware.catalogue import Cluster
from paceline.hardware.failures import find_slowest
from paceline.layout import count_head_groups
from paceline.planner.formulas.compute import Roofline
from paceline.planner.formulas.placement import DtypeSizes, Physics, Placement
from paceline.planner.formulas.shape import BlockShape, find_repeated_block

BUCKET_BYTES = 25e6  # size in which gradients are sent during the backward pass
ZERO_BUBBLE = 1 / 3
"""Of a bubble, where gradients of weights are put off to fill it: of forward, backward and weights, one remains."""
FUSED_UPDATE_KERNELS = 40  # launched to sum up, clip and update, where one kernel takes many tensors
POWER_RANK = 4  # columns of the two thin matrices that PowerSGD sends for each weight matrix
HOST_BYTES_S = 100e9  # memory bandwidth of a host that its devices share, as an update by its cores reaches it


@dataclass(frozen=True)
class CommGroup:
    """Devices that take part in one collective: how many in each node, on how many nodes, and what they share."""

    size: int
    in_node: int
    nodes: int
    bytes_s: float  # bandwidth of a ring through the group: the slowest link on its way
    hop_s: float  # mean latency of one hop of a ring
    tree_s: float  # latency from a leaf to the root of a tree


def build_group(size: int, stride: int, cluster: Cluster, physics: Physics) -> CommGroup:
    """Group `size` devices that are `stride` apart in the order of the cluster."""
    per_node = cluster.per_node
    in_node = max(1, min(size, per_node // stride)) if stride < per_node else 1
    nodes = math.ceil(size / in_node)
    link = cluster.link_bytes_s * physics.link_efficiency
    if nodes == 1:
        hops = physics.link_latency_s
        return CommGroup(size, in_node, 1, link, hops, math.log2(max(size, 2)) * hops)
    # groups that cross the same network share it: every device has its part of the node's bandwidth
    network = cluster.node_bytes_s * physics.node_efficiency * in_node / per_node
    slowest = min(link, network) if in_node > 1 else network
    hop = (physics.link_latency_s * (in_node - 1) + physics.node_latency_s) / in_node
    tree = math.log2(nodes) * physics.node_latency_s + (in_node - 1) * physics.link_latency_s
    return CommGroup(size, in_node, nodes, slowest, hop, tree)


def all_reduce_s(sent_bytes: float, members: CommGroup, physics: Physics, calls: float = 1) -> float:
    """Return 2(N−1)/N · bytes/bandwidth, and the latency of a ring or of a tree, whichever is less."""
    n = members.size
    if n == 1:
        return 0.0
    latency = min(2 * (n - 1) * members.hop_s, 2 * members.tree_s)
    return calls * (physics.call_s + latency) + 2 * (n - 1) / n * sent_bytes / members.bytes_s


def all_gather_s(whole_bytes: float, members: CommGroup, physics: Physics, calls: float = 1) -> float:
    """Return (N−1)/N · bytes/bandwidth around a ring; a reduce-scatter costs the same."""
    n = members.size
    if n == 1:
        return 0.0
    return calls * (physics.call_s + (n - 1) * members.hop_s) + (n - 1) / n * whole_bytes / members.bytes_s


def send_s(sent_bytes: float, stride: int, cluster: Cluster, physics: Physics) -> float:
    if stride < cluster.per_node:
        return physics.link_latency_s + sent_bytes / (cluster.link_bytes_s * physics.link_efficiency)
    share = cluster.node_bytes_s * physics.node_efficiency / cluster.per_node
    return physics.node_latency_s + sent_bytes / share


def exposed_s(comm_s: float, compute_s: float, physics: Physics, overlap: bool = True) -> float:
    """Return what remains visible of communication beside that much compute."""
    return comm_s - physics.overlap * min(comm_s, compute_s) if overlap else comm_s


@dataclass(frozen=True)
class StepTime:
    """The terms of one step. All but `comm_s` add up to `step_s`."""

    compute_s: float  # forward, backward and recomputation of all micro-batches on the slowest stage
    comm_s: float
    exposed_s: float
    bubble_s: float = 0.0  # a stage waiting for the first micro-batch to come and the last to go
    update_s: float = 0.0
    overhead_s: float = 0.0
    waiting_s: float = 0.0
    offload_s: float = 0.0
    """Shards on their way between host and device that nothing hides, and the update by the host."""
    data_s: float = 0.0

    @property
    def step_s(self) -> float:
        work = self.compute_s + self.exposed_s + self.bubble_s + self.update_s + self.overhead_s + self.waiting_s
        return work + self.offload_s + self.data_s


@dataclass(frozen=True)
class Travel:
    """Communication: in flight, and visible."""

    flight_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(frozen=True)
class _Stage:
    """One micro-batch on the slowest stage of a pipeline, or on the whole model without one."""

    forward_s: float
    compute_s: float
    mean_compute_s: float  # of all stages, which fill and drain the pipeline
    travel: Travel

    @property
    def backward_s(self) -> float:
        return self.compute_s - self.forward_s


@dataclass(frozen=True)
class StepPricer:
    """Prices the parts of one step of a model (its blocks: first, repeated, last) under a layout on a cluster.

    `price` adds them up; `simulation` plays them on their ranks instead.
    """

    blocks: tuple[BlockShape, ...]
    placement: Placement
    cluster: Cluster
    numbers: DtypeSizes
    physics: Physics
    uneven: float = 0.0
    """Deviation of what ranks with other samples have to do in a pass, over its mean."""

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.cluster.device, self.numbers, self.physics)

    def _count_local(self, kind: str) -> float:
        """Count the parameters of a kind in one stage and one part of the tensors."""
        tensor, pipeline, expert = self.placement.tensor, self.placement.pipeline, self.placement.expert
        counts: list[tuple[BlockShape, float]] = [(b, getattr(b, kind)) for b in self.blocks]
        divided = sum(b.repeat * (count - b.elsewhere(expert)) for b, count in counts) / (tensor * pipeline)
        return divided + sum(b.repeat * b.undivided(count, tensor, expert) for b, count in counts) / pipeline

    @property
    def collectives(self) -> float:
        """Return the collectives of a pass, where each layer has its own."""
        return max(b.repeat for b in self.blocks) / self.placement.pipeline + 2

    def price(self) -> StepTime:
        """Add up the terms of one optimiser step."""
        placement = self.placement
        stages, passes = placement.pipeline, placement.accumulate
        stage = self._price_stage()
        sharded = placement.zero == 3
        per_pass, per_step = self._sharded(stage) if sharded else (Travel(), self._reduced(stage.backward_s))
        bubble_s = (stages - 1) * (stage.mean_compute_s + stage.travel.exposed_s) / placement.chunks
        bubble_s *= ZERO_BUBBLE if placement.schedule == "zero_bubble" else 1.0
        exposed = passes * (stage.travel.exposed_s + per_pass.exposed_s) + per_step.exposed_s
        busy_s = passes * stage.compute_s + exposed + bubble_s
        owned = self._count_local("trained_params") / (placement.shards if placement.zero else 1)
        on_device = placement.offload == "none"
        return StepTime(
            compute_s=passes * stage.compute_s,
            comm_s=passes * (stage.travel.flight_s + per_pass.flight_s) + per_step.flight_s,
            exposed_s=exposed,
            bubble_s=bubble_s,
            update_s=self.roofline.optimizer_s(owned) if on_device else 0.0,
            overhead_s=self._update_starts_s(),
            waiting_s=self._lag() * busy_s,
            offload_s=0.0 if on_device else self._offload_s(owned, stage.compute_s),
        )

    def _lag(self) -> float:
        """Return by how much the slowest rank is expected to lag: by its device, and by the samples dealt to it."""
        placement = self.placement
        if placement.ranks == 1:
            return 0.0
        meetings = placement.accumulate if placement.zero < 3 else 1  # passes between two moments when ranks meet
        dealt = self.uneven / math.sqrt(meetings) * find_slowest(placement.data) if placement.data > 1 else 0.0
        return math.hypot(self.physics.spread * find_slowest(placement.ranks), dealt)

    def _exposed_s(self, comm_s: float, compute_s: float) -> float:
        return exposed_s(comm_s, compute_s, self.physics, self.placement.runtime.overlap)

    def _update_starts_s(self) -> float:
        """Price starts of the update's kernels: by the host, unless steps are compiled or recorded."""
        runtime, physics = self.placement.runtime, self.physics
        if runtime.compiled or runtime.one_graph:
            return FUSED_UPDATE_KERNELS * physics.kernel_s
        launches = FUSED_UPDATE_KERNELS if runtime.fused_update else self.collectives * physics.update_launches
        return launches * physics.launch_s

    def _offload_s(self, owned: float, compute_s: float) -> float:
        """Price `owned` parameters of a device: gradients go down after each pass, weights come up before their use.

        Where shards of the weights live in the host too, they come up twice a pass: forward and backward. The host's
        cores make the update.
        """
        placement, numbers = self.placement, self.numbers
        bus = self.cluster.device.pcie_bytes_s * self.physics.link_efficiency
        twice = placement.offload == "all"
        ups = 2 * numbers.weight_bytes if twice else numbers.weight_bytes / placement.accumulate
        bus_s = owned * (ups + numbers.sent_bytes) / bus
        update_s = owned * numbers.updated_bytes / (HOST_BYTES_S / self.cluster.per_node)
        return placement.accumulate * self._exposed_s(bus_s, compute_s) + update_s

    def _price_stage(self) -> _Stage:
        stages = self.placement.pipeline
        layer = find_repeated_block(self.blocks)
        each = self.roofline.price_block(layer, self.placement)
        others = [b for b in self.blocks if b is not layer]
        ends = [self.roofline.price_block(b, self.placement) for b in others]
        # the embedding is on the first stage and the head on the last; layers that are left over go to other stages
        most, few = math.ceil(layer.repeat / stages), layer.repeat // stages
        added = ends if stages == 1 else [max(ends, key=lambda p: p.total_s)]
        end_s = sum(p.total_s for p in added)
        here, added = (few, added) if few * each.total_s + end_s > most * each.total_s else (most, [])
        compute_s = here * each.total_s + sum(p.total_s for p in added)
        travels = self.list_layer_travels(layer, each.total_s)
        flight_s = here * sum(t.flight_s for t in travels)
        visible_s = here * sum(t.exposed_s for t in travels)
        if stages > 1:
            sends_s = 2 * self.placement.chunks * self.send_s(layer)
            flight_s += sends_s
            visible_s += self._exposed_s(sends_s, compute_s)
        return _Stage(
            forward_s=here * each.forward_s + sum(p.forward_s for p in added),
            compute_s=compute_s,
            mean_compute_s=(layer.repeat * each.total_s + sum(p.total_s for p in ends)) / stages,
            travel=Travel(flight_s, visible_s),
        )

    def list_layer_travels(self, layer: BlockShape, compute_s: float) -> list[Travel]:
        """Price what one layer sends in a pass: parts of tensors, of sequences, and tokens for experts."""
        return [self._tensor(layer, compute_s), self._context(layer, compute_s), self._experts(layer)]

    def send_s(self, layer: BlockShape) -> float:
        """Price what one stage of a pipeline sends to the next for one micro-batch."""
        placement = self.placement
        edge = placement.micro_batch * layer.edge_elements / placement.context
        edge = edge * self.numbers.element_bytes / placement.tensor
        stride = placement.tensor * placement.context * placement.data
        return send_s(edge, stride, self.cluster, self.physics)

    def price_shards(self) -> tuple[float, float, float]:
        """Price gathers and scatters among shards, in a pass, and the sum of replicas, in a step."""
        placement, numbers, physics = self.placement, self.numbers, self.physics
        shards = build_group(placement.shards, placement.tensor, self.cluster, physics)
        stored, trained = (self._count_local(kind) for kind in ("stored_params", "trained_params"))
        gather = all_gather_s(stored * numbers.gathered_bytes, shards, physics, self.collectives)
        each = placement.reduction.sent_bytes(numbers)
        scatter = all_gather_s(trained * each, shards, physics, self.collectives)
        copies = build_group(placement.replicate, placement.tensor * placement.shards, self.cluster, physics)
        sent = trained / placement.shards * each
        return gather, scatter, all_reduce_s(sent, copies, physics, self.collectives)

    def _sharded(self, stage: _Stage) -> tuple[Travel, Travel]:
        """Return what is sent in each pass, and once a step."""
        gather, scatter, flight = self.price_shards()
        visible = self._exposed_s(gather, stage.forward_s)
        visible += self._exposed_s(gather + scatter, stage.backward_s)
        return Travel(2 * gather + scatter, visible), Travel(flight, self._exposed_s(flight, stage.backward_s))

    def price_reduction(self) -> tuple[float, float]:
        """Price gradients of all that see different samples, reduced once a step, and in how many buckets."""
        placement, numbers, physics = self.placement, self.numbers, self.physics
        everyone = build_group(placement.data * placement.context, placement.tensor, self.cluster, physics)
        reduction, overlap = placement.reduction, placement.runtime.overlap
        if reduction.kind in ("local_sgd", "diloco"):  # weights are averaged every few steps
            weights_bytes = self._count_local("stored_params") * numbers.weight_bytes
            return all_reduce_s(weights_bytes, everyone, physics) / reduction.local_steps, 1.0
        sent = self._count_local("trained_params") * reduction.sent_bytes(numbers)
        if reduction.kind == "powersgd":
            sent = sum(b.repeat * _thin_elements(b) for b in self.blocks) * numbers.sent_bytes
        buckets = max(1.0, sent / BUCKET_BYTES) if overlap else 1.0
        return all_reduce_s(sent, everyone, physics, buckets), buckets

    def _reduced(self, backward_s: float) -> Travel:
        flight, buckets = self.price_reduction()
        sent, overlap = buckets * BUCKET_BYTES, self.placement.runtime.overlap
        return Travel(flight, bucketed_exposed_s(flight, sent, backward_s, self.physics, overlap))

    def _tensor(self, layer: BlockShape, compute_s: float) -> Travel:
        """Price sums of partial results, two per layer forward and two backward, and again where it is recomputed.

        With sequence parallelism they are gathers and scatters, which some run in pieces beside the products they feed.
        """
        placement = self.placement
        if placement.tensor == 1:
            return Travel()
        sent = placement.micro_batch * layer.edge_elements / placement.context * self.numbers.element_bytes
        sums = 6 if placement.recompute == "full" else 4
        sums //= 2 if layer.expert_params else 1  # experts are whole: those of attention
        total = sums * all_reduce_s(sent, build_group(placement.tensor, 1, self.cluster, self.physics), self.physics)
        overlap = placement.runtime.overlap and placement.runtime.pieced_tensor and placement.sequence_parallel
        return Travel(total, exposed_s(total, compute_s, self.physics, overlap))

    def _context(self, layer: BlockShape, compute_s: float) -> Travel:
        """Price keys and values of a sequence's parts, gathered, and their gradients summed; or passed round."""
        placement, attention = self.placement, layer.attention
        if attention is None or placement.context == 1:
            return Travel()
        elements = attention.key_elements / placement.tensor
        if placement.ring:
            total = self._ring_s(elements)
            return Travel(total, exposed_s(total, compute_s, self.physics))
        if not placement.runtime.waits_for_keys:
            total = self._gather_s(elements, placement.context, 2)
            return Travel(total, exposed_s(total, compute_s, self.physics))
        # of the groups of heads, the first has nothing beside it on its way there, and the last on its way back
        groups = count_head_groups(max(1, attention.kv_heads // placement.tensor))
        total = groups * self._gather_s(elements / groups, placement.context, 2)
        alone = 1 / groups
        beside_s = (1 - alone) * sum(self.roofline.attention_s(attention, placement))
        return Travel(total, total * alone + exposed_s(total * (1 - alone), beside_s, self.physics))

    def _ring_s(self, elements: float) -> float:
        """Price the messages of a ring: keys and values forward and backward, there with their gradients in fp32."""
        placement, n = self.placement, self.placement.context
        part = placement.micro_batch * elements / n
        members = build_group(n, placement.tensor, self.cluster, self.physics)
        rounds = (n - 1) * (3 if placement.recompute == "full" else 2)
        sent = part * (rounds * self.numbers.element_bytes + n * max(4.0, self.numbers.element_bytes))
        return (rounds + n) * (self.physics.call_s + members.hop_s) + sent / members.bytes_s

    def _experts(self, layer: BlockShape) -> Travel:
        """Price tokens sent to their experts and back, forward and backward, and again where the layer is recomputed.

        On their way there, and their gradients on the way home, an expert for all tokens is computed beside them.
        """
        placement = self.placement
        total = self._gather_s(layer.routed_elements / placement.context, placement.expert, 4)
        if not total or not layer.beside_tokens:
            return Travel(total, total)
        samples, way = placement.micro_batch / placement.context, total / 4
        forward_s = sum(self.roofline.matmul_s(m.rows * samples, m.inner, m.outer) for m in layer.beside_tokens)
        there, home = (exposed_s(way, compute_s, self.physics) for compute_s in (forward_s, 2 * forward_s))
        return Travel(total, 2 * way + there + home)

    def _gather_s(self, elements: float, size: int, times: int) -> float:
        """Price so many gathers of the elements of each sample, and half as many again if layers are recomputed."""
        placement = self.placement
        sent = placement.micro_batch * elements * self.numbers.element_bytes
        members = build_group(size, placement.tensor, self.cluster, self.physics)
        times = times if placement.recompute == "none" else times * 3 // 2
        return times * all_gather_s(sent, members, self.physics)


def bucketed_exposed_s(comm_s: float, sent: float, compute_s: float, physics: Physics, overlap: bool = True) -> float:
    """Return what remains visible of gradients sent in buckets: the last is full when the backward pass is over."""
    last = comm_s / max(1.0, sent / BUCKET_BYTES)
    return last + exposed_s(comm_s - last, compute_s, physics, overlap)


def _thin_elements(block: BlockShape) -> float:
    """Count what PowerSGD sends of a block: two thin matrices per product, and what is no matrix as it is."""
    if not block.matmuls:
        return block.params / max(1.0, math.sqrt(block.params) / (2 * POWER_RANK))
    whole = sum(m.inner * m.outer for m in block.matmuls)
    return POWER_RANK * sum(m.inner + m.outer for m in block.matmuls) + max(0.0, block.params - whole)
