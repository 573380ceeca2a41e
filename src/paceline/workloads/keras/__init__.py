"""A Keras model on the torch backend: built by a function of the user's, or read from a .keras file."""

from paceline.config.registry import Traits, WorkloadEntry

ENTRY = WorkloadEntry(
    run="paceline.workloads.keras.workload:KerasWorkload",
    model="paceline.workloads.keras.sections:KerasModel",
    data="paceline.workloads.keras.sections:KerasData",
    preload=("paceline.nn.keras_module",),
    traits=Traits(few_shapes=True, compiles=False),
)
