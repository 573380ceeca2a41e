"""The verb `watch`: a live view of a run, from its files alone, so it works from anywhere and over ssh.

It reads the events that every rank adds, also while a run is killed and resumed. Ctrl-C leaves the view, not the run.
As a page it is a file that is kept current, or served on the loopback for `ssh -L`.
"""

import math
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from paceline.config import RunSpec
from paceline.io import terminal
from paceline.io.arguments import option_error
from paceline.io.files import print_json, write_atomic
from paceline.io.format import clock, duration, format_metrics, number, percent, plural, size
from paceline.io.table import UNKNOWN, Table
from paceline.launch.heartbeat import STOPPED, read_beats
from paceline.reports.charts import Chart, draw_lines, round_digits
from paceline.reports.page import PageHead, render_page
from paceline.reports.run_view import split_stretches
from paceline.runlog.events import extract_metrics, parse_event
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import describe_baseline

EVERY_S = 1.0
WINDOW = 200
KEPT = 4000
MOST_RANKS = 16
NOTICES, RECENT = 3, 12
QUIET_S = 30.0
BLOCKS = "▁▂▃▄▅▆▇█"
BAR = 40
NAMES = 11
STYLES = {"finished": "bold green", "failed": "bold red", "running": "bold cyan"}
TERMS = {"compute": "█", "exposed": "▒", "data": "░"}
MOST_BYTES = 1 << 24  # else only the end is read at first
Point = tuple[int, float | None]


@dataclass
class EventFollower:
    path: Path
    place: int = 0
    rest: bytes = b""
    last: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))  # newest of each kind
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))
    used: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT))
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
        kind = event["kind"]
        if kind == "step" and not all(isinstance(event.get(name), int) for name in ("step", "epoch", "samples")):
            return
        self.last[kind] = event
        {"step": self.steps, "usage": self.used}.get(kind, self.recent).append(event)
        if kind == "start":
            self.last["end"] = {}
        elif kind == "notice":
            self.notices.append(str(event.get("text", "")))
        elif kind == "resume":
            while self.steps and self.steps[-1]["step"] > (event.get("step") or 0):
                self.steps.pop()

    @property
    def end(self) -> dict[str, Any]:
        return self.last["end"]

    def mean(self, *names: str) -> float:
        return _mean([sum(step.get(name) or 0 for name in names) for step in list(self.steps)[-WINDOW:]])


class LiveView:
    def __init__(self, run: RunDir, spec: RunSpec) -> None:
        self.run, self.spec = run, spec
        self.main = EventFollower(run.events_file(0))
        self.ranks = [self.main]

    def look(self) -> bool:
        while len(self.ranks) < MOST_RANKS and (file := self.run.events_file(len(self.ranks))).is_file():
            self.ranks.append(EventFollower(file))
        return sum(follower.look() for follower in self.ranks) > 0

    @property
    def status(self) -> str:
        if not self.main.last["start"]:
            return "starting"
        if self.main.end:
            return str(self.main.end.get("status", "ended"))
        return f"no news for {duration(self.quiet_s)}" if self.quiet_s else "running"

    @property
    def quiet_s(self) -> float:
        """How long a running run has written nothing; 0 while that is usual."""
        if not (start := self.main.last["start"]) or self.main.end:
            return 0.0
        steps = [follower.steps[-1] for follower in self.ranks if follower.steps]
        newest = max(float(event.get("t") or 0) for event in steps or [start])
        quiet_s = time.time() - newest
        return quiet_s if quiet_s > max(QUIET_S, 5 * self.step_s) else 0.0

    @property
    def step_s(self) -> float:
        return self.main.mean("step_s")

    @property
    def place(self) -> str:
        """How far the run is: its step, epoch, samples, and the time left."""
        last, total = self.main.steps[-1], self.total_steps
        of = f" of {total:,}" if total else ""
        left = f", about {clock((total - last['step']) * self.step_s)} left" if total and not self.main.end else ""
        return f"step {last['step']:,}{of}, epoch {last['epoch'] + 1}, {last['samples']:,} samples{left}"

    @property
    def total_steps(self) -> int | None:
        steps = self.main.last["start"].get("steps")
        return steps if isinstance(steps, int) else self.spec.train.steps


def watch(
    path: Path,
    *,
    once: bool = False,
    as_json: bool = False,
    every_s: float = EVERY_S,
    page: Path | None = None,
    serve: int | None = None,
) -> int:
    """Show a run until it ends; once if `once`, as JSON, or without a terminal. Keep `page` current, or `serve` it."""
    run = RunDir.open(path)
    view = LiveView(run, run.recorded_spec())
    console = terminal.build_console()
    view.look()
    if as_json:
        print_json(_dump_state(view))
        return 0
    if page is not None or serve is not None:
        with suppress(KeyboardInterrupt):
            _keep_page(view, page, serve, once)
        return 0
    if once or not console.is_terminal:
        console.print(render_view(view))
        return 0
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(render_view(view), console=console, auto_refresh=False) as live:
        while not view.main.end:
            time.sleep(every_s)
            if view.look() or view.quiet_s:
                live.update(render_view(view), refresh=True)
        live.update(render_view(view), refresh=True)
    return 0


def _keep_page(view: LiveView, page: Path | None, serve: int | None, once: bool) -> None:
    """Write the page until the run has ended; a served one stays until Ctrl-C."""
    if page is not None and not page.parent.is_dir():
        raise option_error("--page", f"there is no folder {str(page.parent)!r}; make it with  mkdir -p {page.parent}")
    text = render_watch_page(view)
    if serve is not None:
        port = start_server(serve, lambda: text)
        tunnel = f"from elsewhere after  ssh -L {port}:localhost:{port} {socket.gethostname()}"
        terminal.print_text(f"open  http://localhost:{port}/  ({tunnel});  Ctrl-C ends the page, not the run")
    if page is not None:
        write_atomic(page, text)
        later = "" if once or view.main.end else "; it is kept current until the run ends"
        terminal.print_text(f"written: {page}{later}")
    while not once and (serve is not None or not view.main.end):
        time.sleep(REFRESH_S)
        if view.look() or view.quiet_s:
            text = render_watch_page(view)
            if page is not None:
                write_atomic(page, text)


def _dump_state(view: LiveView) -> dict[str, Any]:
    main = view.main
    step = main.steps[-1] if main.steps else {}
    ranks = [rank for rank in view.ranks if rank.place]
    return {
        "run": view.run.path,
        "status": view.status,
        "step": step.get("step"),
        "steps": view.total_steps,
        "epoch": step.get("epoch"),
        "loss": step.get("loss"),
        "step_s": view.step_s,
        "evaluation": extract_metrics(main.last["evaluate"]),
        "saved_at_step": main.last["checkpoint"].get("step") or None,
        "noticed": list(main.notices),
        "usage": [{k: v for k, v in rank.last["usage"].items() if k not in ("kind", "t")} for rank in ranks],
    }


def describe_progress(view: LiveView) -> dict[str, str]:
    """Return the loss and speed of a run that made steps, its last evaluation and checkpoint, and its machine."""
    main, step_s = view.main, view.step_s
    rate, tokens = (main.mean(name) / step_s if step_s else 0.0 for name in ("batch", "tokens"))
    speed = f"{number(rate, 3)} samples/s" + (f", {number(tokens, 3)} tokens/s" if tokens else "")
    found = {"loss": number(main.steps[-1].get("loss")), "rate": f"{speed}, {duration(step_s)} per step"}
    if evaluation := main.last["evaluate"]:
        metrics, poor = format_metrics(extract_metrics(evaluation)), describe_baseline(evaluation)
        found["evaluation"] = f"{metrics}  (step {evaluation.get('step') or 0:,})" + (f"; {poor}" if poor else "")
    if saved := main.last["checkpoint"].get("step"):
        found["checkpoint"] = f"step {saved:,}"
    start = main.last["start"]
    ranks = plural(start.get("ranks") or 1, "rank")
    found["machine"] = f"{start.get('host')}, {ranks} on {start.get('device', '?')}"
    return found


def render_view(view: LiveView) -> Any:
    """Return the state of a run as rich draws it: its progress, and a row for each rank."""
    from rich.console import Group
    from rich.table import Table as Grid
    from rich.text import Text

    main, ranks = view.main, build_ranks_table(view)
    head = Text.assemble((view.run.name, "bold"), "  ", (view.status, STYLES.get(view.status, "bold yellow")))
    if not main.steps:
        return Group(head, Text("waiting for the first step", style="dim"))
    head.append(f"  {view.place}")
    if why := main.end.get("why"):
        head.append(f": {why}")
    body = Grid.grid(padding=(0, 2))
    body.add_column(style="dim", no_wrap=True, min_width=NAMES)
    body.add_column(no_wrap=True)
    for name, text in describe_progress(view).items():
        if name == "loss":
            text += f"  {draw_sparkline([step.get('loss') for step in main.steps], 60)}"
        body.add_row(name, text)
        if name == "rate":
            body.add_row("step", _draw_bar(main, view.step_s))
    for text in main.notices:
        body.add_row("noticed", text)
    return Group(head, body, "", ranks) if ranks.rows else Group(head, body)


USES: dict[str, tuple[str, Callable[[float], str]]] = {
    "device_share": ("device", percent),
    "device_bytes": ("device memory", size),
    "device_watts": ("power", lambda watts: f"{number(watts, 3)} W"),
    "cores": ("cores", lambda cores: number(cores, 2)),
    "resident_bytes": ("memory", size),
    "network_bytes_s": ("network", lambda rate: f"{size(rate)}/s"),
}


def build_ranks_table(view: LiveView) -> Table:
    """Build a row for each rank: its step, how much of it is work, and what it uses."""
    known = {name: shown for name, shown in USES.items() if any(name in rank.last["usage"] for rank in view.ranks)}
    table = Table(
        "rank", "step", "works", "waits", *(title for title, _ in known.values()), name="ranks", title="Ranks"
    )
    silent = {beat.rank: beat for beat in read_beats(view.run.heartbeats)} if view.quiet_s else {}
    for rank, follower in enumerate(view.ranks if len(view.ranks) > 1 or known else ()):
        if (beat := silent.get(rank)) is not None:
            stopped = ", stopped by a signal" if beat.state == STOPPED else ""
            silence = duration(max(0.0, time.time() - beat.t))
            table.add_failed_row(f"rank {rank}", f"{beat.description} for {silence}{stopped}")
            continue
        cells = [UNKNOWN] * 3
        if follower.steps:
            step_s = follower.mean("step_s") or 1.0
            shares = (follower.mean("compute_s", "data_s") / step_s, follower.mean("exposed_s") / step_s)
            cells = [f"{follower.steps[-1]['step']:,}", *map(percent, shares)]
        for name, (_, show) in known.items():
            value = follower.last["usage"].get(name)
            cells.append(show(float(value)) if isinstance(value, int | float) else UNKNOWN)
        table.add_row(str(rank), *cells)
    return table


def _draw_bar(main: EventFollower, step_s: float) -> str:
    shares = {name: main.mean(f"{name}_s") / step_s if step_s else 0.0 for name in TERMS}
    bar = "".join(TERMS[name] * round(BAR * min(1.0, share)) for name, share in shares.items())[:BAR]
    return f"{bar:<{BAR}} " + ", ".join(f"{TERMS[n]} {n} {percent(s)}" for n, s in shares.items())


def draw_sparkline(values: Iterable[float | None], columns: int) -> str:
    known = _select_finite(values)
    if not known:
        return ""
    means = [_mean(some) for some in split_stretches(known, columns)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((m - low) * scale)] for m in means)


def _select_finite(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None and math.isfinite(v)]


def _mean(values: Iterable[float | None]) -> float:
    found = _select_finite(values)
    return sum(found) / len(found) if found else 0.0


REFRESH_S = 5
MAX_POINTS = 400
LOOPBACK = "127.0.0.1"


def render_watch_page(view: LiveView) -> str:
    """Render loss, throughput, what each rank uses and the last events; the page reloads itself until the run ends."""
    ended = bool(view.main.end)
    made = time.strftime("%Y-%m-%d %H:%M:%S") + ("" if ended else f", again every {REFRESH_S} s")
    progress = ["waiting for the first step"]
    if view.main.steps:
        progress = [view.place, *(f"{name}: {text}" for name, text in describe_progress(view).items())]
    verdict = [f"{view.status}: {progress[0]}", *progress[1:]]
    head = PageHead(view.run.name, verdict, made=made, refresh=0 if ended else REFRESH_S)
    tables = [table for table in (build_ranks_table(view), _build_events_table(view.main)) if table.rows]
    parts = {"": ("loss", "rate", "use", "ranks", "events")}
    return render_page(head, _build_live_charts(view), tables, parts=parts)


def _build_live_charts(view: LiveView) -> list[Chart]:
    steps, devices = view.main.steps, any("device_share" in event for rank in view.ranks for event in rank.used)
    name, scale, label = ("device_share", 100.0, "% of the device") if devices else ("cores", 1.0, "cores")
    used = {
        f"rank {rank}": [(event.get("step") or 0, scale * event[name]) for event in follower.used if name in event]
        for rank, follower in enumerate(view.ranks)
    }
    rates = [(step["step"], step.get("batch", 0) / step["step_s"]) for step in steps if step.get("step_s")]
    losses = [(step["step"], step.get("loss")) for step in steps]
    charts = [
        Chart("loss", "Loss", "Training loss.", _draw_means({"loss": losses}, "loss"), tall=True),
        Chart("rate", "Throughput", "Throughput, samples/s.", _draw_means({"samples/s": rates}, "samples/s")),
        Chart("use", "What each rank uses", f"What each rank uses, {label}.", _draw_means(used, label)),
    ]
    return [chart for chart in charts if any(len(line["points"]) > 1 for line in chart.data["lines"])]


def _draw_means(points: Mapping[str, Sequence[Point]], label: str) -> dict[str, Any]:
    """Return lines through the means of at most `MAX_POINTS` stretches."""
    lines = []
    for name, some in points.items():
        known = [(step, value) for step, value in some if value is not None and math.isfinite(value)]
        groups = split_stretches(known, MAX_POINTS)
        means = [[group[-1][0], round_digits(_mean(value for _, value in group))] for group in groups]
        lines.append({"name": name, "points": means})
    return draw_lines(lines, label, from_zero=label != "loss")


def _build_events_table(main: EventFollower) -> Table:
    table = Table("time", "event", "what", left=3, name="events", title="Last events")
    for event in reversed(main.recent):
        at = time.strftime("%H:%M:%S", time.localtime(float(event.get("t") or 0)))
        step = f"step {event['step']:,}" if isinstance(event.get("step"), int) else ""
        metrics = format_metrics(extract_metrics(event)) if event["kind"] == "evaluate" else ""
        status = event.get("status") if event["kind"] == "end" else ""
        more = event.get("text") or event.get("why") or metrics or status or ""
        table.add_row(at, event["kind"], ", ".join(filter(None, (step, str(more)))))
    return table


def start_server(port: int, render: Callable[[], str]) -> int:
    """Serve the page on the loopback in a thread; return the port, which is free if 0 was given."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = str(self.headers.get("Host", "")).rpartition(":")[0]
            if self.path != "/" or host not in (LOOPBACK, "localhost"):  # a name of elsewhere could be pointed here
                self.send_error(404)
                return
            content = render().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError):
        problem = f"port {port} is not free here; give another, as  --serve 8001"
        raise option_error("--serve", problem, "unavailable") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])
