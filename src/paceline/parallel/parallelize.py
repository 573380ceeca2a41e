"""Spread an untouched model over ranks: the one place where layouts are applied, in an order that matters.

1. Pipeline cuts first: all that follows works on the layers this rank holds.
2. Tensor divides the matrices of those layers, context their sequences and expert their experts, which changes their
   forward pass; fp8 changes how they multiply.
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
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.weak import WeakIdKeyDictionary

from paceline.config import RunSpec
from paceline.errors import invalid_workload, reject_value
from paceline.execution import CPU, CUDA, Execution, Target
from paceline.launch.process_group import create_device_mesh, flatten_mesh, init_single_rank_group
from paceline.layout import Layout
from paceline.nn.batch_norm import list_batch_norms
from paceline.nn.experts import find_experts
from paceline.nn.keras_backend import has_keras
from paceline.nn.keyed_dropout import KeyedPasses, Site, list_sites, run_again
from paceline.nn.nf4 import count_elements
from paceline.parallel import ddp
from paceline.parallel.batch_layers import BatchLayers, convert_batch_layers
from paceline.parallel.compile import Compilation, compile_layers, find_equal_layers
from paceline.parallel.compress import GradientReduction, build_reduction
from paceline.parallel.context import ContextGroup
from paceline.parallel.parameters import LocalParameters, ParameterGroups, collect_local_parameters, resolve_groups
from paceline.parallel.precision import IN_BF16, set_tf32, use_fp8
from paceline.runlog.timers import CollectiveTimer
from paceline.workload import LogFn, Workload, ignore_log

if TYPE_CHECKING:
    from paceline.parallel.pipeline_inference import Cut
    from paceline.parallel.tensor_inference import InferredRules

AXES = ("pipeline", "replicate", "shard", "tensor")
"""The grid of ranks over which tensors are divided and gradients summed: neighbours on the last axis are neighbouring
ranks (`Layout.data_rank`); those that share a sequence are neighbours on `shard` or `replicate`."""
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
    parts: Sequence[nn.Module]  # those this rank holds, with the names of checkpoints; several only in a pipeline
    local_parameters: LocalParameters
    parameters: int
    same_samples: int = 1  # ranks that compute the loss of the same samples
    reduction: GradientReduction = field(default_factory=GradientReduction)
    groups: ParameterGroups = field(default_factory=ParameterGroups)
    context: ContextGroup | None = None  # the ranks that divide each sequence

    @cached_property
    def batch_layers(self) -> BatchLayers:
        mixtures = [part for part in self.parts if getattr(part, "expert_load", None) is not None]
        return BatchLayers(KeyedPasses(self.parts), list_batch_norms(self.parts), mixtures)

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
    notice: LogFn = ignore_log
    begin: Callable[[Sequence[nn.Module]], None] = lambda parts: None
    """Sets other first values than those that were drawn."""
    begins_whole: Callable[[nn.Module | None], bool] | None = None
    """Whether `begin` gives all that the model of every rank has; called by all ranks."""
    example: Callable[[], Any] = lambda: None
    """Returns a batch, for models of which it has to be found out how they can be divided."""


def parallelize(setup: ModelSetup) -> ParallelModel:
    workload, spec, layout, device = setup.workload, setup.spec, setup.layout, setup.device
    late, context = workload.draws_by_name, build_context_group(setup)
    found = None if late or layout.held_whole else _build_empty_model(setup)
    with torch.device("meta") if late else nullcontext():
        model, groups = found or _build_model(setup)
    if layout.held_whole:
        if late:
            _draw_weights(model, device, spec)
        setup.begin([model.to(device)])
        ddp.compare_first_weights(model)
        if context is not None:
            workload.gather_context(model, context)
        transform_layers(model, setup)
        return replace(_replicate_model(model, groups, setup), context=context)

    from paceline.parallel import expert, fsdp, pipeline, tensor
    from paceline.parallel.pipeline_inference import InferredPipeline

    rules, cut = infer_division(workload, model, setup.example, layout)
    if rules or cut:
        setup = replace(setup, execution=replace(setup.execution, compiled_layers=False))
    mesh, group = build_mesh(layout, device)
    if rules is not None and context is not None:
        cast(Any, context).attend = rules.divide_attention(mesh["tensor"], context.attend)
    experts = None
    if layout.expert > 1:  # neighbours on `expert` hold others, those on `replicate` and `shard` the same
        sizes = (layout.pipeline, *layout.expert_groups, layout.expert, layout.tensor)
        experts = create_device_mesh(device.type, sizes, (*AXES[:-1], "expert", "tensor"))
    home = torch.device("cpu") if layout.offload else device
    if late and cut is not None:  # weights are drawn in the order of all modules
        late = False
        _draw_weights(model, home, spec)
    elif not late:
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(home))
        ddp.compare_first_weights(model)
        ddp.broadcast_model(model)

    parameters = count_parameters(model)
    stages, ties = {0: model}, cut.ties if cut is not None else []
    if cut is not None:
        cut.keep_stage(model, mesh.get_local_rank("pipeline"))
    elif layout.pipeline > 1:
        stages, ties = pipeline.build_stages(workload, model, layout, mesh.get_local_rank("pipeline"))
    for stage in stages.values():
        blocks = workload.blocks(stage) if cut is None else cut.list_layers(stage)
        if rules is not None:
            rules.apply(stage, blocks, mesh["tensor"])
        elif layout.tensor > 1:
            tensor.apply_tensor_parallel(stage, workload.shard_rules, mesh["tensor"], layout.sequence)
        if context is not None:
            workload.gather_context(stage, context)
        if experts is not None:
            expert.divide_experts(stage, experts["expert"], setup.timer)
        transform_layers(stage, setup, blocks)
        if layout.data * layout.context > 1 or layout.strategy in ("fsdp", "hsdp", "zero2"):
            fsdp.shard_model(stage, blocks, mesh, setup, experts)
        if late:
            _draw_weights(stage, home, spec)
        elif found:
            allocate_parameters(stage, home)

    parts = list(stages.values())
    setup.begin(parts)
    local = collect_local_parameters(parts, layout.ranks // layout.pipeline, group)
    net: nn.Module = parts[0]
    if ties or cut is not None:
        back, _ = build_mesh(layout, device)  # so that ranks never wait for each other
        local = pipeline.tie_parameters(local, ties, layout, mesh, back)
    if cut is not None:
        net = InferredPipeline(model, cut, layout, mesh, back)
    elif layout.pipeline > 1:
        net = pipeline.Pipeline(stages, layout, mesh, device, layout.passes(layout.global_batch))
    return ParallelModel(net, parts, local, parameters, layout.tensor, groups=groups, context=context)


def infer_division(
    workload: Workload, model: nn.Module, example: Callable[[], Any], layout: Layout
) -> tuple["InferredRules | None", "Cut | None"]:
    """Derive shard rules, or stages, from the model if its workload defines none."""
    rules, cut = None, None
    if layout.tensor > 1 and not workload.shard_rules:
        from paceline.parallel.tensor_inference import infer_rules

        rules = infer_rules(workload, model, example(), layout)
    if layout.pipeline > 1 and not workload.has("stage"):
        from paceline.parallel.pipeline_inference import infer_stages

        cut = infer_stages(workload, model, example(), layout)
    return rules, cut


def build_mesh(layout: Layout, device: torch.device) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Return (the grid, the group of the ranks that hold the same layers as this one)."""
    init_single_rank_group(device)
    mesh = create_device_mesh(device.type, (layout.pipeline, *layout.summed_over, layout.tensor), AXES)
    return mesh, flatten_mesh(mesh["replicate", "shard", "tensor"], "stage")


def build_context_group(setup: ModelSetup) -> ContextGroup | None:
    layout = setup.layout
    if layout.context == 1:
        return None
    sizes = layout.pipeline * layout.data, layout.context, layout.tensor
    mesh = create_device_mesh(setup.device.type, sizes, ("outer", "context", "inner"))
    group = ContextGroup(mesh["context"], setup.timer, layout.ring)
    if setup.execution.compiled_layers:  # a collective with a gradient of its own stays outside of a compiled layer
        cast(Any, group).attend = torch.compiler.disable(group.attend)
    return group


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
    return sum(count_elements(p) for p in model.parameters())


def detect_target(device: torch.device) -> Target:
    """Detect what the device can do, as far as it decides how a step runs."""
    compiler = os.environ.get("CC") or "gcc"
    compiles = any(map(shutil.which, (compiler, "cc", "clang"))) and find_spec("triton") is not None
    return CPU if device.type == "cpu" else replace(CUDA, compiles=compiles)


def transform_layers(model: nn.Module, setup: ModelSetup, blocks: Sequence[nn.Module] | None = None) -> None:
    """Apply what concerns single layers: fp8, activation checkpointing, compilation."""
    workload, layout = setup.workload, setup.layout
    blocks = workload.blocks(model) if blocks is None else blocks
    if setup.spec.train.precision == "fp8":
        use_fp8(blocks or [model], setup.device)
    if layout.checkpointing != "none":
        if not blocks:
            reason = "the model has no repeated layers; give its Workload a method  blocks(model) -> list of layers"
            raise reject_value("parallel.activation_checkpointing", layout.checkpointing, reason)
        _recompute(blocks, layout.checkpointing)
    if setup.execution.compiled_layers:
        compile_model(model, setup)
        if layout.tensor > 1:
            from paceline.parallel.tensor import wait_for_inputs

            for block in blocks:
                block.register_forward_pre_hook(wait_for_inputs)


def _recompute(blocks: Sequence[nn.Module], how: str) -> None:
    """Compute activations again in the backward pass, from each block's input (full) or products."""
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        ops = [getattr(torch.ops.aten, name).default for name in KEPT_OPERATIONS if hasattr(torch.ops.aten, name)]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, ops)
    for block in blocks:
        block.forward = partial(_checkpoint, block.forward, list_sites(block), options)


def _checkpoint(
    forward: Callable[..., Any], sites: Sequence[Site], options: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    return checkpoint(run_again(forward, sites) if sites else forward, *args, **options, **kwargs)


def compile_model(model: nn.Module, setup: ModelSetup, dynamic: bool | None = None) -> Compilation:
    """Compile the layers of a model, or the whole if it has none of one structure."""
    workload, layout = setup.workload, setup.layout
    sharded = not layout.plain and layout.strategy != "zero1"
    # attention to a divided sequence, and tokens sent to experts or sorted by them, run as written between two graphs
    cut = layout.context > 1 or bool(find_experts(model))
    compilation = Compilation(setup.notice, only_training=not workload.compile_layers, in_one_graph=not cut)
    equal = workload.blocks(model) if workload.compile_layers else find_equal_layers(model)
    if equal:
        # DistributedDataParallel's own way would cut each layer in pieces, by buckets that layers already suit
        torch._dynamo.config.optimize_ddp = False
    # compiled, recomputing is part of the graph: calls of dropout need not be counted again
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    layers = equal or (workload.blocks(model) if sharded else []) or [model]
    dynamic = False if workload.compile_layers else dynamic
    compile_layers(layers, compilation, dynamic, forward_only=sharded or workload.compile_layers)
    return compilation


def _build_empty_model(setup: ModelSetup) -> tuple[nn.Module, ParameterGroups] | None:
    """Build without memory what is read later; None if it needs values, ties parameters, or draws."""
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
        raise invalid_workload("model", f"model() returned {type(found).__name__}; it must return a torch.nn.Module")
    if has_keras(found):
        reject_for_keras(setup.spec, setup.layout)
    train = setup.spec.train
    set_tf32(train.precision)
    convert_batch_layers(found, setup.spec, setup.layout, setup.device)
    groups = resolve_groups(setup.workload, train, found)
    model = found.to(torch.float64 if train.precision == "fp64" else torch.float32)
    if train.precision in IN_BF16 and setup.spec.parallel.engine == "torch":
        pure = (p for p in model.parameters() if p.is_floating_point())
        for weight in pure if train.weights == "bf16" else setup.workload.kept_in_bf16(model):
            weight.data = weight.data.to(torch.bfloat16)
    return model, groups


def reject_for_keras(spec: RunSpec, layout: Layout) -> None:
    """Raise UserError for what a Keras model cannot do: its variables hold whole weights."""
    train = spec.train
    if train.precision in ("fp64", "fp8"):
        raise reject_value("train.precision", train.precision, "Keras on torch does not support it; use fp32 or bf16")
    if train.weights == "bf16":
        raise reject_value("train.weights", "bf16", "Keras on torch does not support it; use fp32")
    if not layout.plain and layout.strategy != "zero1":
        axes = (axis for axis in ("tensor", "context", "expert", "pipeline") if getattr(layout, axis) > 1)
        axis = next(axes, "strategy")
        reason = "it divides weights, which Keras holds itself; use parallel.strategy=ddp, or zero1"
        raise reject_value(f"parallel.{axis}", getattr(spec.parallel, axis), reason)


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


def allocate_parameters(model: nn.Module, device: torch.device) -> None:
    """Allocate what has no memory; values come later."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
