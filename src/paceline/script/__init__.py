"""A script that keeps its own loop: `with paceline.run("run.yaml") as run`, or `workload: train.py` in a run file."""

from paceline.config.registry import Traits, WorkloadEntry

ENTRY = WorkloadEntry(run="paceline.script.workload:Script", traits=Traits(own_loop=True))
