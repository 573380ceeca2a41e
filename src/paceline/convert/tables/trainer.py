"""Hugging Face `TrainingArguments`: its JSON, and the same names as options of a script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.convert.rules import (
    Outcome,
    Rule,
    Ruling,
    UnreadableValue,
    all_of,
    always,
    backend,
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
    word,
    workers,
)
from paceline.convert.sources import KeyTable
from paceline.convert.tables.accelerate import FSDP
from paceline.convert.tables.deepspeed import DEEPSPEED, sections

WORKLOAD = "transformers"
INLINE = "deepspeed."
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {"train.schedule": "linear"},
    "cosine": {"train.schedule": "cosine"},
    "constant": {"train.schedule": "constant", "train.warmup": 0.0},
    "constant_with_warmup": {"train.schedule": "constant"},
}
SHARDS = {"full_shard": "fsdp", "shard_grad_op": "zero2", "no_shard": "ddp", "hybrid_shard": "hsdp"}
LAST_WORD = 1


def _epochs(value: Any) -> Ruling:
    if number(value) % 1:  # infinity too
        why = "a run has whole epochs; give its length as train.steps"
        return Ruling(Outcome.NOT_SUPPORTED, why=why)
    if number(value) < 1:
        return Ruling(Outcome.NOT_SUPPORTED, why="a run has at least one epoch")
    return Ruling(Outcome.TRANSLATED, {"train.epochs": int(number(value))})


def _steps(value: Any) -> Ruling:
    if whole(value) <= 0:
        return Ruling(Outcome.KEPT, why="off")
    return Ruling(Outcome.TRANSLATED, {"train.steps": whole(value)}, weight=LAST_WORD)


def _warmup_steps(value: Any) -> Ruling:
    if number(value) == 0:
        return Ruling(Outcome.KEPT, why="off")
    if number(value) < 1:
        return Ruling(Outcome.TRANSLATED, {"train.warmup": number(value)})
    return Ruling(Outcome.TRANSLATED, {"train.warmup_steps": whole(value)}, weight=LAST_WORD)


def _every(key: str) -> Rule:
    """A rhythm in steps; as a fraction of the run it depends on the length."""

    def rule(value: Any) -> Ruling:
        if value is None:
            return Ruling(Outcome.KEPT, why="not set")
        if number(value) < 1:
            return Ruling(Outcome.NOT_SUPPORTED, why="give it in steps")
        return Ruling(Outcome.DERIVED if "." not in key else Outcome.TRANSLATED, {key: whole(value)})

    return rule


def _update(value: Any) -> Ruling:
    text = str(value).lower()
    if text.startswith("adamw_torch") or text in ("adamw_hf", "adamw_apex_fused", "adamw"):
        return Ruling(Outcome.TRANSLATED, {"train.optimizer": "adamw"})
    if text == "sgd":
        return Ruling(Outcome.TRANSLATED, {"train.optimizer": "sgd", "train.momentum": 0.0})
    return Ruling(Outcome.NOT_SUPPORTED, why="the optimisers are adamw, sgd, lars and lamb")


def _report(value: Any) -> Ruling:
    if value is not None and not isinstance(value, str | list):
        raise UnreadableValue("a name or a list of names")
    names = [value] if isinstance(value, str) else value or []
    if not names or names in (["none"], ["all"]):
        return Ruling(Outcome.KEPT, why="events are in the run folder")
    if unknown := [name for name in names if name not in ("tensorboard", "wandb", "mlflow")]:
        return Ruling(Outcome.NOT_SUPPORTED, why=f"loggers are tensorboard, wandb and mlflow, not {unknown[0]}")
    return Ruling(Outcome.TRANSLATED, {"train.loggers": names})


def _fsdp(value: Any) -> Ruling:
    """`full_shard auto_wrap offload`, or a list of these words, or true."""
    if is_off(value):
        return Ruling(Outcome.KEPT, why="off")
    if value is True:
        return Ruling(Outcome.TRANSLATED, {"parallel.strategy": "fsdp"}, weight=-1)
    if not isinstance(value, str | list):
        raise UnreadableValue("words such as 'full_shard auto_wrap'")
    words = value.split() if isinstance(value, str) else [str(part) for part in value]
    ways = [SHARDS[part] for part in words if part in SHARDS]
    claims: dict[str, Any] = {"parallel.strategy": ways[0]} if ways else {}
    if "offload" in words:
        claims["parallel.offload"] = True
    return Ruling(Outcome.TRANSLATED if claims else Outcome.NOT_SUPPORTED, claims, "" if claims else "no known word")


def _model(value: Any) -> Ruling:
    return Ruling(
        Outcome.TRANSLATED, {"model.init_from": word(value)}, "a folder; a name of the Hub is downloaded first"
    )


LENGTH: dict[str, Rule] = {
    "per_device_train_batch_size": quantity("micro"),
    "per_gpu_train_batch_size": quantity("micro"),
    "gradient_accumulation_steps": quantity("accumulation"),
    "num_train_epochs": _epochs,
    "max_steps": _steps,
    "learning_rate": to("train.lr", number),
    "lr_scheduler_type": choice(SCHEDULES, "schedules are linear, cosine and constant, after a linear warm-up"),
    "lr_scheduler_kwargs.*": no("schedules are linear, cosine and constant, after a linear warm-up"),
    "lr_scheduler_kwargs": no("schedules are linear, cosine and constant, after a linear warm-up"),
    "warmup_steps": _warmup_steps,
    "warmup_ratio": to("train.warmup", lambda value: number(value or 0)),
    "optim": _update,
    "weight_decay": to("train.weight_decay", number, "biases and norms are exempt, as in the Trainer"),
    "adam_beta1": to("train.beta1", number),
    "adam_beta2": to("train.beta2", number),
    "adam_epsilon": to("train.eps", number),
    "max_grad_norm": to("train.clip", number),
    "seed": to("train.seed", whole),
    "data_seed": always("one seed gives weights, order and dropout", None, otherwise="train.seed gives all of them"),
}
PRECISION: dict[str, Rule] = {
    "bf16": when({"train.precision": "bf16"}),
    "fp16": when({"train.precision": "fp16"}),
    "tf32": when({"train.precision": "tf32"}, weight=-1),
    **all_of(("fp16_opt_level", "half_precision_backend", "fp16_backend"), always("mixed precision is by autocast")),
    **all_of(("bf16_full_eval", "fp16_full_eval"), no("evaluation has the precision of training")),
    "gradient_checkpointing": when({"parallel.activation_checkpointing": "full"}),
    "gradient_checkpointing_kwargs.*": always("layers are computed again without reentrance"),
    "torch_compile": when({"train.compile": "on"}),
    **all_of(("torch_compile_backend", "torch_compile_mode"), no("train.compile uses inductor")),
}
RHYTHM: dict[str, Rule] = {
    "logging_steps": _every("train.log_every"),
    **all_of(("eval_strategy", "evaluation_strategy"), quantity("evaluate_by", str)),
    "eval_steps": _every("evaluate_steps"),
    "save_strategy": quantity("save_by", str),
    "save_steps": _every("save_steps"),
    "save_total_limit": to("train.keep", whole),
    "load_best_model_at_end": always("the best checkpoint is kept beside the newest"),
    "report_to": _report,
    "run_name": to("name", word),
}
SPREADING: dict[str, Rule] = {
    "fsdp": _fsdp,
    **{f"fsdp_config.{key}": rule for key, rule in FSDP.items()},
    **{f"fsdp_config.{key.removeprefix('fsdp_')}": rule for key, rule in FSDP.items()},
    "fsdp_config.*": no("the layout says it"),
    "fsdp_min_num_params": FSDP["fsdp_min_num_params"],
    "fsdp_transformer_layer_cls_to_wrap": FSDP["fsdp_transformer_layer_cls_to_wrap"],
    "deepspeed": file_too(),
    **{f"deepspeed.{key}": rule for key, rule in DEEPSPEED.rules.items()},
    "ddp_bucket_cap_mb": to("parallel.bucket_mb", number),
    "ddp_timeout": to("parallel.timeout_s", number),
    "ddp_backend": backend,
    "ddp_find_unused_parameters": always("parameters without a gradient are left as they are", False),
    **all_of(("ddp_broadcast_buffers", "ddp_static_graph"), no("buffers are those of the main rank")),
    **all_of(("use_cpu", "no_cuda"), when({"parallel.device": "cpu"})),
    "parallelism_config": no("parallel.tensor and parallel.pipeline are for workloads with shard rules"),
    "accelerator_config.split_batches": choice({"false": {}}, "a batch is counted over all ranks"),
    "accelerator_config.*": always("the order of samples and the accumulation are Paceline's"),
    "accelerator_config": always("the order of samples and the accumulation are Paceline's"),
}
DATA: dict[str, Rule] = {
    "model_name_or_path": _model,
    "config_name": to("model.config", word),
    "tokenizer_name": noted("data.tokenizer takes a tokenizer.json"),
    "train_file": to("data.path", word),
    "validation_file": to("data.test_path", word),
    **all_of(("block_size", "max_length"), to("data.sequence", whole)),
    "max_seq_length": to("data.max_length", whole),
    **all_of(("dataset_name", "dataset_config_name", "task_name"), noted("data.source and data.path name the texts")),
    "dataloader_num_workers": workers,
    **all_of(
        (
            *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
            *(
                "dataloader_multiprocessing_context",
                "dataloader_in_order",
                "length_column_name",
                "remove_unused_columns",
            ),
        ),
        always("samples are made ahead, in an order that the seed gives"),
    ),
    "dataloader_drop_last": always("the last batch is what is left; nothing is dropped", False),
    **all_of(
        ("train_sampling_strategy", "group_by_length"), always("the order is a function of the seed", "random", False)
    ),
    "average_tokens_across_devices": always("the loss is divided once, by the count over all ranks"),
    "label_smoothing_factor": always("labels are not smoothed", 0),
    "neftune_noise_alpha": no("embeddings are trained without noise"),
}
ALWAYS = {
    "runs go to runs/NAME, or to --out": ("output_dir", "overwrite_output_dir", "logging_dir"),
    "paceline train trains and evaluates": ("do_train", "do_eval", "do_predict", "prediction_loss_only"),
    "a run knows where it stands: paceline train --resume": (
        *("resume_from_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
        "enable_jit_checkpoint",
    ),
    "the launcher says it": ("local_rank", "log_on_each_node", "save_on_each_node", "_n_gpu", "n_gpu"),
    "evaluation is exact on any number of ranks": (
        *("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_accumulation_steps", "eval_delay"),
        *("eval_on_start", "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics"),
        *("include_for_metrics", "include_inputs_for_metrics", "jit_mode_eval", "metric_for_best_model"),
        *("greater_is_better", "label_names", "save_only_model", "save_safetensors"),
    ),
    "progress is shown, unless --quiet": (
        *("disable_tqdm", "log_level", "log_level_replica", "logging_strategy", "logging_first_step"),
        *("logging_nan_inf_filter", "include_num_input_tokens_seen", "include_tokens_per_second"),
        *("skip_memory_metrics", "debug"),
    ),
}
NEVER = {
    "nothing is uploaded": (
        *("push_to_hub", "hub_model_id", "hub_private_repo", "hub_always_push", "hub_revision"),
        *("push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token"),
    ),
    "it is not offered": (
        *("auto_find_batch_size", "torch_empty_cache_steps", "optim_target_modules", "optim_args", "use_liger_kernel"),
        *("liger_kernel_config", "full_determinism", "use_ipex", "use_mps_device", "mp_parameters", "sharded_ddp"),
        *("tpu_num_cores", "tpu_metrics_debug", "past_index", "torchdynamo", "ray_scope", "split_batches"),
        *("dispatch_batches", "include_tokens_per_second_", "adafactor", "use_legacy_prediction_loop"),
    ),
}


def _unsaid(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Ruling]]:
    """What TrainingArguments has where nothing is said, and a run file has otherwise."""
    why = "the Trainer's default"
    said = {key.rsplit(".", 1)[-1] for key in values}
    defaults: dict[str, tuple[Any, dict[str, Any]]] = {
        "learning_rate": (5e-5, {"train.lr": 5e-5}),
        "lr_scheduler_type": ("linear", {"train.schedule": "linear"}),
        "weight_decay": (0.0, {"train.weight_decay": 0.0}),
        "num_train_epochs": (3, {"train.epochs": 3}),
        "max_grad_norm": (1.0, {"train.clip": 1.0}),
        "seed": (42, {"train.seed": 42}),
        "per_device_train_batch_size": (8, {"micro": 8}),
    }
    for key, (value, claims) in defaults.items():
        if key not in said:
            yield key, value, Ruling(Outcome.DERIVED, claims, why, weight=-1)
    if not said & {"warmup_steps", "warmup_ratio"} or not any(values.get(k) for k in ("warmup_steps", "warmup_ratio")):
        yield "warmup_steps", 0, Ruling(Outcome.DERIVED, {"train.warmup": 0.0}, why, weight=-1)
    claims = {"workload": WORKLOAD}
    yield "model", None, Ruling(Outcome.DERIVED, claims, "a model of the library transformers", weight=LAST_WORD)


def _inline(values: Mapping[str, Any]) -> dict[str, Ruling]:
    """The sections of a DeepSpeed configuration that stands in place of its file."""
    inner = {key.removeprefix(INLINE): value for key, value in values.items() if key.startswith(INLINE)}
    return {f"{INLINE}{key}": ruling for key, ruling in sections(inner).items()}


TRAINER = KeyTable(
    "TrainingArguments",
    {
        **LENGTH,
        **PRECISION,
        **RHYTHM,
        **SPREADING,
        **DATA,
        **{key: always(why) for why, keys in ALWAYS.items() for key in keys},
        **{key: no(why) for why, keys in NEVER.items() for key in keys},
        **all_of(("hub_strategy", "hub_token"), always("nothing is uploaded")),
        **all_of(
            ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "use_cache"), always("")
        ),
    },
    frozenset(
        (
            *("per_device_train_batch_size", "num_train_epochs", "output_dir", "learning_rate", "max_grad_norm"),
            *("lr_scheduler_type", "save_total_limit", "logging_steps", "warmup_ratio", "adam_beta1", "eval_strategy"),
            *("evaluation_strategy", "save_strategy", "max_steps", "dataloader_num_workers", "report_to"),
        )
    ),
    _unsaid,
    _inline,
)
