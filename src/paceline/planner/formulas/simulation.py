"""Simulate one step event by event: what each stage computes and sends, as lanes of a timeline."""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.planner.formulas.placement import Placement
from paceline.planner.formulas.shape import find_repeated_block
from paceline.planner.formulas.step_time import StepPricer

MAX_BUCKETS = 48  # pieces of a backward pass that gradients are sent after; more would hide no more
PLAYED = 4  # micro-batches per stage that are played; the others repeat the last of them
FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "gradients of weights"
LANES = ("compute", "collectives", "sends")


@dataclass(frozen=True)
class Span:
    """What one lane of a stage does for some time; all ranks of a stage do the same."""

    stage: int
    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The spans of a step, of its first micro-batches if there are many, and the time of the whole step."""

    spans: tuple[Span, ...]
    step_s: float
    played: int  # micro-batches, of `passes`
    passes: int

    def as_trace(self, ranks_per_stage: int) -> dict[str, Any]:
        """Return it in the format of Chrome's traces, which Perfetto opens too."""
        events: list[dict[str, Any]] = []
        for stage in sorted({span.stage for span in self.spans}):
            first = stage * ranks_per_stage
            name = f"rank {first}" if ranks_per_stage == 1 else f"ranks {first} to {first + ranks_per_stage - 1}"
            events.append({"name": "process_name", "ph": "M", "pid": stage, "args": {"name": name}})
            events += [
                {"name": "thread_name", "ph": "M", "pid": stage, "tid": tid, "args": {"name": lane}}
                for tid, lane in enumerate(LANES)
            ]
        for span in self.spans:
            times = {"ts": 1e6 * span.start_s, "dur": 1e6 * (span.end_s - span.start_s)}
            events.append({"name": span.name, "ph": "X", "pid": span.stage, "tid": LANES.index(span.lane), **times})
        about = {"step_s": self.step_s, "micro_batches": self.passes, "micro_batches_shown": self.played}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


@dataclass(eq=False, slots=True)
class _Task:
    """Work of one lane; it starts when it is the next of its lane and nothing that it waits for is left."""

    stage: int
    lane: int
    name: str
    left_s: float
    waits: int = 0
    followers: list["_Task"] = field(default_factory=list)
    start_s: float = 0.0

    def wait_for(self, *others: "_Task") -> None:
        for other in others:
            other.followers.append(self)
            self.waits += 1


@dataclass(frozen=True)
class _Pass:
    kind: str
    chunk: int
    batch: int


def simulate_step(pricer: StepPricer) -> Timeline:
    """Simulate a step on all stages: its first micro-batches, the rest as long as the last of those."""
    placement, passes = pricer.placement, pricer.placement.accumulate
    each = placement.pipeline
    played = min(passes, PLAYED * each)
    spans = _play_passes(pricer, played)
    end_s = max(span.end_s for span in spans)
    if played < passes:
        before_s = max(span.end_s for span in _play_passes(pricer, played - each))
        end_s += (passes - played) * (end_s - before_s) / each
    time = pricer.price()
    after_s = time.update_s + time.overhead_s + time.waiting_s + time.offload_s
    return Timeline(tuple(spans), end_s + after_s, played, passes)


def _play_passes(pricer: StepPricer, passes: int) -> list[Span]:
    lanes = _LaneBuilder(pricer, passes).build()
    return _run_tasks(lanes, 1 / (2 - pricer.physics.overlap))


def order_passes(placement: Placement, stage: int, passes: int) -> list[_Pass]:
    """Return what a stage computes, in the order of its schedule."""
    stages, chunks = placement.pipeline, placement.chunks
    each = passes // max(1, passes // stages)  # micro-batches of a round, after which the next chunk's turn comes
    rounds = [range(k, min(k + each, passes)) for k in range(0, passes, each)]
    turns = [(chunk, batch) for batches in rounds for chunk in range(chunks) for batch in batches]
    forward = [_Pass(FORWARD, chunk, batch) for chunk, batch in turns]
    backward = [_Pass(BACKWARD, chunks - 1 - chunk, batch) for chunk, batch in turns]
    if placement.schedule == "gpipe" or stages == 1:
        return forward + backward if stages > 1 else [p for pair in zip(forward, backward, strict=True) for p in pair]
    ahead = stages - stage - 1
    ahead = min(len(turns), ahead if chunks == 1 else 2 * ahead + (chunks - 1) * each)
    order = forward[:ahead]
    for k, one in enumerate(backward):
        order += [*forward[ahead + k : ahead + k + 1], one]
        if placement.schedule == "zero_bubble" and k >= stage:
            order.append(replace(backward[k - stage], kind=WEIGHTS))
    if placement.schedule == "zero_bubble":
        order += [replace(one, kind=WEIGHTS) for one in backward[max(0, len(backward) - stage) :]]
    return order


class _LaneBuilder:
    """Puts the pieces of each stage's passes on one of its lanes, and what they wait for and send on the other."""

    def __init__(self, pricer: StepPricer, passes: int) -> None:
        self.placement, self.passes = pricer.placement, passes
        placement, layer = self.placement, find_repeated_block(pricer.blocks)
        self.parts = placement.pipeline * placement.chunks
        each = pricer.roofline.price_block(layer, placement)
        few, more = divmod(round(layer.repeat), self.parts)
        inner_first = sorted(range(self.parts), key=lambda part: (part in (0, self.parts - 1), part))
        self.layers = [few + (part in inner_first[:more]) for part in range(self.parts)]
        self.forward_s = [n * each.forward_s for n in self.layers]
        self.whole_s = [n * each.total_s for n in self.layers]
        for block in pricer.blocks:
            if block is not layer:
                price, part = pricer.roofline.price_block(block, placement), 0 if block is pricer.blocks[0] else -1
                self.forward_s[part] += price.forward_s
                self.whole_s[part] += price.total_s
        self.sums_s = sum(t.exposed_s for t in pricer.list_layer_travels(layer, each.total_s))
        self.send_s = pricer.send_s(layer) if placement.pipeline > 1 else 0.0
        self.gather_s, self.scatter_s, self.reduce_s, self.buckets = 0.0, 0.0, 0.0, math.inf
        if placement.zero == 3:
            self.gather_s, self.scatter_s, self.reduce_s = pricer.price_shards()
        else:
            self.reduce_s, self.buckets = pricer.price_reduction()
        self.sent: dict[tuple[str, int, int], _Task] = {}  # by kind, part and micro-batch
        self.needed: list[tuple[_Task, tuple[str, int, int]]] = []

    def build(self) -> list[list[list[_Task]]]:
        """Return the tasks of each stage and lane, in their order."""
        stages = [self._build_stage(stage) for stage in range(self.placement.pipeline)]
        for task, key in self.needed:
            task.wait_for(self.sent[key])
        return stages

    def _build_stage(self, stage: int) -> list[list[_Task]]:
        compute: list[_Task] = []
        collectives: list[_Task] = []
        sends: list[_Task] = []
        overlaps, order = self.placement.runtime.overlap, order_passes(self.placement, stage, self.passes)
        last = {one.chunk: one for one in order if self._makes_gradients(one)}
        held = sum(max(1, n) for n in self.layers[stage :: self.placement.pipeline])
        due: list[_Task] = []  # to be sent after the last piece, and after the weights of the next are asked for
        ends: list[_Task] = []  # of pieces
        blocking: list[_Task] = []  # what the next piece waits for
        for one in order:
            part, backward = one.chunk * self.placement.pipeline + stage, one.kind != FORWARD
            pieces = max(1, self.layers[part]) if self.gather_s else 1
            reduces = one is last[one.chunk] and self.reduce_s > 0
            if reduces and overlaps:
                pieces = max(pieces, math.ceil(min(self.buckets, MAX_BUCKETS)))
            share = max(1, self.layers[part]) / held / pieces  # of what the stage gathers in a pass
            reduce_s = self.reduce_s * share * pieces
            for piece in range(pieces):
                task = _Task(stage, 0, f"{one.kind} {one.batch}", self._compute_s(one, part) / pieces)
                if self.gather_s and one.kind != WEIGHTS:
                    gather = _Task(stage, 1, "gather weights", share * self.gather_s)
                    gather.wait_for(*ends[-2:-1] if overlaps else ends[-1:])  # one piece ahead
                    collectives.append(gather)
                    task.wait_for(gather)
                collectives += due
                task.wait_for(*blocking)
                compute.append(task)
                if piece == 0 and (key := self._find_input(one, part)) is not None:
                    self.needed.append((task, key))
                if self.sums_s and one.kind != WEIGHTS:
                    seconds = self._sums_s(backward) * self.layers[part] / pieces
                    compute.append(_Task(stage, 0, "sums in layers", seconds))
                ends.append(compute[-1])
                due = []
                if self.scatter_s and self._makes_gradients(one):
                    due.append(_Task(stage, 1, "scatter gradients", share * self.scatter_s))
                if reduces:
                    due.append(_Task(stage, 1, "reduce gradients", self._bucket_s(reduce_s, piece, pieces)))
                for sent in due:
                    sent.wait_for(compute[-1])
                blocking = [] if overlaps else list(due)
            if self.send_s and (part + 1 < self.parts if one.kind == FORWARD else part and one.kind == BACKWARD):
                sends.append(_Task(stage, 2, "send", self.send_s))
                sends[-1].wait_for(compute[-1])
                self.sent[one.kind, part, one.batch] = sends[-1]
                blocking += [] if overlaps else sends[-1:]
        return [compute, collectives + due, sends]

    def _makes_gradients(self, one: _Pass) -> bool:
        return one.kind == (WEIGHTS if self.placement.schedule == "zero_bubble" else BACKWARD)

    def _compute_s(self, one: _Pass, part: int) -> float:
        if one.kind == FORWARD:
            return self.forward_s[part]
        return (self.whole_s[part] - self.forward_s[part]) * (0.5 if self.placement.schedule == "zero_bubble" else 1.0)

    def _sums_s(self, backward: bool) -> float:
        forward = 1 / 3 if self.placement.recompute == "full" else 1 / 2
        return self.sums_s * (1 - forward if backward else forward)

    def _bucket_s(self, reduce_s: float, piece: int, pieces: int) -> float:
        """Return the time of gradients that are sent after a piece; the last bucket is full at the end."""
        if pieces == 1:
            return reduce_s
        last_s = self.reduce_s / self.buckets
        others = pieces - 1 if last_s else pieces
        return last_s if last_s and piece == others else (reduce_s - last_s) / others

    def _find_input(self, one: _Pass, part: int) -> tuple[str, int, int] | None:
        """Return which pass of the stage before (or, backward, after) a pass waits for."""
        if one.kind == FORWARD and part > 0:
            return FORWARD, part - 1, one.batch
        if one.kind == BACKWARD and part < self.parts - 1:
            return BACKWARD, part + 1, one.batch
        return None


def _run_tasks(stages: list[list[list[_Task]]], overlap_speed: float) -> list[Span]:
    """Run the tasks of each lane in their order. Lanes of a stage that are busy at once have `overlap_speed` of the
    speed of one alone."""
    queues = [[deque(lane) for lane in lanes] for lanes in stages]
    busy: list[list[_Task]] = [[] for _ in stages]
    now_s, version = [0.0] * len(stages), [0] * len(stages)
    events: list[tuple[float, int, int]] = []
    spans: list[Span] = []

    def lane_speed(k: int) -> float:
        return overlap_speed if len(busy[k]) > 1 else 1.0

    def advance(k: int, to_s: float) -> None:
        done_s, now_s[k] = (to_s - now_s[k]) * lane_speed(k), to_s
        for task in busy[k]:
            task.left_s -= done_s

    def start(k: int) -> None:
        for lane, queue in enumerate(queues[k]):
            if queue and not queue[0].waits and all(task.lane != lane for task in busy[k]):
                busy[k].append(queue.popleft())
                busy[k][-1].start_s = now_s[k]
        version[k] += 1
        if busy[k]:
            heapq.heappush(events, (now_s[k] + min(task.left_s for task in busy[k]) / lane_speed(k), k, version[k]))

    for k in range(len(stages)):
        start(k)
    while events:
        time_s, k, seen = heapq.heappop(events)
        if seen != version[k]:
            continue
        advance(k, time_s)
        touched = {k}
        for task in [task for task in busy[k] if task.left_s <= 1e-12 * max(1.0, time_s)]:
            busy[k].remove(task)
            spans.append(Span(k, LANES[task.lane], task.name, task.start_s, time_s))
            for other in task.followers:
                other.waits -= 1
                touched.add(other.stage)
        for j in touched:
            advance(j, time_s)
            start(j)
    assert not any(queue for lanes in queues for queue in lanes), "passes wait for each other"
    return spans
