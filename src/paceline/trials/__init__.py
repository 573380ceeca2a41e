"""Trials: run variants of a spec in separate processes; the verbs `check` and `sweep`.

Imports api, config, data, errors, io, launch, layout, nn, parallel, runlog, trainer, workload.
"""
