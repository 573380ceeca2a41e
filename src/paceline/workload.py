"""The one protocol that everything trainable implements.

A workload knows its model, its data and its loss. It does not know how many ranks there are: it is handed sample
numbers and returns sums, and the loop divides once, globally.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from paceline.errors import UserError
from paceline.spec import RunSpec, Section

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

BUILT_IN = {"classifier": "paceline.workloads.classifier:Classifier"}


class Samples(Protocol):
    """One split of the data, addressed by sample number."""

    def __len__(self) -> int: ...

    def cost(self, ids: np.ndarray) -> np.ndarray:
        """How much work each sample is (its tokens, its pixels): used to give every rank the same amount."""
        ...

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Any:
        """These samples as tensors: one, or a tuple, list, dict or registered dataclass of them.

        `keys` holds one random number per sample, a function of (seed, epoch, sample): a model that draws its
        dropout from them gives the same answer on any layout.
        """
        ...


class Workload:
    """Subclass this for a model of your own; `model`, `data` and `loss` are all it needs."""

    Model: ClassVar[type[Section]] = Section
    Data: ClassVar[type[Section]] = Section
    score: ClassVar[str] = "-loss"
    """The metric that ranks checkpoints; a leading minus says that lower is better."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec

    def prepare(self, say: Callable[[str], None]) -> None:
        """Done once before ranks start: read, tokenise, check. Must be safe to call again."""

    def model(self) -> nn.Module:
        raise NotImplementedError

    def data(self, split: str) -> Samples | None:
        """The samples of "train" or "test"; None where there is no such split."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        """(sum of the losses, how many there were); never a mean."""
        raise NotImplementedError

    steady: Callable[[Any, int], Any] | None = None
    """Optional: `steady(batch, most)` fills a batch of up to `most` samples with stand-ins that count nothing, so that
    only a few shapes occur and a step can be recorded as a CUDA graph."""

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        """Sums over the samples of a batch; must hold "count", by which `metrics` divides."""
        total, count = self.loss(model, batch)
        return {"loss": total, "count": count}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The metrics, from the sums over all samples."""
        return {name: value / sums["count"] for name, value in sums.items() if name != "count"}

    def goodness(self, metrics: Mapping[str, float]) -> float:
        """The score as a number of which more is better."""
        return -metrics[self.score[1:]] if self.score.startswith("-") else metrics[self.score]


def workload_of(spec: RunSpec) -> Workload:
    return own_workload(BUILT_IN.get(spec.workload, spec.workload))(spec)


def own_workload(name: str) -> type[Workload]:
    """The class behind `file.py:Class` or `package.module:Class`."""
    place, _, cls = name.rpartition(":")
    try:
        module = _module_from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError:
        raise UserError(f"workload: there is no file {place!r}; write it as  workload: path/to/file.py:Class") from None
    except ModuleNotFoundError as error:
        if error.name is not None and place.split(".")[0] == error.name.split(".")[0]:
            raise UserError(f"workload: there is no module {place!r}; write it as  workload: file.py:Class") from None
        raise UserError(f"workload: {place!r} needs {error.name!r}, which is not installed") from None
    except SyntaxError as error:
        raise UserError(f"workload: {place!r} is not valid Python: {error.msg} (line {error.lineno})") from None
    found = getattr(module, cls, None)
    if not (isinstance(found, type) and issubclass(found, Workload)):
        classes = {n: v for n, v in vars(module).items() if isinstance(v, type)}
        have = [n for n, v in classes.items() if issubclass(v, Workload) and v is not Workload]
        raise UserError(
            f"workload: {place!r} has no Workload class {cls!r}; "
            + (f"it has {', '.join(have)}" if have else "subclass paceline.Workload there")
        )
    return found


def _module_from_file(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(file)
    name = f"paceline_own_{file.stem}_{zlib.crc32(bytes(file.resolve())):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
