"""A transformer encoder that sorts texts into classes."""

from paceline.registry import Entry, Traits

ENTRY = Entry(
    run="paceline.workloads.classifier.workload:Classifier",
    model="paceline.workloads.classifier.sections:ClassifierModel",
    data="paceline.workloads.classifier.sections:TextData",
    subject="paceline.workloads.classifier.planning:subject",
    traits=Traits(few_shapes=True, half_only=True),
)
