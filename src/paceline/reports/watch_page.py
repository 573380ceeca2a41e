"""The live view of a run as a page: a file that is kept current, or served on the loopback for `ssh -L`."""

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.io.arguments import option_error
from paceline.io.format import clock, duration, format_metrics, number
from paceline.io.table import Table
from paceline.reports.charts import Chart, round_digits
from paceline.reports.page import PageHead, render_page
from paceline.reports.watch import EventFollower, LiveView, build_ranks_table
from paceline.runlog.events import extract_metrics
from paceline.runlog.summary import describe_baseline

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
    """Return the state of a run: how far it is, its loss and speed, its last evaluation."""
    if not main.steps:
        return [f"{view.status}: waiting for the first step"]
    last, total, step_s = main.steps[-1], view.total_steps, view.step_s
    done = f" of {total:,}" if total else ""
    left = f", about {clock((total - last['step']) * step_s)} left" if total and not main.end else ""
    rate = f"{number(main.mean('batch') / step_s, 3)} samples/s, " if step_s else ""
    lines = [f"{view.status}: step {last['step']:,}{done}{left}"]
    lines.append(f"loss {number(last.get('loss'))}; {rate}{duration(step_s)} per step")
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


def describe_server(port: int) -> str:
    """Return where to open the page, here and from another machine."""
    tunnel = f"ssh -L {port}:localhost:{port} {socket.gethostname()}"
    return f"open  http://localhost:{port}/  (from elsewhere after  {tunnel});  Ctrl-C ends the page, not the run"
