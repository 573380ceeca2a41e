"""Options that training scripts often have: taken by their names, and said so."""

from __future__ import annotations

from paceline.convert.rules import Rule, all_of, always, file_too, quantity, to, whole, workers
from paceline.convert.sources import KeyTable

BY_NAME = "taken by its name"
RULES: dict[str, Rule] = {
    **all_of(("epochs", "num_epochs", "max_epochs"), to("train.epochs", whole, BY_NAME)),
    **all_of(("steps", "max_steps", "num_steps"), to("train.steps", whole, BY_NAME)),
    "seed": to("train.seed", whole, BY_NAME),
    **all_of(
        ("batch_size", "per_gpu_batch_size", "micro_batch_size"),
        quantity("micro", why="taken by its name, as the batch of one process"),
    ),
    "global_batch_size": quantity("global_batch", why=BY_NAME),
    **all_of(
        ("accumulation_steps", "gradient_accumulation_steps", "grad_accum_steps"), quantity("accumulation", why=BY_NAME)
    ),
    **all_of(("num_workers", "workers"), workers),
    "local_rank": always("the launcher says it"),
    **all_of(("deepspeed_config", "config", "config_file"), file_too()),
    "deepspeed": lambda value: (
        always("DeepSpeed is asked for by its file")(value) if value is True else file_too()(value)
    ),
}
SCRIPT = KeyTable("the script", RULES)
