"""The same names as `paceline.horovod.tensorflow.keras`, for `import horovod.keras as hvd`."""

from paceline.horovod.tensorflow.keras import *  # noqa: F403
from paceline.horovod.tensorflow.keras import callbacks as callbacks
