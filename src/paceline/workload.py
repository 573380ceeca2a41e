"""What all work implements: `Workload` trains by gradients, `PassWorkload` fits by passes.

A workload does not know how many ranks there are: it is given sample numbers and returns sums, which the loop divides
once, globally.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from paceline.config import RunSpec, localise_spec
from paceline.config.registry import find_entry
from paceline.config.sections import RunClass
from paceline.errors import RunFailed, UserError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from paceline.layout import Layout
    from paceline.parallel.context import ContextGroup

LogFn = Callable[[str], None]
"""Called with a line for people."""


def ignore_log(line: str) -> None:
    """Discard a line, where a `LogFn` is asked for and nothing is to be printed."""


class Samples(Protocol):
    """One split of the data, addressed by sample number.

    Optional: `padded(ids, keys, rows)` makes a batch of exactly that many rows, as the passes of a pipeline need; added
    rows have no weight. `fixed_shape_batches(cuts, most)` makes the batches of several (ids, keys), padded to few
    shapes, so that a step can be recorded as a CUDA graph (`half_only = True`: in half precision only). `resident()`
    returns all samples as tensors, if `batch(ids, keys)` is no more than their rows.
    """

    def __len__(self) -> int: ...

    def cost(self, ids: np.ndarray) -> np.ndarray:
        """Return how much work each sample is (tokens, pixels), to balance the ranks."""

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Any:
        """Return these samples as tensors: one, or a tuple, list, dict or registered dataclass of them.

        `keys` holds one random number per sample, a function of (seed, epoch, sample): a model that draws its dropout
        from them gives the same answer on any layout.
        """


@dataclass(frozen=True)
class Outline:
    """What a plan must know of data that is not prepared yet."""

    samples: Any
    """Stand-ins for the training samples, as `Workload.data` returns them; only number and shapes matter."""
    held_out: int
    """Samples to evaluate on."""
    times: float = 1.0
    """Size of a real sample over that of a stand-in."""
    assumptions: tuple[str, ...] = ()
    """What was not checked, in words for people."""


class BaseWorkload(RunClass):
    """What both kinds of workload have in common."""

    score: ClassVar[str] = "-loss"
    """The metric that ranks checkpoints; with a leading minus, lower is better."""
    unit: ClassVar[str] = ""
    """What `Samples.cost` counts, if its rate is worth showing: "tokens"."""
    required: ClassVar[tuple[str, ...]] = ()
    """Methods that a subclass must have."""
    kept: Path | None = None
    """What `Workload.keep` wrote, of a finished run."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec

    def prepare(self, say: LogFn) -> None:
        """Read, tokenise and check, once before ranks start. Must be safe to call again."""

    def fingerprint(self) -> str:
        """Optional: identify the content of the data. A run is not resumed with other data."""
        return ""

    def sample_count(self) -> int:
        """Return how many training samples there are."""
        raise NotImplementedError

    def suits(self, layout: Layout) -> None:
        """Raise UserError for a layout that the work does not support."""

    def goodness(self, metrics: Mapping[str, Any]) -> float:
        """Return the score as a number of which more is better."""
        name = self.score.removeprefix("-")
        known = [key for key, value in metrics.items() if isinstance(value, int | float) and key not in ("n", "of")]
        if name not in known:
            message = f"workload: score is {self.score!r}, but its metrics are {', '.join(known)}"
            raise RunFailed(message, code="invalid-workload", key="workload")
        value: float = metrics[name]
        return -value if self.score.startswith("-") else value


class Workload(BaseWorkload):
    """Subclass this for your own model; `model`, `data` and `loss` are all it needs."""

    required = ("model", "data", "loss")
    draws_by_name: ClassVar[bool] = False
    """The model can be built on the meta device, and `initialise(seed)` sets each weight from the seed and its name
    alone, and the buffers: a rank then needs little more memory than for its part."""
    compile_layers: ClassVar[bool] = False
    """Each layer of `blocks` is compiled for one shape of samples (with `Samples.padded`). Without it the layers are
    those of equal structure, and a model that has none is compiled whole."""
    chunks_loss: ClassVar[bool] = False
    """`loss` can compute the logits of a few tokens at a time, and does so while `chunked_loss` is set."""
    chunked_loss: bool = False
    casts_layers: ClassVar[bool] = False
    """In bf16 a layer multiplies by each of its matrices in bf16: they are then gathered in bf16 instead of fp32."""
    has_experts: ClassVar[bool] = False
    """Its model may have experts (`paceline.nn.experts.find_experts`), and `suits` checks their number."""
    asks_for_values: ClassVar[bool] = False
    """Building the model needs the values of tensors: a plan traces a real one instead of fake tensors."""
    evaluation_chunk: int = 256
    """Samples per pass."""
    collate: Callable[[list[Any]], Any] | None = None
    """Optional method: make a batch of the items of a Dataset; by default torch's DataLoader stacks them."""
    served: Mapping[str, Samples | None] = {}
    """The samples by split, while worker processes make them."""
    data_words: ClassVar[str] = "workload: data({split!r})"
    """The name of its samples in messages."""
    export_suffix: ClassVar[str] = ""
    """If `export` writes the whole model as one file, `model` with this suffix: it can be exported alone."""
    shard_rules: ClassVar[Mapping[str, str]] = {}
    """How tensor parallelism divides the modules: pattern of names -> column, row, …"""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.callback_state: dict[str, Any] = {}
        """What `on_step` and `on_evaluate` remember, as plain values: saved in checkpoints."""

    def has(self, method: str) -> bool:
        """Return whether the subclass has this optional method."""
        return getattr(type(self), method) is not getattr(Workload, method)

    def model(self) -> nn.Module:
        raise NotImplementedError

    def data(self, split: str) -> Any:
        """Return the samples of "train" or "test", or None.

        A tuple or dict of tensors or arrays, a torch Dataset, a Hugging Face dataset, or `Samples`.
        """
        raise NotImplementedError

    def outline(self) -> Outline | None:
        """Optional: what a plan must know of the data, if `prepare` is slow. Without it a plan prepares them."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        """Return (sum of the losses, how many there were); never a mean."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor | float]:
        """Return sums over the samples of a batch; must hold "count", by which `metrics` divides.

        Those of `paceline.class_sums` give the metrics of a classifier.
        """
        total, count = self.loss(model, batch)
        return {"loss": total, "count": count}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics, from the sums over all samples: numbers, and arrays that are worth recording."""
        count = sums.get("count")
        if not isinstance(count, int | float) or not count:
            message = f"workload: evaluate must give a count above 0 beside its sums; it gave {dict(sums)}"
            raise RunFailed(message, code="invalid-workload", key="workload")
        from paceline.nn.class_metrics import CLASS_SUMS, compute_class_metrics

        plain = {name: value for name, value in sums.items() if name not in ("count", *CLASS_SUMS)}
        return {**{name: value / count for name, value in plain.items()}, **compute_class_metrics(sums)}

    def groups(self, model: nn.Module) -> Mapping[str, Mapping[str, Any]]:
        """Optional: parameter groups, as in `train.groups`, which takes precedence:
        {"pattern of names": {"lr": 1e-4, "weight_decay": 0.0, "frozen": True}}."""
        return {}

    def pictures(self, model: nn.Module, batch: Any) -> Mapping[str, np.ndarray]:
        """Optional: pictures [H, W, 3] of bytes, by name, of what the model finds in a few held-out samples; written
        after each evaluation as `pictures/NAME-STEP.png`, and shown in the report."""
        return {}

    def init_from_name(self, name: str) -> str | None:
        """Optional: the name of a tensor in `model.init_from`; None if it is to be initialised."""
        return name

    def optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Optional: an optimiser of these groups of plain tensors, in place of `train.optimizer`.

        Each has its "params", "lr" and "weight_decay"; the schedule multiplies the rate of each group.
        """
        raise NotImplementedError

    def schedule(self, seen: int, total: int) -> float:
        """Optional: the learning rate after `seen` of `total` samples as a factor of `train.lr`, in place of
        `train.schedule`, `train.warmup` and `train.final_lr`."""
        raise NotImplementedError

    def on_step(self, step: int, values: Mapping[str, Any]) -> str | None:
        """Optional: called after each step, with the same values on every rank: loss, grad_norm, lr, samples, epoch, …

        A text ends the run at this step, and is the reason. What must survive a restart belongs into
        `self.callback_state`.
        """
        return None

    def on_evaluate(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Optional: called after each evaluation, like `on_step`."""
        return None

    def init_from_targets(self, part: nn.Module) -> Mapping[str, Any]:
        """Optional: what `model.init_from` is read into, by name; by default the state of this part of the model."""
        return part.state_dict()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated layers, which are sharded, recomputed and compiled one by one; by default, of all lists
        of modules of one class, the one with the most weights."""
        return find_repeated_layers(model)

    def kept_in_bf16(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """Optional: frozen weights that stay in bf16 if products are in bf16; all others are kept in fp32."""
        return ()

    def suits(self, layout: Layout) -> None:
        if layout.expert > 1 and not self.has_experts:
            raise self._reject_axis("expert", layout.expert, "has no experts; use parallel.expert=1")
        if layout.context > 1 and not all(map(self.has, ("gather_context", "divide_context"))):
            give = "does not divide sequences; give its Workload class the methods gather_context and divide_context"
            raise self._reject_axis("context", layout.context, give)

    def _reject_axis(self, axis: str, size: int, reason: str) -> UserError:
        message = f"parallel.{axis}={size}: {self.spec.workload} {reason}, or use parallel.strategy=fsdp"
        return UserError(message, code="not-supported", key=f"parallel.{axis}")

    def before_recording(self, model: nn.Module, samples: Any, device: torch.device) -> None:
        """Optional: choose how batches are laid out for a step that is recorded, once the model is on its device."""

    def keep(self, folder: Path) -> None:
        """Optional: write what using the model takes beside its weights (a tokeniser, names of classes).

        Called once, before the first step. A run that is opened later has the folder as `self.kept`.
        """

    def encode(self, inputs: Sequence[Any]) -> Any:
        """Optional: make a batch for `predict` of new inputs (texts, rows, pictures), in the same order."""
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Optional: return predictions for a batch, by name, one row per sample: "probabilities" of classes, …"""
        raise NotImplementedError

    def generate(self, model: nn.Module, prompt: str, **how: Any) -> str:
        """Optional: return what a language model writes for a prompt; `how` has tokens, temperature, top_k and seed."""
        raise NotImplementedError

    def classes(self) -> Sequence[str]:
        """Optional: the names of classes."""
        return ()

    def export(self, model: nn.Module, folder: Path) -> None:
        """Optional: write the trained model into a folder that loads without Paceline. By default the folder has the
        weights, the file of the workload, and a `load.py` that builds the model from both."""
        raise NotImplementedError

    def export_by_tensor(self, stored: Any, folder: Path) -> None:
        """Optional: the same from weights on the disk, for models that are larger than the memory."""
        raise NotImplementedError

    def onnx(self, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
        """Optional: the module to export as ONNX, and example inputs by name, with a row for each sample. By default
        the model, and what `evaluate` calls it with."""
        raise NotImplementedError

    def inputs(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """For pipelines: return (input of the first stage, what every stage gets by name)."""
        raise NotImplementedError

    def costs(self, model: nn.Module) -> tuple[float, list[float], float]:
        """For pipelines: return the compute cost before the layers, of each layer and after them, in any unit."""
        raise NotImplementedError

    def stage(self, model: nn.Module, layers: range) -> nn.Module:
        """For pipelines: return the part of the model with these layers, and what comes before the first and after the
        last. Parameters keep their names. Called with the output of the previous stage."""
        raise NotImplementedError

    def gather_context(self, model: nn.Module, context: ContextGroup) -> None:
        """For context parallelism: let attention call `context.attend`, and tokens know their `context.positions`."""
        raise NotImplementedError

    def divide_context(self, batch: Any, context: ContextGroup) -> Any:
        """For context parallelism: return a batch with `context.part` of each tensor of tokens."""
        raise NotImplementedError


class OwnLoop(Workload):
    """A script with its own loop, which calls the run instead of being called by it."""

    def drive(self, layout: Layout, rank_info: Any, show: bool, folder: Any) -> tuple[Path, Any]:
        """Run one rank from start to end, with the arguments of `run_rank`; return (run folder, summary)."""
        raise NotImplementedError


class PassWorkload(BaseWorkload):
    """Work without gradients: passes over all samples, each rank taking its part of them."""

    batched = False
    required = ("passes",)
    saved_every: ClassVar[int] = 50
    """Passes between two checkpoints, by default."""
    folder: Path | None = None
    """Of the run, once there is one."""
    rank_info: Any = None
    """The `RankInfo` of this process, once the ranks are connected."""

    def passes(self, device: Any) -> Passes:
        """Return this rank's part of the work; ranks are connected already."""
        raise NotImplementedError

    def fitted(self, folder: Path) -> Fitted | None:
        """Optional: return what a finished run left in its folder, for use on new inputs."""
        return None


class FitEnd(Enum):
    """Why a fit makes no more passes."""

    CONVERGED = "converged"
    MOST_PASSES = "most passes"
    AS_ASKED = "as asked"
    PATIENCE = "patience"


class Passes(Protocol):
    """One rank's part of a fit that goes through all samples until it has converged.

    A class may inherit what is optional: `parameters`, `begin`, `evaluate` and `close`.
    """

    samples: int
    most: int
    parameters: int | None = None

    @property
    def end(self) -> FitEnd | None:
        """None while there is more to do."""

    def end_words(self) -> str: ...

    def step(self, flag: bool) -> Mapping[str, Any]:
        """Run one pass; return its "loss", its times, whether a rank's `flagged`, and more for the event."""

    def begin(self) -> None:
        return

    def evaluate(self) -> Mapping[str, Any]:
        """Return metrics of held-out samples after a pass, if they are due."""
        return {}

    def close(self) -> None:
        """Release what ranks hold together, before one of them continues alone."""
        return

    def tensors(self) -> dict[str, Any]:
        """Return what resuming needs, by name; "model" holds the result."""

    def allocate_state(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors of these names and shapes, to read into what was saved beside `meta`."""

    def meta(self) -> dict[str, Any]: ...

    def load_state(self, meta: Mapping[str, Any]) -> None:
        """Restore the saved state, once it was read into the tensors of `allocate_state`."""

    def equations(self, ranks: int) -> list[str]: ...

    def conclude(self, result: Mapping[str, Tensor], folder: Path) -> None:
        """Write the result into the run's folder, for people; on the main rank, and safe to repeat."""


class Fitted(Protocol):
    """The result of a fit, for use on new inputs. Optional: `write_onnx(file)`."""

    @property
    def classes(self) -> Sequence[str]: ...

    def predict(self, inputs: Sequence[Any]) -> Mapping[str, Any]:
        """Return arrays by name, one row per input: "probabilities" of classes, …"""

    def export(self, folder: Path) -> None:
        """Write what loads without Paceline."""


def find_repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Find the layers that `Workload.blocks` returns by default."""
    from torch.nn import ModuleDict, ModuleList, Sequential

    lists = [list(m.children()) for m in model.modules() if isinstance(m, ModuleList | ModuleDict)]
    chains = [list(m.children()) for m in model.modules() if isinstance(m, Sequential)]
    lists += [layers for layers in chains if all(any(layer.children()) for layer in layers)]
    alike = [members for members in lists if len({type(member) for member in members}) == 1]
    return max(alike, key=lambda members: sum(p.numel() for m in members for p in m.parameters()), default=[])


def build_workload(spec: RunSpec) -> Any:
    """Build the workload of a run file."""
    from paceline.nn.keras_backend import as_torch

    kind: type[Any] = find_entry(spec.workload).run_class()
    missing = [name for name in kind.required if getattr(kind, name).__module__ == __name__]
    if missing:
        raise _contract_error(f"{spec.workload} has no method {' and no '.join(missing)}; see paceline.Workload")
    workload = _instantiate_workload(kind, localise_spec(spec))
    if ":" in spec.workload and isinstance(workload, Workload):
        workload.loss = _check_loss(workload.loss)  # type: ignore[method-assign]
        workload.model = partial(as_torch, workload.model, spec.train.seed)  # type: ignore[method-assign]
    return workload


def _contract_error(message: str) -> UserError:
    return UserError(f"workload: {message}", code="invalid-workload", key="workload")


def _instantiate_workload(kind: type[Any], spec: RunSpec) -> Any:
    try:
        inspect.signature(kind).bind(spec)
    except TypeError:
        wrong = f"its __init__{inspect.signature(kind.__init__)} does not take it"
    else:
        workload = kind(spec)
        if hasattr(workload, "spec"):
            return workload
        wrong = "its __init__ does not pass it on"
    example = "  def __init__(self, spec):\n      super().__init__(spec)"
    raise _contract_error(f"{kind.__name__} is made with the spec of its run, and {wrong}; write it as\n{example}")


def _check_loss(loss: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor | int]]:
    """Wrap a user's loss, to report what is wrong with what it returns before torch does."""
    import torch

    def checked(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        result = loss(model, batch)
        total, count = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if count is None or not isinstance(total, torch.Tensor):
            parts = result if isinstance(result, tuple) else (result,)
            wrong = f"returned {', '.join(type(part).__name__ for part in parts)}"
        elif total.ndim:
            wrong = f"returned a sum of shape {list(total.shape)}"
        elif torch.is_grad_enabled() and not total.requires_grad:
            wrong = "returned a sum that does not depend on the model's parameters"
        else:
            return total, count
        example = '  return F.cross_entropy(model(x), labels, reduction="sum"), len(labels)'
        needed = "(sum of the losses, how many there were)"
        raise _contract_error(f"loss {wrong}; it must return {needed}, as in\n{example}")

    return checked
