"""Paceline: distributed training from one run file, with the same answer on any number of ranks."""

from paceline.lazy import attach

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach(__name__, __file__)
