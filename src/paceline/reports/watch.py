"""The verb `watch`: a live view of a run, from its files alone, so it works from anywhere and over ssh.

It reads the events that every rank adds, also while a run is killed and resumed. Ctrl-C leaves the view, not the run.
As a page it is a file that is kept current, or served on the loopback for `ssh -L`.
"""

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from paceline.config import RunSpec
from paceline.io import terminal
from paceline.io.arguments import option_error
from paceline.io.files import print_json, write_atomic
from paceline.io.format import clock, duration, format_metrics, number, percent, size
from paceline.io.table import UNKNOWN, Table
from paceline.launch.heartbeat import STOPPED, read_beats
from paceline.reports.charts import Chart, round_digits
from paceline.reports.page import PageHead, render_page
from paceline.runlog.events import extract_metrics, parse_event
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import describe_baseline, select_class_results

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
        if event["kind"] not in ("step", "usage"):
            self.recent.append(event)
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
                self.used.append(event)
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
    def ended(self) -> bool:
        return bool(self.ranks and self.ranks[0].end)

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
    def place(self) -> str:
        """How far the run is: its step, epoch, samples, and the time left."""
        main, total = self.ranks[0], self.total_steps
        last, of = main.steps[-1], f" of {total:,}" if total else ""
        left = f", about {clock((total - last['step']) * self.step_s)} left" if total and not main.end else ""
        return f"step {last['step']:,}{of}, epoch {last['epoch'] + 1}, {last['samples']:,} samples{left}"

    @property
    def total_steps(self) -> int | None:
        steps = self.ranks[0].start.get("steps") if self.ranks else None
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
    import psutil

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
    psutil.cpu_percent(interval=0.1)  # its later answers count from here
    if once or not console.is_terminal:
        console.print(render_view(view))
        return 0
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(render_view(view), console=console, auto_refresh=False) as live:
        while not view.ended:
            time.sleep(every_s)
            if view.look() or view.quiet_s:
                live.update(render_view(view), refresh=True)
        live.update(render_view(view), refresh=True)
    return 0


def _keep_page(view: LiveView, page: Path | None, serve: int | None, once: bool) -> None:
    """Write the page until the run has ended; a served one stays until Ctrl-C."""
    if page is not None and not page.parent.is_dir():
        raise option_error("--page", f"there is no folder {str(page.parent)!r}; make it with  mkdir -p {page.parent}")
    state = {"text": render_watch_page(view)}
    if serve is not None:
        port = start_server(serve, lambda: state["text"])
        tunnel = f"from elsewhere after  ssh -L {port}:localhost:{port} {socket.gethostname()}"
        terminal.print_text(f"open  http://localhost:{port}/  ({tunnel});  Ctrl-C ends the page, not the run")
    if page is not None:
        write_atomic(page, state["text"])
        terminal.print_text(
            f"written: {page}" + ("" if once or view.ended else "; it is kept current until the run ends")
        )
    while not once and (serve is not None or not view.ended):
        time.sleep(REFRESH_S)
        if view.look() or view.quiet_s:
            state["text"] = render_watch_page(view)
            if page is not None:
                write_atomic(page, state["text"])


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
    from rich.table import Table as Grid
    from rich.text import Text

    head = Text.assemble((view.run.name, "bold"), "  ", (view.status, STYLES.get(view.status, "bold yellow")))
    if not view.ranks or not view.ranks[0].steps:
        return Group(head, Text("waiting for the first step", style="dim"))
    main, step_s = view.ranks[0], view.step_s
    head.append(f"  {view.place}")
    if why := main.end.get("why"):
        head.append(f": {why}")
    body = Grid.grid(padding=(0, 2))
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
    body.add_row("machine", _describe_machine(main.start))
    ranks = build_ranks_table(view)
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
    known = [name for name in USES if any(name in follower.usage for follower in view.ranks)]
    heads = ("rank", "step", "works", "waits", *(USES[name][0] for name in known))
    table = Table(*heads, name="ranks", title="Ranks")
    silent = {beat.rank: beat for beat in read_beats(view.run.heartbeats)} if view.quiet_s else {}
    for rank, follower in enumerate(view.ranks if len(view.ranks) > 1 or known else ()):
        step_s = follower.mean("step_s") or 1.0
        shares = (follower.mean("compute_s", "data_s") / step_s, follower.mean("exposed_s") / step_s)
        used = [(USES[name][1], follower.usage.get(name)) for name in known]
        cells = [show(float(value)) if isinstance(value, int | float) else UNKNOWN for show, value in used]
        if rank in silent:
            beat = silent[rank]
            stopped = ", stopped by a signal" if beat.state == STOPPED else ""
            silence = duration(max(0.0, time.time() - beat.t))
            table.add_failed_row(f"rank {rank}", f"{beat.description} for {silence}{stopped}")
        elif follower.steps:
            table.add_row(str(rank), f"{follower.steps[-1]['step']:,}", *map(percent, shares), *cells)
        else:
            table.add_row(str(rank), UNKNOWN, UNKNOWN, UNKNOWN, *cells)
    return table


def _draw_bar(main: EventFollower, step_s: float) -> str:
    shares = {name: main.mean(f"{name}_s") / step_s if step_s else 0.0 for name in TERMS}
    bar = "".join(TERMS[name] * round(BAR * min(1.0, share)) for name, share in shares.items())[:BAR]
    return f"{bar:<{BAR}} " + ", ".join(f"{TERMS[n]} {n} {percent(s)}" for n, s in shares.items())


def _describe_machine(start: dict[str, Any]) -> str:
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


REFRESH_S = 5
MAX_POINTS = 400
LOOPBACK = "127.0.0.1"


def render_watch_page(view: LiveView) -> str:
    """Render loss, throughput, what each rank uses and the last events; the page reloads itself until the run ends."""
    main = view.ranks[0] if view.ranks else EventFollower(view.run.events_file(0))
    ended = bool(main.end)
    made = f"{time.strftime('%Y-%m-%d %H:%M:%S')}" + ("" if ended else f", again every {REFRESH_S} s")
    head = PageHead(view.run.name, describe_progress(view, main), made=made, refresh=0 if ended else REFRESH_S)
    tables = [table for table in (build_ranks_table(view), _build_events_table(main)) if table.rows]
    return render_page(
        head, _build_live_charts(view, main), tables, parts={"": ("loss", "rate", "use", "ranks", "events")}
    )


def describe_progress(view: LiveView, main: EventFollower) -> list[str]:
    """Return the state of a run: its progress, loss and speed, its last evaluation."""
    if not main.steps:
        return [f"{view.status}: waiting for the first step"]
    step_s = view.step_s
    rate = f"{number(main.mean('batch') / step_s, 3)} samples/s, " if step_s else ""
    lines = [f"{view.status}: {view.place}"]
    lines.append(f"loss {number(main.steps[-1].get('loss'))}; {rate}{duration(step_s)} per step")
    if main.evaluation:
        metrics, at = format_metrics(extract_metrics(main.evaluation)), main.evaluation.get("step") or 0
        poor = describe_baseline(main.evaluation)
        lines.append(f"evaluation at step {at:,}: {metrics}" + (f"; {poor}" if poor else ""))
    return lines


def _build_live_charts(view: LiveView, main: EventFollower) -> list[Chart]:
    loss = [(step["step"], step.get("loss")) for step in main.steps]
    rate = [(step["step"], step.get("batch", 0) / step["step_s"]) for step in main.steps if step.get("step_s")]
    use, label = [], ""
    for name, scale, words in (("device_share", 100.0, "% of the device"), ("cores", 1.0, "cores")):
        use = [
            {
                "name": f"rank {rank}",
                "points": _thin([(e.get("step") or 0, scale * e[name]) for e in follower.used if name in e]),
            }
            for rank, follower in enumerate(view.ranks)
        ]
        if label := words if any(len(line["points"]) > 1 for line in use) else "":
            break
    charts = [
        Chart("loss", "Loss", "Training loss.", {"lines": [{"name": "loss", "points": _thin(loss)}]}, (), tall=True),
        _build_chart("rate", "Throughput", "samples/s", [{"name": "samples/s", "points": _thin(rate)}]),
        _build_chart("use", "What each rank uses", label, use if label else []),
    ]
    return [chart for chart in charts if any(len(line["points"]) > 1 for line in chart.data["lines"])]


def _build_chart(name: str, title: str, label: str, lines: Sequence[dict[str, Any]]) -> Chart:
    return Chart(
        name, title, f"{title}, {label}." if label else "", {"lines": lines, "label": label, "from_zero": True}, ()
    )


def _thin(points: Sequence[tuple[int, float | None]]) -> list[list[float]]:
    """Return the means of at most `MAX_POINTS` stretches."""
    known = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    width = max(1, math.ceil(len(known) / MAX_POINTS))
    groups = [known[i : i + width] for i in range(0, len(known), width)]
    return [[group[-1][0], round_digits(sum(value for _, value in group) / len(group))] for group in groups]


def _build_events_table(main: EventFollower) -> Table:
    table = Table("time", "event", "what", left=3, name="events", title="Last events")
    for event in reversed(main.recent):
        at = time.strftime("%H:%M:%S", time.localtime(float(event.get("t") or 0)))
        step = f"step {event['step']:,}" if isinstance(event.get("step"), int) else ""
        metrics = format_metrics(extract_metrics(event)) if event["kind"] == "evaluate" else ""
        more = (
            event.get("text") or event.get("why") or metrics or (event.get("status") if event["kind"] == "end" else "")
        )
        table.add_row(at, event["kind"], ", ".join(filter(None, (step, str(more or "")))))
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
        raise option_error(
            "--serve", f"port {port} is not free here; give another, as  --serve 8001", "unavailable"
        ) from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])
