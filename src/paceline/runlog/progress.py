"""Progress of a run: one live line on a terminal, a few plain lines in a log, and the time left."""

import contextlib
import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from paceline.config import Train
from paceline.io import terminal
from paceline.io.escape import escape_hidden
from paceline.io.format import clock, format_metrics, number, percent, to_encodable
from paceline.runlog.events import extract_metrics
from paceline.runlog.summary import describe_baseline
from paceline.runlog.timers import TIMES

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text


FORWARD_SHARE = 1 / 3  # cost of evaluating a sample relative to training on it
COPY_BYTES_S = 4e9  # a rank copies its part of a checkpoint aside, while training waits
WRITE_BYTES_S = 1e9  # the copy is written in the background; the run waits for the last one


@dataclass(frozen=True)
class PauseSchedule:
    """Evaluations and checkpoints of a run, as the plan and the live line count them; both follow the last step."""

    steps: int
    evaluate_every: int
    checkpoint_every: int
    evaluated: int = 0  # samples of each evaluation; 0 without evaluation

    @classmethod
    def of(cls, train: Train, steps: int, steps_per_epoch: int, evaluated: int) -> "PauseSchedule":
        saved = steps_per_epoch if train.checkpoint_every == "auto" else train.checkpoint_every or steps_per_epoch
        return cls(steps, train.evaluate_every or steps_per_epoch, saved, evaluated)

    def evaluations(self, done: int = 0) -> int:
        """Return the number of evaluations left after `done` steps; 0 for a run without evaluation."""
        return _count_due(done, self.steps, self.evaluate_every) if self.evaluated else 0

    def checkpoints(self, done: int = 0) -> int:
        """Return the number of checkpoints left after `done` steps, not counting those for a best evaluation."""
        return _count_due(done, self.steps, self.checkpoint_every)

    def evaluate_s(self, sample_s: float) -> float:
        """Return the seconds of an evaluation, given those of a training sample over all ranks."""
        return self.evaluated * sample_s * FORWARD_SHARE

    def checkpoints_s(self, bytes_per_rank: float) -> float:
        """Return the seconds of all checkpoints."""
        return self.checkpoints() * bytes_per_rank / COPY_BYTES_S + bytes_per_rank / WRITE_BYTES_S


def _count_due(done: int, steps: int, every: int) -> int:
    if done >= steps:
        return 0
    return steps // every - done // every + (steps % every > 0)


WINDOW_S = 30.0
REDRAW_S = 0.25
LINE_S, LINE_MOST_S = 2.0, 60.0
BAR = 16
MARK_S = 0.1
NOTEBOOK = "JPY_PARENT_PID"  # set in the kernel of a notebook, and in the ranks that it starts
SHARES = ("compute", "data", "exposed")
STYLES = {"percent": "bold", "rate": "cyan", "loss": "green", "shares": "dim"}


class Progress:
    """Show steps, messages and evaluations: `with Progress(total) as progress: progress.step(event)`."""

    def __init__(
        self, total: int, done: int = 0, stream: TextIO | None = None, pauses: PauseSchedule | None = None
    ) -> None:
        """`total`, `done`: samples of the run, and of those before it was resumed."""
        self.total, self.pauses = total, pauses
        self.stream = stream if stream is not None else sys.stdout
        self._evaluate_s: float | None = None
        self._checkpoint_s, self._ended = 0.0, False
        self._pace = _Pace(done)
        self._event: Mapping[str, Any] = {}
        self._shown: Mapping[str, Any] | None = self._event
        self._loss: float | None = None
        self._began = self._drawn = time.monotonic()
        self._live = _open_live(self.stream)
        self._redraws = NOTEBOOK in os.environ and not self.stream.isatty()
        self._drawn_width = 0  # of the line that a notebook replaces

    def __enter__(self) -> "Progress":
        self._began = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        if self._event and self._event is not self._shown:
            self._draw_line(time.monotonic())
        with self._ignore_closed_stream():
            if self._live is not None and self._live.is_started:
                self._live.stop()
            if self._drawn_width:
                self.stream.write("\n")

    def step(self, event: Mapping[str, Any]) -> None:
        """Show a "step" event, at once or, when steps are fast, with a later one."""
        now = time.monotonic()
        self._pace.add(now, event)
        self._event = event
        self._loss = event.get("loss", self._loss)
        self.total = event.get("of_samples", self.total)  # a fit learns its length as it converges
        log_s = min(LINE_MOST_S, max(LINE_S, (now - self._began) / 50))  # the log of a long run stays readable
        every_s = REDRAW_S if self._redraws or self._live is not None else log_s
        if not self._shown or now - self._drawn >= every_s:
            self._draw_line(now)

    def say(self, text: str) -> None:
        """Print a message above the live line."""
        text = to_encodable(escape_hidden(text), self.stream.encoding)
        with self._ignore_closed_stream():
            if self._live is None:
                self.stream.write(f"\r{text.ljust(self._drawn_width)}\n" if self._drawn_width else f"{text}\n")
                self._drawn_width = 0
                self.stream.flush()
            else:
                from rich.text import Text

                self._live.console.print(Text(text), soft_wrap=True)

    def show_evaluation(self, event: Mapping[str, Any]) -> None:
        """Print the metrics of an "evaluate" event; exclude its time from the rate, and add it for each one left."""
        of = f" of {number(event['of'])}" if event.get("of", event.get("n")) != event.get("n") else ""
        on = f" on {number(event['n'])}{of} samples" if "n" in event else ""
        poor = f"; {words}" if (words := describe_baseline(event)) else ""
        self._evaluate_s = event.get("evaluate_s")
        self._pace.paused_s += self._evaluate_s or 0.0
        metrics = format_metrics(extract_metrics(event))
        self.say(f"evaluated at step {number(event.get('step', 0))}{on}: {metrics}{poor}")

    def saved(self, event: Mapping[str, Any]) -> None:
        """Record how long training waited for a checkpoint, and exclude that from the rate."""
        self._checkpoint_s = event.get("checkpoint_s") or 0.0
        self._pace.paused_s += self._checkpoint_s

    def ended(self, event: Mapping[str, Any]) -> None:
        """Record that the run ends, possibly before all steps are done."""
        self._ended, self._shown = True, None

    def _left_s(self, step: int) -> float:
        """Estimate the seconds left: steps, and evaluations and checkpoints as long as the last ones."""
        seconds = (self.total - self._pace.samples) / self._pace.rate
        if self.pauses is not None:
            each_s = self.pauses.evaluate_s(1 / self._pace.rate) if self._evaluate_s is None else self._evaluate_s
            seconds += self.pauses.evaluations(step) * each_s + self.pauses.checkpoints(step) * self._checkpoint_s
        return seconds

    def _format_parts(self, now: float) -> dict[str, str]:
        """Return what the line says, by name, the last of it first cut by a narrow terminal."""
        event, pace, loss = self._event, self._pace, self._loss
        step, epoch = int(event.get("step", 0)), event.get("epoch") if "of_samples" not in event else None
        left = clock(self._left_s(step)) if pace.rate > 0 else "?"
        going = self.total > pace.samples and not self._ended
        parts = {
            "percent": f"{math.floor(100 * self._done_share):3} %",
            "when": f"eta {left}" if going else f"took {clock(now - self._began)}",
            "step": f"step {step:,}",
            "rate": f"{number(pace.rate, 3)} samples/s",
            "loss": f"loss {loss:.4f}" if loss and 1e-3 <= abs(loss) < 1e4 else f"loss {number(loss)}",
            "epoch": f"epoch {epoch + 1:,}" if epoch is not None else "",
            "shares": " ".join(f"{name} {percent(share)}" for name, share in pace.shares().items()),
        }
        return {name: text for name, text in parts.items() if text}

    @property
    def _done_share(self) -> float:
        return min(1.0, self._pace.samples / self.total) if self.total > 0 else 1.0

    def _draw_line(self, now: float) -> None:
        self._drawn, self._shown = now, self._event
        parts = self._format_parts(now)
        if self._live is not None:
            console = self._live.console
            signs = "━─" if console.encoding.lower().startswith("utf") else "=-"
            text = _render_line(parts, self._done_share, signs)
            with self._ignore_closed_stream():
                if not self._live.is_started:
                    self._live.start()
                    console.show_cursor(True)  # a killed run must not leave a terminal without one
                self._live.update(text, refresh=True)
            return
        line = "  ".join(parts.values())
        if not self._redraws:
            self.say(line)
            return
        with self._ignore_closed_stream():
            self.stream.write("\r" + to_encodable(line, self.stream.encoding).ljust(self._drawn_width))
            self.stream.flush()
        self._drawn_width = len(line)

    @contextlib.contextmanager
    def _ignore_closed_stream(self) -> Iterator[None]:
        """Stop showing progress when the pipe or terminal is closed."""
        try:
            yield
        except (OSError, ValueError):
            self.stream, self._live = io.StringIO(), None


class _Pace:
    """Rate and shares of time over the last half minute."""

    def __init__(self, samples: int) -> None:
        self.samples, self.rate, self.paused_s = samples, 0.0, 0.0
        self._sums = dict.fromkeys(TIMES, 0.0)
        self._marks: deque[tuple[float, int, dict[str, float]]] = deque()
        """(time without pauses, samples, sums of times), at most one per 0.1 s."""

    def add(self, now: float, event: Mapping[str, Any]) -> None:
        now -= self.paused_s
        samples = int(event.get("samples", self.samples))
        if samples < self.samples:
            self._marks.clear()
        self.samples = samples
        if not self._marks or now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, samples, self._sums.copy()))
        for name in TIMES:
            self._sums[name] += event.get(name) or 0.0
        while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()
        then, before, _ = self._marks[0]
        if now > then and samples > before:
            self.rate = (samples - before) / (now - then)
        elif event.get("step_s"):
            self.rate = (event.get("batch") or 0) / event["step_s"]

    def shares(self) -> dict[str, float]:
        """Return shares of the step time; exposed is left out without communication."""
        before = self._marks[0][2]
        spent = {name: self._sums[name] - before[name] for name in TIMES}
        names = SHARES if spent["comm_s"] > 0 or spent["exposed_s"] > 0 else SHARES[:-1]
        return {name: spent[f"{name}_s"] / spent["step_s"] for name in names} if spent["step_s"] > 0 else {}


def _render_line(parts: Mapping[str, str], done: float, signs: str) -> "Text":
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    filled = math.floor(done * BAR)
    for name, part in parts.items():
        text.append("  " * (name != "percent")).append(part, STYLES.get(name, ""))
        if name == "percent":
            text.append(" ").append(signs[0] * filled, "cyan").append(signs[1] * (BAR - filled), "dim")
    return text


def _open_live(stream: TextIO) -> "Live | None":
    """Return a line that can be redrawn, or None if the stream is not a capable terminal."""
    if not stream.isatty() or os.environ.get("TERM", "dumb").lower() in ("", "dumb", "unknown"):
        return None
    from rich.live import Live

    console = terminal.build_console(file=stream)
    return Live(console=console, auto_refresh=False) if console.is_terminal else None
