"""Reports: runs and measurements as a page, figures, tables and a live view.

Imports config, errors, io, launch, layout, measurement, runlog, trainer, trials, workload.
"""
