"""Send events of the main rank to the terminal and to the loggers of the run file: TensorBoard, W&B, MLflow, trackio.

A logger that is not installed is rejected before a run starts; one that fails later is dropped with a warning.
"""

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.config import RunSpec
from paceline.config.registry import describe_error
from paceline.errors import UserError
from paceline.io.files import read_json, write_json
from paceline.io.terminal import warn
from paceline.runlog.progress import PauseSchedule, Progress
from paceline.runlog.run_dir import RunDir
from paceline.workload import LogFn

PROJECT = "paceline"
NOT_LOGGED = ("t", "step")


class TensorBoard:
    def __init__(self, run: RunDir, spec: RunSpec, run_id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.run_id = "tensorboard"
        self._writer = SummaryWriter(str(run.path / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: str = "finished") -> None:
        self._writer.close()


class Wandb:
    """Online or offline as its own environment says; a resumed run keeps its id."""

    def __init__(self, run: RunDir, spec: RunSpec, run_id: str | None) -> None:
        import wandb

        resume = {"id": run_id, "resume": "allow"}
        self._run = wandb.init(dir=str(run.path), project=PROJECT, name=run.name, config=spec.dump(), **resume)
        self.run_id = str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: str = "finished") -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


class Mlflow:
    """Written to the run folder, unless MLFLOW_TRACKING_URI names a server."""

    def __init__(self, run: RunDir, spec: RunSpec, run_id: str | None) -> None:
        from mlflow import MlflowClient

        here = (run.path / "mlflow").resolve().as_uri()
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions refuse files without it
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or here)
        if run_id is None:
            found = self._client.get_experiment_by_name(PROJECT)
            experiment = found.experiment_id if found else self._client.create_experiment(PROJECT)
            run_id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
            for key, value, _, _ in spec.fields():
                self._client.log_param(run_id, key, value)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.run_id = run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self.run_id, [Metric(name, value, now_ms, step) for name, value in values.items()])

    def close(self, status: str = "finished") -> None:
        self._client.set_terminated(self.run_id, {"failed": "FAILED", "stopped": "KILLED"}.get(status, "FINISHED"))


class Trackio(Wandb):
    """In trackio's own folder, where its dashboard looks for it; a resumed run keeps its name."""

    def __init__(self, run: RunDir, spec: RunSpec, run_id: str | None) -> None:
        import trackio

        self.run_id = run_id or f"{run.name}-{time.time_ns() // 1_000_000_000}"
        self._run = trackio.init(PROJECT, self.run_id, config=spec.dump(), resume="allow", embed=False)

    def close(self, status: str = "finished") -> None:
        self._run.finish()


KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def check_loggers(names: Sequence[str]) -> None:
    """Raise UserError for loggers that are unknown or not installed."""
    for name in names:
        if name not in KINDS:
            message = f"train.loggers has {name!r}, which is not known; use some of {', '.join(KINDS)}"
            raise UserError(message, code="unknown-name", key="train.loggers")
        if importlib.util.find_spec(name) is None:
            message = f"train.loggers has {name!r}, which is not installed: pip install 'paceline[{name}]'"
            raise UserError(message, code="not-installed", key="train.loggers")


def open_loggers(names: Sequence[str], run: RunDir, spec: RunSpec, log: LogFn = warn) -> "list[_Guarded]":
    """Open each logger, resuming the ids of an earlier attempt of the run."""
    check_loggers(names)
    file = run.path / "loggers.json"
    ids = read_json(file) if file.exists() else {}
    loggers: list[_Guarded] = []
    for name in dict.fromkeys(names):
        try:
            opened = KINDS[name](run, spec, ids.get(name))
        except Exception as error:
            problem = f"train.loggers has {name!r}, which cannot be opened: {describe_error(error)}"
            if name not in ids:
                raise UserError(problem, code="unavailable", key="train.loggers") from error
            log(f"warning: {problem}; training continues without it")
            continue
        ids[name] = opened.run_id
        loggers.append(_Guarded(name, opened, log))
    if loggers:
        write_json(file, ids)
    return loggers


class _Guarded:
    """A logger that warns once and falls silent instead of ending the run."""

    def __init__(self, name: str, logger: Any, log: LogFn) -> None:
        self.name, self._logger, self._warn = name, logger, log

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        logged = {k: float(v) for k, v in values.items() if k not in NOT_LOGGED and isinstance(v, (int, float))}
        self._call_or_drop(lambda logger: logger.log(step, logged))

    def close(self, status: str = "finished") -> None:
        self._call_or_drop(lambda logger: logger.close(status))
        self._logger = None

    def _call_or_drop(self, do: Callable[[Any], None]) -> None:
        if self._logger is None:
            return
        try:
            do(self._logger)
        except Exception as error:
            self._logger = None
            failed = f"logger {self.name!r} failed and is dropped, training continues"
            self._warn(f"warning: {failed}: {describe_error(error)}")


@contextmanager
def open_event_sink(
    spec: RunSpec, run: RunDir, total_samples: int, done_samples: int, show: bool, pauses: PauseSchedule | None = None
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function to call with each event until the run ends."""
    loggers = open_loggers(spec.train.loggers, run, spec)
    progress = Progress(total_samples, done_samples, pauses=pauses)
    ended = "failed"
    shown = {"step": progress.step, "evaluate": progress.show_evaluation, "checkpoint": progress.saved}
    shown |= {"notice": lambda event: progress.say(event["text"]), "done": progress.ended}

    def send(event: dict[str, Any]) -> None:
        nonlocal ended
        kind, step = event["kind"], event.get("step", 0)
        if kind == "end":
            ended = event["status"]
        if show and kind in shown:
            shown[kind](event)
        if kind == "evaluate" or (kind == "step" and step % spec.train.log_every == 0):
            prefix = "evaluate/" if kind == "evaluate" else "train/"
            values = {f"{prefix}{name}": value for name, value in event.items() if name not in ("kind", "step")}
            for logger in loggers:
                logger.log(step, values)

    with progress:
        try:
            yield send
        finally:
            for logger in loggers:
                logger.close(ended)
