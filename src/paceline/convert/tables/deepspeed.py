"""DeepSpeed's JSON, the usual sections and their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from paceline.config.run_file import set_nested
from paceline.convert.rules import (
    Outcome,
    Rule,
    Ruling,
    all_of,
    always,
    choice,
    is_off,
    no,
    number,
    quantity,
    sums_in,
    to,
    truth,
    when,
    whole,
)
from paceline.convert.sources import KeyTable
from paceline.trainer.engines.deepspeed_sections import AUTO, SECTIONS, Meaning, translate_sections

OWN_TUNING = "it tunes DeepSpeed's own engine; parallel.engine=deepspeed with engine_config takes it"
AS_OTHERS_SAY = Ruling(Outcome.DERIVED, why="auto: as the other files say, or Paceline's default")
BY_DEFAULT = "DeepSpeed's default"
STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}


def _offload(value: Any) -> Ruling:
    if is_off(value):
        return Ruling(Outcome.KEPT, why="off")
    if value == "cpu":
        return Ruling(Outcome.TRANSLATED, {"parallel.offload": True}, "parameters and optimiser go together")
    return Ruling(Outcome.NOT_SUPPORTED, why=f"state can live in host memory, not on {value}")


def _bucket(value: Any) -> Ruling:
    """Elements, of 4 bytes: gradients are fp32 here."""
    return Ruling(Outcome.TRANSLATED, {"parallel.bucket_mb": number(value) * 4 / 1e6}, "as MB of fp32")


def _logger(name: str) -> Rule:
    return when({"train.loggers": [name]})


def unless_auto(rule: Rule) -> Rule:
    """`auto` means: as the Trainer's or Accelerate's own settings say."""

    def wrapped(value: Any) -> Ruling:
        if value == AUTO:
            return AS_OTHERS_SAY
        return rule(value)

    return wrapped


BATCH: dict[str, Rule] = {
    "train_batch_size": quantity("global_batch"),
    "train_micro_batch_size_per_gpu": quantity("micro"),
    "gradient_accumulation_steps": quantity("accumulation"),
    "gradient_clipping": to("train.clip", number),
    "steps_per_print": lambda value: (
        Ruling(Outcome.KEPT, why="off")
        if is_off(value) or value == float("inf")
        else to("train.log_every", whole)(value)
    ),
}
PRECISION: dict[str, Rule] = {
    **all_of(("bf16.enabled", "bfloat16.enabled"), when({"train.precision": "bf16"})),
    "bf16.*": no("weights, gradients and optimiser state are fp32; products are bf16"),
    "torch_autocast.enabled": always("mixed precision is by autocast"),
    "torch_autocast.dtype": choice(
        {"bfloat16": {"train.precision": "bf16"}, "float16": {"train.precision": "fp16"}}, "bfloat16 or float16"
    ),
    "torch_autocast.lower_precision_safe_modules": no("torch's own list of operations is used"),
    "communication_data_type": sums_in,
    "seq_parallel_communication_data_type": always("gradients are summed in fp32", "fp32"),
    "data_types.grad_accum_dtype": always("gradients are accumulated in fp32", "fp32"),
    "amp.*": no("NVIDIA's Apex; train.precision does it"),
}
ZERO: dict[str, Rule] = {
    "stage": choice({stage: {"parallel.strategy": name} for stage, name in STAGES.items()}, "stages are 0 to 3"),
    "offload_optimizer.device": _offload,
    "offload_param.device": _offload,
    **all_of(("cpu_offload", "cpu_offload_param"), when({"parallel.offload": True})),
    **all_of(
        ("offload_optimizer.pin_memory", "offload_param.pin_memory", "cpu_offload_use_pin_memory"),
        always("memory is pinned where a device can copy from it"),
    ),
    "offload_optimizer.*": no(OWN_TUNING),
    "offload_param.*": no(OWN_TUNING),
    "allgather_partitions": always("shards are gathered by collectives", True),
    "reduce_scatter": always("gradients are reduce-scattered where they are sharded", True),
    "overlap_comm": always("communication overlaps with the backward pass", True),
    "contiguous_gradients": always("gradients lie in one buffer", True),
    "reduce_bucket_size": _bucket,
    "allgather_bucket_size": no(OWN_TUNING),
    **all_of(
        ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        always("paceline export writes whole weights"),
    ),
    "ignore_unused_parameters": always("parameters without a gradient are left as they are", True),
    "elastic_checkpoint": always("a run resumes on any number of ranks"),
    "load_from_fp32_weights": always("weights are fp32", True),
    "round_robin_gradients": no(OWN_TUNING),
    **all_of(
        (
            *("sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
            *("stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
            *("stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params"),
            *("stage3_allgather_sequential", "use_multi_rank_bucket_allreduce", "parameter_alignment"),
            *("memory_efficient_linear", "legacy_stage1", "pipeline_loading_checkpoint", "override_module_apply"),
            *("log_trace_cache_warnings", "enable_sanity_checks", "leaf_module", "compute_grad_norm"),
        ),
        no(OWN_TUNING),
    ),
    "zero_hpz_partition_size": no("parallel.strategy=hsdp with parallel.replicate keeps shards within a node"),
    **all_of(
        ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
        no("it changes the answer; parallel.reduce has ways to send less"),
    ),
    "zenflow.*": no("it updates with gradients of earlier steps"),
    "mics_shard_size": no("parallel.strategy=hsdp with parallel.replicate does it"),
    "mics_hierarchical_params_gather": no("parallel.strategy=hsdp with parallel.replicate does it"),
}
OTHERS: dict[str, Rule] = {
    "zero_allow_untested_optimizer": always("the update rule works on shards as on anything"),
    "zero_force_ds_cpu_optimizer": always("the update is Paceline's own", False),
    "wall_clock_breakdown": always("the four times of every step are recorded"),
    "memory_breakdown": always("the peak memory of each rank is recorded"),
    "dump_state": always("paceline explain prints every value"),
    "prescale_gradients": always("gradients are summed, then divided once by the global count", False),
    "gradient_predivide_factor": always("gradients are summed, then divided once by the global count", 1),
    "gradient_allreduce_op": always("the loss is a mean over the global batch", "mean"),
    "managed_gradient_accumulation": always("a step ends with its last pass", True),
    "disable_allgather": no(OWN_TUNING),
    "disable_python_gc": no(OWN_TUNING),
    "sparse_gradients": no("gradients are dense"),
    "dataloader_drop_last": always("the last batch is what is left; nothing is dropped", False),
    "activation_checkpointing.*": no("parallel.activation_checkpointing=selective or full says it"),
    "tensorboard.enabled": _logger("tensorboard"),
    "wandb.enabled": _logger("wandb"),
    **all_of(("tensorboard.*", "wandb.*"), no("loggers write into the run folder, or as their own settings say")),
    "csv_monitor.*": no("events are lines of JSON in the run folder"),
    "flops_profiler.*": no("paceline measure says where the time goes"),
    "comms_logger.*": no("comm_s and exposed_s of every step are recorded"),
    "autotuning.*": no("paceline plan chooses the layout"),
    "elasticity.*": no("a run resumes on any number of ranks: paceline train --resume"),
    "checkpoint.*": no("checkpoints are Paceline's own"),
    "nebula.*": no("checkpoints are Paceline's own"),
    "aio.*": no("there is no NVMe offload"),
    "data_efficiency.*": no("the order of samples is a function of the seed"),
    "curriculum_learning.*": no("the order of samples is a function of the seed"),
    "compression_training.*": no("models are trained as they are"),
    "progressive_layer_drop.*": no("models are trained as they are"),
    "eigenvalue.*": no("models are trained as they are"),
    "sparse_attention.*": no("the model says it"),
    "tensor_parallel.*": no("parallel.tensor, for a workload with shard rules"),
    "pipeline.*": no("parallel.pipeline, for a workload of equal layers"),
    "sequence_parallel_size": no("parallel.sequence, beside parallel.tensor"),
    "hybrid_engine.*": no("for generation while training"),
    "compile.*": no("train.compile says it"),
    "log_level": no("--quiet says it"),
}


def _meanings(values: Mapping[str, Any]) -> list[Meaning]:
    config: dict[str, Any] = {}
    for key, value in values.items():
        if key.split(".")[0] in SECTIONS:
            set_nested(config, key, value)
    return translate_sections(config)


def _ruling(one: Meaning) -> Ruling:
    if one.refusal:
        return Ruling(Outcome.NOT_SUPPORTED, why=one.refusal)
    if not one.keys:
        other = Outcome.REPLACED if one.name == "optimizer.params.lr" else Outcome.NOT_SUPPORTED
        return Ruling(other if one.own_way else Outcome.KEPT, why=one.note)
    claims = {"total_steps" if key == "train.steps" else key: value for key, value in one.keys.items()}
    return Ruling(Outcome.TRANSLATED, claims)


def sections(values: Mapping[str, Any]) -> dict[str, Ruling]:
    """The keys of `optimizer`, `scheduler` and `fp16`, read as parallel.engine=deepspeed reads them."""
    auto = {key: AS_OTHERS_SAY for key, value in values.items() if value == AUTO and key.split(".")[0] in SECTIONS}
    return {**{one.name: _ruling(one) for one in _meanings(values) if one.given}, **auto}


def unsaid(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Ruling]]:
    """DeepSpeed clips nothing and keeps the learning rate where it is not asked to."""
    if "gradient_clipping" not in values:
        yield "gradient_clipping", 0.0, Ruling(Outcome.DERIVED, {"train.clip": 0.0}, "DeepSpeed does not clip", -1)
    if not any(key.startswith("scheduler") for key in values):
        why = "without a scheduler the learning rate stays"
        yield "scheduler", None, Ruling(Outcome.DERIVED, {"train.schedule": "constant", "train.warmup": 0.0}, why, -1)
    for one in _meanings(values):
        if not one.given:
            ruling = _ruling(one)
            outcome = Outcome.DERIVED if ruling.claims else ruling.outcome
            yield one.name, one.value, replace(ruling, outcome=outcome, why=ruling.why or BY_DEFAULT, weight=-1)


def _rules() -> dict[str, Rule]:
    nested = {f"zero_optimization.{key}": rule for key, rule in ZERO.items()}
    return {key: unless_auto(rule) for key, rule in {**BATCH, **PRECISION, **nested, **OTHERS}.items()}


def zero_enabled(value: Any) -> Ruling:
    """Old files say `zero_optimization: true` for stage 1."""
    return Ruling(Outcome.TRANSLATED, {"parallel.strategy": "zero1" if truth(value) else "ddp"})


DEEPSPEED = KeyTable(
    "DeepSpeed",
    {**_rules(), "zero_optimization": zero_enabled},
    frozenset(
        (*BATCH, "zero_optimization", "fp16.enabled", "bf16.enabled", "optimizer.type", "scheduler.type", *OTHERS)
    )
    - {"gradient_accumulation_steps", "gradient_clipping"},
    unsaid,
    sections,
)
