"""Progress of a running training: one live line on a terminal, a few plain lines in a log, and the time left.

The plan, the live line and the time that is left count with the same numbers.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from paceline.config import Train
from paceline.io import terminal
from paceline.io.escape import escape_hidden
from paceline.io.format import clock, format_metrics, number, percent, to_encodable
from paceline.io.terminal import COLUMNS
from paceline.runlog.events import extract_metrics
from paceline.runlog.summary import describe_baseline
from paceline.runlog.timers import TIMES

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text


FORWARD_SHARE = 1 / 3
"""Time of a sample that is evaluated over that of one that is trained on: there is no backward pass."""
COPY_BYTES_S = 4e9
"""At which each rank copies its part of a checkpoint aside, while training waits."""
WRITE_BYTES_S = 1e9
"""At which the copy then goes to the disk, with its checksums, while training goes on; the run waits for the last."""


@dataclass(frozen=True)
class PauseSchedule:
    """Of a whole run."""

    steps: int
    evaluate_every: int
    """Steps; the last step is followed by an evaluation and a checkpoint too."""
    checkpoint_every: int
    evaluated: int = 0
    """Samples of each evaluation; 0 where there is none."""

    @classmethod
    def of(cls, train: Train, steps: int, steps_per_epoch: int, evaluated: int) -> PauseSchedule:
        return cls(steps, train.evaluate_every or steps_per_epoch, train.checkpoint_every or steps_per_epoch, evaluated)

    def evaluations(self, done: int = 0) -> int:
        """How many are to come after so many steps."""
        return _due(done, self.steps, self.evaluate_every) if self.evaluated else 0

    def checkpoints(self, done: int = 0) -> int:
        """The same, without those that are made because an evaluation was the best so far."""
        return _due(done, self.steps, self.checkpoint_every)

    def evaluate_s(self, sample_s: float) -> float:
        """Of one evaluation, where a sample of the training takes that long over all ranks."""
        return self.evaluated * sample_s * FORWARD_SHARE

    def checkpoints_s(self, bytes_per_rank: float) -> float:
        """Of all checkpoints, of which each rank writes so much."""
        return self.checkpoints() * bytes_per_rank / COPY_BYTES_S + bytes_per_rank / WRITE_BYTES_S


def _due(done: int, steps: int, every: int) -> int:
    if done >= steps:
        return 0
    return steps // every - done // every + (steps % every > 0)


WINDOW_S = 30.0
REDRAW_S = 0.25
LINE_S = 2.0
LINE_MOST_S = 60.0
LEAST_BAR, MOST_BAR = 5, 24
MARK_S = 0.1
SHARES = ("compute", "data", "exposed")
PLAIN = (
    (0, "percent step epoch rate loss when shares"),
    (0, "percent step rate loss when shares"),
    (0, "percent step short_rate loss when shares"),
    (0, "percent short_rate loss when shares"),
    (0, "percent short_rate loss when"),
)
"""The line in several lengths: columns of its bar at least, and parts."""
LIVE = (
    (LEAST_BAR, "percent step epoch rate loss when shares"),
    (LEAST_BAR, "percent step epoch short_rate loss when shares"),
    (LEAST_BAR, "percent step rate loss when shares"),
    (LEAST_BAR, "percent step short_rate loss when shares"),
    (0, "percent step short_rate loss when shares"),
    (LEAST_BAR, "percent step rate loss when"),
    (0, "percent step short_rate loss when"),
    (0, "percent short_rate loss when"),
    (0, "percent when"),
    (0, "percent"),
)
Part = tuple[str, str]
"""A piece of the line and its style."""


class Progress:
    """Shows steps, messages and evaluations. `with Progress(total) as progress: progress.step(event)`."""

    def __init__(
        self,
        total_samples: int,
        done_samples: int = 0,
        stream: TextIO | None = None,
        pauses: PauseSchedule | None = None,
    ) -> None:
        """`pauses`: what is done between steps, so that the time that is left counts it."""
        self.total = total_samples
        self.pauses = pauses
        self._evaluate_s: float | None = None
        self._checkpoint_s = 0.0
        self._ended = False
        self.stream = stream if stream is not None else sys.stdout
        self._pace = _Pace(done_samples)
        self._event: Mapping[str, Any] | None = None
        self._loss: float | None = None
        self._began = self._drawn = time.monotonic()
        self._shown: Mapping[str, Any] | None = None
        self._live = _live_line(self.stream)

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        if self._event is not self._shown:
            self._draw(time.monotonic())
        if self._live is not None and self._live.is_started:
            with self._nobody_listening():
                self._live.stop()

    def step(self, event: Mapping[str, Any]) -> None:
        """Take the latest "step" event; drawn at once or, when they come fast, with one of the next."""
        now = time.monotonic()
        self._pace.add(now, event)
        self._event = event
        self._loss = event.get("loss", self._loss)
        self.total = event.get("of_samples", self.total)  # a fit that converges knows its length by and by
        log_s = min(LINE_MOST_S, max(LINE_S, (now - self._began) / 50))  # the log of a long run stays readable
        if self._shown is None or now - self._drawn >= (log_s if self._live is None else REDRAW_S):
            self._draw(now)

    def say(self, text: str) -> None:
        """Show a message that stays."""
        text = to_encodable(escape_hidden(text), self.stream.encoding)
        with self._nobody_listening():
            if self._live is None:
                self.stream.write(f"{text}\n")
                self.stream.flush()
            else:
                from rich.text import Text

                self._live.console.print(Text(text), soft_wrap=True)

    def evaluated(self, event: Mapping[str, Any]) -> None:
        """Show the metrics of an "evaluate" event."""
        of = f" of {number(event['of'])}" if event.get("of", event.get("n")) != event.get("n") else ""
        on = f" on {number(event['n'])}{of} samples" if "n" in event else ""
        poor = f"; {words}" if (words := describe_baseline(event)) else ""
        self._evaluate_s = event.get("evaluate_s")
        self._pace.paused_s += self._evaluate_s or 0.0
        self.say(
            f"evaluated at step {number(event.get('step', 0))}{on}: {format_metrics(extract_metrics(event))}{poor}"
        )

    def saved(self, event: Mapping[str, Any]) -> None:
        """Take a "checkpoint" event: how long training waited for it."""
        self._checkpoint_s = event.get("checkpoint_s") or 0.0
        self._pace.paused_s += self._checkpoint_s

    def ended(self) -> None:
        """The run is over, though not all that was planned may be done."""
        self._ended, self._shown = True, None

    def _left_s(self, step: int) -> float:
        """Steps to come, and the evaluations and checkpoints between them, each as long as the last one took."""
        seconds = (self.total - self._pace.samples) / self._pace.rate
        if self.pauses is not None:
            one = self.pauses.evaluate_s(1 / self._pace.rate) if self._evaluate_s is None else self._evaluate_s
            seconds += self.pauses.evaluations(step) * one + self.pauses.checkpoints(step) * self._checkpoint_s
        return seconds

    def _draw(self, now: float) -> None:
        event = self._event
        assert event is not None
        self._drawn, self._shown = now, event
        pace = self._pace
        rest = self.total - pace.samples
        left = clock(self._left_s(int(event.get("step", 0)))) if pace.rate > 0 else "?"
        when = f"eta {left}" if rest > 0 and not self._ended else f"took {clock(now - self._began)}"
        done = min(1.0, pace.samples / self.total) if self.total > 0 else 1.0
        place = int(event.get("step", 0)), event.get("epoch") if "of_samples" not in event else None
        parts = _parts(done, place, pace.rate, self._loss, when, pace.shares())
        if self._live is None:
            self.say("  ".join(text for text, _ in _chosen(parts, PLAIN, _columns(self.stream))[1]))
            return
        console = self._live.console
        signs = "━─" if console.encoding.lower().startswith("utf") else "=-"
        text = _styled(parts, done, min(COLUMNS, console.width - 1), signs)
        with self._nobody_listening():
            if not self._live.is_started:
                self._live.start()
                console.show_cursor(True)  # a killed run must not leave a terminal without one
            self._live.update(text, refresh=True)

    @contextlib.contextmanager
    def _nobody_listening(self) -> Iterator[None]:
        """A pipe that was closed or a terminal that has gone: the run goes on, unseen."""
        try:
            yield
        except (OSError, ValueError):
            self.stream, self._live = io.StringIO(), None


class _Pace:
    """Rate and shares over the last half minute, so that they follow the run as it is now."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.rate = 0.0
        self.paused_s = 0.0
        """Spent between steps so far, which no rate counts."""
        self._sums = dict.fromkeys(TIMES, 0.0)
        self._marks: deque[tuple[float, int, dict[str, float]]] = deque()
        """(when, less pauses, samples by then, sums of the times until then), at most one for each 0.1 s."""

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
        """Of the time of a step; exposed is left out where ranks have nothing to say to each other."""
        before = self._marks[0][2]
        spent = {name: self._sums[name] - before[name] for name in TIMES}
        names = SHARES if spent["comm_s"] > 0 or spent["exposed_s"] > 0 else SHARES[:-1]
        return {name: spent[f"{name}_s"] / spent["step_s"] for name in names} if spent["step_s"] > 0 else {}


def _parts(
    done: float, place: tuple[int, int | None], rate: float, loss: float | None, when: str, shares: Mapping[str, float]
) -> dict[str, Part]:
    """`place` is the step, and the epoch from 0 where that is another number."""
    step, epoch = place
    return {
        "percent": (f"{math.floor(100 * done):3} %", "bold"),
        "step": (f"step {step:,}", ""),
        "epoch": (f"epoch {epoch + 1:,}" if epoch is not None else "", ""),
        "rate": (f"{number(rate, 3)} samples/s", "cyan"),
        "short_rate": (f"{number(rate, 3)}/s", "cyan"),
        "loss": (f"loss {loss:.4f}" if loss is not None and abs(loss) < 1e4 else f"loss {number(loss)}", "green"),
        "when": (when, ""),
        "shares": (" ".join(f"{name} {percent(share)}" for name, share in shares.items()), "dim"),
    }


def _chosen(parts: Mapping[str, Part], choices: Iterable[tuple[int, str]], width: int) -> tuple[int, list[Part]]:
    """The least bar and the parts of the first choice that fits; of the last, where none does."""
    bar, found = 0, []
    for bar, names in choices:
        found = [parts[name] for name in names.split() if parts[name][0]]
        if _length(found) + bar <= width:
            break
    return bar, found


def _styled(parts: Mapping[str, Part], done: float, width: int, signs: str) -> Text:
    from rich.text import Text

    least_bar, (percent, *rest) = _chosen(parts, LIVE, width - 1)
    text = Text(no_wrap=True, overflow="crop")
    text.append(*percent)
    if least_bar:
        room = min(MOST_BAR, width - 1 - _length([percent, *rest]))
        filled = math.floor(done * room)
        text.append(" ").append(signs[0] * filled, "cyan").append(signs[1] * (room - filled), "dim")
    for part, style in rest:
        text.append("  ").append(part, style)
    return text


def _length(parts: list[Part]) -> int:
    return sum(len(text) + 2 for text, _ in parts) - 2


def _columns(stream: TextIO) -> int:
    """A log has 100; a terminal too simple for a live line has what it has."""
    return min(COLUMNS, shutil.get_terminal_size().columns) if stream.isatty() else COLUMNS


def _live_line(stream: TextIO) -> Live | None:
    """A line that can be drawn over, where the stream is a terminal that can do so."""
    if not stream.isatty() or os.environ.get("TERM", "dumb").lower() in ("", "dumb", "unknown"):
        return None
    from rich.live import Live

    console = terminal.build_console(file=stream)
    return Live(console=console, auto_refresh=False) if console.is_terminal else None
