"""Boosted trees on tables: XGBoost on any number of ranks with the same answer, LightGBM on one."""

from paceline.config.registry import WorkloadEntry

ENTRY = WorkloadEntry(
    run="paceline.workloads.trees.workload:Trees",
    model="paceline.workloads.trees.sections:TreesModel",
    data="paceline.workloads.trees.sections:TreesData",
    subject="paceline.workloads.trees.planning:build_trees_cost_model",
    draw="paceline.workloads.trees.plots:draw_tree_plots",
    batched=False,
    preload=("paceline.trainer.checkpoint.dcp_files",),  # else each rank imports it beside its rounds, on their core
    extends=True,
)
