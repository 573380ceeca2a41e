"""A network for tables: embeddings of categories and of bins of numbers, then dense layers."""

from paceline.config.registry import Traits, WorkloadEntry

ENTRY = WorkloadEntry(
    run="paceline.workloads.tabular.workload:Tabular",
    model="paceline.workloads.tabular.sections:TabularModel",
    data="paceline.workloads.tabular.sections:TabularData",
    traits=Traits(few_shapes=True),
)
