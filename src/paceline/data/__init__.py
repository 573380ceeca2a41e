"""What comes when and from where: the order of samples, worker processes, tokenised corpora, users' files."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
