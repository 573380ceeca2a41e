"""The verb `export`: the weights of a run as one safetensors file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline.errors import UserError
from paceline.record.run_dir import RunDir


def export(run: str | Path, out: str | Path, which: str = "newest") -> Path:
    """Write the newest (or best) checkpoint's weights to `out`, with the spec and the step in its header."""
    from safetensors.torch import save

    from paceline.record.files import write_atomic
    from paceline.training.checkpoints.saved import best, newest, read_tensors

    folder, out = RunDir.open(Path(run)), Path(out)
    if out.suffix != ".safetensors":
        name = out.with_suffix(".safetensors")
        raise UserError(f"{str(out)!r} does not end in .safetensors; write it as  --out {name}")
    if out.is_dir():
        raise UserError(f"{str(out)!r} is a folder; name a file that is not there yet, or may be replaced")
    if not out.parent.is_dir():
        raise UserError(f"{str(out)!r}: there is no folder {str(out.parent)!r}; make it with  mkdir -p {out.parent}")
    checkpoint = {"newest": newest, "best": best}[which](folder.checkpoints, lambda text: print(text, file=sys.stderr))
    if checkpoint is None:
        raise UserError(f"{folder.path} has no whole checkpoint; go on with  paceline train --resume {folder.path}")
    header = {"paceline_spec": json.dumps(folder.spec().dump()), "step": str(checkpoint.step)}
    tensors = {name: tensor.contiguous() for name, tensor in read_tensors(checkpoint).items()}
    write_atomic(out, save(tensors, metadata=header))
    return out
