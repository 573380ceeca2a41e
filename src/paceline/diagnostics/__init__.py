"""The verb `doctor`: check a machine, or all nodes of a job, for what makes runs fail or slow.

Imports config, data, errors, hardware, io, launch, layout, planner, runlog, workload.
"""
