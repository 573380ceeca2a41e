"""Parts of models that several workloads share: attention, losses, metrics.

Imports errors, io.
"""
