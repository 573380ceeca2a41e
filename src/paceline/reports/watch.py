"""The verb `watch`: a live view of a run in the terminal, from its files alone, so it works from anywhere and over ssh.

It reads the events that every rank adds, also while a run is killed and resumed. Ctrl-C leaves the view, not the run.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import RunSpec
from paceline.io import terminal
from paceline.io.files import print_json
from paceline.io.format import clock, duration, format_metrics, number, percent, size
from paceline.launch.heartbeat import STOPPED, Beat, read_beats
from paceline.runlog.events import extract_metrics, parse_event
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import describe_baseline, read_summary, select_class_results

EVERY_S = 1.0
WINDOW = 200
KEPT = 4000
MOST_RANKS = 16
NOTICES = 3
QUIET_S = 30.0
BLOCKS = "▁▂▃▄▅▆▇█"
BAR = 40
NAMES = 11
STYLES = {"finished": "bold green", "failed": "bold red", "running": "bold cyan"}
TERMS = {"compute": "█", "exposed": "▒", "data": "░"}
MOST_BYTES = 1 << 24  # else only the end is read at first


@dataclass
class EventFollower:
    path: Path
    place: int = 0
    rest: bytes = b""
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))
    start: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    saved: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    notices: deque[str] = field(default_factory=lambda: deque(maxlen=NOTICES))

    def look(self) -> bool:
        """Read new events; return whether there were any."""
        try:
            length = self.path.stat().st_size
            if length == self.place:
                return False
            if length < self.place or length - self.place > MOST_BYTES:
                self.place, self.rest = max(0, length - MOST_BYTES), b""
            with open(self.path, "rb") as file:
                file.seek(self.place)
                added = file.read()
        except OSError:
            return False
        self.place += len(added)
        *lines, self.rest = (self.rest + added).split(b"\n")
        for line in lines:
            if (event := parse_event(line)) is not None:
                self._take(event)
        return True

    def _take(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "step" if all(isinstance(event.get(name), int) for name in ("step", "epoch", "samples")):
                self.steps.append(event)
            case "start":
                self.start, self.end = event, {}
            case "resume":
                while self.steps and self.steps[-1]["step"] > (event.get("step") or 0):
                    self.steps.pop()
            case "evaluate":
                self.evaluation = event
            case "usage":
                self.usage = event
            case "notice":
                self.notices.append(str(event.get("text", "")))
            case "checkpoint":
                self.saved = event.get("step") or 0
            case "end":
                self.end = event

    def mean(self, *names: str) -> float:
        return _mean([sum(step.get(name) or 0 for name in names) for step in list(self.steps)[-WINDOW:]])


@dataclass
class LiveView:
    run: RunDir
    spec: RunSpec
    ranks: list[EventFollower] = field(default_factory=list)

    def look(self) -> bool:
        known = len(self.ranks)
        while len(self.ranks) < MOST_RANKS and self.run.events_file(len(self.ranks)).is_file():
            self.ranks.append(EventFollower(self.run.events_file(len(self.ranks))))
        new = [follower.look() for follower in self.ranks]
        return any(new) or len(self.ranks) > known

    @property
    def status(self) -> str:
        if not self.ranks or not self.ranks[0].start:
            return "starting"
        if self.ranks[0].end:
            return str(self.ranks[0].end.get("status", "ended"))
        return f"no news for {duration(self.quiet_s)}" if self.quiet_s else "running"

    @property
    def quiet_s(self) -> float:
        """How long a running run has written nothing; 0 while that is usual."""
        if not self.ranks or not self.ranks[0].start or self.ranks[0].end:
            return 0.0
        begun = float(self.ranks[0].start.get("t") or 0)
        newest = max((float(f.steps[-1].get("t") or 0) for f in self.ranks if f.steps), default=begun)
        quiet_s = time.time() - newest
        return quiet_s if quiet_s > max(QUIET_S, 5 * self.step_s) else 0.0

    @property
    def step_s(self) -> float:
        return self.ranks[0].mean("step_s") if self.ranks else 0.0

    @property
    def total_steps(self) -> int | None:
        if self.spec.train.steps:
            return self.spec.train.steps
        if not self.run.summary_file.is_file():
            return None
        summary = read_summary(self.run.summary_file)
        return summary.trained.steps if summary.trained.epochs and summary.status == "finished" else None


def watch(path: Path, *, once: bool = False, as_json: bool = False, every_s: float = EVERY_S) -> int:
    """Show a run until it ends; once if `once`, as JSON, or without a terminal."""
    import psutil
    from rich.live import Live

    run = RunDir.open(path)
    view = LiveView(run, run.recorded_spec())
    console = terminal.build_console()
    view.look()
    if as_json:
        print_json(_dump_state(view))
        return 0
    psutil.cpu_percent(interval=0.1)  # its later answers count from here
    if once or not console.is_terminal:
        console.print(render_view(view))
        return 0
    with suppress(KeyboardInterrupt), Live(render_view(view), console=console, auto_refresh=False) as live:
        while not view.ranks or not view.ranks[0].end:
            time.sleep(every_s)
            if view.look() or view.quiet_s:
                live.update(render_view(view), refresh=True)
        live.update(render_view(view), refresh=True)
    return 0


def _dump_state(view: LiveView) -> dict[str, Any]:
    main = view.ranks[0] if view.ranks else EventFollower(view.run.events_file(0))
    last = main.steps[-1] if main.steps else {}
    return {
        "run": view.run.path,
        "status": view.status,
        "step": last.get("step"),
        "steps": view.total_steps,
        "epoch": last.get("epoch"),
        "loss": last.get("loss"),
        "step_s": view.step_s,
        "evaluation": extract_metrics(main.evaluation),
        "saved_at_step": main.saved or None,
        "noticed": list(main.notices),
        "usage": [{k: v for k, v in rank.usage.items() if k not in ("kind", "t")} for rank in view.ranks],
    }


def render_view(view: LiveView) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble((view.run.name, "bold"), "  ", (view.status, STYLES.get(view.status, "bold yellow")))
    if not view.ranks or not view.ranks[0].steps:
        return Group(head, Text("waiting for the first step", style="dim"))
    main, step_s, total = view.ranks[0], view.step_s, view.total_steps
    last = main.steps[-1]
    of = f" of {total:,}" if total else ""
    left = f", about {clock((total - last['step']) * step_s)} left" if total and not main.end else ""
    head.append(f"  step {last['step']:,}{of}, epoch {last['epoch'] + 1}, {last['samples']:,} samples{left}")
    if why := main.end.get("why"):
        head.append(f": {why}")
    body = Table.grid(padding=(0, 2))
    body.add_column(style="dim", no_wrap=True, min_width=NAMES)
    body.add_column(no_wrap=True)
    losses = [s["loss"] for s in main.steps if "loss" in s]
    body.add_row("loss", f"{number(losses[-1] if losses else None)}  {draw_sparkline(losses, 60)}")
    rate, tokens = (main.mean(name) / step_s if step_s else 0.0 for name in ("batch", "tokens"))
    speed = f"{number(rate, 3)} samples/s" + (f", {number(tokens, 3)} tokens/s" if tokens else "")
    body.add_row("rate", f"{speed}, {duration(step_s)} per step")
    body.add_row("step", _draw_bar(main, step_s))
    if main.evaluation:
        metrics = format_metrics(extract_metrics(main.evaluation))
        body.add_row("evaluation", f"{metrics}  (step {main.evaluation.get('step') or 0:,})")
        if words := describe_baseline(main.evaluation):
            body.add_row("", words)
        for name, precision, recall, f1, support in (r.cells() for r in select_class_results(main.evaluation)[0]):
            body.add_row("", f"{name:24.24}  precision {precision}  recall {recall}  F1 {f1}  of {support}")
    if main.saved:
        body.add_row("checkpoint", f"step {main.saved:,}")
    for text in main.notices:
        body.add_row("noticed", text)
    silent = {beat.rank: beat for beat in read_beats(view.run.heartbeats)} if view.quiet_s else {}
    for rank, follower in enumerate(view.ranks if len(view.ranks) > 1 else ()):
        body.add_row(
            f"rank {rank}", _describe_silent_rank(silent[rank]) if rank in silent else _describe_rank(follower)
        )
    for rank, follower in enumerate(view.ranks):
        if used := _describe_usage(follower.usage):
            body.add_row(f"rank {rank} uses", used)
    body.add_row("machine", _describe_machine(main.start))
    return Group(head, body)


def _describe_rank(follower: EventFollower) -> str:
    if not follower.steps:
        return "no step yet"
    step_s = follower.mean("step_s") or 1.0
    busy, exposed = follower.mean("compute_s", "data_s") / step_s, follower.mean("exposed_s") / step_s
    return f"step {follower.steps[-1]['step']:,}, works {percent(busy)}, waits {percent(exposed)}"


def _describe_usage(usage: dict[str, Any]) -> str:
    known = {name: float(value) for name, value in usage.items() if isinstance(value, int | float)}
    formats: dict[str, Callable[[float], str]] = {
        "device_share": lambda share: f"device {percent(share)}",
        "device_bytes": lambda count: f"{size(count)} of it",
        "device_watts": lambda watts: f"{number(watts, 3)} W",
        "cores": lambda cores: f"{number(cores, 2)} cores",
        "resident_bytes": size,
        "network_bytes_s": lambda rate: f"network {size(rate)}/s",
    }
    return ", ".join(show(known[name]) for name, show in formats.items() if name in known)


def _describe_silent_rank(beat: Beat) -> str:
    stopped = ", stopped by a signal" if beat.state == STOPPED else ""
    return f"{beat.description} for {duration(max(0.0, time.time() - beat.t))}{stopped}"


def _draw_bar(main: EventFollower, step_s: float) -> str:
    shares = {name: main.mean(f"{name}_s") / step_s if step_s else 0.0 for name in TERMS}
    bar = "".join(TERMS[name] * round(BAR * min(1.0, share)) for name, share in shares.items())[:BAR]
    return f"{bar:<{BAR}} " + ", ".join(f"{TERMS[n]} {n} {percent(s)}" for n, s in shares.items())


def _describe_machine(start: dict[str, Any]) -> str:
    import socket

    ranks = start.get("ranks", 1)
    where = f"{start.get('host')}, {ranks} rank{'s' * (ranks != 1)} on {start.get('device', '?')}"
    if start.get("host") != socket.gethostname():
        return where
    import psutil

    memory = psutil.virtual_memory()
    return f"{where}; cores {percent(psutil.cpu_percent() / 100)}, memory {size(memory.used)} of {size(memory.total)}"


def draw_sparkline(values: list[float | None], columns: int) -> str:
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return ""
    width = max(1, math.ceil(len(known) / columns))
    means = [_mean(known[i : i + width]) for i in range(0, len(known), width)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((m - low) * scale)] for m in means)


def _mean(values: Any) -> float:
    found = [float(v) for v in values if v is not None and math.isfinite(v)]
    return sum(found) / len(found) if found else 0.0
