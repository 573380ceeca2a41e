"""Accelerate: its YAML, the options of `accelerate launch`, and the arguments of `Accelerator`."""

from __future__ import annotations

from typing import Any

from paceline.convert.rules import (
    Outcome,
    Rule,
    Ruling,
    all_of,
    always,
    choice,
    file_too,
    is_off,
    no,
    noted,
    number,
    quantity,
    to,
    when,
    whole,
)
from paceline.convert.sources import KeyTable

FULL, GRADIENTS, NONE = (
    {"parallel.strategy": "fsdp"},
    {"parallel.strategy": "zero2"},
    {"parallel.strategy": "ddp"},
)
SHARDING: dict[str, dict[str, Any]] = {
    **all_of(("FULL_SHARD", "1", "true"), FULL),
    **all_of(("SHARD_GRAD_OP", "2", "false"), GRADIENTS),
    **all_of(("NO_SHARD", "3"), NONE),
    **all_of(("HYBRID_SHARD", "4"), {"parallel.strategy": "hsdp"}),
}
"""What FSDP calls its ways to divide a model, in both of its versions."""
MEETING = "ranks find each other by what the launcher tells them"
LIGHT = -1
"""The kind of parallelism, which a section of its own may say more exactly."""
KINDS: dict[str, dict[str, Any]] = {
    "NO": {},
    **all_of(("MULTI_GPU", "DDP"), NONE),
    "MULTI_CPU": {**NONE, "parallel.device": "cpu"},
    "FSDP": FULL,
    "DEEPSPEED": {"parallel.strategy": "zero2"},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    **all_of(("no", "fp32"), {}),
    **{name: {"train.precision": name} for name in ("bf16", "fp16", "fp8")},
}


def _kind(value: Any) -> Ruling:
    why = "Paceline runs on CPUs and CUDA devices, under ddp, ZeRO and FSDP"
    claims = KINDS.get(str(value).upper())
    if claims is None:
        return Ruling(Outcome.NOT_SUPPORTED, why=why)
    return Ruling(Outcome.TRANSLATED if claims else Outcome.KEPT, claims, weight=LIGHT)


def offloaded(value: Any) -> Ruling:
    if is_off(value) or value == "false":
        return Ruling(Outcome.KEPT, why="off")
    if value == "cpu" or value is True or value == "true":
        return Ruling(Outcome.TRANSLATED, {"parallel.offload": True}, "parameters and optimiser go together")
    return Ruling(Outcome.NOT_SUPPORTED, why=f"state can live in host memory, not on {value}")


def _policy(value: Any) -> Ruling:
    if str(value).upper() == "TRANSFORMER_BASED_WRAP":
        return Ruling(Outcome.KEPT, why="the repeated layers are gathered one by one")
    if str(value).upper() == "SIZE_BASED_WRAP":
        return Ruling(Outcome.KEPT, why="fsdp_min_num_params says the size")
    return Ruling(Outcome.NOT_SUPPORTED, why="the repeated layers are gathered one by one")


def _least(value: Any) -> Ruling:
    if not whole(value):
        return Ruling(Outcome.KEPT, why="off")
    return Ruling(Outcome.TRANSLATED, {"parallel.wrap": whole(value)})


FSDP: dict[str, Rule] = {
    "fsdp_sharding_strategy": choice(SHARDING, "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD"),
    "fsdp_reshard_after_forward": choice(SHARDING, "true or false"),
    "fsdp_offload_params": offloaded,
    "fsdp_auto_wrap_policy": _policy,
    "fsdp_transformer_layer_cls_to_wrap": always("a workload names its layers, or the repeated ones are found"),
    "fsdp_min_num_params": _least,
    "fsdp_activation_checkpointing": when({"parallel.activation_checkpointing": "full"}),
    "fsdp_activation_checkpointing_offload": no("activations stay on the device"),
    "fsdp_ignored_modules": no("all parameters are sharded"),
    "fsdp_version": always("FSDP2 is used; the answer is the same"),
    "fsdp_backward_prefetch": always("the next layer is gathered ahead", "BACKWARD_PRE", "BACKWARD_POST"),
    "fsdp_backward_prefetch_policy": always("the next layer is gathered ahead"),
    "fsdp_forward_prefetch": always("the next layer is gathered ahead"),
    "fsdp_state_dict_type": choice(
        {"FULL_STATE_DICT": {"train.checkpoint_format": "full"}, "SHARDED_STATE_DICT": {}},
        "checkpoints are sharded, or one file: train.checkpoint_format=full",
    ),
    "fsdp_use_orig_params": always("optimisers see the model's own parameters"),
    "fsdp_cpu_ram_efficient_loading": always("each rank reads its part of the weights"),
    "fsdp_sync_module_states": always("all ranks begin with the same weights"),
}
ZERO: dict[str, Rule] = {
    "zero_stage": choice(
        {str(n): {"parallel.strategy": name} for n, name in enumerate(("ddp", "zero1", "zero2", "zero3"))},
        "stages are 0 to 3",
    ),
    "offload_optimizer_device": offloaded,
    "offload_param_device": offloaded,
    "gradient_accumulation_steps": quantity("accumulation"),
    "gradient_clipping": to("train.clip", number),
    "deepspeed_config_file": file_too(),
    "zero3_init_flag": always("weights are drawn in shards where ranks hold parts"),
    "zero3_save_16bit_model": always("paceline export writes whole weights"),
    "deepspeed_multinode_launcher": always(MEETING),
    "deepspeed_moe_layer_cls_names": no("mixtures of experts are not spread"),
    **all_of(("offload_optimizer_nvme_path", "offload_param_nvme_path"), no("there is no NVMe offload")),
    **all_of(
        ("deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"),
        noted("which machines; the scheduler or the launcher says it"),
    ),
}
LAUNCHING: dict[str, Rule] = {
    "num_processes": quantity("ranks"),
    "num_machines": quantity("nodes"),
    "machine_rank": always(MEETING),
    **all_of(
        (
            *("main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf", "same_network"),
            *("main_training_function", "role", "max_restarts", "monitor_interval"),
        ),
        always(MEETING),
    ),
    "gpu_ids": lambda value: (
        Ruling(Outcome.KEPT, why="all devices")
        if value in (None, "all")
        else Ruling(Outcome.NOTED, why=f"export CUDA_VISIBLE_DEVICES={value}")
    ),
    "use_cpu": when({"parallel.device": "cpu"}),
    "num_cpu_threads_per_process": to("parallel.threads", whole),
    "enable_cpu_affinity": no("processes are not bound to cores; numactl does it"),
    "debug": no("paceline check finds what differs between ranks"),
    "tee": no("every rank's events are in the run folder"),
    "log_dir": no("every rank's events are in the run folder"),
}
RULES: dict[str, Rule] = {
    **LAUNCHING,
    "compute_environment": choice({"LOCAL_MACHINE": {}}, "ranks are started here, or by torchrun, srun or mpirun"),
    "distributed_type": _kind,
    "mixed_precision": choice(PRECISIONS, "the precisions are no, bf16, fp16 and fp8"),
    "downcast_bf16": no("for TPUs"),
    "gradient_accumulation_steps": quantity("accumulation"),
    "gradient_clipping": to("train.clip", number),
    **{f"fsdp_config.{key}": rule for key, rule in FSDP.items()},
    **{f"deepspeed_config.{key}": rule for key, rule in ZERO.items()},
    **all_of(("fsdp_config", "deepspeed_config"), no("a section is meant")),
    "dynamo_config.dynamo_backend": choice(
        {"no": {}, "eager": {}, "inductor": {"train.compile": "on"}}, "train.compile uses inductor"
    ),
    "dynamo_config.*": no("train.compile says it"),
    "parallelism_config.parallelism_config_tp_size": to("parallel.tensor", whole),
    "parallelism_config.parallelism_config_dp_replicate_size": always("parallel.replicate says it", 1),
    "parallelism_config.parallelism_config_dp_shard_size": always("parallel.ranks says it"),
    "parallelism_config.*": no("parallel.tensor, parallel.sequence and parallel.pipeline are the other ways"),
    "megatron_lm_config.*": no("parallel.tensor and parallel.pipeline spread a workload of equal layers"),
    "fp8_config.*": no("train.precision=fp8 has no further settings"),
    "mpirun_config.*": always("mpirun starts  paceline train  as it is"),
    **all_of(
        ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "tpu_cluster"), no("for TPUs")
    ),
    **all_of(("command_file", "commands"), no("for TPUs")),
    "split_batches": choice({"false": {}}, "a batch is counted over all ranks; give global_batch the whole of it"),
    "device_placement": always("batches are moved to the rank's device"),
    "log_with": lambda value: (
        Ruling(Outcome.TRANSLATED, {"train.loggers": [value]})
        if value in ("tensorboard", "wandb", "mlflow")
        else no("loggers are tensorboard, wandb and mlflow")(value)
    ),
    "cpu": when({"parallel.device": "cpu"}),
    "even_batches": always("each sample counts once, and no rank waits for another"),
    "step_scheduler_with_optimizer": always("the schedule is a function of the samples seen"),
    "dispatch_batches": no("each rank makes its own samples"),
    "project_dir": no("runs go to the folder that --out names"),
    **all_of(
        ("deepspeed_plugin", "fsdp_plugin", "kwargs_handlers", "dataloader_config", "dynamo_backend", "project_config"),
        no("an object; write it as a configuration file, or set the run file's own key"),
    ),
}
ACCELERATE = KeyTable(
    "Accelerate",
    RULES,
    frozenset(("compute_environment", "distributed_type", "num_processes", "num_machines", "mixed_precision")),
)

OPTIONS: dict[str, str] = {
    "cpu": "use_cpu",
    "config_file": "",
    **{name: f"fsdp_config.{name}" for name in FSDP},
    **{name: f"deepspeed_config.{name}" for name in ZERO if not name.startswith("gradient_")},
    **{
        f"dynamo_{name}": f"dynamo_config.dynamo_{name}" for name in ("backend", "mode", "use_fullgraph", "use_dynamic")
    },
    "zero_stage": "deepspeed_config.zero_stage",
}
"""Options of `accelerate launch` that have another place in its YAML."""
FLAGS: dict[str, dict[str, Any]] = {
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "use_fsdp": {"distributed_type": "FSDP"},
    "use_deepspeed": {"distributed_type": "DEEPSPEED"},
    "use_megatron_lm": {"distributed_type": "MEGATRON_LM"},
    "tpu": {"distributed_type": "XLA"},
    "cpu": {"use_cpu": True},
    "debug": {"debug": True},
    "same_network": {"same_network": True},
    "quiet": {},
    "q": {},
    "enable_cpu_affinity": {"enable_cpu_affinity": True},
    "downcast_bf16": {"downcast_bf16": True},
    "dynamo_use_fullgraph": {"dynamo_config": {"dynamo_use_fullgraph": True}},
    "dynamo_use_dynamic": {"dynamo_config": {"dynamo_use_dynamic": True}},
}
"""Options of `accelerate launch` without a value, and what they are in its YAML."""
