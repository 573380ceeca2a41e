"""A script that keeps its own loop: `with paceline.run("run.yaml") as run`, or `workload: train.py` in a run file."""

from paceline.registry import Entry

ENTRY = Entry(
    run="paceline.script.workload:Script",
    subject="paceline.script.planning:measured",
)
