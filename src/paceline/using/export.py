"""The verb `export`: the weights of a run as one file, or a folder that loads without Paceline."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.errors import RunFailed, UserError
from paceline.nn.keras_backend import as_built
from paceline.record.files import write_atomic, write_json
from paceline.record.run_dir import KEPT_SUMS, RunDir
from paceline.registry import entry_of, is_script
from paceline.training.failures import expected_failures
from paceline.training.keeping import SOURCE, own_file
from paceline.using.trained import FittedModel, TrainedModel
from paceline.using.trained import open as open_run

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, CONFIG = "model.safetensors", "config.json"
OTHERS = (".pt", ".pth", ".bin", ".ckpt", ".h5", ".keras", ".npz", ".json", ".pkl", ".safetensor", ".zip", ".gz")
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
        return _export_alone(run, out, which, code, onnx)
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
        with expected_failures(trained.workload.spec):
            _fill(trained, aside, onnx)
        aside.rename(out)
    except OSError as error:
        raise RunFailed(f"cannot write {out}: {error.strerror}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _file_suffix(run: RunDir) -> str:
    """Of the one file that is all of the run's model; empty where there is no such file."""
    return getattr(entry_of(run.spec().workload).run_class(), "export_suffix", "")


def _export_alone(run: str | Path, out: Path, which: str, code: str | Path | None, onnx: bool) -> Path:
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
    write_weights(folder / WEIGHTS, tensors)
    write_json(folder / CONFIG, config)
    package, _, module = loader.rpartition(".")
    write_atomic(folder / "load.py", resources.files(package).joinpath(f"{module}.py").read_bytes())


def _export_file(run: RunDir, out: Path, which: str, onnx: bool) -> Path:
    from paceline.training.checkpoints.saved import chosen, read_tensors

    _check_file(out, onnx)
    checkpoint = chosen(run, which)
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
    if out.suffix.lower() in OTHERS:
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


def _fill(trained: TrainedModel | FittedModel, folder: Path, onnx: bool) -> None:
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
    file = own_file(workload.spec.workload)
    if has_loader := workload.has("export"):
        workload.export(model, folder)
    else:
        _write_parts(trained, folder, file)
    if onnx or not (has_loader or file):
        from paceline.using.onnx_file import write_onnx

        otherwise = "leave --onnx out" if has_loader or file else f"use  --out {trained.run.name}.safetensors"
        write_onnx(workload, model, folder / "model.onnx", otherwise)


def _write_parts(trained: TrainedModel, folder: Path, file: Path | None) -> None:
    """The weights, what the run kept and its values; of a model of the user's own, its file and how to load it."""
    spec = trained.workload.spec
    if trained.run.kept.is_dir():
        shutil.copytree(trained.run.kept, folder / "kept", ignore=shutil.ignore_patterns(SOURCE, KEPT_SUMS))
    values: dict[str, Any] = spec.dump()
    sections = {name: values.get(name) or {} for name in ("model", "data", "train")}
    made = {"paceline": __version__, "step": trained.step, "classes": list(trained.classes)}
    own = {} if file is None else {"file": file.name, "class": spec.workload.rpartition(":")[2]}
    weights, config = as_built(trained.model).state_dict(), {"workload": spec.workload, **own, **sections, **made}
    if file is None:
        write_weights(folder / WEIGHTS, weights)
        write_json(folder / CONFIG, config)
    else:
        write_atomic(folder / file.name, file.read_bytes())
        write_standalone(folder, weights, config, "paceline.using.own_loader")
