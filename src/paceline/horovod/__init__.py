"""Horovod's PyTorch interface over torch.distributed: `import paceline.horovod as hvd`.

`python -m paceline.horovod train.py` runs an unmodified script. Unsupported parts raise an error (`world.py`).
"""

from paceline.horovod import elastic as elastic
from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
