"""A transformer encoder that sorts texts into classes."""

from paceline.config.registry import Traits, WorkloadEntry

ENTRY = WorkloadEntry(
    run="paceline.workloads.classifier.workload:Classifier",
    model="paceline.workloads.classifier.sections:ClassifierModel",
    data="paceline.workloads.classifier.sections:TextData",
    subject="paceline.workloads.classifier.planning:build_classifier_cost_model",
    traits=Traits(few_shapes=True, half_only=True),
)
