"""The YAML of a project with a training script of its own: sections model, data, training, distributed.

Every project has its own words for the same quantities. These are the usual ones, for a classifier of texts.
"""

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
    is_off,
    no,
    noted,
    number,
    quantity,
    to,
    truth,
    when,
    whole,
    word,
)
from paceline.convert.sources import KeyTable

MODEL: dict[str, Rule] = {
    **all_of(("d_model", "hidden_size", "embed_dim", "width"), to("model.width", whole)),
    **all_of(("n_heads", "num_heads", "nhead", "heads"), to("model.heads", whole)),
    **all_of(("num_layers", "n_layers", "layers"), to("model.layers", whole)),
    **all_of(("dim_feedforward", "d_ff", "ffn_dim", "ffn"), to("model.ffn", whole)),
    "dropout": to("model.dropout", number),
    **all_of(("max_seq_len", "max_length", "max_len", "max_seq_length"), to("data.max_length", whole)),
    "vocab_size": to("data.vocab", whole),
    "num_classes": always("the classes are those of the data"),
    **all_of(("type", "name"), noted("the classifier is a transformer encoder")),
    "label_smoothing": to("model.label_smoothing", number),
}


def _dataset(value: Any) -> Ruling:
    name = word(value).lower().replace("-", "_").removeprefix("fancyzhx/")
    if name in ("ag_news", "agnews"):
        return Ruling(Outcome.TRANSLATED, {"data.source": "ag_news"})
    return Ruling(Outcome.NOT_SUPPORTED, why="give the texts as data.source: csv, jsonl or parquet, and data.path")


DATA: dict[str, Rule] = {
    **all_of(("dataset", "dataset_name", "name"), _dataset),
    **all_of(("path", "data_dir", "root", "data_path"), to("data.path", word)),
    **all_of(("max_seq_len", "max_length", "max_len", "max_seq_length"), to("data.max_length", whole)),
    "vocab_size": to("data.vocab", whole),
    "num_workers": always("texts are tokenised once and read from a memory map: there is nothing for workers to do"),
    **all_of(("pin_memory", "shuffle", "persistent_workers", "prefetch_factor", "drop_last"), always("so it is")),
    "batch_size": quantity("global_batch", why="taken as that of all devices together"),
}


def _mixed(value: Any) -> Ruling:
    if isinstance(value, str) and value.lower() in ("bf16", "fp16", "fp32"):
        return Ruling(Outcome.TRANSLATED, {"train.precision": value.lower()})
    if is_off(value) or not truth(value):
        return Ruling(Outcome.KEPT, why="off")
    return Ruling(Outcome.TRANSLATED, {"train.precision": "fp16"}, "torch's autocast takes fp16 unless told otherwise")


TRAINING: dict[str, Rule] = {
    **all_of(("epochs", "num_epochs"), to("train.epochs", whole)),
    **all_of(("steps", "max_steps"), to("train.steps", whole)),
    **all_of(
        ("batch_size", "global_batch_size"), quantity("global_batch", why="taken as that of all devices together")
    ),
    **all_of(("per_gpu_batch_size", "batch_size_per_gpu", "micro_batch_size"), quantity("micro")),
    **all_of(("learning_rate", "lr"), to("train.lr", number)),
    "weight_decay": to("train.weight_decay", number),
    "optimizer": choice(
        {name: {"train.optimizer": ours} for name, ours in (("adamw", "adamw"), ("adam", "adam"), ("sgd", "sgd"))},
        "the optimisers are adamw, sgd, lars and lamb",
    ),
    **all_of(
        ("scheduler", "lr_scheduler", "schedule"),
        choice(
            {name: {"train.schedule": name} for name in ("constant", "linear", "cosine")}, "constant, linear, cosine"
        ),
    ),
    "warmup_steps": to("train.warmup_steps", whole),
    **all_of(("warmup_ratio", "warmup"), to("train.warmup", number)),
    **all_of(
        ("grad_clip", "gradient_clip", "max_grad_norm", "clip_grad_norm", "gradient_clipping"), to("train.clip", number)
    ),
    **all_of(("gradient_accumulation_steps", "accumulation_steps", "grad_accum_steps"), quantity("accumulation")),
    **all_of(("use_amp", "amp", "mixed_precision", "precision", "fp16"), _mixed),
    "bf16": when({"train.precision": "bf16"}),
    "seed": to("train.seed", whole),
    "label_smoothing": to("model.label_smoothing", number),
    **all_of(("log_interval", "log_every", "logging_steps"), to("train.log_every", whole)),
    **all_of(("eval_interval", "eval_every"), to("train.evaluate_every", whole)),
    **all_of(("save_interval", "save_every"), to("train.checkpoint_every", whole)),
    **all_of(("compile", "torch_compile"), when({"train.compile": "on"})),
    "device": choice({"cuda": {}, "gpu": {}, "auto": {}, "cpu": {"parallel.device": "cpu"}}, "cpu or cuda"),
    "num_workers": DATA["num_workers"],
}


def _use_ddp(value: Any) -> Ruling:
    return Ruling(Outcome.TRANSLATED, {"parallel.strategy": "ddp" if truth(value) else "single"})


DISTRIBUTED: dict[str, Rule] = {
    **all_of(("use_ddp", "ddp", "enabled"), _use_ddp),
    "strategy": choice(
        {name: {"parallel.strategy": name} for name in ("ddp", "fsdp", "zero2", "zero3")}, "ddp or fsdp"
    ),
    "backend": backend,
    **all_of(("world_size", "num_gpus", "gpus"), quantity("ranks")),
    "num_nodes": quantity("nodes"),
    "find_unused_parameters": always("parameters without a gradient are left as they are", False),
    **all_of(("master_addr", "master_port", "init_method", "local_rank", "rank"), always("the launcher says it")),
    "bucket_cap_mb": to("parallel.bucket_mb", number),
    "gradient_as_bucket_view": always("so it is"),
}
PROJECT = KeyTable(
    "the project",
    {
        **all_of(("experiment_name", "name", "run_name"), to("name", word)),
        "seed": to("train.seed", whole),
        **{f"model.{key}": rule for key, rule in MODEL.items()},
        **{f"data.{key}": rule for key, rule in DATA.items()},
        **{f"{part}.{key}": rule for part in ("training", "train") for key, rule in TRAINING.items()},
        **{f"distributed.{key}": rule for key, rule in DISTRIBUTED.items()},
        **all_of(("output_dir", "save_dir", "log_dir"), always("runs go to runs/NAME, or to --out")),
        **all_of(("logging.*", "checkpoint.*", "output.*"), no("events and checkpoints are in the run folder")),
    },
    frozenset(
        (
            *(
                "experiment_name",
                "model.d_model",
                "model.n_heads",
                "model.num_layers",
                "model.dim_feedforward",
                "training",
            ),
            *("distributed", "distributed.use_ddp", "data.dataset", "training.batch_size", "training.learning_rate"),
        )
    ),
    lambda values: [
        ("experiment", None, Ruling(Outcome.DERIVED, {"workload": "classifier"}, "it classifies texts", 1))
    ],
)
