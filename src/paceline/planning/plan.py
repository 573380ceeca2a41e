"""The verb `plan`: does it fit, will more devices pay, which layout, how long, how much."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.arguments import check_price
from paceline.errors import UserError
from paceline.layout import Layout
from paceline.planning.advice import nothing_fits
from paceline.planning.candidates import MEMORY_BAND, Limits, Price, Refusal, Refused
from paceline.planning.search import Found, search
from paceline.planning.site import Site, site_of
from paceline.planning.subject import Subject, subject_of
from paceline.spec import DEFAULT, RunSpec, Source, spec_of

MOST_ROWS = 8
MOST_DEVICES = 1 << 20
FORMAT = 1
WORTH = 0.5
"""Efficiency below which more devices are not chosen: half of what is paid for would be lost."""
AS_FAST = 1.05
"""Times slower that still counts as equally fast."""
GAIN = 1.2
"""Times faster that twice the devices must be to be called worth it."""


@dataclass(frozen=True)
class PlannedRow:
    """One number of devices under its best layout."""

    devices: int
    found: Found
    price: Price
    speedup: float
    """Samples per second over those of one device."""
    hours: float | None
    cost_usd: float | None
    energy_kwh: float | None
    pauses_s: Mapping[str, float] = field(default_factory=dict)
    """Of the whole run, between its steps; `hours` has them in it."""

    @property
    def efficiency(self) -> float:
        return self.speedup / self.devices

    @property
    def device_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.devices

    def as_json(self) -> dict[str, Any]:
        names = ("devices", "speedup", "efficiency", "hours", "device_hours", "cost_usd", "energy_kwh")
        return {
            **{name: getattr(self, name) for name in names},
            **self.price.as_json(),
            "pauses_s": dict(self.pauses_s),
            "usual_tree": self.found.usual.words() if self.found.usual else "",
            "candidates": [p.as_json() for p in self.found.prices],
            "refused": [r.as_json() for r in self.found.refused],
        }


def planned_row(found: Found, one_device: Price, subject: Subject, usd_per_device_hour: float | None) -> PlannedRow:
    assert found.chosen is not None
    chosen, n = found.chosen, found.devices
    pauses_s = subject.pauses_s(chosen)
    hours = None
    if subject.steps is not None:
        hours = (chosen.start_s + subject.steps * chosen.step_s + sum(pauses_s.values())) / 3600
    usd = None if hours is None or usd_per_device_hour is None else hours * n * usd_per_device_hour
    kwh = None if hours is None else hours * (chosen.where.cluster.device.watts * n) / 1e3
    return PlannedRow(n, found, chosen, one_device.step_s / chosen.step_s, hours, usd, kwh, pauses_s)


@dataclass(frozen=True)
class Ceilings:
    """What no number of devices can pass, for this batch."""

    serial_share: float
    """Of the step on one device that does not shrink with the batch: launches, update."""
    amdahl: float | None
    """1 / serial share; None where nothing is serial."""
    communication: float | None
    """The step on one device over the time that collectives are in flight on the most devices."""


@dataclass(frozen=True)
class Plan:
    """The answer. `chosen` is None where nothing fits; `overrides()` are the lines that apply it."""

    spec: RunSpec
    subject: Subject
    site: Site
    limits: Limits
    usd_per_device_hour: float | None
    one_device: Price
    """Which speed-ups are counted from."""
    one_device_fits: bool
    """Whether it has the memory; if not, it is priced as if it had."""
    rows: tuple[PlannedRow, ...]
    """The best layout of each number of devices, fewest first."""
    out: tuple[Found, ...]
    """Numbers of devices on which nothing fits."""
    impossible: tuple[Refused, ...]
    """Numbers of devices that cannot be."""

    @property
    def fits(self) -> bool:
        return bool(self.rows)

    @functools.cached_property
    def chosen(self) -> PlannedRow | None:
        """The fastest at an efficiency of a half or more; where none has that, the most efficient.

        Ranks that share one machine cost nothing more: the fewest that are about as fast as the fastest.
        """
        if self.site.shared:
            best = max((r.speedup for r in self.rows), default=0.0)
            return next((r for r in self.rows if r.speedup * AS_FAST >= best), None)
        if fine := [r for r in self.rows if r.efficiency >= WORTH]:
            return max(fine, key=lambda r: (r.speedup, -r.devices))
        return max(self.rows, key=lambda r: (r.efficiency, r.speedup), default=None)

    @property
    def cheapest(self) -> PlannedRow | None:
        """The fewest device-hours, and so the least money."""
        return min(self.rows, key=lambda r: (r.devices * r.price.step_s, r.devices), default=None)

    @property
    def fastest(self) -> PlannedRow | None:
        return min(self.rows, key=lambda r: (r.price.step_s, r.devices), default=None)

    @property
    def break_even(self) -> int | None:
        """The fewest devices that beat one; None where none of those tried does."""
        return next((r.devices for r in self.rows if r.devices > 1 and r.speedup > 1), None)

    @property
    def pays_until(self) -> int | None:
        """The most devices tried to which each doubling still added a fifth."""
        for last, following in itertools.pairwise(self.rows):
            if following.speedup / last.speedup < GAIN ** math.log2(following.devices / last.devices):
                return last.devices
        return self.rows[-1].devices if self.rows else None

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        """The serial part is what a step costs as its batch goes to nothing: a line through batches of one and two."""
        layout, where, whole_s = self.one_device.layout, self.one_device.where, self.one_device.step_s
        layouts = [replace(layout, global_batch=batch, micro_batch=batch) for batch in (1, 2)]
        one, two = (self.subject.price(small, where).step_s for small in layouts)
        serial = max(0.0, min(1.0, (2 * one - two) / whole_s)) if layout.global_batch > 2 else 1.0
        flight = self.rows[-1].price.time.comm_s if self.rows else self.one_device.time.comm_s
        return Ceilings(serial, 1 / serial if serial > 1e-9 else None, whole_s / flight if flight else None)

    @functools.cached_property
    def advice(self) -> tuple[str, ...]:
        return tuple(nothing_fits(self) if self.chosen is None else self.subject.advice(self))

    def overrides(self) -> dict[str, Any]:
        """The chosen layout as dotted values of the run file."""
        if self.chosen is None:
            raise UserError(f"nothing fits: {self.advice[0] if self.advice else 'no layout was found'}")
        return self.subject.overrides(self.chosen.price.layout)

    def as_json(self) -> dict[str, Any]:
        """Every term of every row, as plain data."""
        return {
            "format": FORMAT,
            "run": self.subject.as_json(),
            "cluster": self.site.as_json(self.usd_per_device_hour),
            "physics": asdict(self.site.at(1).physics),
            "memory_error": MEMORY_BAND,
            "one_device": {**self.one_device.as_json(), "fits": self.one_device_fits},
            "rows": [row.as_json() for row in self.rows],
            "does_not_fit": [{"devices": f.devices, "refused": [r.as_json() for r in f.refused]} for f in self.out],
            "impossible": [r.as_json() for r in self.impossible],
            "chosen": self.chosen and {"devices": self.chosen.devices, "overrides": self.overrides()},
            "cheapest_devices": self.cheapest and self.cheapest.devices,
            "fastest_devices": self.fastest and self.fastest.devices,
            "break_even_devices": self.break_even,
            "pays_until_devices": self.pays_until,
            "ceilings": asdict(self.ceilings),
            "advice": list(self.advice),
        }


def plan(
    spec: Source,
    cluster: str | None = None,
    devices: Sequence[int] = (),
    price: float | None = None,
    *,
    samples: int | None = None,
    tokens: float | None = None,
    calibration: str | Path | None = None,
) -> Plan:
    """Price a run (a spec, a run file, its content or a Workload class) on a cluster.

    `cluster` is local, a short form (`2x8xH100`) or a file; `price` is in USD per device and hour; `devices` are the
    numbers to try; `samples` and `tokens` say what the data are not there to say.
    """
    spec = spec_of(spec)
    site = site_of(cluster or spec.cluster, calibration)
    usd = check_price(price) if price is not None else site.whole.usd_per_device_hour
    subject = subject_of(spec, samples, tokens)
    device = site.whole.device
    if subject.numbers.matmul == "fp8" and not device.synchronous and "fp8" not in device.flops_s:
        raise UserError(f"train.precision=fp8: {device.name} has no fp8 in the catalogue; use train.precision=bf16")
    counts = _asked(devices) if devices else _doublings(site, subject)
    limits = subject.limits(spec)
    one_device, one_device_fits = _one_device(subject, site, limits)
    found, impossible = _search(subject, _grown(site, counts[-1]) if devices else site, counts, limits)
    return Plan(
        spec=spec,
        subject=subject,
        site=site,
        limits=limits,
        usd_per_device_hour=usd,
        one_device=one_device,
        one_device_fits=one_device_fits,
        rows=tuple(planned_row(f, one_device, subject, usd) for f in found if f.chosen is not None),
        out=tuple(f for f in found if f.chosen is None),
        impossible=tuple(impossible),
    )


def _asked(devices: Sequence[int]) -> list[int]:
    for n in devices:
        if n < 1:
            raise UserError(f"--devices: {n} devices cannot train; give 1 or more, as in  --devices 1,2,4")
        if n > MOST_DEVICES:
            raise UserError(f"--devices: {n} devices are more than any cluster has; give at most {MOST_DEVICES}")
    return sorted(set(devices))


def _doublings(site: Site, subject: Subject) -> list[int]:
    """Numbers of devices to try: one, and the last doublings up to all that can be used."""
    most, per_node = site.devices, site.whole.per_node
    if subject.divides_samples_only and subject.global_batch < most:
        batch = subject.global_batch
        most = batch if batch <= per_node else batch - batch % per_node
    counts = {most, 1}
    step = 2 if most < 1 << MOST_ROWS else 4
    n = most
    while n > 1 and len(counts) < MOST_ROWS:
        n = n // step if n % step == 0 else 1 << max(0, n.bit_length() - step // 2)
        counts.add(max(1, n))
    return sorted(counts)


def _grown(site: Site, devices: int) -> Site:
    """A site with as many nodes as are asked for."""
    if site.shared or devices <= site.devices:
        return site
    return replace(site, whole=replace(site.whole, nodes=-(-devices // site.whole.per_node)))


def _one_device(subject: Subject, site: Site, limits: Limits) -> tuple[Price, bool]:
    """One device: its best layout or, where none fits, the fastest it would have with enough memory."""
    where = site.at(1)
    found = search(subject, 1, where, replace(limits, strategy=None, tensor=None, pipeline=None))
    if found.chosen is not None and not found.chosen.layout.offload:
        return found.chosen, True
    checkpointing = limits.checkpointing or "none"
    layout = Layout("single", 1, subject.global_batch, subject.global_batch, checkpointing=checkpointing)
    sizes = [max(1, subject.global_batch >> k) for k in range(10)]
    tried = [subject.price(replace(layout, micro_batch=size), where) for size in dict.fromkeys(sizes)]
    return min(tried, key=lambda p: p.step_s), False


def _search(subject: Subject, site: Site, counts: list[int], limits: Limits) -> tuple[list[Found], list[Refused]]:
    found, impossible = [], []
    for n in counts:
        try:
            where = site.at(n)
        except UserError as error:
            impossible.append(Refused(n, f"{n} devices", Refusal.NO_SUCH_CLUSTER, {"error": str(error)}))
            continue
        found.append(search(subject, n, where, limits))
    if not found:
        raise UserError(impossible[0].reason)
    return found, impossible


def applied(spec: RunSpec, ranks: int | None) -> RunSpec:
    """`parallel: auto` on a named cluster, with the layout that the plan chooses written out.

    On this machine auto stays what it is. `ranks` is how many a launcher has started, if one has.
    """
    if spec.cluster == "local" or spec.parallel.strategy != "auto":
        return spec
    asked = ranks if ranks is not None or spec.origin("parallel.ranks") == DEFAULT else spec.parallel.ranks
    found = plan(spec, devices=(asked,) if asked else ())
    chosen = found.overrides()
    nodes = found.chosen.price.where.cluster.nodes if found.chosen else 1
    if ranks is None and nodes > 1:
        raise UserError(
            f"cluster: {spec.cluster}: the plan takes {chosen['parallel.ranks']} devices on {nodes} nodes, and this "
            "command starts ranks on one; make launch files with  paceline plan RUN.yaml --emit slurm  or  torchrun"
        )
    return spec.replace(chosen)
