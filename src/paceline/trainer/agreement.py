"""Compare what must be the same on all ranks: before the first step, and their replicas at every checkpoint.

Under torchrun, srun or mpirun each node reads its own files. With another learning rate, code or data on one of them a
run would train to the end, with wrong weights; so it would with a bit that flips in the memory of one rank.
Callbacks of a workload may stop the run, on all ranks at the same step.
"""

import hashlib
import json
import os
import platform
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline import __version__
from paceline.config import RunSpec
from paceline.data.files import hash_files, hash_text
from paceline.data.order import Order
from paceline.data.samples import ArraySamples
from paceline.errors import RunFailed, UserError, join_names
from paceline.launch.process_group import broadcast_from_main, gather_objects, raise_on_all
from paceline.layout import Layout
from paceline.parallel.parameters import is_sharded
from paceline.trainer.resume_guard import collect_determining_values, find_user_files, length_of
from paceline.workload import Samples, Workload

VARIABLES = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR"),
    *("PYTHONHASHSEED", "TORCHDYNAMO_DISABLE"),
)  # environment variables that change results
LIBRARIES = ("numpy", "transformers", "keras", "xgboost", "lightgbm", "deepspeed", "accelerate")
FEW_SAMPLES = 16
ORDER = -1  # number of the position in the data, beside those of ways in which tensors are divided
HASHED_BYTES = 1 << 28  # of an array or a file; else spread rows, or two ends


def check_ranks_agree(spec: RunSpec, data: str, local_rank: int = 0) -> None:
    """Raise UserError on all ranks if one has another spec, code, data (fingerprint) or version."""
    files = dict(_hash_data_files(spec)) if local_rank == 0 else {}
    _compare_facts(files | dict(_collect_facts(spec, data)), "give all nodes the same files, packages and environment")


def check_samples_agree(samples: Samples, order: Order, step: int) -> None:
    """Raise UserError on all ranks if they have other samples: compare their number, arrays and a few of the step."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        advice = "give all nodes the same data, and draw at random from torch, numpy or random, which are seeded"
        _compare_facts(dict(_hash_samples(samples, order, step)), advice, key="data")


def agree_on_digest(key: str, compute: Callable[[], str], local_rank: int) -> str:
    """Return the main rank's digest of files; raise UserError on all ranks if one of another node differs."""
    digest, wrong = "", None
    try:
        digest = compute() if local_rank == 0 else ""
    except OSError as error:
        wrong = UserError(f"{key}: cannot be read: {error}", code="unreadable", key=key)
    raise_on_all(wrong)
    _compare_facts({key: digest[:12]} if digest else {}, "give all nodes the same files")
    return broadcast_from_main(lambda: digest)


def _compare_facts(mine: Mapping[str, Any], advice: str, key: str = "") -> None:
    """Raise UserError, on all ranks, for the first fact in which a rank differs from rank 0."""
    (first_host, first), *others = gather_objects((socket.gethostname(), mine))
    for rank, (host, facts) in enumerate(others, 1):
        for name in (name for name in first if name in facts and first[name] != facts[name]):
            both = f"{facts[name]} on rank {rank} ({host}), {first[name]} on rank 0 ({first_host})"
            raise UserError(f"ranks differ in {name}: {both}; {advice}", code="conflict", key=key or name)


def _collect_facts(spec: RunSpec, data: str) -> Iterator[tuple[str, Any]]:
    yield "workload", Path(spec.workload).name
    yield from collect_determining_values(spec).items()
    yield length_of(spec.train)
    paths = spec.parallel.paths()
    yield from ((f"parallel.{key}", value) for key, value in spec.dump()["parallel"].items() if key not in paths)
    yield from ((name, hash_files([file])[:12]) for name, file in _find_code(spec).items())
    yield "data", hashlib.sha256(data.encode()).hexdigest()[:12]
    yield from (("paceline", __version__), ("python", platform.python_version()), ("torch", torch.__version__))
    yield "CUDA", torch.version.cuda
    yield from ((name, sys.modules[name].__version__) for name in LIBRARIES if name in sys.modules)
    yield from ((name, os.environ.get(name)) for name in VARIABLES)


def _find_code(spec: RunSpec) -> dict[str, Path]:
    """Find the user's own files, and the modules that they have imported from beside them."""
    code = find_user_files(spec)
    for folder in {file.resolve().parent for file in code.values() if file.suffix == ".py"}:
        for module in list(sys.modules.values()):
            file = Path(getattr(module, "__file__", None) or "")
            own = file.suffix == ".py" and file.is_relative_to(folder) and "site-packages" not in file.parts
            if own and not file.is_relative_to(sys.prefix) and file.is_file():
                code.setdefault(str(file.relative_to(folder)), file)
    return code


def _hash_data_files(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield a hash of each file that the section `data` names: of the whole, or of both ends of a large one."""
    for key in spec.data.paths():
        path = Path(getattr(spec.data, key) or "").expanduser()
        if path.is_file():
            digest, size = hashlib.sha256(), path.stat().st_size
            with path.open("rb") as file:
                digest.update(file.read(HASHED_BYTES))
                file.seek(max(file.tell(), size - HASHED_BYTES))
                digest.update(file.read(HASHED_BYTES))
            yield f"data.{key}", f"{size:,} bytes {digest.hexdigest()[:12]}"


def _hash_samples(samples: Samples, order: Order, step: int) -> Iterator[tuple[str, Any]]:
    yield "the number of samples", len(samples)
    if isinstance(samples, ArraySamples):
        leaves = tree_leaves(samples.columns)
        stride = 1 + sum(leaf.nbytes for leaf in leaves) // HASHED_BYTES
        yield "the samples", _hash_leaves([leaf[::stride] for leaf in leaves])
    batch = order.global_batch(step)
    for i, number in enumerate(batch.ids[:FEW_SAMPLES]):
        yield f"sample {number}", _hash_leaves(tree_leaves(samples.batch(batch.ids[i : i + 1], batch.keys[i : i + 1])))


def _hash_leaves(leaves: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes() if array.dtype.kind != "O" else type(leaf).__name__.encode())
    return digest.hexdigest()[:12]


def check_replicas(tensors: Mapping[str, Tensor], layout: Layout, step: int, order: Order | None = None) -> None:
    """Raise RunFailed on all ranks if those that must hold the same numbers do not, and name the odd ones.

    Tensors are compared bit by bit, by sums, between ranks on the same hardware that hold the same part of each; on
    CUDA devices not between tensor-parallel ranks, whose kernels may round differently. So is the place in the data.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    cuda, kinds, parts = torch.cuda.is_initialized(), defaultdict[str, list[str]](list), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            name = f"{name} at {[tuple(chunk.offsets) for chunk in tensor.__create_chunk_list__()]}"
        kinds[str(tensor.placements) if is_sharded(tensor) else ""].append(name)
        parts[name] = tensor.to_local() if is_sharded(tensor) else tensor
    sums = dict(zip(parts, sum_bits(parts.values()), strict=True))
    place = torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability()
    place += f" {dist.get_rank() % layout.tensor}" if cuda else ""
    mine = {hash_text(f"{place} {names}"): hash_text(str([sums[name] for name in names])) for names in kinds.values()}
    if order is not None:
        mine[ORDER] = hash_text(str([step, order.samples, order.global_batch(step).ids.tolist()]))
    held = gather_objects(mine)
    for key in dict.fromkeys(key for rank in held for key in rank):
        values = {rank: digests[key] for rank, digests in enumerate(held) if key in digests}
        if len(set(values.values())) > 1:
            raise _describe_odd_ranks(values, gather_objects((socket.gethostname(), sums)), step)


def _describe_odd_ranks(values: Mapping[int, int], everyone: Sequence[tuple[str, Any]], step: int) -> RunFailed:
    """Return the error that names the ranks unlike most others, and the first tensor that differs."""
    common, count = Counter(values.values()).most_common(1)[0]
    decided = 2 * count > len(values)
    odd = [rank for rank, value in values.items() if value != common or not decided]
    names = [name for name in everyone[odd[0]][1] if len({everyone[rank][1].get(name) for rank in values}) > 1]
    what = names[0].partition(" at ")[0] if names else "the position in the data"
    ranks = f"rank{'s' * (len(odd) > 1)} {join_names([f'{rank} ({everyone[rank][0]})' for rank in odd], 8)}"
    others = f"unlike the {count} others that must hold the same" if decided else "and no majority tells which is wrong"
    reason = f"another {what} at step {step} on {ranks}, {others}"
    advice = "it was not saved; memory or a device may be faulty: resume without that node"
    return RunFailed(f"{reason}; {advice}", code="replica-differs", key=what)


@torch.no_grad()
def sum_bits(tensors: Iterable[Tensor]) -> list[int]:
    """Return the sum of the bits of each tensor, read as integers: one that flips always changes it."""
    sums = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        flat = flat.clone() if flat.storage_offset() % 8 else flat
        words = flat.numel() // 8 * 8
        sums.append(flat[:words].view(torch.int64).sum() + flat[words:].sum())
    return torch.stack(sums).tolist() if sums else []


def run_callback(
    workload: Workload, method: Literal["on_step", "on_evaluate"], step: int, values: Mapping[str, Any], device: Any
) -> str:
    """Call a callback; return why the run should stop, in the words of the lowest rank that wants to, or ""."""
    if not workload.has(method):
        return ""
    reason: object = getattr(workload, method)(step, dict(values))
    if not isinstance(reason, str | None):
        text = f"workload: {method} returned {reason!r}; return None, or why the run should stop, as a string"
        raise RunFailed(text, code="invalid-workload", key=method)
    if not dist.is_initialized():
        return reason or ""
    wants = torch.tensor(float(bool(reason)), device=device)
    dist.all_reduce(wants)
    return next(filter(None, gather_objects(reason))) if wants else ""


def dump_callback_state(workload: Workload) -> dict[str, Any]:
    """Return `workload.callback_state` as plain values for a checkpoint."""
    try:
        state: dict[str, Any] = json.loads(json.dumps(workload.callback_state))
    except (TypeError, ValueError) as error:
        reason = f"workload: callback_state cannot be saved: {error}; it may hold numbers, words, lists and dicts"
        raise RunFailed(reason, code="invalid-workload", key="callback_state") from None
    return state
