"""The command line: one table of verbs, and a module per verb.

Imports api, config, convert, data, diagnostics, errors, hardware, inference, io, launch, measurement, nn, planner,
reports, runlog, script, slurm, trainer, trials, workload.
"""
