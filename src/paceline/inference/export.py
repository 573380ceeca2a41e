"""Export a run's weights as one file, as a folder that loads without Paceline, or as ONNX."""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline import __version__
from paceline.config.registry import describe_error, find_entry, is_script
from paceline.errors import RunFailed, UserError, not_installed
from paceline.inference.trained_model import FittedModel, StoredModel, TrainedModel, open_stored
from paceline.io.arguments import option_error
from paceline.io.files import write_atomic, write_json
from paceline.io.limits import check_limits
from paceline.io.terminal import warn
from paceline.launch.root_cause import iter_causes
from paceline.nn.keras_backend import unwrap_keras
from paceline.runlog.run_dir import KEPT_SUMS, RunDir
from paceline.trainer.failures import translate_failures
from paceline.trainer.run import SOURCE, find_user_file
from paceline.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn


WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
ONNX_FILE = "model.onnx"
SHARD_BYTES = 5_000_000_000
"""Most that a file of weights in an exported folder holds."""
REMOVE_AT_END = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
ONNX_TOLERANCE = 1e-4
"""Largest difference of an output, relative to the largest one, between the file and the model."""


def export(
    run: str | Path, out: str | Path, which: str = "newest", *, onnx: bool = False, code: str | Path | None = None
) -> Path:
    """Write a run's newest (or best) weights, averaged ones if it keeps them, to FILE.safetensors or a new folder."""
    out, folder = Path(out), RunDir.open(Path(run))
    if out.suffix == ".safetensors":
        return _export_weights(folder, out, which, onnx)
    if out.suffix and out.suffix == getattr(find_entry(folder.spec().workload).run_class(), "export_suffix", ""):
        _check_target(out, is_file=True, onnx=onnx)
        with _open_scratch(out) as scratch:
            exported = export(run, scratch / "all", which, code=code)
            (exported / f"model{out.suffix}").replace(out)
        return out
    _check_target(out, is_file=False, onnx=onnx)
    if is_script(folder.recorded_spec().workload):
        raise option_error("--out", f"a script has no class; use  --out {out}.safetensors", "not-supported")
    stored = open_stored(run, which, code)
    with _open_scratch(out) as scratch:
        whole = scratch / "all"
        whole.mkdir()
        with translate_failures(stored.workload.spec):
            _fill_folder(stored, whole, onnx)
        whole.rename(out)
    return out


@contextmanager
def _open_scratch(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that is gone at the end, even if this process is killed: another one removes it."""
    try:
        with tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=".exporting-") as scratch:
            command = [sys.executable, "-I", "-S", "-c", REMOVE_AT_END, scratch]
            with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
                yield Path(scratch)
    except OSError as error:
        raise RunFailed(f"cannot write {out}: {error.strerror}", code="not-writable", key=str(out)) from error


def write_weights(
    file: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None, **header: str
) -> None:
    """Write safetensors, one tensor at a time; `read` returns the values of tensors that have none."""
    import torch
    from safetensors.torch import _TYPES

    types, end = {dtype: name for name, dtype in _TYPES.items()}, 0
    entries: dict[str, Any] = {"__metadata__": dict(sorted({"format": "pt", **header}.items()))}
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # which keeps all of them aligned
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        sides = list(tensors[name].shape)
        entries[name] = {"dtype": types[tensors[name].dtype], "shape": sides, "data_offsets": [begin, end]}
    head = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    head = head.ljust(-(-len(head) // 8) * 8)

    def iter_parts() -> Iterator[Any]:
        yield len(head).to_bytes(8, "little") + head
        for name in names:
            whole = (read or tensors.__getitem__)(name).detach().cpu().contiguous()
            assert whole.nbytes == tensors[name].nbytes, f"{name} is not what was announced"
            yield whole.reshape(-1).view(torch.uint8).numpy().data

    write_atomic(file, iter_parts())


def write_shards(folder: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write one file or, of more than `SHARD_BYTES`, several and the index that names them."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        write_weights(folder / WEIGHTS_FILE, tensors, read)
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_weights(file, shard, read)
        where |= dict.fromkeys(shard, file.name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / f"{WEIGHTS_FILE}.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def write_standalone(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], loader: str) -> None:
    """Write weights, config.json, and load.py: a copy of the module `loader`, which needs no other of Paceline."""
    write_weights(folder / WEIGHTS_FILE, tensors)
    write_json(folder / CONFIG_FILE, config)
    package, _, module = loader.rpartition(".")
    write_atomic(folder / "load.py", resources.files(package).joinpath(f"{module}.py").read_bytes())


def _export_weights(run: RunDir, out: Path, which: str, onnx: bool) -> Path:
    check_limits()
    from paceline.trainer.checkpoint.reader import find_checkpoint
    from paceline.trainer.init_from import SavedWeights

    _check_target(out, is_file=True, onnx=onnx)
    checkpoint = find_checkpoint(run, which)
    header = {"paceline_spec": json.dumps(run.recorded_spec().dump()), "step": str(checkpoint.step)}
    weights = SavedWeights.of(checkpoint)
    with _open_scratch(out) as scratch:
        write_weights(scratch / out.name, weights.like, weights.get, **header)
        (scratch / out.name).replace(out)
    return out


def _check_target(out: Path, is_file: bool, onnx: bool) -> None:
    """Raise UserError if an export cannot be written there."""
    if onnx and is_file:
        raise option_error("--out", f"--onnx writes a folder, {str(out)!r} is a file; type  --out {out.stem} --onnx")
    if out.suffix in (".pt", ".pth", ".bin"):
        raise option_error("--out", f"{out}: a file of weights is written as  {out.with_suffix('.safetensors')}")
    if not is_file and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise option_error("--out", f"{str(out)!r} exists; name a new folder")
    if not out.parent.is_dir():
        raise option_error("--out", f"there is no folder {str(out.parent)!r}; make it with  mkdir -p {out.parent}")


def _fill_folder(stored: StoredModel | FittedModel, folder: Path, onnx: bool) -> None:
    """Export by the workload's own method, else with the user's file, else as ONNX, which needs no code."""
    if isinstance(stored, FittedModel):
        write = getattr(stored.fitted, "write_onnx", None)
        if onnx and write is None:
            raise option_error("--onnx", f"not for {stored.workload.spec.workload}; leave it out", "not-supported")
        stored.fitted.export(folder)
        if onnx and write is not None:
            write(folder / ONNX_FILE)
        return
    workload = stored.workload
    file = find_user_file(workload.spec.workload)
    if by_tensor := workload.has("export_by_tensor"):
        workload.export_by_tensor(stored, folder)
        if not onnx:
            return
    trained = stored.load()
    model = trained.model.cpu()
    has_loader = by_tensor or workload.has("export")
    if has_loader and not by_tensor:
        workload.export(model, folder)
    elif not has_loader:
        _write_parts(trained, folder, file)
    if onnx or not (has_loader or file):
        otherwise = "leave --onnx out" if has_loader or file else f"use  --out {trained.run.name}.safetensors"
        export_onnx(workload, model, folder / ONNX_FILE, otherwise)


def _write_parts(trained: TrainedModel, folder: Path, file: Path | None) -> None:
    """Write the weights, what the run kept and its values and, for a model of the user, its file and load.py."""
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


def export_onnx(workload: Workload, model: nn.Module, file: Path, otherwise: str) -> None:
    """Write an ONNX file with dynamic sizes, and compare its outputs with the model's; `otherwise` is a remedy."""
    for name in ("onnx", "onnxscript"):
        if importlib.util.find_spec(name) is None:
            raise not_installed("an ONNX file", name, "paceline[onnx]")
    import torch

    model, inputs = workload.onnx(model) if workload.has("onnx") else trace_example_call(workload, model, otherwise)
    error = _try_export(model, inputs, "samples", file) and _try_export(model, inputs, torch.export.Dim.AUTO, file)
    if error is not None:
        raise _onnx_error(describe_error(error), otherwise)
    _compare_with_model(file, model, inputs)


def _onnx_error(reason: str, otherwise: str) -> UserError:
    return option_error("--onnx", f"torch cannot export this model: {reason}; {otherwise}", "not-supported")


def _try_export(model: nn.Module, inputs: dict[str, Tensor], first: Any, file: Path) -> BaseException | None:
    import torch

    sizes = {name: {i: torch.export.Dim.AUTO if i else first for i in range(x.ndim)} for name, x in inputs.items()}
    try:
        with _silence_torch(), torch.no_grad():
            program = torch.onnx.export(model, kwargs=inputs, dynamic_shapes=sizes, dynamo=True, verbose=False)
            assert program is not None
            program.save(str(file))
    except Exception as error:
        return [*iter_causes(error)][-1]
    return None


def trace_example_call(workload: Workload, model: nn.Module, otherwise: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model and the arguments that `workload.evaluate` calls it with for two samples."""
    import torch

    from paceline.data.samples import samples_of

    samples: Any = samples_of(workload, "test") or samples_of(workload)
    ids = np.arange(min(2, len(samples)))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        workload.evaluate(model, samples.batch(ids, np.zeros_like(ids)))
    hook.remove()
    bound = inspect.signature(model.forward).bind(*calls[0][0], **calls[0][1]).arguments
    if wrong := [name for name, value in bound.items() if not isinstance(value, torch.Tensor)]:
        reason = f"its forward takes {wrong[0]!r}, which is not a tensor"
        raise _onnx_error(reason, f"give the workload a method onnx(model), or {otherwise}")
    return model, dict(bound)


def _compare_with_model(file: Path, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    import torch

    with torch.no_grad():
        wanted = model(**inputs)
    wanted = wanted if isinstance(wanted, torch.Tensor) else next(iter(wanted))
    given = {name: value.numpy() for name, value in inputs.items()}
    session = compare_onnx(str(file), given, wanted.numpy(), ONNX_TOLERANCE)
    shapes = [] if session is None else [argument.shape for argument in session.get_inputs()]
    if fixed := {shape[0] for shape in shapes if shape and isinstance(shape[0], int)}:
        warn(f"model.onnx takes exactly {min(fixed)} samples at a time: the model fixes their number")


def compare_onnx(model: str | bytes, inputs: Mapping[str, np.ndarray], wanted: np.ndarray, most: float) -> Any:
    """Return the session of an ONNX model whose output is the wanted one; None if onnxruntime is not installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        warn("model.onnx was not compared: onnxruntime is not installed")
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = {argument.name for argument in session.get_inputs()}
    got = session.run(None, {name: value for name, value in inputs.items() if name in names})[0]
    off = float(np.abs(got - wanted).max() / max(1e-30, np.abs(wanted).max()))
    if not off <= most:
        raise RunFailed(f"the ONNX file differs from the model by {off:.1e}; it was not written", code="run-failed")
    return session


@contextmanager
def _silence_torch() -> Any:
    level, output = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(output), redirect_stderr(output):
            yield
    finally:
        logging.disable(level)
