"""Find out which rank and which samples made a step that is not finite, and say what to do about it."""

import socket
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from paceline.data.order import split_by_cost
from paceline.data.samples import cost_of
from paceline.errors import RunFailed, join_names
from paceline.launch.process_group import gather_objects

if TYPE_CHECKING:
    from paceline.trainer.loop import GradientJob

SKIP = "or skip such steps with train.nonfinite=skip"
MAX_SEARCHED = 4096  # samples of a rank's share


def build_nonfinite_error(job: "GradientJob", event: dict[str, Any], local_loss: float | None) -> RunFailed:
    """Return the error for a step that is not finite, the same on all ranks, all of which call this.

    `local_loss` is this rank's own sum of losses, if it is known.
    """
    key = "grad_norm" if isfinite(event["loss"]) else "loss"
    what = f"{key.replace('grad_norm', 'gradient norm')} is {event[key]} at step {event['step']}"
    mine = _find_bad_sample(job, event["step"]), local_loss is None or isfinite(local_loss)
    ids = _list_own_ids(job, event["step"])[0].tolist()
    everyone = gather_objects((socket.gethostname(), ids, *mine))
    several = len(everyone) > 1
    for rank, (host, _, sample, _) in enumerate(everyone):
        if sample:
            where = f" (rank {rank} on {host})" if several else ""
            reason = f"{what}: {sample}{where}; remove or replace it, {SKIP}"
            return RunFailed(reason, code="nonfinite", key="data")
    odd = [rank for rank, (_, _, _, finite) in enumerate(everyone) if not finite]
    if 0 < len(odd) < len(everyone):
        host, own, *_ = everyone[odd[0]]
        samples = join_names([f"{number:,}" for number in own], 8)
        where = f"rank {odd[0]} ({host}) alone, whose samples are {samples}" if len(odd) == 1 else f"ranks {odd}"
        return RunFailed(f"{what} on {where}; look at these samples and loss(), {SKIP}", code="nonfinite", key=key)
    return RunFailed(f"{what}: {_advise_remedy(job, event)}", code="nonfinite", key=key)


def _advise_remedy(job: "GradientJob", event: dict[str, Any]) -> str:
    train, scaler = job.context.spec.train, job.state.scaler
    if train.precision == "fp16" and not scaler.adapts:
        return f"train.loss_scale={train.loss_scale:g} may be too large; use dynamic"
    if event["step"] == 1:
        return f"with the first weights: look for the cause in the data, the model or loss(), {SKIP}"
    smaller = f"Try a smaller train.lr (now {event['lr']:.3g}) or a longer train.warmup"
    return f"that step was not applied. {smaller}, {SKIP}"


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
        for i, number in enumerate(ids.tolist()):
            leaves = tree_flatten_with_path(samples.batch(ids[i : i + 1], keys[i : i + 1]))[0]
            for path, leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                    bad.setdefault(number, (keystr(path), leaf))
    if not bad or len(bad) == len(ids) > 1:
        return ""
    number, (part, leaf) = next(iter(bad.items()))
    row = leaf[0] if leaf.ndim > 1 else leaf
    place = (~row.isfinite()).nonzero()[0].tolist()
    column = f"column {place[0]}" if len(place) == 1 and leaf.ndim > 1 else f"position {place}" if leaf.ndim > 1 else ""
    file = getattr(job.context.spec.data, "path", None)
    source = Path(file).name if file else job.workload.data_words.format(split="train").partition(": ")[2]
    where = " ".join(filter(None, [part, column])) or "it"
    return f"sample {number:,} of {source} has {float(row[tuple(place)])} in {where}"
