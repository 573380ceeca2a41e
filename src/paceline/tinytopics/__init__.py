"""The interface of the package tinytopics over Paceline's own fit: change the import, keep the program.

    import paceline.tinytopics as tt
    model, losses = tt.fit_model(X, k=10)

What its arguments mean for a fit without a learning rate is in docs/moving/tinytopics.md.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
