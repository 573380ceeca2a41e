"""Boosted trees on tables: XGBoost on any number of ranks with the same answer, LightGBM on one."""

from paceline.registry import Entry

ENTRY = Entry(
    run="paceline.workloads.trees.workload:Trees",
    model="paceline.workloads.trees.sections:TreesModel",
    data="paceline.workloads.trees.sections:TreesData",
    subject="paceline.workloads.trees.planning:subject",
    draw="paceline.workloads.trees.pictures:draw",
    batched=False,
    preload=("paceline.training.checkpoints.storage",),  # else each rank imports it beside its rounds, on their core
    extends=True,
)
