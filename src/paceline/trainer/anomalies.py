"""Report loss spikes, stragglers (by heartbeats), and which rank and samples made a step not finite."""

import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from paceline.data.order import split_by_cost
from paceline.data.samples import cost_of
from paceline.errors import RunFailed, join_names
from paceline.io.format import duration, number
from paceline.launch.heartbeat import Beat, read_beats
from paceline.launch.process_group import gather_objects
from paceline.runlog.run_dir import RunDir
from paceline.trainer.context import RunContext

if TYPE_CHECKING:
    from paceline.trainer.loop import GradientJob

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
                facts["text"] = f"rank {rank} on {beat.host} {took}"
                self.context.event("notice", about="straggler", step=step, **facts)


SKIP = "or skip such steps with train.nonfinite=skip"
MAX_SEARCHED = 4096  # samples of a rank's share


def build_nonfinite_error(job: "GradientJob", event: dict[str, Any], local_loss: float | None) -> RunFailed:
    """Return the error for a step that is not finite, the same on all ranks."""
    key = "grad_norm" if isfinite(event["loss"]) else "loss"
    what = f"{key.replace('grad_norm', 'gradient norm')} is {event[key]} at step {event['step']}"
    mine = _find_bad_sample(job, event["step"]), local_loss is None or isfinite(local_loss)
    ids = _list_own_ids(job, event["step"])[0].tolist()
    everyone = gather_objects((socket.gethostname(), ids, *mine))
    for rank, (host, _, sample, _) in enumerate(everyone):
        if sample:
            where = f" (rank {rank} on {host})" if len(everyone) > 1 else ""
            return RunFailed(f"{what}: {sample}{where}; remove or replace it, {SKIP}", code="nonfinite", key="data")
    odd = [rank for rank, (_, _, _, finite) in enumerate(everyone) if not finite]
    if 0 < len(odd) < len(everyone):
        host, own, *_ = everyone[odd[0]]
        samples = join_names([f"{sample:,}" for sample in own], 8)
        where = f"rank {odd[0]} ({host}) alone, whose samples are {samples}" if len(odd) == 1 else f"ranks {odd}"
        return RunFailed(f"{what} on {where}; look at these samples and loss(), {SKIP}", code="nonfinite", key=key)
    return RunFailed(f"{what}: {_advise_remedy(job, event)}", code="nonfinite", key=key)


def _advise_remedy(job: "GradientJob", event: dict[str, Any]) -> str:
    train, scaler = job.context.spec.train, job.state.scaler
    if train.precision == "fp16" and not scaler.adapts:
        return f"train.loss_scale={train.loss_scale:g} may be too large; use dynamic"
    if event["step"] == 1:
        return f"with the first weights: look for the cause in the data, the model or loss(), {SKIP}"
    return f"try a smaller train.lr (now {event['lr']:.3g}) or a longer train.warmup, {SKIP}"


def _list_own_ids(job: "GradientJob", step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, keys) of the samples that this rank had in a step."""
    loader = job.loader
    whole = loader.order.global_batch(step - 1)
    count, cost = loader.layout.passes(len(whole.ids)), cost_of(loader.samples, whole.ids)
    shares = split_by_cost(cost, loader.layout.data * count)[loader.rank * count : (loader.rank + 1) * count]
    own = np.sort(np.concatenate(shares))[:MAX_SEARCHED]
    return whole.ids[own], whole.keys[own]


def _find_bad_sample(job: "GradientJob", step: int) -> str:
    """Describe the first sample of this rank with a number that is not finite; "" if all have one, as masks do."""
    samples, (ids, keys) = job.loader.samples, _list_own_ids(job, step)
    bad: dict[int, tuple[str, Tensor]] = {}
    with suppress(Exception):  # the user's own code: what it raises is another matter
        for i, sample in enumerate(ids.tolist()):
            for path, leaf in tree_flatten_with_path(samples.batch(ids[i : i + 1], keys[i : i + 1]))[0]:
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                    bad.setdefault(sample, (keystr(path), leaf))
    if not bad or len(bad) == len(ids) > 1:
        return ""
    sample, (part, leaf) = next(iter(bad.items()))
    row = leaf[0]
    place = (~row.isfinite()).nonzero()[0].tolist()
    column = f"column {place[0]}" if len(place) == 1 else f"position {place}" if place else ""
    file = getattr(job.context.spec.data, "path", None)
    source = Path(file).name if file else job.workload.data_words.format(split="train").partition(": ")[2]
    where = " ".join(filter(None, [part, column])) or "it"
    return f"sample {sample:,} of {source} has {float(row[tuple(place)])} in {where}"
