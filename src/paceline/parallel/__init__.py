"""Apply a layout to an untouched model: tensor, pipeline, sharded and replicated data parallelism.

Imports config, errors, execution, io, launch, layout, nn, runlog, workload.
"""
