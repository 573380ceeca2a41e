"""Scripts that keep their own loop: `with paceline.run("run.yaml") as run`, or `workload: train.py`.

Imports api, config, data, errors, execution, io, launch, layout, nn, parallel, runlog, trainer, workload.
"""

from paceline.config.registry import Traits, WorkloadEntry

ENTRY = WorkloadEntry(run="paceline.script.workload:Script", traits=Traits(own_loop=True))
