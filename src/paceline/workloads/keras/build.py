"""The Keras model of a run file: built by a function of the user's, or read from a .keras file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from paceline.config import RunSpec
from paceline.config.registry import describe_error, load_user_function
from paceline.errors import UserError
from paceline.nn.keras_backend import is_keras
from paceline.nn.keras_module import KerasModule, keras, reset_keras_names
from paceline.workloads.keras.samples import guard_model_call, guard_user_code
from paceline.workloads.keras.sections import SAVED, KerasModel

BUILD_KEY = "model.build"


def build_keras_model(spec: RunSpec, section: KerasModel, an_input: Callable[[], Any]) -> KerasModule:
    """`an_input` gives what a model is called with that takes its shapes from the first call."""
    with reset_keras_names(spec.train.seed):
        file = Path(section.build)
        model = _load_saved(file) if file.suffix == SAVED else _call_builder(section)
        if not model.built:
            with guard_model_call():
                model(an_input(), training=False)
    return KerasModule(model)


def _call_builder(section: KerasModel) -> Any:
    function = load_user_function(section.build, BUILD_KEY)
    try:
        inspect.signature(function).bind(**section.arguments)
    except TypeError as error:
        raise UserError(f"model.arguments: {section.build} {error}") from None
    with guard_user_code(BUILD_KEY, section.build):
        found = function(**section.arguments)
    if not is_keras(found) or not isinstance(found, nn.Module):
        raise UserError(f"{BUILD_KEY}: {section.build} returned {type(found).__name__}; it must return a keras.Model")
    return found


def _load_saved(file: Path) -> Any:
    """Keras refuses functions that are saved as code, and a file of a run from elsewhere needs a word before."""
    if not file.is_file():
        raise UserError(f"{BUILD_KEY}: there is no file {str(file)!r}")
    try:
        return keras.saving.load_model(file, safe_mode=True)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(
            f"{BUILD_KEY}: {file} cannot be read: {describe_error(error)}; a model with layers "
            "of your own needs a function that "
            "builds it, as  model: file.py:function"
        ) from None
