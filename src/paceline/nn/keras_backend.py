"""Import Keras with the torch backend, and recognise its models."""

import os
import sys
from collections.abc import Callable
from typing import Any

from paceline.errors import Code, UserError

BACKEND = "KERAS_BACKEND"


def import_keras() -> Any:
    """Import keras on torch; its backend is fixed by the first import in a process."""
    if "keras" not in sys.modules:
        os.environ[BACKEND] = "torch"
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise _keras_error("is not installed; type  pip install 'paceline[keras]'") from None
    if keras.__version__.startswith(("0.", "1.", "2.")):
        raise _keras_error(f"{keras.__version__} is too old; type  pip install 'keras>=3.10'")
    if (found := keras.config.backend()) != "torch":
        advice = f'set  os.environ["{BACKEND}"] = "torch"  before keras is imported for the first time'
        raise _keras_error(f"runs on {found} in this process; {advice}", "conflict")
    return keras


def _keras_error(reason: str, code: Code = "not-installed") -> UserError:
    return UserError(f"workload: keras {reason}", code=code, key="workload")


def is_keras(model: Any) -> bool:
    """Return whether it is a layer or model of Keras, without importing that."""
    return any(kind.__module__.partition(".")[0] == "keras" for kind in type(model).__mro__)


def unwrap_keras(module: Any) -> Any:
    """Return the Keras model of a module that `as_torch` made; any other module as it is."""
    original = getattr(module, "original", None)
    return original if is_keras(original) else module


def has_keras(model: Any) -> bool:
    """Return whether a torch module is, or contains, a model of Keras."""
    return any(is_keras(unwrap_keras(module)) for module in model.modules())


def as_torch(make: Callable[[], Any], seed: int) -> Any:
    """Return what `make` returns, a Keras model as a torch module."""
    keras = sys.modules.get("keras")
    if keras is None or keras.config.backend() != "torch":
        model = make()
    else:
        from paceline.nn.keras_module import reset_keras_names

        with reset_keras_names(seed):
            model = make()
    if not is_keras(model):
        return model
    import_keras()
    from paceline.nn.keras_module import KerasModule

    return KerasModule(model)
