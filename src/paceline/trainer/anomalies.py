"""Report loss spikes and stragglers while a run is training; times per step are read from heartbeats."""

import time
from collections import deque
from collections.abc import Mapping
from math import inf, isfinite
from statistics import median
from typing import Any

from paceline.io.format import duration, number
from paceline.launch.heartbeat import Beat, read_beats
from paceline.runlog.run_dir import RunDir
from paceline.trainer.context import RunContext

WINDOW = 100
ENOUGH = 20  # steps before a loss can be unusual
UPDATE_EVERY = 10
SPREADS = 8.0  # from the usual loss to a spike, in median deviations
MIN_RATIO = 1.2  # of a spike to the usual loss
LOOK_EVERY_S = 10.0
SLOW_RATIO = 1.3
LOOKS = 2  # in a row, before a slow rank is reported


class AnomalyDetector:
    """Observes every step of one rank."""

    def __init__(self, context: RunContext) -> None:
        self.context, self.folder = context, RunDir(context.folder).heartbeats
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.busy: deque[float] = deque(maxlen=WINDOW)
        self.usual, self.limit = 0.0, inf
        self.spiked = False
        self.slow: dict[int, int] = {}  # in how many looks in a row a rank was slow
        self.look_at = time.monotonic() + LOOK_EVERY_S

    def observe(self, event: Mapping[str, Any]) -> None:
        info = self.context.rank_info
        self.busy.append(event["compute_s"] + event["data_s"])
        if info.rank == 0:
            self._check_loss(event["step"], event["loss"])
        if info.world > 1 and time.monotonic() > self.look_at:
            self.look_at = time.monotonic() + LOOK_EVERY_S
            self.context.beat(None, None, median(self.busy))
            if info.rank == 0:
                self._check_ranks(event["step"], [beat for beat in read_beats(self.folder) if beat.rank < info.world])

    def _check_loss(self, step: int, loss: float) -> None:
        if not isfinite(loss):
            return
        spikes = loss > self.limit
        if spikes and not self.spiked:
            text = f"the loss jumps to {number(loss)} at step {step}; before, it was about {number(self.usual)}"
            self.context.event("notice", about="loss", step=step, loss=loss, usual=self.usual, text=text)
        self.spiked = spikes
        self.losses.append(loss)
        if len(self.losses) >= ENOUGH and step % UPDATE_EVERY == 0:
            self.usual = median(self.losses)
            spread = median(abs(earlier - self.usual) for earlier in self.losses)
            self.limit = max(self.usual + SPREADS * spread, MIN_RATIO * self.usual) if self.usual > 0 else inf

    def _check_ranks(self, step: int, beats: list[Beat]) -> None:
        known = {beat.rank: beat for beat in beats if beat.busy_s > 0}
        if len(known) < self.context.rank_info.world:
            return
        for rank, beat in known.items():
            others = median(other.busy_s for other in known.values() if other.rank != rank)
            if beat.busy_s < SLOW_RATIO * others:
                self.slow.pop(rank, None)
                continue
            self.slow[rank] = self.slow.get(rank, 0) + 1
            if self.slow[rank] == LOOKS:
                took = f"works {duration(beat.busy_s)} on a step, the others {duration(others)}: they wait for it"
                facts = {"rank": rank, "host": beat.host, "busy_s": beat.busy_s, "others_s": others}
                text = f"rank {rank} on {beat.host} {took}"
                self.context.event("notice", about="straggler", step=step, text=text, **facts)
