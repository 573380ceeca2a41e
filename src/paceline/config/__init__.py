"""The run file: validated, frozen, each value with its origin; the registry of workloads.

Imports errors, hardware, io, lazy.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
