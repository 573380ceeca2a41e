"""Export a run's weights as one file, as a folder that loads without Paceline, or as ONNX."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import logging
import os
import shutil
import tempfile
import warnings
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline import __version__
from paceline.config.registry import describe_error, find_entry, is_script
from paceline.errors import RunFailed, UserError
from paceline.inference.trained_model import FittedModel, TrainedModel
from paceline.inference.trained_model import open as open_run
from paceline.io.files import write_atomic, write_json
from paceline.io.terminal import warn
from paceline.nn.keras_backend import unwrap_keras
from paceline.runlog.run_dir import KEPT_SUMS, RunDir
from paceline.trainer.failures import translate_failures
from paceline.trainer.inference_assets import SOURCE, find_user_file
from paceline.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn


WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
OTHER_SUFFIXES = (
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".h5",
    ".keras",
    ".npz",
    ".json",
    ".pkl",
    ".safetensor",
    ".zip",
    ".gz",
)
"""Names of files that are asked for, and not written."""


def export(
    run: str | Path, out: str | Path, which: str = "newest", *, onnx: bool = False, code: str | Path | None = None
) -> Path:
    """Write a run's newest (or best) weights to `out`: a file FILE.safetensors, or a folder that loads by itself.

    What a run evaluates is what is written: averaged weights, where it keeps an average.
    """
    out = Path(out)
    if out.suffix == ".safetensors":
        return _export_file(RunDir.open(Path(run)), out, which, onnx)
    if out.suffix and out.suffix == _file_suffix(RunDir.open(Path(run))):
        return _export_single_file(run, out, which, code, onnx)
    _check_folder(out)
    if is_script(RunDir.open(Path(run)).recorded_spec().workload):
        raise UserError(
            f"{run} is a run of a script, whose model has no class that a folder could build it from; write its "
            f"weights as  --out {out}.safetensors"
        )
    trained = open_run(run, which, code=code)
    aside = out.resolve().with_name(f".{out.resolve().name}.{os.getpid()}.writing")
    try:
        aside.mkdir()
        with translate_failures(trained.workload.spec):
            _fill_folder(trained, aside, onnx)
        aside.rename(out)
    except OSError as error:
        raise RunFailed(f"cannot write {out}: {error.strerror}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _file_suffix(run: RunDir) -> str:
    """Of the one file that is all of the run's model; empty where there is no such file."""
    return getattr(find_entry(run.spec().workload).run_class(), "export_suffix", "")


def _export_single_file(run: str | Path, out: Path, which: str, code: str | Path | None, onnx: bool) -> Path:
    """What the workload exports, as one file."""
    _check_file(out, onnx)
    with tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=".exporting-") as aside:
        folder = export(run, Path(aside) / "all", which, code=code)
        (folder / f"model{out.suffix}").replace(out)
    return out


def write_weights(file: Path, tensors: dict[str, Tensor], **header: str) -> None:
    """As safetensors; tensors that share their memory are written once each."""
    from safetensors.torch import save

    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomic(file, save(whole, metadata={"format": "pt", **header}))


def write_standalone(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], loader: str) -> None:
    """Weights, config.json, and as load.py a module of ours that needs nothing else of ours."""
    write_weights(folder / WEIGHTS_FILE, tensors)
    write_json(folder / CONFIG_FILE, config)
    package, _, module = loader.rpartition(".")
    write_atomic(folder / "load.py", resources.files(package).joinpath(f"{module}.py").read_bytes())


def _export_file(run: RunDir, out: Path, which: str, onnx: bool) -> Path:
    from paceline.trainer.checkpoint.reader import find_checkpoint, read_tensors

    _check_file(out, onnx)
    checkpoint = find_checkpoint(run, which)
    header = {"paceline_spec": json.dumps(run.recorded_spec().dump()), "step": str(checkpoint.step)}
    write_weights(out, read_tensors(checkpoint), **header)
    return out


def _check_file(out: Path, onnx: bool) -> None:
    if onnx:
        raise UserError(f"--onnx writes a folder, and {str(out)!r} is a file; write it as  --out {out.stem} --onnx")
    if out.is_dir():
        raise UserError(f"{str(out)!r} is a folder; name a file that is not there yet, or may be replaced")
    _check_parent(out)


def _check_folder(out: Path) -> None:
    if out.suffix.lower() == ".onnx":
        raise UserError(f"{str(out)!r}: an ONNX file is written into a folder; type  --out {out.stem} --onnx")
    if out.suffix.lower() in OTHER_SUFFIXES:
        name = out.with_suffix(".safetensors")
        raise UserError(
            f"{str(out)!r} does not end in .safetensors; write it as  --out {name}  or, for a folder that loads "
            f"without Paceline, as  --out {out.stem}"
        )
    if out.is_file():
        raise UserError(f"{str(out)!r} is a file; name a folder that is not there yet")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{str(out)!r} is a folder with files in it; name one that is not there yet")
    _check_parent(out)


def _check_parent(out: Path) -> None:
    if not out.parent.is_dir():
        raise UserError(f"{str(out)!r}: there is no folder {str(out.parent)!r}; make it with  mkdir -p {out.parent}")


def _fill_folder(trained: TrainedModel | FittedModel, folder: Path, onnx: bool) -> None:
    """By the workload's own method, else with the user's own file, else with ONNX, which needs no code of ours."""
    if isinstance(trained, FittedModel):
        write = getattr(trained.fitted, "write_onnx", None)
        if onnx and write is None:
            raise UserError(f"--onnx: a run of {trained.workload.spec.workload} is not written as ONNX; leave it out")
        trained.fitted.export(folder)
        if onnx and write is not None:
            write(folder / "model.onnx")
        return
    workload, model = trained.workload, trained.model.cpu()
    file = find_user_file(workload.spec.workload)
    if has_loader := workload.has("export"):
        workload.export(model, folder)
    else:
        _write_parts(trained, folder, file)
    if onnx or not (has_loader or file):
        otherwise = "leave --onnx out" if has_loader or file else f"use  --out {trained.run.name}.safetensors"
        export_onnx(workload, model, folder / "model.onnx", otherwise)


def _write_parts(trained: TrainedModel, folder: Path, file: Path | None) -> None:
    """The weights, what the run kept and its values; of a model of the user's own, its file and how to load it."""
    spec = trained.workload.spec
    if trained.run.kept.is_dir():
        shutil.copytree(trained.run.kept, folder / "kept", ignore=shutil.ignore_patterns(SOURCE, KEPT_SUMS))
    values: dict[str, Any] = spec.dump()
    sections = {name: values.get(name) or {} for name in ("model", "data", "train")}
    made = {"paceline": __version__, "step": trained.step, "classes": list(trained.classes)}
    own = {} if file is None else {"file": file.name, "class": spec.workload.rpartition(":")[2]}
    weights, config = unwrap_keras(trained.model).state_dict(), {"workload": spec.workload, **own, **sections, **made}
    if file is None:
        write_weights(folder / WEIGHTS_FILE, weights)
        write_json(folder / CONFIG_FILE, config)
    else:
        write_atomic(folder / file.name, file.read_bytes())
        write_standalone(folder, weights, config, "paceline.inference.user_model_loader")


ONNX_TOLERANCE = 1e-4
"""Largest difference of an output, relative to the largest of them, at which the file counts as the same model."""


def export_onnx(workload: Workload, model: nn.Module, file: Path, otherwise: str) -> None:
    """Write it with every size left open that the model leaves open, and compare its numbers with the model's.

    Where torch cannot, `otherwise` is what to do.
    """
    for name in ("onnx", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"an ONNX file needs {name}, which is not installed: pip install 'paceline[onnx]'")
    import torch

    model, inputs = workload.onnx(model) if workload.has("onnx") else trace_example_call(workload, model, otherwise)
    why = _try_export(model, inputs, "samples", file) and _try_export(model, inputs, torch.export.Dim.AUTO, file)
    if why is not None:
        raise UserError(f"torch cannot export this model as ONNX: {describe_error(why)}; {otherwise}")
    _compare_with_model(file, model, inputs)


def _try_export(model: nn.Module, inputs: dict[str, Tensor], first: Any, file: Path) -> BaseException | None:
    """With this for the first size of each input; returns why it failed."""
    import torch

    sizes = {name: {i: torch.export.Dim.AUTO if i else first for i in range(x.ndim)} for name, x in inputs.items()}
    try:
        with _silence_torch(), torch.no_grad():
            made = torch.onnx.export(model, kwargs=inputs, dynamic_shapes=sizes, dynamo=True, verbose=False)
            assert made is not None
            made.save(str(file))
    except Exception as error:
        return _find_innermost(error)
    return None


def trace_example_call(workload: Workload, model: nn.Module, otherwise: str) -> tuple[nn.Module, dict[str, Tensor]]:
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


def _compare_with_model(file: Path, model: nn.Module, inputs: dict[str, Tensor]) -> None:
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
    if off > ONNX_TOLERANCE:
        raise RunFailed(f"the ONNX file gives other numbers than the model (off by {off:.1e}); it was not written")


def _find_innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextlib.contextmanager
def _silence_torch() -> Any:
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
