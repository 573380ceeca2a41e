"""What people want to know while it happens: a loss that jumps, and a rank that is slower than the others.

Both are "notice" events of the main rank: the terminal, `watch` and the page show them. How long each rank works on a
step stands in its heartbeat, where the main rank reads it now and then; nothing is sent for it.
"""

from __future__ import annotations

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
ENOUGH = 20
"""Steps before a loss can be unusual."""
EVERY = 10
"""Steps between two looks at what is usual."""
SPREADS = 8.0
"""From the usual loss to one that jumps: times the median distance of the last ones from it."""
AT_LEAST = 1.2
"""Times the usual loss that a jump is at least."""
LOOK_EVERY_S = 10.0
SLOWER = 1.3
"""Times as long at work as the others, to be called slow."""
LOOKS = 2
"""In a row, before it is said."""


class AnomalyDetector:
    """On one rank, told of every step."""

    def __init__(self, context: RunContext) -> None:
        self.context, self.folder = context, RunDir(context.folder).heartbeats
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.busy: deque[float] = deque(maxlen=WINDOW)
        self.usual, self.most = 0.0, inf
        """The usual loss, and the highest that is not a jump."""
        self.spiked = False
        self.slow: dict[int, int] = {}
        """Ranks that were slow, and in how many looks in a row."""
        self.look_at = time.monotonic() + LOOK_EVERY_S

    def step(self, event: Mapping[str, Any]) -> None:
        place = self.context.rank_info
        self.busy.append(event["compute_s"] + event["data_s"])
        if place.rank == 0:
            self._loss(event["step"], event["loss"])
        if place.world > 1 and time.monotonic() > self.look_at:
            self.look_at = time.monotonic() + LOOK_EVERY_S
            self.context.beat(None, None, median(self.busy))
            if place.rank == 0:
                self._ranks(event["step"], [beat for beat in read_beats(self.folder) if beat.rank < place.world])

    def _loss(self, step: int, loss: float) -> None:
        if not isfinite(loss):
            return
        jumps = loss > self.most
        if jumps and not self.spiked:
            text = f"the loss jumps to {number(loss)} at step {step}; before, it was about {number(self.usual)}"
            self.context.event("notice", about="loss", step=step, loss=loss, usual=self.usual, text=text)
        self.spiked = jumps
        self.losses.append(loss)
        if len(self.losses) >= ENOUGH and step % EVERY == 0:
            self.usual = median(self.losses)
            spread = median(abs(earlier - self.usual) for earlier in self.losses)
            self.most = max(self.usual + SPREADS * spread, AT_LEAST * self.usual) if self.usual > 0 else inf

    def _ranks(self, step: int, beats: list[Beat]) -> None:
        known = {beat.rank: beat for beat in beats if beat.busy_s > 0}
        if len(known) < self.context.rank_info.world:
            return
        for rank, beat in known.items():
            others = median(other.busy_s for other in known.values() if other.rank != rank)
            if beat.busy_s < SLOWER * others:
                self.slow.pop(rank, None)
                continue
            self.slow[rank] = self.slow.get(rank, 0) + 1
            if self.slow[rank] == LOOKS:
                took = f"works {duration(beat.busy_s)} on a step, the others {duration(others)}: they wait for it"
                text = f"rank {rank} on {beat.host} {took}"
                told = {"rank": rank, "host": beat.host, "busy_s": beat.busy_s, "others_s": others}
                self.context.event("notice", about="straggler", step=step, text=text, **told)
