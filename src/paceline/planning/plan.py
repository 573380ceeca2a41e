"""The verb `plan`: does it fit, will more devices pay, which layout, how long, how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from paceline.arguments import check_price
from paceline.errors import UserError
from paceline.layout import Layout
from paceline.planning import money
from paceline.planning.candidates import Limits, Refused, limits_of
from paceline.planning.formulas.physics import Physics
from paceline.planning.formulas.spread import Reduce
from paceline.planning.money import Ceilings, Row
from paceline.planning.price import MEMORY_BAND, Price, Ways, price
from paceline.planning.search import Found, search
from paceline.planning.site import Site, site_of
from paceline.planning.subject import Subject, subject_of
from paceline.spec import RunSpec

MOST_ROWS = 8
FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """The answer. `chosen` is None where nothing fits; `overrides()` are the lines that apply it."""

    spec: RunSpec
    subject: Subject
    site: Site
    limits: Limits
    alone: Price
    """One device, which speed-ups are counted from."""
    alone_fits: bool
    """Whether it has the memory; if not, it is priced as if it had."""
    rows: tuple[Row, ...]
    """The best layout of each number of devices, fewest first."""
    out: tuple[Found, ...]
    """Numbers of devices on which nothing fits."""
    impossible: tuple[Refused, ...]
    """Numbers of devices that cannot be."""
    chosen: Row | None
    cheapest: Row | None
    fastest: Row | None
    break_even: int | None
    pays_until: int | None
    ceilings: Ceilings
    usd_per_device_hour: float | None
    advice: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.chosen is not None

    def overrides(self) -> dict[str, Any]:
        """The chosen layout as dotted values of the run file."""
        if self.chosen is None:
            raise UserError(f"nothing fits: {self.advice[0] if self.advice else 'no layout was found'}")
        if self.subject.counts is not None:
            return {"parallel.ranks": self.chosen.devices}
        return overrides_of(self.chosen.price.layout)

    def as_json(self) -> dict[str, Any]:
        """Every term of every row, as plain data."""
        device = self.site.whole.device
        return {
            "format": FORMAT,
            "run": {
                "name": self.spec.name,
                "workload": self.subject.workload,
                "parameters": self.subject.params,
                "flops_per_sample": self.subject.flops_per_sample,
                "global_batch": self.subject.global_batch,
                "units_per_sample": self.subject.units_per_sample,
                "unit": self.subject.unit,
                "samples": self.subject.samples,
                "steps": self.subject.steps,
                "numbers": asdict(self.subject.numbers),
                "counts": self.subject.counts and asdict(self.subject.counts),
                "assumptions": list(self.subject.assumptions),
            },
            "cluster": {
                "name": self.site.name,
                "device": device.name,
                "nodes": self.site.whole.nodes,
                "per_node": self.site.whole.per_node,
                "link_bytes_s": self.site.whole.link_bytes_s,
                "node_bytes_s": self.site.whole.node_bytes_s,
                "usd_per_device_hour": self.usd_per_device_hour,
                "calibration": self.site.calibrated or None,
                "note": self.site.note or None,
                "source": device.source,
                "date": device.date,
            },
            "physics": {f.name: getattr(self.site.at(1).physics, f.name) for f in fields(Physics)},
            "memory_error": MEMORY_BAND,
            "one_device": {**self.alone.as_json(), "fits": self.alone_fits},
            "rows": [
                {
                    **r.as_json(),
                    "usual_tree": r.found.usual,
                    "candidates": [p.as_json() for p in r.found.prices],
                    "refused": [asdict(x) for x in r.found.refused],
                }
                for r in self.rows
            ],
            "does_not_fit": [{"devices": f.devices, "refused": [asdict(x) for x in f.refused]} for f in self.out],
            "impossible": [asdict(x) for x in self.impossible],
            "chosen": self.chosen and {"devices": self.chosen.devices, "overrides": self.overrides()},
            "cheapest_devices": self.cheapest and self.cheapest.devices,
            "fastest_devices": self.fastest and self.fastest.devices,
            "break_even_devices": self.break_even,
            "pays_until_devices": self.pays_until,
            "ceilings": asdict(self.ceilings),
            "advice": list(self.advice),
        }


def plan(
    spec: RunSpec,
    cluster: str | None = None,
    devices: Sequence[int] = (),
    price: float | None = None,
    *,
    samples: int | None = None,
    tokens: float | None = None,
    calibration: str | Path | None = None,
) -> Plan:
    """Price a run file on a cluster: `cluster` is local, a short form (`2x8xH100`) or a file; `price` is in USD per
    device and hour; `devices` are the numbers to try; `samples` and `tokens` say what the data are not there to say.
    """
    from paceline.planning.advice import advise

    site = site_of(cluster or spec.cluster, calibration)
    usd = _price(price, site)
    subject = subject_of(spec, samples, tokens)
    device = site.whole.device
    if subject.numbers.matmul == "fp8" and not device.synchronous and "fp8" not in device.flops_s:
        raise UserError(f"train.precision=fp8: {device.name} has no fp8 in the catalogue; use train.precision=bf16")
    counts = _counts(devices, site, subject)
    limits = limits_of(spec) if subject.counts is None else Limits()
    ways = Ways(cast(Reduce, spec.parallel.reduce), spec.parallel.local_steps)
    alone, alone_fits = _alone(subject, site, limits)
    found, impossible = _search(subject, site, counts, limits, ways, asked=bool(devices))
    rows = tuple(money.row(f, alone, subject, usd) for f in found if f.chosen is not None)
    answer = Plan(
        spec=spec,
        subject=subject,
        site=site,
        limits=limits,
        alone=alone,
        alone_fits=alone_fits,
        rows=rows,
        out=tuple(f for f in found if f.chosen is None),
        impossible=tuple(impossible),
        chosen=money.pick(rows, site.shared) if rows else None,
        cheapest=money.cheapest(rows) if rows else None,
        fastest=money.fastest(rows) if rows else None,
        break_even=money.break_even(rows),
        pays_until=money.pays_until(rows) if rows else None,
        ceilings=money.ceilings(subject, alone, rows[-1].price if rows else alone),
        usd_per_device_hour=usd,
    )
    return replace(answer, advice=tuple(advise(answer)))


def auto(spec: RunSpec, cluster: str | None = None) -> dict[str, Any]:
    """The values of `parallel` that `parallel: auto` stands for on a cluster."""
    return plan(spec, cluster).overrides()


def _price(price: float | None, site: Site) -> float | None:
    return check_price(price) if price is not None else site.whole.usd_per_device_hour


def _counts(devices: Sequence[int], site: Site, subject: Subject) -> list[int]:
    """Numbers of devices to try: those asked for, or one and the last doublings up to all that can be used."""
    for n in devices:
        if n < 1:
            raise UserError(f"--devices: {n} devices cannot train; give 1 or more, as in  --devices 1,2,4")
        if n > 1 << 20:
            raise UserError(f"--devices: {n} devices are more than any cluster has; give at most {1 << 20}")
    if devices:
        return sorted(set(devices))
    most = site.devices
    if not subject.splits and subject.global_batch < most:  # each rank needs a sample
        most = max(
            n for n in range(1, subject.global_batch + 1) if n <= site.whole.per_node or not n % site.whole.per_node
        )
    counts = {most, 1}
    step = 2 if most < 1 << MOST_ROWS else 4
    n = most
    while n > 1 and len(counts) < MOST_ROWS:
        n = n // step if n % step == 0 else 1 << max(0, n.bit_length() - step // 2)
        counts.add(max(1, n))
    return sorted(counts)


def _alone(subject: Subject, site: Site, limits: Limits) -> tuple[Price, bool]:
    """One device: its best layout or, where none fits, the fastest it would have with enough memory."""
    where = site.at(1)
    found = search(subject, 1, where, replace(limits, strategy=None, tensor=None, pipeline=None))
    if found.chosen is not None and not found.chosen.layout.offload:
        return found.chosen, True
    checkpointing = limits.checkpointing or "none"
    layout = Layout("single", 1, subject.global_batch, subject.global_batch, checkpointing=checkpointing)
    sizes = [max(1, subject.global_batch >> k) for k in range(10)]
    tried = [price(subject, replace(layout, micro_batch=size), where) for size in dict.fromkeys(sizes)]
    return min(tried, key=lambda p: p.step_s), False


def _search(
    subject: Subject, site: Site, counts: list[int], limits: Limits, ways: Ways, asked: bool
) -> tuple[list[Found], list[Refused]]:
    found, impossible = [], []
    grown = site
    if asked and not site.shared and counts[-1] > site.devices:
        nodes = -(-counts[-1] // site.whole.per_node)
        grown = replace(site, whole=replace(site.whole, nodes=nodes))
    for n in counts:
        try:
            where = grown.at(n)
        except UserError as error:
            impossible.append(Refused(n, f"{n} devices", str(error)))
            continue
        found.append(search(subject, n, where, limits, ways))
    if not found:
        raise UserError(impossible[0].reason)
    return found, impossible


def overrides_of(layout: Layout) -> dict[str, Any]:
    """A layout as the values of `parallel` that lead to it; what is as by default is left out."""
    values: dict[str, Any] = {"strategy": layout.strategy, "ranks": layout.ranks, "micro_batch": layout.micro_batch}
    if layout.strategy == "hsdp":
        values["replicate"] = layout.replicate
    usual = Layout("", 1, 1, 1)
    for name in ("tensor", "pipeline", "sequence", "checkpointing", "offload"):
        if getattr(layout, name) != getattr(usual, name):
            values[name] = getattr(layout, name)
    if layout.pipeline > 1:
        values["schedule"] = layout.schedule
    return {f"parallel.{name}": value for name, value in values.items()}
