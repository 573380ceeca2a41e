"""Lightning: the YAML of its command line, and the arguments of `Trainer`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.convert.rules import (
    Outcome,
    Rule,
    Ruling,
    all_of,
    always,
    backend,
    choice,
    is_off,
    no,
    noted,
    number,
    quantity,
    to,
    truth,
    whole,
    workers,
)
from paceline.convert.sources import KeyTable
from paceline.convert.tables.accelerate import SHARDING, offloaded
from paceline.convert.tables.torch_calls import UPDATE as OF_TORCH

PRECISIONS: dict[str, dict[str, Any]] = {
    **all_of(("32", "32-true"), {}),
    **all_of(("16", "16-mixed"), {"train.precision": "fp16"}),
    **all_of(("bf16", "bf16-mixed"), {"train.precision": "bf16"}),
    **all_of(("64", "64-true"), {"train.precision": "fp64"}),
    "transformer-engine": {"train.precision": "fp8"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"train.optimizer": "adamw"},
    "adam": {"train.optimizer": "adam"},
    "sgd": {"train.optimizer": "sgd"},
}
STAGES = {n: {"parallel.strategy": f"zero{n}"} for n in (1, 2, 3)}
STRATEGIES = {"ddp": "ddp", "fsdp": "fsdp", "deepspeed": "zero2", "ddp_sharded": "zero2"}


def _strategy(value: Any) -> Ruling:
    text = str(value).lower().removesuffix("strategy").split(".")[-1]
    if stage := re.fullmatch(r"deepspeed_stage_([123])(_offload)?", text):
        claims: dict[str, Any] = {"parallel.strategy": f"zero{stage[1]}"}
        return Ruling(Outcome.TRANSLATED, {**claims, "parallel.offload": True} if stage[2] else claims)
    name = re.sub(r"_(spawn|fork|notebook|find_unused_parameters_(true|false))", "", text)
    if text in ("auto", "singledevice", "single_device"):
        return Ruling(Outcome.KEPT, why="auto is ddp above one rank")
    if name in STRATEGIES:
        return Ruling(Outcome.TRANSLATED, {"parallel.strategy": STRATEGIES[name]}, weight=-1)
    return Ruling(Outcome.NOT_SUPPORTED, why="the strategies are ddp, fsdp and deepspeed's stages")


def _precision(value: Any) -> Ruling:
    if str(value) in ("16-true", "bf16-true"):
        claims = {"train.precision": "fp16" if str(value).startswith("16") else "bf16"}
        return Ruling(Outcome.TRANSLATED, claims, "weights stay in fp32")
    return choice(PRECISIONS, "the precisions are fp32, bf16, fp16, fp64 and fp8")(value)


def _devices(value: Any) -> Ruling:
    if value in ("auto", -1, "-1", None):
        return Ruling(Outcome.NOT_SUPPORTED, why="write how many as parallel.ranks")
    if isinstance(value, list):
        why = f"export CUDA_VISIBLE_DEVICES={','.join(map(str, value))}"
        return Ruling(Outcome.DERIVED, {"per_node": len(value)}, why)
    return Ruling(Outcome.DERIVED, {"per_node": whole(value)})


def _length(key: str) -> Rule:
    def rule(value: Any) -> Ruling:
        if value is None or whole(value) < 0:
            return Ruling(Outcome.KEPT, why="off")
        return Ruling(Outcome.TRANSLATED, {key: whole(value)}, weight=int(key == "train.steps"))

    return rule


def _seed(value: Any) -> Ruling:
    if value is None or isinstance(value, bool):
        return Ruling(Outcome.KEPT, why="train.seed is 0")
    return Ruling(Outcome.TRANSLATED, {"train.seed": whole(value)})


def _accelerator(value: Any) -> Ruling:
    if value in ("auto", "gpu", "cuda", None):
        return Ruling(Outcome.KEPT, why="CUDA devices are taken where there are any")
    return choice({"cpu": {"parallel.device": "cpu"}}, "devices are CPUs and CUDA devices")(value)


def _between(value: Any) -> Ruling:
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return Ruling(Outcome.TRANSLATED, {"train.evaluate_every": value})
    return always("the run is evaluated at the end of each epoch", 1, 1.0, None)(value)


def _logger(value: Any) -> Ruling:
    if value is None or isinstance(value, bool):
        return Ruling(Outcome.KEPT, why="events are in the run folder")
    known = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
    found = next((name for part, name in known.items() if part in str(value).lower()), None)
    if found is None:
        return Ruling(Outcome.NOT_SUPPORTED, why="loggers are tensorboard, wandb and mlflow")
    return Ruling(Outcome.TRANSLATED, {"train.loggers": [found]})


def _classes(options: Mapping[str, Mapping[str, Any]], why: str) -> Rule:
    return lambda value: choice(options, why)(str(value).split(".")[-1])


def _batch_norm(value: Any) -> Ruling:
    return no("statistics are those of each rank's samples; use a norm without a batch")(truth(value))


TRAINER: dict[str, Rule] = {
    "accelerator": _accelerator,
    "strategy": _strategy,
    "strategy.class_path": _strategy,
    "strategy.init_args.sharding_strategy": choice(SHARDING, "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD"),
    "strategy.init_args.stage": choice(STAGES, "stages are 1 to 3"),
    **all_of(
        tuple(f"strategy.init_args.{key}" for key in ("cpu_offload", "offload_optimizer", "offload_parameters")),
        offloaded,
    ),
    "strategy.init_args.find_unused_parameters": always("parameters without a gradient are left as they are"),
    "strategy.init_args.process_group_backend": backend,
    "strategy.*": no("the section parallel says it"),
    "devices": _devices,
    "gpus": _devices,
    "distributed_backend": _strategy,
    "num_nodes": quantity("nodes"),
    "precision": _precision,
    "max_epochs": _length("train.epochs"),
    "max_steps": _length("train.steps"),
    "accumulate_grad_batches": quantity("accumulation"),
    "gradient_clip_val": to("train.clip", number),
    "gradient_clip_algorithm": always("the norm is clipped", "norm", otherwise="train.clip_value clips each number"),
    "log_every_n_steps": to("train.log_every", whole),
    "val_check_interval": _between,
    "check_val_every_n_epoch": always("the run is evaluated at the end of each epoch", 1),
    "logger": _logger,
    "logger.class_path": _logger,
    "logger.*": no("loggers write into the run folder, or as their own settings say"),
    "callbacks": no("train.patience, train.keep and train.ema are the usual ones; others are methods of a Workload"),
    "max_time": no("a scheduler's signal stops a run, which saves and can be resumed"),
    **all_of(("min_epochs", "min_steps"), always("a run has one length")),
    **all_of(
        ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"),
        lambda value: always("all samples are used", 1, 1.0, 0, None, otherwise="all samples are used; see data.limit")(
            value
        ),
    ),
    "num_sanity_val_steps": always("data are checked before ranks are started"),
    **all_of(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "inference_mode", "benchmark"),
        always("so it is"),
    ),
    "deterministic": always("the order of samples and the seeds are fixed"),
    "use_distributed_sampler": always("the order of samples is Paceline's", True),
    "sync_batchnorm": _batch_norm,
    "reload_dataloaders_every_n_epochs": always("the data stay", 0),
    "default_root_dir": always("runs go to runs/NAME, or to --out"),
    **all_of(
        (
            "profiler",
            "detect_anomaly",
            "barebones",
            "plugins",
            "fast_dev_run",
            "enable_autolog_hparams",
            "model_registry",
        ),
        no("it is not offered"),
    ),
}
UPDATE: dict[str, Rule] = {
    "optimizer.class_path": _classes(OPTIMIZERS, "the optimisers are adamw, sgd, lars and lamb"),
    **{f"optimizer.init_args.{key}": rule for key, rule in OF_TORCH.items()},
    "lr_scheduler.class_path": _classes(
        {
            "CosineAnnealingLR": {"train.schedule": "cosine", "train.warmup": 0.0},
            "ConstantLR": {"train.schedule": "constant", "train.warmup": 0.0},
        },
        "schedules are a linear warm-up, then constant, linear or cosine",
    ),
    "lr_scheduler.init_args.T_max": always("the decay ends with the run"),
    "lr_scheduler.init_args.eta_min": always("train.final_lr is a fraction of lr", 0),
    "lr_scheduler.*": no("schedules are a linear warm-up, then constant, linear or cosine"),
}
RULES: dict[str, Rule] = {
    "seed_everything": _seed,
    **{f"trainer.{key}": rule for key, rule in TRAINER.items()},
    **UPDATE,
    "model.class_path": noted("make it a Workload, and name it as  workload: file.py:Class"),
    "model.*": noted("a field of your Workload.Model"),
    "data.class_path": noted("data(split) of your Workload returns it"),
    "data.init_args.batch_size": quantity("micro", why="the loader's batch, of one process"),
    "data.init_args.num_workers": workers,
    "data.*": noted("a field of your Workload.Data"),
    "ckpt_path": lambda value: (
        Ruling(Outcome.KEPT, why="off")
        if is_off(value)
        else Ruling(Outcome.NOTED, why="model.init_from begins with weights")
    ),
    "lightning.pytorch": always(""),
    "verbose": always(""),
}


def _unsaid(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Ruling]]:
    if not values.get("trainer.gradient_clip_val"):
        yield (
            "trainer.gradient_clip_val",
            0,
            Ruling(Outcome.DERIVED, {"train.clip": 0.0}, "Lightning does not clip", -1),
        )
    if not any(key.startswith("lr_scheduler") for key in values):
        claims = {"train.schedule": "constant", "train.warmup": 0.0}
        yield "lr_scheduler", None, Ruling(Outcome.DERIVED, claims, "without a scheduler the learning rate stays", -1)


LIGHTNING = KeyTable(
    "Lightning",
    {**RULES, **{f"fit.{key}": rule for key, rule in RULES.items()}},
    frozenset(
        (
            *("seed_everything", "ckpt_path", "model.class_path", "data.class_path", "optimizer.class_path"),
            *(f"{above}trainer.{key}" for key in TRAINER if "." not in key for above in ("", "fit.")),
        )
    ),
    _unsaid,
)
