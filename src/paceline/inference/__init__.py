"""Use trained models: open them from run folders, predict, sample and export.

Imports config, data, errors, io, launch, nn, runlog, trainer, workload.
"""
