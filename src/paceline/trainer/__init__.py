"""Training: ranks, the loop, the step, optimisers, checkpoints, evaluation and engines.

Imports config, data, errors, execution, hardware, io, launch, layout, nn, parallel, runlog, workload.
"""
