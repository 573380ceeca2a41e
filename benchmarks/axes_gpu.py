"""Long sequences, and the memory of every axis, on one CUDA device that ranks share: beside the plan.

    python benchmarks/axes_gpu.py --part long [--sequences 4096 16384 65536]
    python benchmarks/axes_gpu.py --part memory [--compile on|off] [--ranks 1 2 4 8]
    python benchmarks/axes_gpu.py --part unseen [--compile on|off]     # memory of other models, for plans made before
    python benchmarks/axes_gpu.py --part memory --device cpu      # to try the program on cores, with tiny models

Ranks that share a device are connected by gloo, through host memory: their memory is that of ranks with a device each,
their speed is not, so the planned step is comparable for one rank alone. Peaks are those of torch's allocator, on the
fullest rank. Layouts of as many ranks are trained in one launch, one after the other. One that fails does not stop
those after it; `--out` gets a row of JSON for each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from paceline.config import RunSpec, build_spec
from paceline.errors import PacelineError
from paceline.launch.environment import SINGLE_RANK, detect_rank
from paceline.launch.local import run_ranks
from paceline.layout import layout_of, parse_layout
from paceline.planner.cost_model import build_cost_model
from paceline.planner.target import resolve_target
from paceline.runlog.events import read_steps

GIB = float(1 << 30)
DENSE = {"preset": "custom", "width": 1024, "heads": 16, "kv_heads": 4, "layers": 12, "vocab": 16384, "tied": False}
MIXTURE = {**DENSE, "ffn": 704, "experts": 8, "layers": 8}
TINY = {"width": 64, "heads": 4, "kv_heads": 2, "layers": 4, "ffn": 64, "vocab": 512}
LONG_TOKENS, SHORT_TOKENS, SHORT_SEQUENCE = 65_536, 16_384, 2048
"""Tokens of a step, for long sequences and for the memory of the axes."""
LONG_STEPS, SHARED_STEPS, WARM_STEPS = 10, 4, 1
AXES = (
    *("single", "ddp:2", "zero1:2", "zero2:2", "fsdp:2", "tensor:2", "context:2", "context:2:ring", "pipeline:2"),
    *("fsdp:2+context:2", "fsdp:2+tensor:2", "fsdp:2+pipeline:2", "fsdp:2+context:2+tensor:2"),
)
UNSEEN: dict[str, dict[str, Any]] = {
    "wide": {**DENSE, "width": 1536, "heads": 12, "kv_heads": 12, "layers": 6, "vocab": 8192, "tied": True},
    "deep": {**DENSE, "width": 768, "heads": 12, "kv_heads": 4, "layers": 16, "vocab": 32_768},
    "mixed": {**MIXTURE, "width": 768, "heads": 12, "layers": 6, "ffn": 512, "experts": 16, "top_k": 4, "vocab": 8192},
}
"""Models that no formula was made with: other widths, heads, layers, vocabularies and experts."""
UNSEEN_RUNS = (
    *(("wide", layout, 1024) for layout in ("context:2", "tensor:2", "pipeline:2", "fsdp:2+context:2:ring")),
    *(("deep", layout, 4096) for layout in ("context:2:ring", "fsdp:2", "fsdp:2+tensor:2", "fsdp:2+context:2")),
    *(("mixed", layout, 512) for layout in ("ddp:2+expert:2", "fsdp:2+expert:2", "context:2+expert:2")),
    *(("deep", "fsdp:2+pipeline:2", 512), ("mixed", "fsdp:2+tensor:2", 1024)),
)
EXPERT_AXES = ("single", "fsdp:2", "ddp:2+expert:2", "fsdp:2+expert:2", "fsdp:4+expert:2", "context:2+expert:2")


MODELS = {"dense": DENSE, "mixture": MIXTURE, **UNSEEN}


@dataclass(frozen=True)
class Run:
    model: str  # dense, mixture or one of UNSEEN
    layout: str
    sequence: int
    batch: int
    steps: int
    compile: str
    device: str

    @property
    def ranks(self) -> int:
        return int(parse_layout(self.layout)["ranks"])

    def spec(self, texts: str) -> RunSpec:
        model = {**MODELS[self.model], **(TINY if self.device == "cpu" else {})}
        data = {"source": "text", "path": texts, "sequence": self.sequence, "vocab": 257, "test_fraction": 0.04}
        steps = {"steps": self.steps, "global_batch": self.batch, "precision": "bf16", "compile": self.compile}
        rare = {"checkpoint_every": 1 << 20, "evaluate_every": 1 << 20, "evaluate_on": 1, "log_every": 1}
        shared = {"device": self.device, "backend": "gloo", "activation_checkpointing": "none"}
        values = {"name": "axes", "workload": "lm", "model": model, "data": data, "train": {**steps, **rare}}
        return build_spec({**values, "parallel": {**shared, **parse_layout(self.layout)}})


def train_runs(runs: list[Run], texts: str, rows_file: str) -> None:
    """Train runs of as many ranks one after the other; the main rank appends a row for each."""
    from paceline.launch.process_group import gather_objects, join_ranks

    info = detect_rank(os.environ) or SINGLE_RANK
    with join_ranks(info, runs[0].device, 0, 150.0, "gloo") as device:  # type: ignore[arg-type]
        for run in runs:
            try:
                figures = measure(run.spec(texts), info, device)
                figures["peaks"] = gather_objects(figures.pop("peak"))
            except Exception as error:  # the other rows are worth having
                figures = {"failed": f"{type(error).__name__}: {error}"}
            if info.rank == 0:
                row = {**asdict(run), **price(run.spec(texts)), **figures}
                print(show(row), flush=True)
                with open(rows_file, "a") as file:
                    file.write(json.dumps(row) + "\n")


def measure(spec: RunSpec, info: Any, device: Any) -> dict[str, Any]:
    """Train without saving, as `paceline train` does: median times of a step, and the peak of this rank."""
    import torch

    from paceline.launch.signals import StopRequest
    from paceline.runlog.events import EventWriter
    from paceline.trainer.checkpoint.writer import CheckpointWriter
    from paceline.trainer.context import RunContext
    from paceline.trainer.loop import GradientJob
    from paceline.trainer.setup import build_gradient_job
    from paceline.workload import build_workload

    torch._dynamo.reset()  # other sizes would be compiled as of unknown size
    gc.collect()
    cuda, before = device.type == "cuda", 0
    if cuda:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        events = folder / "events.jsonl"
        with (
            EventWriter(events) as writer,
            closing(CheckpointWriter(folder / "checkpoints", 1)) as checkpoints,
            patch.object(GradientJob, "save", lambda *_: None),
        ):
            parts = spec, layout_of(spec), info, device, folder, writer, checkpoints, StopRequest()
            job = build_gradient_job(RunContext(*parts), build_workload(spec))
            job.run()
        peak = torch.cuda.max_memory_allocated() - before if cuda else 0
        steps = read_steps(events)[WARM_STEPS:]
    return {"peak": peak, **{key: statistics.median(step[key] for step in steps) for key in ("step_s", "comm_s")}}


def price(spec: RunSpec) -> dict[str, Any]:
    """Price a run on as many H200s as it has ranks."""
    ranks = spec.parallel.ranks
    found = build_cost_model(spec).price(layout_of(spec), resolve_target(f"{ranks}xH200").at(ranks))
    memory: Any = found.memory
    terms = {key: value for key, value in asdict(memory).items() if value}
    return {"planned_s": found.step_s, "planned_bytes": memory.allocated_bytes, "terms": terms}


HEAD = "layout                             tokens  tokens/s   step ms   comm ms   plan ms  peak GiB  plan GiB    error"


def show(row: dict[str, Any]) -> str:
    name = f"{row['model'] + ' ' + row['layout']:<34} {row['sequence']:>6}"
    if "failed" in row:
        return f"{name} FAILED: {row['failed'][:400]}"
    tokens_s = row["batch"] * row["sequence"] / row["step_s"]
    times = " ".join(f"{row[key] * 1e3:>9.1f}" for key in ("step_s", "comm_s", "planned_s"))
    peak = max(*row["peaks"], 1)
    memory = f"{peak / GIB:>9.2f} {row['planned_bytes'] / GIB:>9.2f} {row['planned_bytes'] / peak - 1:>+8.1%}"
    return f"{name} {tokens_s:>9,.0f} {times} {memory}"


def list_runs(asked: argparse.Namespace) -> Iterator[Run]:
    small, common = asked.device == "cpu", {"compile": asked.compile, "device": asked.device}
    if asked.part == "memory":
        sequence, batch = (64, 8) if small else (SHORT_SEQUENCE, SHORT_TOKENS // SHORT_SEQUENCE)
        for model, layouts in (("dense", AXES), ("mixture", EXPERT_AXES)):
            for layout in asked.layouts or layouts:
                yield Run(model, layout, sequence, batch, WARM_STEPS + 2, **common)
        return
    if asked.part == "unseen":
        for model, layout, sequence in UNSEEN_RUNS:
            if layout in (asked.layouts or [layout]):
                sequence, batch = (64, 8) if small else (sequence, SHORT_TOKENS // sequence)
                yield Run(model, layout, sequence, batch, WARM_STEPS + 2, **common)
        return
    for sequence in asked.sequences:
        longest = sequence == max(asked.sequences)
        shared = ["context:2", "context:2:ring", "context:4", "context:4:ring"] if longest else ["context:2"]
        for layout in asked.layouts or ["single", *shared]:
            steps = LONG_STEPS if layout == "single" else SHARED_STEPS
            batch = max(1, (1024 if small else LONG_TOKENS) // sequence)
            yield Run("dense", layout, sequence, batch, steps, **common)


def write_text(file: Path) -> None:
    """Write made-up text, one byte per token."""
    draw = random.Random(0)
    file.write_text("".join(draw.choices("abcdefghijklmnopqrstuvwxyz     .,\n", k=2_200_000)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("long", "memory", "unseen"), required=True)
    parser.add_argument("--sequences", type=int, nargs="+", default=[4096, 16_384, 65_536])
    parser.add_argument("--layouts", nargs="+", help="instead of those of the part")
    parser.add_argument("--ranks", type=int, nargs="+", help="only layouts of so many")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="on", help="as train.compile")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="append every row there, as JSON")
    asked = parser.parse_args()
    began, failed = time.perf_counter(), False
    runs = sorted(list_runs(asked), key=lambda run: run.ranks)
    with tempfile.TemporaryDirectory() as folder:
        write_text(texts := Path(folder) / "text.txt")
        print(HEAD, flush=True)
        for ranks, group in groupby(runs, key=lambda run: run.ranks):
            if asked.ranks and ranks not in asked.ranks:
                continue
            try:
                run_ranks(train_runs, (list(group), str(texts), str(asked.out.resolve())), ranks)
            except PacelineError as error:
                failed = True
                print(f"{ranks} ranks FAILED: {error}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    import axes_gpu  # ranks import what they run by the name of this file

    axes_gpu.main()
