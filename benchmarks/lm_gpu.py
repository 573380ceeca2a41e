"""A language model on one CUDA device: Paceline against a hand-tuned loop and against transformers under Accelerate.

    python benchmarks/lm_gpu.py [--models gpt2,1.3b] [--sequences 1024,4096] [--ways ours,hand,accelerate]

Same shape, same batches, same optimiser, same run. Prints tokens per second, the share of the device's peak (attention
counted in full, the head once), peak memory, and the loss of the first step and of step `--steps`. `ddp` is wrapped as
for several ranks, over one; `fsdp` is sharded over one; `unrecorded` is `ours` without the CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from torch import Tensor

from gpu import device_name
from paceline.config import RunSpec, build_spec
from paceline.config.decoder_shape import DecoderShape
from paceline.data.corpora.documents import TokenStreams
from paceline.data.order import Order
from paceline.data.prefetch import Loader
from paceline.execution import Traits, decide_execution
from paceline.hardware.catalogue import match_driver_name
from paceline.io.files import write_json
from paceline.launch.process_group import init_single_rank_group
from paceline.layout import layout_of
from paceline.parallel import ddp
from paceline.parallel.parallelize import ModelSetup, detect_target, parallelize
from paceline.runlog.timers import CudaCollectiveTimer
from paceline.trainer import setup
from paceline.trainer.optim.optimizers import set_lr
from paceline.workloads.lm.workload import LanguageModel

TOKENS = 32768
"""Per step, for every contender."""
WARM_UP, STEPS = 3, 20
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "unrecorded": {},
    "ddp": {},
    "fsdp": {"parallel.strategy": "fsdp"},
    "recomputed": {"parallel.activation_checkpointing": "full"},
    "fp8": {"train.precision": "fp8"},
}
RIVALS = ("hand", "accelerate")


class Synthetic(LanguageModel):
    """Tokens drawn from a part of the vocabulary: nothing to download, and something to learn."""

    @property
    def corpus(self) -> TokenStreams:
        vocab = self.spec.model.shape(vocab=1, sequence=self.sequence).vocab
        draw = np.random.default_rng(0)
        ids = (draw.integers(0, vocab // 64, 4_000_000) * 64).astype(np.uint32)
        return TokenStreams(Path(), vocab, "", ids, ids[: self.sequence + 1])


def spec_of(model: str, sequence: int, tokens: int, more: dict[str, Any]) -> RunSpec:
    batch = tokens // sequence
    context = {"context": sequence} if model == "gpt2" else {}
    return build_spec(
        {
            "workload": "lm",
            "model": {"preset": model, **context},
            "data": {"sequence": sequence},
            "train": {"steps": 1000, "global_batch": batch, "precision": "bf16", "clip": 1.0, "beta2": 0.95},
            "parallel": {"micro_batch": batch, "device": "cuda"},
        }
    ).replace(more)


def paceline_step(spec: RunSpec, way: str) -> Callable[[], Tensor]:
    """One step of a run, by Paceline's own parts: batches made ahead, forward, backward, update."""
    workload, layout, device, timer = Synthetic(spec), layout_of(spec), torch.device("cuda", 0), CudaCollectiveTimer()
    samples = workload.data("train")
    traits = Traits(equal_layers=workload.compile_layers, few_shapes=way not in ("ddp", "unrecorded"))
    execution = decide_execution(spec.train, layout, detect_target(device), traits)
    made_from = ModelSetup(workload, spec, layout, device, timer, execution)
    model = parallelize(made_from)
    if way == "ddp":
        init_single_rank_group(device)
        model = replace(model, net=ddp.wrap_ddp(model.net, device, spec.parallel.bucket_mb, timer))
    step = setup.build_step(made_from, model)
    order = Order(len(samples), spec.train.global_batch, spec.train.seed)
    batches = Loader(samples, order, layout, 0, step.collate(samples, layout), step.at_once).prefetch(0, 1000)
    model.net.train()

    def once() -> Tensor:
        set_lr(step.state.optimizer, 3e-4)
        stats = step(next(batches), False)
        timer.take()
        return stats[0] / stats[1]

    return once


def batches_of(spec: RunSpec) -> Iterator[tuple[Tensor, Tensor]]:
    samples = Synthetic(spec).data("train")
    order = Order(len(samples), spec.train.global_batch, spec.train.seed)
    for whole in order.global_batches(0, 1000):
        yield tuple(tensor.pin_memory() for tensor in samples.batch(whole.ids, whole.keys))


def step_of(way: str, spec: RunSpec, shape: DecoderShape) -> Callable[[], Tensor]:
    if way in OURS:
        return paceline_step(spec, way)
    import lm_rivals

    made = lm_rivals.hand_tuned if way == "hand" else lm_rivals.under_accelerate
    return made(shape, spec.data.sequence, batches_of(spec))


def timed(step: Callable[[], Tensor], steps: int) -> dict[str, Any]:
    began = time.perf_counter()
    first = float(step())
    compiled_s = time.perf_counter() - began
    for _ in range(WARM_UP - 1):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / steps
    peak = torch.cuda.max_memory_allocated()
    return {"step_s": step_s, "first_s": compiled_s, "peak_bytes": peak, "first": first, "last": float(loss)}


def flops_per_token(shape: DecoderShape, sequence: int) -> float:
    weights = shape.layers * shape.weights_per_layer + shape.vocab * shape.width
    return 6.0 * weights + 12.0 * shape.layers * shape.width * sequence


def profiled(step: Callable[[], Tensor], rows: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)[:rows]
    for event in events:
        print(f"      {event.self_device_time_total / 2e3:8.2f} ms  {event.count / 2:6.0f} x  {event.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,1.3b")
    parser.add_argument("--sequences", default="1024,4096")
    parser.add_argument("--ways", default="ours,hand,accelerate", help=f"of {', '.join([*OURS, *RIVALS])}")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--profile", type=int, default=0, help="show so many kernels of each of our ways")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    name = device_name()
    kind = match_driver_name(name)
    peak = kind.flops_s["bf16"] if kind is not None else math.nan
    print(f"{name}, torch {torch.__version__}, bf16, {asked.tokens} tokens per step, peak {peak / 1e12:.0f} TFLOP/s")
    print("model   sequence way            ms/step   tokens/s   of peak   ratio  peak GiB  first s  loss")
    rows: list[dict[str, Any]] = []
    for model in asked.models.split(","):
        for sequence in map(int, asked.sequences.split(",")):
            base = None
            for way in asked.ways.split(","):
                spec = spec_of(model, sequence, asked.tokens, OURS.get(way, {}))
                shape = Synthetic(spec).shape
                step = None
                torch.cuda.reset_peak_memory_stats()
                try:
                    step = step_of(way, spec, shape)
                    row = timed(step, asked.steps)
                except Exception as error:  # the others are still worth having
                    print(f"{model:<7} {sequence:8} {way:<11} {type(error).__name__}: {str(error)[:400]}", flush=True)
                    row = None
                if row is not None:
                    rate = asked.tokens / row["step_s"]
                    base = base or rate
                    mfu = rate * flops_per_token(shape, sequence) / peak
                    print(
                        f"{model:<7} {sequence:8} {way:<11} {row['step_s'] * 1e3:10.2f} {rate:10,.0f} {mfu:9.1%} "
                        f"{base / rate:7.2f} {row['peak_bytes'] / 2**30:9.2f} {row['first_s']:8.1f}  "
                        f"{row['first']:.4f} {row['last']:.4f}",
                        flush=True,
                    )
                    rows.append({"model": model, "sequence": sequence, "way": way, "tokens_s": rate, "mfu": mfu, **row})
                    if asked.profile and way in OURS:
                        profiled(step, asked.profile)
                del step
                torch._dynamo.reset()
                gc.collect()
                torch.cuda.empty_cache()
    if asked.out:
        write_json(asked.out, {"device": name, "torch": torch.__version__, "rows": rows})
        print(json.dumps({"rows": len(rows)}))


if __name__ == "__main__":
    main()
