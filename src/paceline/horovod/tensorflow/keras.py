"""Horovod's interface for Keras: `import paceline.horovod.tensorflow.keras as hvd`."""

from typing import Any

import tensorflow as tf

from paceline.horovod.tensorflow import *  # noqa: F403
from paceline.horovod.tensorflow import callbacks as callbacks
from paceline.horovod.tensorflow.bridge import DistributedOptimizer


def load_model(path: Any, custom_optimizers: Any = None, custom_objects: Any = None, compression: Any = None) -> Any:
    """Load a saved model, and make its optimiser average gradients over ranks."""
    model = tf.keras.models.load_model(path, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
