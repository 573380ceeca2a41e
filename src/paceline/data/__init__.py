"""Data: the order of samples, workers, tables, images, tokenised corpora and their cache.

Imports config, errors, io, launch, layout, lazy, nn, workload.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
