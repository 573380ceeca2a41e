"""PyTorch scripts written for Horovod, over torch.distributed: `import paceline.horovod as hvd` in place of its import.

The names and what they answer are those of Horovod's PyTorch interface. `python -m paceline.horovod train.py` runs a
script without any change. What is not carried over says so when it is called (`refused.py`).
"""

from paceline.horovod import elastic as elastic
from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
