"""Keras on torch: the library is imported with that backend, or a line says why it cannot be."""

from __future__ import annotations

import os
import sys
from typing import Any

from paceline.errors import UserError

BACKEND = "KERAS_BACKEND"


def import_keras() -> Any:
    """The library keras. Its backend is fixed by the first import in a process, so that one must be ours."""
    first = "keras" not in sys.modules
    if first:
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
        raise other_backend(found)
    return keras


def other_backend(found: str) -> UserError:
    return UserError(
        f"workload: keras runs on {found} in this process, and Paceline trains Keras models on torch; set "
        f'os.environ["{BACKEND}"] = "torch"  before keras is imported for the first time'
    )


def is_keras(model: Any) -> bool:
    """Whether it is a layer or model of Keras, asked without importing that."""
    return any(kind.__module__.partition(".")[0] == "keras" for kind in type(model).__mro__)
