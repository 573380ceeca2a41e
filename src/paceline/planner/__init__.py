"""The verbs `plan` and `calibrate`: predict memory, time, speed-up and cost before a device is taken.

Imports config, data, errors, execution, hardware, io, launch, layout, nn, parallel, runlog, trainer, workload.
"""
