"""The verb `adopt`: convert configurations, job scripts and commands of other tools into a run file.

May import config, hardware, io and the DeepSpeed sections of trainer.
"""
