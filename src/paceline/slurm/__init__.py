"""Runs as Slurm jobs: site files, requests, requeueing; the verbs submit, jobs, logs and cancel.

Imports config, errors, hardware, io, layout, planner, reports, runlog, script.
"""
