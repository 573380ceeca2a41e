"""Models of the library transformers for the tasks of `sections.py`, from a folder or a config."""

from paceline.config.registry import SAMPLE, Traits, WorkloadEntry

ENTRY = WorkloadEntry(
    run="paceline.workloads.transformers.workload:TransformersModel",
    model="paceline.workloads.transformers.sections:ModelFolder",
    data="paceline.workloads.transformers.sections:Texts",
    subject="paceline.workloads.transformers.planning:build_transformers_cost_model",
    traits=Traits(equal_layers=True, few_shapes=True, chunks_loss=True),
    plan_defaults="paceline.workloads.transformers.model_files:suggest_settings",
    verbs={"sample": SAMPLE},
)
