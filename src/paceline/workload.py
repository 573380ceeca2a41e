"""What everything that can be trained or fitted implements.

A workload knows its data and what is to be done with them. It does not know how many ranks there are: it is handed
sample numbers and returns sums, and the loop divides once, globally. There are two kinds: `Workload` trains a model by
gradients, `PassWorkload` fits by passes over all of its samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from paceline.config import RunSpec
from paceline.config.registry import find_entry
from paceline.config.sections import RunClass
from paceline.errors import RunFailed, UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from paceline.layout import Layout
    from paceline.trainer.passes import Fitted, Passes

LogFn = Callable[[str], None]
"""Told a line at a time, for people."""


class Samples(Protocol):
    """One split of the data, addressed by sample number.

    Optional: `padded(ids, keys, rows)` makes a batch of exactly that many rows, those added counting nothing: the
    passes of a pipeline all have the same shape. `fixed_shape_batches(cuts, most)` makes the batches of several
    (ids, keys) at once, each of up to `most` samples and padded with samples that count nothing, so that only a few
    shapes occur: a step can then be recorded as a CUDA graph (`half_only = True`: in half precision alone).
    `resident()` gives all samples as tensors of which row i is sample i, where `batch(ids, keys)` is no more than
    those rows.
    """

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


@dataclass(frozen=True)
class Outline:
    """What a plan must know of data that nobody has prepared yet."""

    samples: Any
    """As many as there are to train on, of their shapes, in any form that `Workload.data` may return them; their values
    do not matter."""
    held_out: int
    """Samples to evaluate on."""
    times: float = 1.0
    """A sample of the run is so many times as large as one of these."""
    assumptions: tuple[str, ...] = ()
    """What was not looked at, in words for people."""


class BaseWorkload(RunClass):
    """What the two kinds of work have in common."""

    score: ClassVar[str] = "-loss"
    """The metric that ranks checkpoints; a leading minus says that lower is better."""
    unit: ClassVar[str] = ""
    """What `Samples.cost` counts, if a rate of it is worth showing: "tokens"."""
    required: ClassVar[tuple[str, ...]] = ()
    """Methods that a subclass must have."""

    kept: Path | None = None
    """Where a finished run has what `Workload.keep` wrote; None while there is no run yet."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec

    def prepare(self, say: LogFn) -> None:
        """Done once before ranks start: read, tokenise, check. Must be safe to call again."""

    def fingerprint(self) -> str:
        """Optional: a name of the data's content. A run does not go on with other data than it began with."""
        return ""

    def sample_count(self) -> int:
        """How many samples there are to learn from."""
        raise NotImplementedError

    def suits(self, layout: Layout) -> None:
        """Refuse a layout that the work cannot take, before a process starts."""

    def goodness(self, metrics: Mapping[str, Any]) -> float:
        """The score as a number of which more is better."""
        name = self.score.removeprefix("-")
        beside = ("n", "of")
        known = [key for key, value in metrics.items() if isinstance(value, int | float) and key not in beside]
        if name not in known:
            raise RunFailed(f"workload: score is {self.score!r}, but its metrics are {', '.join(known)}")
        return -metrics[name] if self.score.startswith("-") else metrics[name]


class Workload(BaseWorkload):
    """Subclass this for a model of your own; `model`, `data` and `loss` are all it needs."""

    required = ("model", "data", "loss")
    draws_by_name: ClassVar[bool] = False
    """The model can be built on the meta device, and has a method `initialise(seed)` that gives each weight a value
    which depends on nothing but the seed and its name, and sets what buffers there are: a rank then needs little more
    memory than for its part."""
    compile_layers: ClassVar[bool] = False
    """On a CUDA device `train.compile=auto` compiles each layer by itself: for a model of many equal layers whose
    samples have one shape (and a method `padded`, see Samples). Any other model is compiled whole, if at all."""
    casts_layers: ClassVar[bool] = False
    """In bf16 a layer uses each of its weights in bf16, not only those of its products: where layers are sharded, they
    are then gathered in bf16, which is half the bytes. Without this they are gathered in fp32."""
    asks_for_values: ClassVar[bool] = False
    """Building the model takes the values of tensors, which fake ones do not have: a plan tries out the real one."""
    evaluation_chunk: int = 256
    """Samples that are evaluated in one pass."""
    collate: Callable[[list[Any]], Any] | None = None
    """Optional, a method: makes a batch of the items of a Dataset. Without it (and without a method `collate` of the
    data set) they are stacked, as torch's DataLoader does."""
    served: Mapping[str, Samples | None] = {}
    """The samples by split, while worker processes make them; `paceline.data.samples.samples_of` looks here first."""
    data_words: ClassVar[str] = "workload: data({split!r})"
    """What its samples are called in messages."""
    export_suffix: ClassVar[str] = ""
    """Where `export` writes one file, `model` with this suffix, that is all of the model: it can be asked for alone."""
    shard_rules: ClassVar[Mapping[str, str]] = {}
    """How tensor parallelism divides the modules of the model: a pattern of names, and what becomes of them."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.callback_state: dict[str, Any] = {}
        """What `on_step` and `on_evaluate` remember, as plain values: kept in checkpoints."""

    def has(self, method: str) -> bool:
        """Whether the subclass has this optional method."""
        return getattr(type(self), method) is not getattr(Workload, method)

    def model(self) -> nn.Module:
        raise NotImplementedError

    def data(self, split: str) -> Any:
        """The samples of "train" or "test"; None where there is no such split.

        A tuple or dict of tensors or arrays, a torch Dataset, a Hugging Face dataset, or `Samples`.
        """
        raise NotImplementedError

    def outline(self) -> Outline | None:
        """Optional: what a plan must know of the data, where `prepare` takes long. Without it a plan prepares them."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        """(sum of the losses, how many there were); never a mean."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        """Sums over the samples of a batch, numbers or tensors of any shape; must hold "count", by which `metrics`
        divides. What `paceline.class_sums` gives is judged as a classifier is."""
        total, count = self.loss(model, batch)
        return {"loss": total, "count": count}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics, from the sums over all samples: numbers, and arrays where those are worth recording."""
        count = sums.get("count")
        if not isinstance(count, int | float) or not count:
            raise RunFailed(f"workload: evaluate must give a count above 0 beside its sums; it gave {dict(sums)}")
        from paceline.nn.class_metrics import CLASS_SUMS, compute_class_metrics

        plain = {name: value for name, value in sums.items() if name not in ("count", *CLASS_SUMS)}
        return {**{name: value / count for name, value in plain.items()}, **compute_class_metrics(sums)}

    def groups(self, model: nn.Module) -> Mapping[str, Mapping[str, Any]]:
        """Optional: parameters that are trained otherwise, as `train.groups` of the run file says them, which comes
        first: {"pattern of names": {"lr": 1e-4, "weight_decay": 0.0, "frozen": True}}."""
        return {}

    def pictures(self, model: nn.Module, batch: Any) -> Mapping[str, np.ndarray]:
        """Optional: what the model finds in a few held-out samples, as pictures [H, W, 3] of bytes, by name. They are
        written after each evaluation, as `pictures/NAME-STEP.png` of the run's folder, and shown in its report."""
        return {}

    def init_from_name(self, name: str) -> str | None:
        """Optional: what a tensor of the model is called in `model.init_from`; None where it begins as it was drawn."""
        return name

    def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Optional: the update rule, in place of `train.optimizer`: an optimiser of these groups of plain tensors.

        Each has its "params", and its "lr" and "weight_decay" as the run file says. The schedule multiplies the rate
        that the optimiser has for a group.
        """
        raise NotImplementedError

    def schedule(self, seen: int, total: int) -> float:
        """Optional: the learning rate after `seen` of `total` samples as a factor of `train.lr`, in place of
        `train.schedule`, `train.warmup` and `train.final_lr`."""
        raise NotImplementedError

    def on_step(self, step: int, values: Mapping[str, Any]) -> str | None:
        """Optional: told after each step, on every rank the same: its loss, grad_norm, lr, samples, epoch, …

        Words end the run at this step, and say why; None goes on. What must outlive a restart belongs into
        `self.callback_state`.
        """
        return None

    def on_evaluate(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Optional: told after each evaluation, as `on_step` is."""
        return None

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated layers, which are sharded, recomputed and compiled one by one: of all lists of modules of one
        class, the one with the most weights."""
        return find_repeated_layers(model)

    def kept_in_bf16(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """Optional: frozen weights that stay in bf16 where products are in bf16; all others are kept in fp32."""
        return ()

    def suits(self, layout: Layout) -> None:
        """Refuse a layout that the model cannot take, before a process starts."""
        if layout.tensor > 1 and not self.shard_rules:
            raise UserError(
                f"parallel.tensor={layout.tensor}: {self.spec.workload} has no table of shard rules; "
                "give its Workload class  shard_rules = {'layers.*.up': 'column', 'layers.*.down': 'row'}  "
                "or use parallel.strategy=fsdp"
            )
        if layout.pipeline > 1 and not all(map(self.has, ("inputs", "costs", "stage"))):
            raise UserError(
                f"parallel.pipeline={layout.pipeline}: {self.spec.workload} cannot be cut into stages; "
                "give its Workload class the methods inputs, costs and stage, or use parallel.strategy=fsdp"
            )

    def keep(self, folder: Path) -> None:
        """Optional: write into the folder what using the model on new data takes beside its weights, such as a
        tokeniser and the names of classes. Called once, before the first step. A run that is opened later has the
        folder as `self.kept`, and may not need its training data any more."""

    def encode(self, inputs: Sequence[Any]) -> Any:
        """Optional: new inputs (texts, rows, pictures) as a batch that `predict` takes, in the same order."""
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Optional: what the model says of a batch, by name, one row per sample: "probabilities" of classes, …"""
        raise NotImplementedError

    def classes(self) -> Sequence[str]:
        """Optional: the names of classes, where the model tells classes apart."""
        return ()

    def export(self, model: nn.Module, folder: Path) -> None:
        """Optional: write the trained model into a folder that loads without Paceline. Without it, the folder has the
        weights, the file of the workload, and a `load.py` that builds the model from both."""
        raise NotImplementedError

    def onnx(self, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
        """Optional: what ONNX is made of, a module and an example of what it is called with, by name and with a row
        for each sample. Without it, the model and what `evaluate` calls it with."""
        raise NotImplementedError

    def inputs(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """For pipelines: (what the first stage is called with, what every stage gets by name)."""
        raise NotImplementedError

    def costs(self, model: nn.Module) -> tuple[float, list[float], float]:
        """For pipelines: what is computed (before the layers, in each layer, after them), in any unit."""
        raise NotImplementedError

    def stage(self, model: nn.Module, layers: range) -> nn.Module:
        """For pipelines: the part of the model with these layers, and what comes before the first and after the last.

        Parameters keep their names. Called with the output of the stage before.
        """
        raise NotImplementedError


class OwnLoop(Workload):
    """Work that has its loop itself, a script: it calls the run, and is not called by it."""

    def drive(self, layout: Layout, rank_info: Any, show: bool, folder: Any) -> tuple[Path, Any]:
        """Be one rank from beginning to end; return (run folder, summary). The arguments are those of `run_rank`."""
        raise NotImplementedError


class PassWorkload(BaseWorkload):
    """Work without gradients: a series of passes over all samples, each rank taking its part of them."""

    batched = False
    required = ("passes",)
    saved_every: ClassVar[int] = 50
    """Passes between two checkpoints, where the run file does not say."""
    folder: Path | None = None
    """Of the run, once there is one."""
    rank_info: Any = None
    """The `RankInfo` of this process, once the ranks have joined."""

    def passes(self, device: Any) -> Passes:
        """This rank's part of the work, with the ranks joined already."""
        raise NotImplementedError

    def fitted(self, folder: Path) -> Fitted | None:
        """Optional: what a finished run left in its folder, for use on new inputs."""
        return None


def find_repeated_layers(model: nn.Module) -> list[nn.Module]:
    """See `Workload.blocks`."""
    from torch.nn import ModuleDict, ModuleList

    lists = [list(m.children()) for m in model.modules() if isinstance(m, ModuleList | ModuleDict)]
    alike = [members for members in lists if len({type(member) for member in members}) == 1]
    return max(alike, key=lambda members: sum(p.numel() for m in members for p in m.parameters()), default=[])


def build_workload(spec: RunSpec) -> Any:
    """The workload of a run file: an instance of the class that its entry names."""
    from paceline.nn.keras_backend import as_torch

    kind: type[Any] = find_entry(spec.workload).run_class()
    missing = [name for name in kind.required if getattr(kind, name).__module__ == __name__]
    if missing:
        raise UserError(f"workload: {spec.workload} has no method {' and no '.join(missing)}; see paceline.Workload")
    workload = _made(kind, spec)
    if ":" in spec.workload and isinstance(workload, Workload):
        workload.loss = _checked(workload.loss)  # type: ignore[method-assign]
        workload.model = partial(as_torch, workload.model, spec.train.seed)  # type: ignore[method-assign]
    return workload


def _made(kind: type[Any], spec: RunSpec) -> Any:
    """An instance, or what its `__init__` lacks."""
    try:
        inspect.signature(kind).bind(spec)
    except TypeError:
        wrong = f"its __init__{inspect.signature(kind.__init__)} does not take it"
    else:
        workload = kind(spec)
        if hasattr(workload, "spec"):
            return workload
        wrong = "its __init__ does not hand it on"
    raise UserError(
        f"workload: {kind.__name__} is made with the spec of its run, and {wrong}; write it as\n"
        "  def __init__(self, spec):\n      super().__init__(spec)"
    )


def _checked(loss: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor | int]]:
    """A loss that says what is wrong with what it returns, where torch would speak of something else."""
    import torch

    def checked(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        found = loss(model, batch)
        total, count = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if count is None or not isinstance(total, torch.Tensor):
            parts = [type(part).__name__ for part in found] if isinstance(found, tuple) else [type(found).__name__]
            wrong = f"returned {', '.join(parts)}"
        elif total.ndim:
            wrong = f"returned a sum of shape {list(total.shape)}"
        elif torch.is_grad_enabled() and not total.requires_grad:
            wrong = "returned a sum that does not depend on the model's parameters"
        else:
            return total, count
        raise UserError(
            f"workload: loss {wrong}; it must return (sum of the losses, how many there were), as in\n"
            '  return F.cross_entropy(model(x), labels, reduction="sum"), len(labels)'
        )

    return checked
