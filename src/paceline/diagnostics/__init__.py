"""Checks of the verb `doctor`: whether this machine, or every node of a job, is fit to train.

May import everything below the commands; nothing but `paceline.cli` imports it.
"""
