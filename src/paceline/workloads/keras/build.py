"""The Keras model of a run file: built by a function of the user's, or read from a .keras file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from paceline.errors import UserError
from paceline.nn.keras_backend import is_keras
from paceline.nn.keras_module import KerasModule, fresh_names, keras
from paceline.registry import function_of, one_line
from paceline.spec import RunSpec
from paceline.workloads.keras.own_code import fitting_together, own_code
from paceline.workloads.keras.sections import SAVED, KerasModel

KEY = "model.build"


def build(spec: RunSpec, section: KerasModel, an_input: Callable[[], Any]) -> KerasModule:
    """`an_input` gives what a model is called with that takes its shapes from the first call."""
    with fresh_names(spec.train.seed):
        file = Path(section.build)
        model = _saved(file) if file.suffix == SAVED else _returned(section)
        if not model.built:
            with fitting_together():
                model(an_input(), training=False)
    return KerasModule(model)


def _returned(section: KerasModel) -> Any:
    function = function_of(section.build, KEY)
    try:
        inspect.signature(function).bind(**section.arguments)
    except TypeError as error:
        raise UserError(f"model.arguments: {section.build} {error}") from None
    with own_code(KEY, section.build):
        found = function(**section.arguments)
    if not is_keras(found) or not isinstance(found, nn.Module):
        raise UserError(f"{KEY}: {section.build} returned {type(found).__name__}; it must return a keras.Model")
    return found


def _saved(file: Path) -> Any:
    """Keras refuses functions that are saved as code, and a file of a run from elsewhere needs a word before."""
    if not file.is_file():
        raise UserError(f"{KEY}: there is no file {str(file)!r}")
    try:
        return keras.saving.load_model(file, safe_mode=True)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(
            f"{KEY}: {file} cannot be read: {one_line(error)}; a model with layers of your own needs a function that "
            "builds it, as  model: file.py:function"
        ) from None
