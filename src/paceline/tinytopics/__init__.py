"""The interface of the package tinytopics over Paceline's own fit: change the import, keep the program.

    import paceline.tinytopics as tt
    model, losses = tt.fit_model(X, k=10)

Names, signatures, shapes and exceptions are those that its users know. What its arguments mean for a fit without a
learning rate is in docs/moving/tinytopics.md; `paceline.topics` is our own, smaller interface.
"""

from paceline.tinytopics.data import NumpyDiskDataset, TorchDiskDataset
from paceline.tinytopics.fit import fit_model, fit_model_distributed
from paceline.tinytopics.models import NeuralPoissonNMF, poisson_nmf_loss
from paceline.tinytopics.plot import (
    pal_tinytopics,
    plot_loss,
    plot_structure,
    plot_top_terms,
    scale_color_tinytopics,
)
from paceline.tinytopics.utils import (
    align_topics,
    generate_synthetic_data,
    set_random_seed,
    sort_documents,
    write_synthetic_data,
)

__all__ = [
    "NeuralPoissonNMF",
    "NumpyDiskDataset",
    "TorchDiskDataset",
    "align_topics",
    "fit_model",
    "fit_model_distributed",
    "generate_synthetic_data",
    "pal_tinytopics",
    "plot_loss",
    "plot_structure",
    "plot_top_terms",
    "poisson_nmf_loss",
    "scale_color_tinytopics",
    "set_random_seed",
    "sort_documents",
    "write_synthetic_data",
]
