"""Ask Slurm when each number of nodes would start, and say which request finishes first."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from paceline.config import RunSpec
from paceline.errors import PacelineError, UserError
from paceline.io.format import format_short_duration, plural
from paceline.io.table import Table
from paceline.runlog.run_dir import RunDir
from paceline.slurm import commands
from paceline.slurm.request import JobOptions, JobRequest, build_job_request
from paceline.slurm.site_file import SiteFile
from paceline.slurm.submit import find_site_partition, render_script

SOON_S = 60.0  # a start within it is printed as "now"
MAX_CANDIDATES = 6


@dataclass(frozen=True)
class QueuedRequest:
    """A request with the start that the scheduler expects and the end that follows from the plan."""

    request: JobRequest
    start: datetime
    run_h: float  # planned, without its failures

    @property
    def end(self) -> datetime:
        return self.start + timedelta(hours=self.run_h)

    @property
    def nodes(self) -> int:
        return int(self.request.nodes.rpartition("-")[2])

    @property
    def name(self) -> str:
        return plural(self.nodes, "node")

    def as_json(self) -> dict[str, Any]:
        times = {"start": self.start.isoformat(), "end": self.end.isoformat(), "run_h": self.run_h}
        return {"nodes": self.nodes, **times, "cost_usd": self.cost_usd, "reasons": self.request.reasons}

    @property
    def cost_usd(self) -> float | None:
        return self.request.chosen.cost_usd if self.request.chosen else None


@dataclass(frozen=True)
class QueueComparison:
    now: datetime
    rows: tuple[QueuedRequest, ...]  # fewest nodes first
    failed: tuple[tuple[int, str], ...]  # numbers of nodes that cannot be requested, and why

    @property
    def best(self) -> QueuedRequest:
        """The request that finishes first; of equal ones, that of the fewest nodes."""
        return min(self.rows, key=lambda row: (row.end, row.nodes))

    def describe(self) -> str:
        """Return the verdict: when each number of nodes starts and ends, and which to take."""
        each = "; ".join(f"{row.name}: {self._at(row.start)} to {self._at(row.end)}" for row in self.rows)
        return f"Take {self.best.name}, which finishes first. Expected start and end: {each}."

    def _at(self, time: datetime) -> str:
        if (time - self.now).total_seconds() < SOON_S:
            return "now"
        return f"{time:%H:%M}" if time.date() == self.now.date() else f"{time:%d %b %H:%M}"

    def table(self) -> Table:
        table = Table("nodes", "layout", "starts", "runs for", "ends", "USD", left=2, mark=True)
        for row in self.rows:
            chosen = row.request.chosen
            table.add_row(
                str(row.nodes),
                chosen.price.layout.strategy if chosen else "-",
                self._at(row.start),
                format_short_duration(3600 * row.run_h),
                self._at(row.end),
                "-" if row.cost_usd is None else f"{row.cost_usd:,.2f}",
                chosen=row is self.best,
            )
        for nodes, why in self.failed:
            table.add_failed_row(str(nodes), why)
        return table


def compare_queue(spec: RunSpec, site: SiteFile, asked: JobOptions, counts: Sequence[int] = ()) -> QueueComparison:
    """Query Slurm for the expected start of the run on each number of nodes (doublings up to what a job may have)."""
    commands.require_slurm()
    partitions = commands.list_partitions()
    site = find_site_partition(site, asked, partitions)
    if not counts:
        partition = partitions.get(asked.get("partition") or site.partition or "")
        most = site.nodes or (partition.nodes if partition else 1)
        counts = sorted({most, *(1 << k for k in range(most.bit_length()))})[:MAX_CANDIDATES]
    rows, failed = [], []
    for nodes in counts:
        try:
            request = build_job_request(spec, site, {**asked, "nodes": nodes}, partitions)
            chosen = request.chosen
            if chosen is None or chosen.hours is None:
                raise UserError("the plan does not know how long the run is; give  train.steps=N", code="missing-value")
            script = render_script(request, RunDir(Path("runs") / spec.name), site, False)
            rows.append(QueuedRequest(request, commands.predict_start(script), chosen.hours))
        except PacelineError as error:
            failed.append((nodes, str(error)))
    if not rows:
        raise UserError(failed[0][1], code="unavailable", key="--queue")
    return QueueComparison(datetime.now(), tuple(rows), tuple(failed))
