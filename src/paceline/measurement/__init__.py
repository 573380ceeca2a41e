"""The verb `measure`: where the time of a step goes, how well ranks scale, and why.

Imports config, errors, hardware, io, launch, layout, planner, runlog, trials, workload.
"""
