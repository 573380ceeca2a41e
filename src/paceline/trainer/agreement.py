"""Compare what determines the answer between ranks, before the first step.

Under torchrun, srun or mpirun each node reads its own files. With another learning rate, code or data on one of them a
run would train to the end, with wrong weights.
"""

import hashlib
import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.config import RunSpec
from paceline.errors import UserError
from paceline.launch.process_group import gather_objects
from paceline.trainer.resume_guard import collect_determining_values, find_user_files, hash_code_files, length_of

VARIABLES = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR"),
    *("PYTHONHASHSEED", "TORCHDYNAMO_DISABLE"),
)
"""Environment variables that change results."""


def check_ranks_agree(spec: RunSpec, data: str) -> None:
    """Raise UserError on all ranks if one differs from the first in spec, code, data, versions or environment.

    `data` is the fingerprint of this rank's data; empty if it is unknown.
    """
    (first_host, first), *others = gather_objects((socket.gethostname(), dict(_collect_facts(spec, data))))
    for rank, (host, facts) in enumerate(others, 1):
        for key in (key for key in first if key in facts):
            if first[key] != facts[key]:
                raise UserError(
                    f"ranks differ in {key}: {facts[key]} on rank {rank} ({host}), {first[key]} on rank 0 "
                    f"({first_host}); give all nodes the same files, packages and environment",
                    code="conflict",
                    key=key,
                )


def _collect_facts(spec: RunSpec, data: str) -> Iterator[tuple[str, Any]]:
    yield "workload", Path(spec.workload).name
    yield from collect_determining_values(spec).items()
    yield length_of(spec.train)
    paths = spec.parallel.paths()
    yield from ((f"parallel.{key}", value) for key, value in spec.dump()["parallel"].items() if key not in paths)
    yield from ((name, hash_code_files([file])[:12]) for name, file in _find_code(spec).items())
    yield "data", hashlib.sha256(data.encode()).hexdigest()[:12]
    yield from (("paceline", __version__), ("python", platform.python_version()), ("torch", torch.__version__))
    yield "CUDA", torch.version.cuda
    yield from ((name, os.environ.get(name)) for name in VARIABLES)


def _find_code(spec: RunSpec) -> dict[str, Path]:
    """Find the user's own files, and the modules that they have imported from beside them."""
    found = find_user_files(spec)
    for folder in {file.resolve().parent for file in found.values() if file.suffix == ".py"}:
        for module in list(sys.modules.values()):
            file = Path(getattr(module, "__file__", None) or "")
            own = file.suffix == ".py" and file.is_relative_to(folder) and "site-packages" not in file.parts
            if own and not file.is_relative_to(sys.prefix) and file.is_file():
                found.setdefault(str(file.relative_to(folder)), file)
    return found
