"""The tables of keys: every rule takes any value, and single rules that no file above exercises."""

import pytest

from paceline.convert.key_tables import TABLES, load_table
from paceline.convert.rules import Outcome, Translation, Unreadable

ODD = (None, True, False, -1, 0, 1, 2.5, float("inf"), float("nan"), "", "0", "auto", "none", "$N", "a:b", [], [1], {})


@pytest.mark.parametrize("name", sorted({file.stem for file in TABLES.glob("*.yaml")} - {"programs"}))
def test_every_rule_takes_any_value(name):
    for key, rule in load_table(name).rules.items():
        for value in ODD:
            translation = None
            try:
                translation = rule(value)
            except Unreadable as kind:
                assert str(kind), key  # noqa: PT017
            assert translation is None or isinstance(translation, Translation)
            assert translation is None or translation.outcome is not Outcome.NOT_SUPPORTED or translation.reason, (
                key,
                value,
            )


@pytest.mark.parametrize(
    ("table", "key", "value", "claims"),
    [
        ("torchrun", "nnodes", "2:2", {"nodes": 2}),
        ("torchrun", "nnodes", "1:4", None),
        ("torchrun", "nproc_per_node", "gpu", None),
        ("slurm", "gpus_per_node", "h100:4", {"gpus_per_node": 4, "device_name": "h100"}),
        ("slurm", "gres", "shard:2", {}),
        ("mpirun", "host", "a:4,b:4", {"nodes": 2}),
        ("accelerate", "gpu_ids", "0,1", {}),
        ("deepspeed", "zero_optimization.offload_param.device", "nvme", None),
        ("deepspeed", "zero_optimization.reduce_bucket_size", 250_000_000, {"parallel.bucket_mb": 1000.0}),
        ("deepspeed", "zero_optimization", True, {"parallel.strategy": "zero1"}),
        ("deepspeed", "communication_data_type", "bfloat16", {"parallel.reduce": "bf16"}),
        ("lightning", "trainer.devices", [0, 1, 2], {"per_node": 3}),
        ("lightning", "trainer.strategy", "ddp_find_unused_parameters_true", {"parallel.strategy": "ddp"}),
        ("lightning", "trainer.val_check_interval", 500, {"train.evaluate_every": 500}),
        ("lightning", "trainer.val_check_interval", 0.25, None),
        ("lightning", "trainer.precision", "16-true", {"train.precision": "fp16"}),
        ("torch", "init_process_group.backend", "gloo", {"parallel.backend": "gloo"}),
        ("torch", "FSDP.sharding_strategy", "ShardingStrategy.HYBRID_SHARD", {"parallel.strategy": "hsdp"}),
        (
            "training_arguments",
            "fsdp",
            ["shard_grad_op", "offload"],
            {"parallel.strategy": "zero2", "parallel.offload": True},
        ),
        ("training_arguments", "num_train_epochs", 2.5, None),
        ("training_arguments", "warmup_steps", 0.1, {"train.warmup": 0.1}),
        ("training_arguments", "logging_steps", 0.1, None),
        ("training_arguments", "report_to", ["wandb", "comet_ml"], None),
        ("project", "data.dataset", "fancyzhx/ag_news", {"data.source": "ag_news"}),
        ("project", "training.use_amp", True, {"train.precision": "fp16"}),
    ],
)
def test_a_value_becomes(table, key, value, claims):
    """`claims` of None: it is not supported."""
    translation = load_table(table).rule(key)(value)
    assert (translation.outcome is Outcome.NOT_SUPPORTED) == (claims is None)
    assert dict(translation.claims) == (claims or {})
