"""Keras on torch: the library is imported with that backend, or a line says why it cannot be."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from paceline.errors import UserError

BACKEND = "KERAS_BACKEND"


def import_keras() -> Any:
    """The library keras. Its backend is fixed by the first import in a process, so that one must be ours."""
    if "keras" not in sys.modules:
        os.environ[BACKEND] = "torch"
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise UserError(
            "workload: keras needs the library keras, which is not installed; type  pip install 'paceline[keras]'"
        ) from None
    if keras.__version__.startswith(("0.", "1.", "2.")):
        raise UserError(
            f"workload: keras {keras.__version__} is installed, and models are torch modules since Keras 3; "
            "type  pip install 'keras>=3.10'"
        )
    if (found := keras.config.backend()) != "torch":
        raise UserError(
            f"workload: keras runs on {found} in this process, and Paceline trains Keras models on torch; set  "
            f'os.environ["{BACKEND}"] = "torch"  before keras is imported for the first time'
        )
    return keras


def is_keras(model: Any) -> bool:
    """Whether it is a layer or model of Keras, asked without importing that."""
    return any(kind.__module__.partition(".")[0] == "keras" for kind in type(model).__mro__)


def unwrap_keras(module: Any) -> Any:
    """The Keras model that `as_torch` made a torch module; any other module is what it is."""
    original = getattr(module, "original", None)
    return original if is_keras(original) else module


def has_keras(model: Any) -> bool:
    """Whether a torch module is, or has somewhere within, a model of Keras."""
    return any(is_keras(unwrap_keras(module)) for module in model.modules())


def as_torch(make: Callable[[], Any], seed: int) -> Any:
    """What `make` returns; a Keras model as a plain torch module, which is the same however many were made before."""
    keras = sys.modules.get("keras")
    if keras is None or keras.config.backend() != "torch":
        found = make()
    else:
        from paceline.nn.keras_module import reset_keras_names

        with reset_keras_names(seed):
            found = make()
    if not is_keras(found):
        return found
    import_keras()
    from paceline.nn.keras_module import KerasModule

    return KerasModule(found)
