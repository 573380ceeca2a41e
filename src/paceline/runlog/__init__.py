"""The run folder: events, timers, summary, progress and loggers.

Imports config, errors, io, workload.
"""
