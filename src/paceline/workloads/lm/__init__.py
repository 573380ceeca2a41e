"""A language model: windows of a stream of tokens."""

from paceline.config.registry import SAMPLE, Traits, WorkloadEntry

ENTRY = WorkloadEntry(
    run="paceline.workloads.lm.workload:LanguageModel",
    model="paceline.workloads.lm.sections:LMModel",
    data="paceline.workloads.lm.sections:LMData",
    subject="paceline.workloads.lm.planning:build_lm_cost_model",
    traits=Traits(equal_layers=True, few_shapes=True, half_only=True),
    use='sample {run} "PROMPT"',
    verbs={"sample": SAMPLE},
)
