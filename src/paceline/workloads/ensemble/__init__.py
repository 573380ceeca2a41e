"""Ensembles: several models of one table, of any workload, whose predictions become one."""

from paceline.config.registry import WorkloadEntry

ENTRY = WorkloadEntry(
    run="paceline.workloads.ensemble.workload:Ensemble",
    model="paceline.workloads.ensemble.sections:EnsembleModel",
    data="paceline.workloads.ensemble.sections:EnsembleData",
    subject="paceline.workloads.ensemble.sections:build_ensemble_cost_model",
    batched=False,
    tables="paceline.workloads.ensemble.members:build_member_tables",
)
