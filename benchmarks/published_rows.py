"""Published measurements of distributed training as typed rows: what was run, on what, and what came out.

A source is often silent about something that a price needs. What is filled in, and by which rule, is written here and
nowhere else; the rules are of the kind "Megatron before 2023 did not hide its gradients", never of the kind "this
source is slow".
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from published_models import model_of
from unknown_shapes import count_flops, count_params

from paceline.errors import UserError
from paceline.hardware.catalogue import GB, Cluster, find_device
from paceline.planner.formulas.memory import estimate_memory
from paceline.planner.formulas.placement import DTYPE_SIZES, GPU_PHYSICS, DtypeSizes, Kernels, Placement, Runtime
from paceline.planner.formulas.shape import ModelShape

USUAL_BATCH_TOKENS = 4e6
"""Of large language models, where a source gives neither batch nor layout."""
REACHED_BITS_S = 55e9
"""Of the 400 Gb/s per node of bigscience's V100 nodes, in its own all-reduces on 16 of them (experiments/bandwidth)."""
LOW_QUALITY = ("smallmlp", "colossal")
NEEDED = ("hidden", "heads", "seq_len", "vocab", "tp", "pp", "microbatch", "global_batch", "activation_checkpointing")
"""What a price depends on, beside device and precision."""
LAYOUT = NEEDED[NEEDED.index("tp") :]
CONFIGURED_RECOMPUTE = {  # in the source's own configurations; the projections of the attention are kept
    "GPT3-5B (Paxml)": "none",
    "GPT3-175B (Paxml)": "selective",
    "Llama-3-70B (MaxText)": "selective",
}
KNOWN_PARAMS = {"NCF (NeuMF, ML-20M)": 31.8e6, "Transformer-big (WMT en-de)": 210e6, "DistilBERT SQuAD": 66e6}


@dataclass(frozen=True)
class Row:
    """One published result."""

    id: str
    source: str
    model_name: str
    model: ModelShape | None
    """None for what is not a transformer."""
    params: float
    cluster: Cluster | None
    placement: Placement
    numbers: DtypeSizes
    step_s: float | None
    memory_bytes: float | None
    counted: Literal["whole", "reserved", "allocated"]
    """What the memory is: of the whole device, of the framework's allocator, or of that what it handed out."""
    samples_s: float | None
    speedup: float | None
    strategy: str
    year: int
    low_quality: bool
    filled: tuple[str, ...] = ()
    """What its source does not say, and the rules below fill in."""

    @property
    def layout_stated(self) -> bool:
        """Its source says how the work was spread and what was recomputed."""
        return not set(LAYOUT) & set(self.filled)

    @property
    def family(self) -> str:
        """Who measured: rows of one family share people, machines and code, so they are left out together."""
        return re.sub(r"\d+$", "", self.id.rsplit("-", 1)[0])


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(filter(None, map(_row, csv.DictReader(file))))


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _row(raw: dict[str, str]) -> Row | None:
    n = {key: _number(value) for key, value in raw.items()}
    notes, year = raw["notes"], int(n["year"] or 2021)
    model = model_of(raw, n, year)
    known = count_params(model) if model else KNOWN_PARAMS.get(raw["model_name"], 0.0)
    params = (n["params_b"] or 0.0) * 1e9 or known
    cluster = _cluster(raw, n)
    if cluster is None and not n["measured_peak_mem_gb"]:
        return None
    numbers = _numbers(raw, cluster)
    placement = _spread(raw, n, model, cluster, numbers, year)
    step_s = _step_s(n, notes, model, placement, cluster, numbers, raw)
    binary = "MiB" in notes or "GiB" in notes or "torch.cuda" in notes or "bloom" in raw["id"] or _torchtitan(raw)
    memory_gb = n["measured_peak_mem_gb"]
    return Row(
        id=raw["id"],
        source=raw["source"],
        model_name=raw["model_name"],
        model=model,
        params=params,
        cluster=cluster,
        placement=placement,
        numbers=numbers,
        step_s=step_s,
        memory_bytes=memory_gb * (2**30 if binary else GB) if memory_gb else None,
        counted=_counted(raw),
        samples_s=n["measured_samples_per_s"]
        or (n["measured_tokens_per_s_per_gpu"] or 0) * (n["gpu_count"] or 1)
        or None,
        speedup=n["measured_speedup"],
        strategy=raw["strategy"],
        year=year,
        low_quality=raw["id"].startswith(LOW_QUALITY) or "LOW QUALITY" in notes,
        filled=tuple(name for name in NEEDED if not raw[name]),
    )


def _counted(raw: dict[str, str]) -> Literal["whole", "reserved", "allocated"]:
    """torchtitan prints what its allocator has reserved; tools that watch the device see the driver too."""
    if _torchtitan(raw):
        return "reserved"
    return "allocated" if "max_memory_allocated" in raw["notes"] or "FSDP2" in raw["notes"] else "whole"


def _torchtitan(raw: dict[str, str]) -> bool:
    """torchao's benchmark script runs torchtitan and copies the memory, in GiB, from its log."""
    return "torchtitan" in raw["source"] or raw["id"].startswith("torchao")


def _sharded(raw: dict[str, str]) -> bool:
    """Weights are gathered layer by layer. With a pipeline torchtitan gathers them once a step, as zero1 holds them."""
    return raw["strategy"] == "fsdp" or ("torchtitan" in raw["source"] and raw["pp"] in ("", "1"))


def _cluster(raw: dict[str, str], n: dict[str, float | None]) -> Cluster | None:
    name = re.sub(r"\(.*?\)|Gen\d", "", raw["gpu"]).strip()
    name = name.replace("CPU Intel Sapphire Rapids", "CPU").replace("140GB", "141GB").replace("192GB", "180GB")
    name = name.replace("RTX 3090 24GB", "RTX 3090").replace("RTX 4090 24GB", "RTX 4090").replace("SXM4", "SXM")
    if not name:
        return None
    cap = re.search(r"-(\d+)W$", name)
    try:
        kind = find_device(name[: cap.start()].replace("-96GB", "") if cap else name)
    except UserError:
        return None
    if cap:  # clocks follow the third root of the power
        kind = replace(
            kind.slower((kind.watts / float(cap[1])) ** (1 / 3)), memory_bytes=96 * GB, bandwidth_bytes_s=2.4e12
        )
    count = int(n["gpu_count"] or 8)
    per_node = min(count, int(n["gpus_per_node"] or kind.per_node))
    link, text = kind.link_bytes_s, raw["intra_node"]
    if "P2P" in text and ("no P2P" in text or "DISABLE" in text.upper()):
        link = kind.pcie_bytes_s / 2
    elif text.startswith("PCIe"):
        link = min(kind.link_bytes_s, kind.pcie_bytes_s)
    elif "(4 links)" in text:
        link = 4 * 25 * GB
    network = kind.node_bits_s
    stated = re.match(r"(\d+) per (node|GPU)", raw["inter_node_gbps"])
    if stated:
        network = float(stated[1]) * GB * (per_node if stated[2] == "GPU" else 1)
    if "not reached" in raw["inter_node_gbps"]:
        network = REACHED_BITS_S
    return Cluster(kind, math.ceil(count / per_node), per_node, link, network / 8)


def _numbers(raw: dict[str, str], cluster: Cluster | None) -> DtypeSizes:
    text = raw["precision"].lower()
    if text == "amp fp16" and _apex(raw):
        text = "fp16"
    if "rowwise" in text:  # with a scale for every row, products run at about the 16-bit rate
        text = "bf16"
    if "fp8" in text or "float8" in text or text.startswith(("rowwise", "tensorwise")):
        return DTYPE_SIZES["amp_fp8" if _sharded(raw) else "fp8"]
    if text in ("fp32", "fp32/tf32", "tf32", ""):
        has_tf32 = cluster is not None and "tf32" in cluster.device.flops_s
        return DTYPE_SIZES["tf32" if has_tf32 and text not in ("fp32", "") else "fp32"]
    if text == "bf16" and _sharded(raw):
        return DTYPE_SIZES["pure_bf16" if "PURE" in raw["notes"] else "amp_bf16"]
    return DTYPE_SIZES[{"amp fp16": "amp_fp16", "amp_bf16": "amp_bf16", "fp16": "fp16"}.get(text, "bf16")]


def _apex(raw: dict[str, str]) -> bool:
    """Apex's mixed precision (O2) keeps weights in 16 bits and masters in 32: NVIDIA's older scripts for transformers,
    which DLPerf ran too, and Lambda, as its logs show."""
    older = "Transformer-XL" in raw["model_name"] or "NVIDIADeepLearningExamples/PyTorch" in raw["source"]
    lambdas = "pytorch-train-throughput-fp16" in raw["source"] and raw["model_name"].startswith(("bert", "transformer"))
    return older or lambdas


def _spread(
    raw: dict[str, str],
    n: dict[str, float | None],
    model: ModelShape | None,
    cluster: Cluster | None,
    numbers: DtypeSizes,
    year: int,
) -> Placement:
    notes, strategy = raw["notes"], raw["strategy"]
    count = int(n["gpu_count"] or 8)
    tensor, pipeline, context = int(n["tp"] or 0), int(n["pp"] or 0), int(n["cp"] or 1)
    if not tensor:
        parts = re.search(r"model-parallel size=(\d+)", notes)
        together = int(parts[1]) if parts else 1
        tensor = min(8, together)
        pipeline = together // tensor
    pipeline = pipeline or 1
    if tensor * pipeline * context > count:  # a few printed layouts are larger than the machine they ran on
        pipeline = max(1, count // (tensor * context))
    data = max(1, count // (tensor * pipeline * context))
    whole = n["global_batch"]
    if not whole and not n["microbatch"] and model is not None and strategy in ("", "3d"):
        whole = max(data, round(USUAL_BATCH_TOKENS / model.seq_len))
    tokens = re.search(r"batch (\d+) tokens per GPU", notes)
    if model is None and not n["microbatch"]:
        # rates of such rows are in samples or tokens; pictures are usually trained at 256 (fp16) or 128 per device
        n["microbatch"] = float(tokens[1]) if tokens else 256.0 if numbers.element_bytes == 2 else 128.0
    micro = n["microbatch"] or (min(4.0, max(1.0, (whole or 4) / data)) if pipeline == 1 else 1.0)
    if whole:
        micro = min(micro, max(1.0, whole / data))
        accumulate = max(1, round(whole / data / micro))
        micro = whole / data / accumulate
    else:
        accumulate = int(n["grad_accum"] or 1)
    modern = year >= 2023 and "Megatron-DeepSpeed" not in notes
    # a data-parallel script whose attention stores its scores has no other hand-made kernels either
    plain_script = strategy in ("ddp", "none") and model is not None and not model.fused_attention
    megatron = _megatron(raw) or (modern and not _sharded(raw) and not plain_script)
    zero = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "": 3}.get(strategy, 0)
    if _sharded(raw):
        zero = 3
    if not zero and ("zero=1" in notes or "distributed" in raw["optimizer"] or (modern and strategy == "3d")):
        zero = 1
    group = re.search(r"FSDP group=(\d+)", notes)
    shard = min(data, int(group[1])) if group else data if zero else 1
    chunks = re.search(r"VP=(\d+)", notes)
    # frameworks since 2023 interleave their pipelines; by default, layer by layer
    interleaved = max(1, model.layers // pipeline) if modern and cluster and pipeline > 1 and model is not None else 1
    if chunks is None and ("VP=" in notes or "torchtitan" in raw["source"]):
        interleaved = 2 if "Interleaved" in notes else 1
    if "torchtitan" in raw["source"] and pipeline > 1 and whole:  # as many micro-batches as stages
        accumulate = pipeline * interleaved
        micro = whole / data / accumulate
    overlap = modern or strategy in ("ddp", "fsdp", "none")
    if "no gradient bucketing" in notes or (year < 2023 and "Megatron" in raw["source"]):
        overlap = False
    listed = "flash-attn, swiglu" in notes  # the row has its switches, and this one is off unless it is given
    placement = Placement(
        replicate=data // shard,
        shard=shard,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        micro_batch=micro,
        accumulate=accumulate,
        zero=zero,
        sequence_parallel=tensor > 1 and modern and not listed,
        chunks=int(chunks[1]) if chunks and pipeline > 1 else interleaved,
        runtime=Runtime(
            _kernels(notes, megatron),
            overlap=overlap,
            pieced_tensor="torchtitan" not in raw["source"] or bool(re.search("asyncTP=1|Async", notes)),
            fused_loss=_fused_loss(raw, year),
            older_attention=_older_attention(raw),
        ),
    )
    if model is not None and cluster is not None and data > 1 and placement.zero < 3:
        placement = _zero_that_fits(placement, model, cluster, numbers)
    if not whole and not n["microbatch"] and model is not None and cluster is not None:
        placement = _largest_that_fits(placement, model, cluster, numbers)
    recompute = raw["activation_checkpointing"] or CONFIGURED_RECOMPUTE.get(raw["model_name"], "")
    if recompute == "selective" and model is not None and model.fused_attention and not _sharded(raw):
        recompute = "none"  # Megatron's recomputes the scores alone, which a fused kernel never stores
    if recompute in ("none", "selective", "full"):
        return replace(placement, recompute=recompute)  # type: ignore[arg-type]
    if megatron and modern and strategy:
        if not n["microbatch"] and model is not None and cluster is not None:
            placement = _smaller_until_it_fits(placement, model, cluster, numbers)
        return placement  # NeMo's configurations say "selective": the scores alone, see above
    return _recompute_that_fits(placement, model, cluster, numbers)


def _fused_loss(raw: dict[str, str], year: int) -> bool:
    """MPT takes flash-attention's loss unless set otherwise; torchtitan compiles its own since April 2025.

    torchao measured on H100 in March (torch 2.7.0a0), on MI300X and B200 in August.
    """
    compiled = _torchtitan(raw) and year >= 2025 and "compile=1" in raw["notes"]
    compiled &= not raw["id"].startswith("torchao") or not raw["gpu"].startswith("H100")
    return compiled or "llm-foundry" in raw["source"]


def _older_attention(raw: dict[str, str]) -> bool:
    """What torch's FSDP stacks took until 2025; NVIDIA's take cuDNN's, and so do MaxText and Paxml."""
    torch_stack = _sharded(raw) or "torchtitan" in raw["source"]
    return torch_stack and not re.search("Paxml|Maxtext|MaxText", raw["notes"])


def _megatron(raw: dict[str, str]) -> bool:
    """Its kernels for norms, softmax, biases with activations and dropout with sums are fused by hand since 2020."""
    return bool(re.search("Megatron|NeMo", raw["source"] + raw["notes"])) or raw["id"].startswith("bloom-")


def _kernels(notes: str, megatron: bool) -> Kernels:
    if re.search(r"compile=1|opt=Float8|Paxml|Maxtext|MaxText", notes):
        return "compiled"
    return "fused" if megatron else "eager"


def _largest_that_fits(placement: Placement, model: ModelShape, cluster: Cluster, numbers: DtypeSizes) -> Placement:
    """Where a source is silent about the batch: the largest power of two that the device holds."""
    while placement.micro_batch < 1024:
        tried = replace(placement, micro_batch=2 * placement.micro_batch)
        if estimate_memory(model.blocks, tried, numbers, GPU_PHYSICS).total_bytes > cluster.device.memory_bytes:
            break
        placement = tried
    return placement


def _smaller_until_it_fits(placement: Placement, model: ModelShape, cluster: Cluster, numbers: DtypeSizes) -> Placement:
    """Where a source is silent about batch and recomputation: rather smaller passes than recomputed ones."""
    while placement.micro_batch > 1 and placement.micro_batch % 2 == 0:
        if estimate_memory(model.blocks, placement, numbers, GPU_PHYSICS).total_bytes <= cluster.device.memory_bytes:
            break
        placement = replace(placement, micro_batch=placement.micro_batch / 2, accumulate=2 * placement.accumulate)
    return placement


def _zero_that_fits(placement: Placement, model: ModelShape, cluster: Cluster, numbers: DtypeSizes) -> Placement:
    """Where the states alone would overflow the device they ran on, they must have been divided."""
    for zero in range(placement.zero, 4):
        tried = placement if zero == 0 else replace(placement, zero=zero, shard=placement.data, replicate=1)
        priced = estimate_memory(model.blocks, tried, numbers, GPU_PHYSICS)
        if priced.weights_bytes + priced.gradients_bytes + priced.states_bytes <= cluster.device.memory_bytes:
            return tried
    return placement


def _recompute_that_fits(
    placement: Placement, model: ModelShape | None, cluster: Cluster | None, numbers: DtypeSizes
) -> Placement:
    """Where a source is silent: the least recomputation that fits into the device."""
    if model is None or cluster is None:
        return placement
    for choice in ("none", "selective", "full"):
        tried = replace(placement, recompute=choice)  # type: ignore[arg-type]
        if estimate_memory(model.blocks, tried, numbers, GPU_PHYSICS).total_bytes <= cluster.device.memory_bytes:
            return tried
    return replace(placement, recompute="full")


def _step_s(
    n: dict[str, float | None],
    notes: str,
    model: ModelShape | None,
    placement: Placement,
    cluster: Cluster | None,
    numbers: DtypeSizes,
    raw: dict[str, str],
) -> float | None:
    """Seconds per optimiser step: as printed, or from a rate, or from FLOP/s with the source's own counting."""
    batch, count = placement.micro_batch * placement.accumulate * placement.data, n["gpu_count"] or 8
    if n["measured_step_time_s"]:
        return n["measured_step_time_s"]
    if n["measured_samples_per_s"]:
        return batch / n["measured_samples_per_s"]
    if n["measured_tokens_per_s_per_gpu"]:
        return batch * (model.seq_len if model else 1) / (n["measured_tokens_per_s_per_gpu"] * count)
    if model is None or cluster is None:
        return None
    flops = count_flops(model)
    if "HFU" in notes or "4-pass" in notes:
        flops += model.blocks[1].repeat * model.blocks[1].flops
    if n["measured_tflops_per_gpu"]:
        return batch * flops / (n["measured_tflops_per_gpu"] * 1e12 * count)
    if n["measured_mfu"]:
        return batch * flops / (n["measured_mfu"] * cluster.device.peak_flops_s(numbers.matmul) * count)
    return None


def by_family(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for family in dict.fromkeys(row.family for row in rows):
        yield family, [row for row in rows if row.family == family]


@dataclass(frozen=True)
class Scaling:
    """A data-parallel row beside the same work on fewer devices."""

    row: Row
    base: Row
    speedup: float
    """Measured: rate of the row over rate of the base."""


CONV_GFLOPS = {"InceptionV3": 11.4, "ResNet-101": 15.6, "VGG-16": 31.0, "VGG16": 31.0}
"""Forward FLOPs of one picture, for the few scaling rows that come without the rate of one device."""


def scalings(rows: list[Row]) -> list[Scaling]:
    """Every published data-parallel speed-up that can be paired with the rate of one device."""
    found = []
    for row in rows:
        plain = row.placement.tensor == row.placement.pipeline == row.placement.context == 1
        if row.speedup is None or row.strategy != "ddp" or not plain or row.cluster is None or row.params == 0:
            continue
        bases = [
            other
            for other in rows
            if other.cluster is not None
            and other.cluster.devices == 1
            and (other.source, other.model_name, other.numbers.name) == (row.source, row.model_name, row.numbers.name)
            and other.cluster.device.name == row.cluster.device.name
            and other.samples_s
        ]
        if bases:
            base = min(bases, key=lambda b: abs(math.log(b.placement.micro_batch / row.placement.micro_batch)))
            found.append(Scaling(row, base, row.speedup))
        elif row.model_name in CONV_GFLOPS:
            peak = row.cluster.device.peak_flops_s(row.numbers.matmul)
            alone_s = 3 * CONV_GFLOPS[row.model_name] * 1e9 * row.placement.micro_batch / (0.5 * peak)
            found.append(Scaling(row, replace(row, step_s=alone_s), row.speedup))
    return found
