"""For a run that found no memory: what the plan counts, and what would take less, at which price."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.errors import PacelineError
from paceline.layout import layout_of
from paceline.planning.candidates import Price
from paceline.planning.site import site_of
from paceline.planning.subject import Subject, subject_of
from paceline.record.units import number, size
from paceline.registry import entry_of
from paceline.spec import RunSpec

MOST = 4


def ways_out(spec: RunSpec) -> str:
    """Lines for people; empty where such a run cannot be priced."""
    if not entry_of(spec.workload).batched:
        return ""
    try:
        subject = subject_of(spec)
        now = _price(subject, spec)
    except Exception:  # a model of one's own is tried out, and may find no memory once more: what was said stays
        return ""
    less = []
    for changes in _changes(spec):
        try:
            price = _price(subject, spec.replace(changes))
        except PacelineError:  # not for this model, or more devices than there are
            continue
        saves = price.memory.total_bytes < now.memory.total_bytes
        if saves and size(price.memory.total_bytes) != size(now.memory.total_bytes):
            less.append((price, "  ".join(f"{key}={value}" for key, value in changes.items())))
    memory = now.memory
    lines = [
        f"the plan counts {size(memory.total_bytes)} per rank, most of it {memory.largest_term()}, of "
        f"{size(now.capacity_bytes)}" + ("; what takes less:" if less else "")
    ]
    width = max((len(words) for _, words in less), default=0)
    for price, words in sorted(less, key=lambda way: way[0].step_s)[:MOST]:
        slower = price.step_s / now.step_s
        lines.append(f"  {words:<{width}}  {size(price.memory.total_bytes)}, {number(slower, 3)} × the time of a step")
    return "\n".join(f"  {line}" for line in lines)


def _price(subject: Subject, spec: RunSpec) -> Price:
    layout = layout_of(spec)
    return subject.price(layout, site_of(spec.cluster).at(layout.ranks))


def _changes(spec: RunSpec) -> Iterator[dict[str, Any]]:
    """What may help, one thing at a time."""
    layout, parallel = layout_of(spec), spec.parallel
    if layout.micro_batch > 1:
        yield {"parallel.micro_batch": layout.micro_batch // 2}
    if parallel.checkpointing != "full":
        yield {"parallel.checkpointing": "full"}
    if layout.strategy not in ("fsdp", "hsdp") and layout.plain:
        yield {"parallel.strategy": "fsdp", "parallel.ranks": max(2, layout.ranks)}
    if not parallel.offload:
        yield {"parallel.strategy": "fsdp", "parallel.offload": "true"}
    if spec.train.precision == "fp32":
        yield {"train.precision": "bf16"}
