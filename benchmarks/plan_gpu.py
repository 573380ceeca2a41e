"""Is the plan right on this CUDA device? Step time and peak memory of a few runs, planned and measured.

    python benchmarks/plan_gpu.py [--set fresh|seen|own|own-seen] [--compile auto|on|off] [--out plan_gpu.json]
                                  [--data AG_NEWS_FOLDER]

It calibrates first (under a minute), plans each run with that calibration and with the catalogue alone, then trains it
for a few steps. The formulas were revised on the `seen` runs; the six `fresh` ones were first planned
and run after that, and are those that count. `own-seen` and `own` are the same for modules as people write them
(`own_modules.py`). Texts are made up unless AG News is named. The last steps of a run are profiled, and not
timed; `--out` gets every term of each plan and the time of each kernel. Runs are neither evaluated nor saved: neither
is part of a step.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import own_modules
import torch

import paceline
from gpu import device_name
from paceline.config import RunSpec, build_spec
from paceline.data.prefetch import Loader
from paceline.io.files import to_flat, write_json
from paceline.planner.calibration.calibrate import describe_machine
from paceline.planner.calibration.gpu_probes import measure_gpu
from paceline.planner.candidates import PricedLayout
from paceline.planner.plan import plan
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.trainer import loop
from paceline.trainer.checkpoint.writer import CheckpointWriter

GIB = float(1 << 30)
LM_STEPS, CLASSIFIER_STEPS = 16, 2000
OWN_STEPS = 600
WINDOW = {"lm": 4, "classifier": 20, "own": 20}
"""Steps between two readings of the clock."""
WARM = {"lm": 4, "classifier": 1000, "own": 300}
"""Steps that compile, record and warm up."""
TEXT_BYTES = 2_200_000
KERNELS_KEPT = 100
CLASSIFIERS = {
    "small": {"width": 128, "heads": 4, "layers": 2, "ffn": 512, "dropout": 0.1},
    "large": {"width": 256, "heads": 8, "layers": 4, "ffn": 1024, "dropout": 0.1},
}
"""As in classifier_gpu.py."""


@dataclass(frozen=True)
class Run:
    name: str
    workload: str
    model: dict[str, Any]
    batch: int
    sequence: int = 1024
    parallel: dict[str, Any] = field(default_factory=dict)

    def spec(self, texts: Path, data: Path | None) -> RunSpec:
        steps = {"lm": LM_STEPS, "classifier": CLASSIFIER_STEPS, "own": OWN_STEPS}[self.workload] + WINDOW[
            self.workload
        ]
        source: dict[str, Any] = {"source": "text", "path": str(texts / "text.txt"), "sequence": self.sequence}
        source |= {"vocab": 257, "test_fraction": 0.01}
        if self.workload == "classifier":
            source = {"source": "csv", "path": str(texts / "texts.csv")}
            if data is not None:
                source = {"source": "ag_news", "path": str(data.resolve())}
            source |= {"max_length": 256, "vocab": 16384}
        train = {"steps": steps, "global_batch": self.batch, "precision": "bf16", "schedule": "constant", "warmup": 0.0}
        train |= {"lr": 1e-4, "log_every": WINDOW[self.workload], "checkpoint_every": 1 << 20}
        train |= {"evaluate_every": 1 << 20}
        whole = {"strategy": "single", "micro_batch": self.batch, "activation_checkpointing": "none", "device": "cuda"}
        values = {"name": self.name, "workload": self.workload, "model": self.model, "data": source, "train": train}
        if self.workload == "own":
            file = Path(__file__).with_name("own_modules.py")
            values = {"name": self.name, "workload": f"{file}:{self.name}", "train": train}
        return build_spec({**values, "parallel": {**whole, **self.parallel}})


SEEN = (
    Run("gpt2-1k", "lm", {"preset": "gpt2"}, 32),
    Run("small-1k", "lm", {"preset": "small", "vocab": 32000}, 64),
    Run("1.3b-1k", "lm", {"preset": "1.3b"}, 16),
    Run("1.3b-4k-full", "lm", {"preset": "1.3b"}, 4, 4096, {"activation_checkpointing": "full"}),
    Run("classifier-small", "classifier", CLASSIFIERS["small"], 128),
    Run("classifier-large", "classifier", CLASSIFIERS["large"], 128),
    Run("gpt2-512", "lm", {"preset": "gpt2"}, 64, 512),
    Run("1b-2k", "lm", {"preset": "1b"}, 8, 2048),
    Run("custom-2k", "lm", {"preset": "custom", "width": 1024, "heads": 16, "layers": 16, "vocab": 32000}, 16, 2048),
    Run("3b-1k-full", "lm", {"preset": "3b"}, 16, 1024, {"activation_checkpointing": "full"}),
    Run("classifier-192", "classifier", {"width": 192, "heads": 6, "layers": 3, "ffn": 768, "dropout": 0.1}, 256),
    Run("classifier-512", "classifier", {"width": 512, "heads": 8, "layers": 6, "ffn": 2048, "dropout": 0.1}, 64),
    Run("1.3b-2k", "lm", {"preset": "1.3b"}, 8, 2048),
    Run("deep-1k", "lm", {"preset": "custom", "width": 768, "heads": 12, "layers": 24, "vocab": 16000}, 32),
    Run("1b-4k-full", "lm", {"preset": "1b"}, 8, 4096, {"activation_checkpointing": "full"}),
    Run("classifier-320", "classifier", {"width": 320, "heads": 10, "layers": 5, "ffn": 1280, "dropout": 0.1}, 192),
    Run("classifier-384", "classifier", {"width": 384, "heads": 6, "layers": 4, "ffn": 1536, "dropout": 0.1}, 512),
)
FRESH = (
    Run("gpt2-256", "lm", {"preset": "gpt2"}, 128, 256),
    Run("1b-1k", "lm", {"preset": "1b"}, 16, 1024),
    Run("wide-4k", "lm", {"preset": "custom", "width": 2048, "heads": 16, "layers": 8, "vocab": 50257}, 8, 4096),
    Run("3b-2k-full", "lm", {"preset": "3b"}, 8, 2048, {"activation_checkpointing": "full"}),
    Run("classifier-448", "classifier", {"width": 448, "heads": 7, "layers": 3, "ffn": 1792, "dropout": 0.1}, 320),
    Run("classifier-deep", "classifier", {"width": 256, "heads": 4, "layers": 8, "ffn": 512, "dropout": 0.1}, 96),
)
OWN = tuple(Run(name, "own", {}, 256) for name in own_modules.UNSEEN)
OWN_SEEN = tuple(Run(name, "own", {}, 256) for name in own_modules.SEEN)
SETS = {"fresh": FRESH, "seen": SEEN, "own": OWN, "own-seen": OWN_SEEN}


@dataclass(frozen=True)
class Line:
    run: str
    way: str
    planned_s: float
    measured_s: float
    planned_bytes: float
    measured_bytes: float

    @property
    def time_error(self) -> float:
        return self.planned_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.planned_bytes / self.measured_bytes - 1

    def show(self) -> str:
        times = f"{self.planned_s * 1e3:9.2f} {self.measured_s * 1e3:9.2f} {self.time_error:+7.1%}"
        peaks = f"{self.planned_bytes / GIB:9.2f} {self.measured_bytes / GIB:9.2f} {self.memory_error:+7.1%}"
        return f"{self.run:<17} {self.way:<10} {times}  {peaks}"


HEAD = "run               plan from    planned  measured   error    planned  measured   error\n" + (
    "                              ms        ms                  GiB       GiB"
)


def make_texts(folder: Path) -> None:
    """Made-up text: one byte per token for language models, sentences of usual lengths for classifiers."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz     .,\n"
    (folder / "text.txt").write_text("".join(draw.choices(letters, k=TEXT_BYTES)))
    words = ["".join(draw.choices(letters[:26], k=draw.randint(2, 9))) for _ in range(8000)]
    often = [1 / (rank + 10) for rank in range(len(words))]
    with (folder / "texts.csv").open("w") as file:
        file.write("text,label\n")
        for _ in range(20_000):
            length = max(5, round(draw.gauss(44, 16)))
            file.write(f"{' '.join(draw.choices(words, often, k=length))},{draw.randrange(4)}\n")


@contextmanager
def only_steps(profiled: int, kernels: list[dict[str, Any]]) -> Iterator[None]:
    """Nothing but steps: no evaluation, no checkpoint; the last `profiled` of them under a profiler."""
    prefetch = Loader.prefetch

    def watched(loader: Loader, first: int, last: int) -> Iterator[Any]:
        watching = None
        for index, batch in enumerate(prefetch(loader, first, last)):
            if index == last - profiled:
                torch.cuda.synchronize()
                watching = profiler()
            yield batch
        if watching is not None:
            kernels.extend(kernel_times(watching, profiled))

    with ExitStack() as patched:
        patched.enter_context(patch.object(Loader, "prefetch", watched))
        patched.enter_context(patch.object(loop, "evaluate", lambda *_: {"loss": 1.0, "accuracy": 0.0}))
        patched.enter_context(patch.object(CheckpointWriter, "save", lambda *_, **__: None))
        yield


def profiler() -> Any:
    try:
        watching = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        watching.start()
    except Exception as error:  # some machines do not let programs count
        print(f"no profile: {error}", file=sys.stderr)
        return None
    return watching


def kernel_times(watching: Any, steps: int) -> list[dict[str, Any]]:
    torch.cuda.synchronize()
    try:
        watching.stop()
        found = [
            {"kernel": e.key[:120], "calls": e.count / steps, "s": e.self_device_time_total / 1e6 / steps}
            for e in watching.key_averages()
        ]
    except Exception as error:
        print(f"no profile: {error}", file=sys.stderr)
        return []
    return sorted(found, key=lambda row: -row["s"])[:KERNELS_KEPT]


def measured(run: Run, spec: RunSpec) -> tuple[float, float, dict[str, Any]]:
    """(seconds of a step, bytes at the peak, what else is worth keeping): the median over windows of a few steps."""
    torch._dynamo.reset()  # other sizes would be compiled as of unknown size
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, began, kernels = torch.cuda.memory_allocated(), time.perf_counter(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder, only_steps(WINDOW[run.workload], kernels):
        result = paceline.train(spec, folder, show=False)
        steps = [event["step_s"] for event in read_steps(RunDir(result.path).events_file(0))]
    timed = steps[WARM[run.workload] : -WINDOW[run.workload]]
    peak = max(result.summary.peak_bytes_per_rank) - before
    more = {"steps_s": steps, "left_bytes": before, "wall_s": time.perf_counter() - began, "kernels": kernels}
    more |= {"reserved_bytes": torch.cuda.max_memory_reserved(), "summary": to_flat(result.summary)}
    return statistics.median(timed), float(peak), more


def planned(spec: RunSpec, where: str, calibration: Path | None) -> PricedLayout:
    found = plan(spec, where, [1], calibration=calibration)
    if not found.rows:
        raise SystemExit(f"{spec.name}: the plan says it does not fit: {found.advice}")
    return found.rows[0].price


def compare(run: Run, spec: RunSpec, calibration: Path) -> tuple[list[Line], dict[str, Any]]:
    step_s, peak, more = measured(run, spec)  # first: the plan then knows the texts
    prices = {"calibrated": planned(spec, "local", calibration), "catalogue": planned(spec, catalogue_name(), None)}
    lines = [
        Line(run.name, way, price.step_s, step_s, price.memory.allocated_bytes, peak) for way, price in prices.items()
    ]
    return lines, {"plans": {way: price.as_json() for way, price in prices.items()}, **more}


def catalogue_name() -> str:
    return f"1x{device_name()}"


def verdict(way: str, lines: Sequence[Line]) -> str:
    times = [abs(line.time_error) for line in lines if line.way == way]
    peaks = [abs(line.memory_error) for line in lines if line.way == way]
    return (
        f"{way}: step time within 15 % in {sum(e <= 0.15 for e in times)} of {len(times)} (mean "
        f"{statistics.mean(times):.1%}, largest {max(times):.1%}); peak memory within 10 % in "
        f"{sum(e <= 0.1 for e in peaks)} of {len(peaks)} (mean {statistics.mean(peaks):.1%}, largest {max(peaks):.1%})"
    )


def named(names: Sequence[str]) -> list[Run]:
    known = {run.name: run for run in (*FRESH, *SEEN, *OWN, *OWN_SEEN)}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no run is called {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write every term, step and kernel there, as JSON")
    parser.add_argument("--data", type=Path, help="folder of AG News, for the classifiers")
    parser.add_argument("--set", choices=tuple(SETS), default="fresh", help="which runs")
    parser.add_argument("--runs", default="", help="names of any set instead, with commas between them")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="as train.compile")
    parser.add_argument("--calibration", type=Path, help="use this instead of calibrating now")
    asked = parser.parse_args()
    began = time.perf_counter()
    wanted = named(asked.runs.split(",")) if asked.runs else SETS[asked.set]
    kept: dict[str, Any] = {"device": device_name(), "torch": torch.__version__, "runs": {}}
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder)
        make_texts(texts)
        calibration = asked.calibration or texts / "calibration.json"
        if asked.calibration is None:
            kept["calibration"] = {**describe_machine(), "measured": [], "gpu": measure_gpu(print)}
            for file in filter(None, (calibration, asked.out)):
                write_json(file, kept["calibration"] if file == calibration else kept)
        print(f"{kept['device']}, torch {kept['torch']}, calibrated in {time.perf_counter() - began:.0f} s\n{HEAD}")
        for run in wanted:
            try:
                spec = run.spec(texts, asked.data).replace({"train.compile": asked.compile})
                found, more = compare(run, spec, calibration)
            except Exception as error:  # the other runs are worth having
                traceback.print_exc()
                print(f"{run.name:<17} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            for line in found:
                print(line.show(), flush=True)
            lines += found
            kept["runs"][run.name] = {**more, "lines": [asdict(line) for line in found]}
            if asked.out is not None:
                write_json(asked.out, kept)
    for way in ("calibrated", "catalogue"):
        if lines:
            print(verdict(way, lines))
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
