"""Horovod's TensorFlow interface over torch.distributed: `import paceline.horovod.tensorflow as hvd`."""

import importlib.util

from paceline.horovod.world import UnsupportedHorovodModule
from paceline.lazy import attach

if importlib.util.find_spec("tensorflow") is None:
    message = "TensorFlow is not installed; type  pip install 'paceline[tensorflow]'"
    raise UnsupportedHorovodModule(message, code="not-installed", key="tensorflow")
__getattr__, __dir__, __all__ = attach(__name__, __file__)
