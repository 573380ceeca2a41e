"""Topic models: counts of terms in documents as mixtures of a few topics.

import paceline.topics as pt
model = pt.fit("counts.npz", k=20)
model.L, model.F, model.top_terms()
"""

from typing import TYPE_CHECKING, Any

from paceline.registry import Entry, Verb

if TYPE_CHECKING:
    from paceline.workloads.topics.align import align_topics as align_topics
    from paceline.workloads.topics.align import sort_documents as sort_documents
    from paceline.workloads.topics.counts import read_counts as read_counts
    from paceline.workloads.topics.datasets import NumpyDiskDataset as NumpyDiskDataset
    from paceline.workloads.topics.datasets import TorchDiskDataset as TorchDiskDataset
    from paceline.workloads.topics.estimator import TopicModel as TopicModel
    from paceline.workloads.topics.explorer import write_explorer as write_explorer
    from paceline.workloads.topics.familiar import fit_model as fit_model
    from paceline.workloads.topics.familiar import fit_model_distributed as fit_model_distributed
    from paceline.workloads.topics.fitting import exact_loss as exact_loss
    from paceline.workloads.topics.fitting import fit as fit
    from paceline.workloads.topics.model import TopicFit as TopicFit
    from paceline.workloads.topics.plots import plot_loss as plot_loss
    from paceline.workloads.topics.plots import plot_structure as plot_structure
    from paceline.workloads.topics.plots import plot_top_terms as plot_top_terms
    from paceline.workloads.topics.shards import convert as convert
    from paceline.workloads.topics.synthetic import generate_synthetic_data as generate_synthetic_data
    from paceline.workloads.topics.synthetic import zipf_documents as zipf_documents
    from paceline.workloads.topics.text import TextOptions as TextOptions
    from paceline.workloads.topics.text import read_text as read_text

_HOME = {
    "align_topics": "align",
    "sort_documents": "align",
    "read_counts": "counts",
    "NumpyDiskDataset": "datasets",
    "TorchDiskDataset": "datasets",
    "TopicModel": "estimator",
    "write_explorer": "explorer",
    "fit_model": "familiar",
    "fit_model_distributed": "familiar",
    "fit": "fitting",
    "exact_loss": "fitting",
    "TopicFit": "model",
    "plot_loss": "plots",
    "plot_structure": "plots",
    "plot_top_terms": "plots",
    "convert": "shards",
    "generate_synthetic_data": "synthetic",
    "zipf_documents": "synthetic",
    "TextOptions": "text",
    "read_text": "text",
}
__all__ = [*_HOME]
ENTRY = Entry(
    run="paceline.workloads.topics.workload:Topics",
    model="paceline.workloads.topics.sections:TopicsModel",
    data="paceline.workloads.topics.sections:TopicsData",
    subject="paceline.workloads.topics.planning:subject",
    batched=False,
    verbs={
        "topics": Verb(
            "topics of word counts or texts, with pictures and a page",
            "paceline.workloads.topics.verb",
            "paceline topics counts.npz -k 20 --out runs/fit",
        )
    },
)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'paceline.topics' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
