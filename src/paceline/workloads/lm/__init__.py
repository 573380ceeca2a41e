"""A language model: windows of a stream of tokens."""

from paceline.config.registry import Traits, Verb, WorkloadEntry

ENTRY = WorkloadEntry(
    run="paceline.workloads.lm.workload:LanguageModel",
    model="paceline.workloads.lm.sections:LMModel",
    data="paceline.workloads.lm.sections:LMData",
    subject="paceline.workloads.lm.planning:build_lm_cost_model",
    traits=Traits(equal_layers=True, few_shapes=True, half_only=True),
    verbs={
        "sample": Verb(
            "generate text with a trained language model",
            "paceline.workloads.lm.sample:add_sample_arguments",
            "paceline.workloads.lm.sample:run_sample",
            'paceline sample runs/lm_tiny "Returns the"',
            "use",
        )
    },
)
