"""The verb `export`: the weights of a run as one file, or a folder that loads without Paceline."""

from __future__ import annotations

import json
import os
import shutil
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.errors import RunFailed, UserError
from paceline.record.files import write_atomic, write_json
from paceline.record.run_dir import RunDir
from paceline.training.failures import expected_failures
from paceline.training.keeping import SOURCE, own_file
from paceline.using.trained import TrainedModel
from paceline.using.trained import open as open_run
from paceline.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
OTHERS = (".pt", ".pth", ".bin", ".ckpt", ".h5", ".npz", ".json", ".pkl", ".onnx", ".safetensor", ".zip", ".gz")
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
    _check_folder(out)
    trained = open_run(run, which, code=code)
    aside = out.resolve().with_name(f".{out.resolve().name}.{os.getpid()}.writing")
    try:
        aside.mkdir()
        with expected_failures(trained.workload.spec):
            if type(trained.workload).export is Workload.export:
                _export_own(trained, aside)
            else:
                trained.workload.export(trained.model.cpu(), aside)
            if onnx:
                from paceline.using.onnx_file import write_onnx

                write_onnx(trained.workload, trained.model.cpu(), aside / "model.onnx")
        aside.rename(out)
    except OSError as error:
        raise RunFailed(f"cannot write {out}: {error.strerror}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def write_weights(file: Path, tensors: dict[str, Tensor], **header: str) -> None:
    """As safetensors; tensors that share their memory are written once each."""
    from safetensors.torch import save

    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomic(file, save(whole, metadata={"format": "pt", **header}))


def write_loader(folder: Path, package: str, module: str) -> None:
    """A file of ours that needs nothing else of ours, as load.py."""
    write_atomic(folder / "load.py", resources.files(package).joinpath(f"{module}.py").read_bytes())


def _export_file(run: RunDir, out: Path, which: str, onnx: bool) -> Path:
    from paceline.training.checkpoints.saved import chosen, read_tensors

    if onnx:
        raise UserError(f"--onnx writes a folder, and {str(out)!r} is a file; write it as  --out {out.stem} --onnx")
    if out.is_dir():
        raise UserError(f"{str(out)!r} is a folder; name a file that is not there yet, or may be replaced")
    _check_parent(out)
    checkpoint = chosen(run, which)
    header = {"paceline_spec": json.dumps(run.spec().dump()), "step": str(checkpoint.step)}
    write_weights(out, read_tensors(checkpoint), **header)
    return out


def _check_folder(out: Path) -> None:
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


def _export_own(trained: TrainedModel, folder: Path) -> None:
    """A model of the user's: its weights, its own file, what the run kept, and how to load it."""
    spec = trained.workload.spec
    file = own_file(spec.workload)
    if file is None:
        raise UserError(
            f"workload {spec.workload} is in an installed package and says nothing of its export; give its class a "
            f"method export(model, folder), or write the weights alone with  --out {trained.run.name}.safetensors"
        )
    write_weights(folder / WEIGHTS, trained.model.state_dict())
    write_atomic(folder / file.name, file.read_bytes())
    if trained.run.kept.is_dir():
        shutil.copytree(trained.run.kept, folder / "kept", ignore=shutil.ignore_patterns(SOURCE))
    values: dict[str, Any] = spec.dump()
    sections = {name: values.get(name) or {} for name in ("model", "data", "train")}
    made = {"paceline": __version__, "step": trained.step, "classes": list(trained.classes)}
    kind = spec.workload.rpartition(":")[2]
    write_json(folder / "config.json", {"file": file.name, "class": kind, **sections, **made})
    write_loader(folder, "paceline.using", "own_loader")
