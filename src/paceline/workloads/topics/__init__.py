"""Topic models: counts of terms in documents as mixtures of a few topics.

import paceline.topics as pt
model = pt.fit("counts.npz", k=20)
model.L, model.F, model.top_terms()
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "counts.synthetic": ("generate_synthetic_data", "zipf_documents"),
    "estimator": ("TopicModel",),
    "files.convert": ("convert",),
    "files.datasets": ("NumpyDiskDataset", "TorchDiskDataset"),
    "files.reading": ("read_counts",),
    "files.texts": ("TextOptions", "read_text"),
    "fitting.given_topics": ("exact_loss",),
    "in_process": ("fit",),
    "pictures.explorer": ("write_explorer",),
    "pictures.plots": ("plot_loss", "plot_structure", "plot_top_terms"),
    "result.align": ("align_topics", "sort_documents"),
    "result.model": ("TopicFit",),
    "tinytopics_api": ("fit_model", "fit_model_distributed"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'paceline.topics' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
