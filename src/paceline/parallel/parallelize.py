"""Spread an untouched model over ranks: the one place where layouts are applied, in an order that matters.

1. Pipeline cuts first: all that follows works on the layers this rank holds.
2. Tensor divides the matrices of those layers, which changes their forward pass; fp8 changes how they multiply.
3. Activation checkpointing wraps each layer's forward pass as tensor left it.
4. Compilation sees the whole of a layer, repetition included.
5. Data parallelism comes last: it must see the parameters as the optimiser does.
6. A model that draws its weights by name is built without memory and gets it now, when each rank knows its part.
7. `model.init_from` is read last, of each tensor the part that the rank holds; a model that gets all of its weights
   there is built without memory too.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.weak import WeakIdKeyDictionary

from paceline.config import RunSpec
from paceline.errors import UserError
from paceline.execution import CPU, CUDA, Execution, Target
from paceline.launch.process_group import create_device_mesh, flatten_mesh, init_single_rank_group
from paceline.layout import Layout
from paceline.nn.keras_backend import has_keras
from paceline.parallel import ddp
from paceline.parallel.compress import GradientReduction, build_reduction
from paceline.parallel.parameters import LocalParameters, ParameterGroups, collect_local_parameters, resolve_groups
from paceline.parallel.precision import IN_BF16, set_tf32, use_fp8
from paceline.runlog.timers import CollectiveTimer
from paceline.workload import Workload

AXES = ("pipeline", "replicate", "shard", "tensor")
"""The grid of ranks: neighbours on the last axis are neighbouring ranks (`Layout.data_rank`)."""
KEPT_OPERATIONS = (
    *("mm", "addmm", "bmm", "_scaled_mm"),
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""What selective checkpointing keeps: products cost most to compute again."""


@dataclass(frozen=True)
class ParallelModel:
    """A model as one rank holds it."""

    net: nn.Module
    parts: Sequence[nn.Module]  # the modules this rank holds, with the names of checkpoints; several only in a pipeline
    local_parameters: LocalParameters
    parameters: int
    same_samples: int = 1  # ranks that compute the loss of the same samples
    reduction: GradientReduction = field(default_factory=GradientReduction)
    groups: ParameterGroups = field(default_factory=ParameterGroups)

    @property
    def unwrapped(self) -> nn.Module:
        """The model without the wrapper that sums gradients, for evaluation."""
        return self.net.module if isinstance(self.net, nn.parallel.DistributedDataParallel) else self.net


@dataclass(frozen=True)
class ModelSetup:
    """What a model is made from on one rank."""

    workload: Workload
    spec: RunSpec
    layout: Layout
    device: torch.device
    timer: CollectiveTimer
    execution: Execution
    begin: Callable[[Sequence[nn.Module]], None] = lambda parts: None
    """Sets other first values than those that were drawn."""
    begins_whole: Callable[[nn.Module | None], bool] | None = None
    """Whether `begin` gives all that the model of every rank has; called by all ranks."""


def parallelize(setup: ModelSetup) -> ParallelModel:
    workload, spec, layout, device = setup.workload, setup.spec, setup.layout, setup.device
    late, held_whole = workload.draws_by_name, layout.plain or layout.strategy == "zero1"
    found = None if late or held_whole else _build_empty_model(setup)
    with torch.device("meta") if late else nullcontext():
        model, groups = found or _build_model(setup)
    if held_whole:
        if late:
            _draw_weights(model, device, spec)
        setup.begin([model.to(device)])
        ddp.compare_first_weights(model)
        transform_layers(model, setup)
        return _replicate_model(model, groups, setup)

    from paceline.parallel import fsdp, pipeline, tensor

    mesh, group = build_mesh(layout, device)
    home = torch.device("cpu") if layout.offload else device
    if not late:
        move_materialized(model, home)
        ddp.compare_first_weights(model)
        ddp.broadcast_model(model)

    parameters = count_parameters(model)
    stages = {0: model}
    if layout.pipeline > 1:
        stages = pipeline.build_stages(workload, model, layout, mesh.get_local_rank("pipeline"))
    for stage in stages.values():
        blocks = workload.blocks(stage)
        if layout.tensor > 1:
            tensor.apply_tensor_parallel(stage, workload.shard_rules, mesh["tensor"], layout.sequence)
        transform_layers(stage, setup)
        if layout.data > 1 or layout.strategy in ("fsdp", "hsdp", "zero2"):
            fsdp.shard_model(stage, blocks, mesh, setup)
        if late:
            _draw_weights(stage, home, spec)
        elif found:
            allocate_parameters(stage, home)

    parts = list(stages.values())
    setup.begin(parts)
    local = collect_local_parameters(parts, layout.tensor * layout.data, group)
    net: nn.Module = parts[0]
    if layout.pipeline > 1:
        net = pipeline.Pipeline(stages, layout, mesh, device, layout.passes(layout.global_batch))
    return ParallelModel(net, parts, local, parameters, layout.tensor, groups=groups)


def build_mesh(layout: Layout, device: torch.device) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Return (the grid, the group of the ranks that hold the same layers as this one)."""
    init_single_rank_group(device)
    mesh = create_device_mesh(device.type, tuple(getattr(layout, axis) for axis in AXES), AXES)
    return mesh, flatten_mesh(mesh["replicate", "shard", "tensor"], "stage")


def prepare_model(setup: ModelSetup) -> tuple[nn.Module, ParameterGroups]:
    """Build the model before anything wraps it, in host memory, for other engines."""
    model, groups = _build_model(setup)
    setup.begin([model])
    ddp.compare_first_weights(model)
    transform_layers(model, setup)
    return model, groups


def _replicate_model(model: nn.Module, groups: ParameterGroups, setup: ModelSetup) -> ParallelModel:
    layout, device, parallel = setup.layout, setup.device, setup.spec.parallel
    reduction = build_reduction(parallel, model, setup.timer)
    alone = layout.ranks == 1 or reduction.own_models
    net = model if alone else ddp.wrap_ddp(model, device, parallel.bucket_mb, setup.timer, reduction.hook)
    local = collect_local_parameters([model], 1 if alone else layout.ranks)
    if layout.strategy == "zero1" and not alone:
        mesh, _ = build_mesh(layout, device)
        local = ddp.shard_update(model, mesh["shard"], parallel.bucket_mb, setup.timer)
    return ParallelModel(net, [model], local, count_parameters(model), reduction=reduction, groups=groups)


def _draw_weights(model: nn.Module, device: torch.device, spec: RunSpec) -> None:
    """Allocate a model that was built without memory, and draw its first values."""
    model.to_empty(device=device)
    cast(Any, model).initialise(spec.train.seed)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def detect_target(device: torch.device) -> Target:
    """Detect what the device can do, as far as it decides how a step runs."""
    compiler = os.environ.get("CC") or "gcc"
    compiles = any(map(shutil.which, (compiler, "cc", "clang"))) and find_spec("triton") is not None
    return CPU if device.type == "cpu" else replace(CUDA, compiles=compiles)


def transform_layers(model: nn.Module, setup: ModelSetup) -> None:
    """Apply what concerns single layers: fp8, activation checkpointing, compilation."""
    workload, layout = setup.workload, setup.layout
    blocks = workload.blocks(model)
    if setup.spec.train.precision == "fp8":
        use_fp8(blocks or [model], setup.device)
    if layout.checkpointing != "none":
        if not blocks:
            key = "parallel.activation_checkpointing"
            reason = (
                "the model has no repeated layers; give its Workload class a method  blocks(model) -> list of layers"
            )
            raise UserError(f"{key}: {reason}", code="not-supported", key=key)
        _recompute(blocks, layout.checkpointing)
    if setup.execution.compiled_layers:
        _compile(model, blocks, workload.compile_layers)
        if layout.tensor > 1:
            from paceline.parallel.tensor import wait_for_inputs

            for block in blocks:
                block.register_forward_pre_hook(wait_for_inputs)


def _recompute(blocks: Sequence[nn.Module], how: str) -> None:
    """Compute activations again in the backward pass, from the input of each block (full) or its products."""
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        ops = [getattr(torch.ops.aten, name).default for name in KEPT_OPERATIONS if hasattr(torch.ops.aten, name)]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, ops)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def _compile(model: nn.Module, blocks: Sequence[nn.Module], equal: bool) -> None:
    if blocks:
        # DistributedDataParallel's own way would cut each layer in pieces, by buckets that layers already suit
        torch._dynamo.config.optimize_ddp = False
    for block in blocks or [model]:
        if equal:
            # its forward pass alone: hooks, such as those that gather a layer, stay outside, where they cost nothing
            block.forward = torch.compile(block.forward, dynamic=False)
        else:  # a copy of the model, such as an average of its weights, is compiled with its own weights
            block.compile()


def _build_empty_model(setup: ModelSetup) -> tuple[nn.Module, ParameterGroups] | None:
    """Build the model without memory if all of its values are read afterwards.

    None if it needs them while it is built, ties parameters, or draws random numbers that this would change.
    """
    if setup.begins_whole is None:
        return None
    before = torch.get_rng_state()
    try:
        with build_without_memory():
            found: tuple[nn.Module, ParameterGroups] | None = _build_model(setup)
    except Exception:  # the user's own code; it is run again, as usual
        found = None
    drew = not torch.equal(before, torch.get_rng_state())
    if found is not None and (has_shared_parameters(found[0]) or (drew and has_transient_buffers(found[0]))):
        found = None
    if setup.begins_whole(found[0] if found else None):
        return found
    torch.set_rng_state(before)
    return None


def _build_model(setup: ModelSetup) -> tuple[nn.Module, ParameterGroups]:
    found: object = setup.workload.model()
    if not isinstance(found, nn.Module):
        reason = f"workload: model() returned {type(found).__name__}; it must return a torch.nn.Module"
        raise UserError(reason, code="invalid-workload", key="model")
    if has_keras(found):
        reject_for_keras(setup.spec, setup.layout)
    train = setup.spec.train
    set_tf32(train.precision)
    groups = resolve_groups(setup.workload, train, found)
    model = found.to(torch.float64 if train.precision == "fp64" else torch.float32)
    if train.precision in IN_BF16 and setup.spec.parallel.engine == "torch":
        for weight in setup.workload.kept_in_bf16(model):
            weight.data = weight.data.to(torch.bfloat16)
    return model, groups


def reject_for_keras(spec: RunSpec, layout: Layout) -> None:
    """Raise UserError for what a Keras model cannot do: its variables hold whole weights beside the module."""
    key, reason = "", ""
    if spec.train.precision in ("fp64", "fp8"):
        key, reason = "train.precision", "is not supported by Keras on torch; use fp32 or bf16"
    elif not layout.plain and layout.strategy != "zero1":
        key = next((f"parallel.{axis}" for axis in ("tensor", "pipeline") if getattr(layout, axis) > 1), "")
        key = key or "parallel.strategy"
        reason = "divides weights, which Keras holds itself; use parallel.strategy=ddp, or zero1"
    if reason:
        section, _, name = key.partition(".")
        message = f"{key}={getattr(getattr(spec, section), name)}: it {reason}"
        raise UserError(message, code="not-supported", key=key)


@contextmanager
def build_without_memory() -> Iterator[None]:
    """Put parameters on the meta device as soon as a module has them; a shared one stays one."""
    register, emptied = nn.Module.register_parameter, WeakIdKeyDictionary()

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or type(param) is not nn.Parameter or param.is_meta:
            return
        if param not in emptied:
            emptied[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        module._parameters[name] = emptied[param]

    cast(Any, nn.Module).register_parameter = register_empty
    try:
        yield
    finally:
        cast(Any, nn.Module).register_parameter = register


def has_transient_buffers(model: nn.Module) -> bool:
    """Return whether it has buffers that no file of its weights holds."""
    return any(module._non_persistent_buffers_set for module in model.modules())


def has_shared_parameters(model: nn.Module) -> bool:
    """Return whether a parameter has two places, each of which would get its own memory."""
    return len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.named_parameters()))


def move_materialized(model: nn.Module, device: torch.device) -> None:
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def allocate_parameters(model: nn.Module, device: torch.device) -> None:
    """Allocate what has no memory; values come later."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
