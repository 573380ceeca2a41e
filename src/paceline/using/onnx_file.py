"""A trained model as an ONNX file, checked against the model itself where onnxruntime is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import RunFailed, UserError
from paceline.registry import one_line
from paceline.terminal import warn
from paceline.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

CLOSE = 1e-4
"""Largest difference of an output, relative to the largest of them, at which the file counts as the same model."""


def write_onnx(workload: Workload, model: nn.Module, file: Path, otherwise: str) -> None:
    """Write it with every size left open that the model leaves open, and compare its numbers with the model's.

    Where torch cannot, `otherwise` is what to do.
    """
    for name in ("onnx", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"an ONNX file needs {name}, which is not installed: pip install 'paceline[onnx]'")
    import torch

    model, inputs = workload.onnx(model) if workload.has("onnx") else example_call(workload, model, otherwise)
    why = _attempt(model, inputs, "samples", file) and _attempt(model, inputs, torch.export.Dim.AUTO, file)
    if why is not None:
        raise UserError(f"torch cannot export this model as ONNX: {one_line(why)}; {otherwise}")
    _compare(file, model, inputs)


def _attempt(model: nn.Module, inputs: dict[str, Tensor], first: Any, file: Path) -> BaseException | None:
    """With this for the first size of each input; returns why it failed."""
    import torch

    sizes = {name: {i: torch.export.Dim.AUTO if i else first for i in range(x.ndim)} for name, x in inputs.items()}
    try:
        with _quietly(), torch.no_grad():
            made = torch.onnx.export(model, kwargs=inputs, dynamic_shapes=sizes, dynamo=True, verbose=False)
            assert made is not None
            made.save(str(file))
    except Exception as error:
        return _innermost(error)
    return None


def example_call(workload: Workload, model: nn.Module, otherwise: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and what it is called with for two samples: the user's own loss makes the call, and we listen."""
    import torch

    from paceline.data.samples import samples_of

    samples: Any = samples_of(workload, "test") or samples_of(workload)
    ids = np.arange(min(2, len(samples)))
    heard: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: heard.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        workload.evaluate(model, samples.batch(ids, np.zeros_like(ids)))
    hook.remove()
    bound = inspect.signature(model.forward).bind(*heard[0][0], **heard[0][1]).arguments
    if wrong := [name for name, value in bound.items() if not isinstance(value, torch.Tensor)]:
        said = f"torch cannot export this model as ONNX: its forward takes {wrong[0]!r}, which is not a tensor"
        raise UserError(f"{said}; give the workload a method onnx(model), or {otherwise}")
    return model, dict(bound)


def _compare(file: Path, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    if importlib.util.find_spec("onnxruntime") is None:
        warn("model.onnx was not tried out: onnxruntime is not installed")
        return
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    taken = {one.name: one.shape for one in session.get_inputs()}
    got = session.run(None, {name: value.numpy() for name, value in inputs.items() if name in taken})[0]
    fixed = {shape[0] for shape in taken.values() if shape and isinstance(shape[0], int)}
    if fixed:
        warn(f"model.onnx takes exactly {min(fixed)} samples at a time: the model fixes their number")
    with torch.no_grad():
        wanted = model(**inputs)
    wanted = (wanted if isinstance(wanted, torch.Tensor) else next(iter(wanted))).numpy()
    off = float(np.abs(got - wanted).max() / max(1e-30, np.abs(wanted).max()))
    if off > CLOSE:
        raise RunFailed(f"the ONNX file gives other numbers than the model (off by {off:.1e}); it was not written")


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextlib.contextmanager
def _quietly() -> Any:
    """torch talks a lot while it exports."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        silence = io.StringIO()
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(silence),
            contextlib.redirect_stderr(silence),
        ):
            yield
    finally:
        logging.disable(level)
