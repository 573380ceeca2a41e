"""The verb `adopt`: convert configurations, job scripts and commands of other tools to a run file.

Imports config, errors, hardware, io, layout, trainer.
"""
