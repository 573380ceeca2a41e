"""Calls of torch in a script: what they say as literals of its loader, its wrapping and its process group."""

from __future__ import annotations

from typing import Any

from paceline.convert.rules import (
    Outcome,
    Rule,
    Ruling,
    all_of,
    always,
    backend,
    choice,
    no,
    noted,
    number,
    quantity,
    sums_in,
    to,
    when,
    workers,
)
from paceline.convert.sources import KeyTable
from paceline.convert.tables.accelerate import SHARDING, offloaded

ORDER = "the order of samples is Paceline's"


def _dtype(key: str) -> Rule:
    names = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}

    def rule(value: Any) -> Ruling:
        found = names.get(str(value).removeprefix("torch."))
        if found is None:
            return Ruling(Outcome.NOT_SUPPORTED, why="bfloat16, float16 or float32")
        return Ruling(Outcome.TRANSLATED, {key: found})

    return rule


def _last_part(options: dict[str, dict[str, Any]], why: str) -> Rule:
    """Of a dotted name such as ShardingStrategy.FULL_SHARD."""
    return lambda value: choice(options, why)(str(value).split(".")[-1])


def _betas(value: Any) -> Ruling:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return Ruling(Outcome.NOT_SUPPORTED, why="two numbers are meant, as in [0.9, 0.999]")
    beta1, beta2 = map(number, value)
    return Ruling(Outcome.TRANSLATED, {"train.beta1": beta1, "train.beta2": beta2})


def _decay_of_all(value: Any) -> Ruling:
    """torch decays every parameter; a run file, unless it says so, matrices alone."""
    claims = {"train.weight_decay": number(value)}
    return Ruling(Outcome.TRANSLATED, {**claims, "train.decay": "all"} if number(value) else claims)


LOADER: dict[str, Rule] = {
    "batch_size": quantity("micro", why="the loader's batch, of one process"),
    "num_workers": workers,
    **all_of(("pin_memory", "persistent_workers", "prefetch_factor"), always("samples are made ahead")),
    **all_of(("shuffle", "sampler"), always(ORDER)),
    "drop_last": always("the last batch is what is left; nothing is dropped", False),
    "collate_fn": noted("run.batches takes it"),
    "dataset": noted("run.batches takes it"),
}
WRAPPED: dict[str, Rule] = {
    "sharding_strategy": _last_part(SHARDING, "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD"),
    "mixed_precision.param_dtype": _dtype("train.precision"),
    "mixed_precision.reduce_dtype": sums_in,
    "mixed_precision.buffer_dtype": no("buffers stay in fp32"),
    "mixed_precision": noted("its literals are read where it is made"),
    "cpu_offload.offload_params": offloaded,
    "cpu_offload": offloaded,
    "device_id": always("a rank takes the device of its number"),
    "device_ids": always("a rank takes the device of its number"),
    "find_unused_parameters": always("parameters without a gradient are left as they are", False),
    "bucket_cap_mb": to("parallel.bucket_mb", number),
    "auto_wrap_policy": noted("the repeated layers are gathered one by one"),
    "transformer_layer_cls": always("a workload names its layers, or the repeated ones are found"),
    "min_num_params": to("parallel.wrap", lambda value: int(number(value))),
    **all_of(
        ("use_orig_params", "sync_module_states", "forward_prefetch", "backward_prefetch", "limit_all_gathers"),
        always("so it is"),
    ),
}
GROUP: dict[str, Rule] = {
    "backend": backend,
    "timeout": noted("parallel.timeout_s says it"),
    **all_of(("rank", "world_size", "init_method", "store", "device_id"), always("the launcher says it")),
}
WHOLE = "FullStateDictConfig"
SHARDED = ("FullyShardedDataParallel", "FSDP", "fully_shard")
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd"}
UPDATE: dict[str, Rule] = {
    "lr": to("train.lr", number),
    "betas": _betas,
    "eps": to("train.eps", number),
    "weight_decay": _decay_of_all,
    "momentum": to("train.momentum", number),
    "nesterov": when({"train.nesterov": True}),
    "dampening": always("momentum is not dampened", 0),
    "amsgrad": no("AMSGrad is not offered"),
    "maximize": no("a loss is made smaller"),
    **all_of(("fused", "foreach", "capturable", "differentiable"), always("the update is fused where the device can")),
}
"""Arguments of torch's optimisers."""
CALLS: dict[str, dict[str, Rule]] = {
    "DataLoader": LOADER,
    **all_of((*SHARDED[:2], "DistributedDataParallel", "DDP"), WRAPPED),
    **all_of(
        ("MixedPrecision", "MixedPrecisionPolicy"),
        {
            **{key.removeprefix("mixed_precision."): rule for key, rule in WRAPPED.items()},
            "output_dtype": noted("the loss is computed in fp32"),
            "cast_forward_inputs": always("inputs are cast by autocast"),
            "keep_low_precision_grads": no("gradients are fp32"),
            "cast_root_forward_inputs": always("inputs are cast by autocast"),
        },
    ),
    "fully_shard": {
        "reshard_after_forward": choice(SHARDING, "true or false"),
        **all_of(("mesh", "shard_placement_fn", "ignored_params"), no("all parameters are sharded over all ranks")),
        **all_of(("mp_policy", "offload_policy"), noted("its literals are read where it is made")),
    },
    "CPUOffloadPolicy": {"pin_memory": always("memory is pinned where a device can copy from it")},
    "size_based_auto_wrap_policy": WRAPPED,
    "transformer_auto_wrap_policy": WRAPPED,
    "init_process_group": GROUP,
    "DistributedSampler": all_of(("num_replicas", "rank", "shuffle", "seed", "drop_last"), always(ORDER)),
    "spawn": {
        "nprocs": quantity("ranks"),
        **all_of(("join", "daemon", "start_method"), always("paceline train starts the ranks")),
        "args": noted("the script has them from its run"),
    },
    WHOLE: all_of(("offload_to_cpu", "rank0_only"), always("the main rank joins and writes it")),
    **all_of(OPTIMIZERS, UPDATE),
}
TORCH = KeyTable("torch", {f"{call}.{key}": rule for call, rules in CALLS.items() for key, rule in rules.items()})


def claims_of_call(name: str) -> dict[str, Any]:
    """What a call says by being made at all."""
    if name in SHARDED:
        return {"parallel.strategy": "fsdp"}
    if name == "CPUOffloadPolicy":
        return {"parallel.offload": True}
    if name == WHOLE:
        return {"train.checkpoint_format": "full"}
    if name in ("DistributedDataParallel", "DDP"):
        return {"parallel.strategy": "ddp"}
    return {"train.optimizer": OPTIMIZERS[name]} if name in OPTIMIZERS else {}
