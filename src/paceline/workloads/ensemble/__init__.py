"""Ensembles: several models of one table, of any workload, whose predictions become one."""

from paceline.registry import Entry

ENTRY = Entry(
    run="paceline.workloads.ensemble.workload:Ensemble",
    model="paceline.workloads.ensemble.sections:EnsembleModel",
    data="paceline.workloads.ensemble.sections:EnsembleData",
    subject="paceline.workloads.ensemble.planning:subject",
    batched=False,
)
