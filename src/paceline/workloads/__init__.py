"""What can be trained or fitted: each folder holds all there is about one workload.

Imports api, config, data, errors, hardware, inference, io, launch, layout, lazy, nn, parallel, planner, reports,
runlog, trainer, trials, workload.
"""
