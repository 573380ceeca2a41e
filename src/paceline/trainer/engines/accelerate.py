"""Accelerate as the engine: it wraps the model, and the loop stays the same."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.config import RunSpec
from paceline.io.files import write_atomic
from paceline.launch.environment import set_environment
from paceline.launch.process_group import init_single_rank_group
from paceline.layout import Layout
from paceline.parallel import ddp, fsdp
from paceline.parallel.parallelize import ModelSetup, ParallelModel, count_parameters, prepare_model
from paceline.parallel.parameters import collect_local_parameters
from paceline.parallel.precision import HALF
from paceline.trainer import engines
from paceline.trainer.context import RunContext
from paceline.trainer.engines import accelerate_config
from paceline.trainer.step.step import State, Step

LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"  # Accelerate's plugin sets it and does not unset it


def start_accelerate(setup: ModelSetup, context: RunContext) -> Step:
    """Wrap the model with Accelerate; gradients are summed instead of averaged."""
    workload, spec, layout, device = setup.workload, setup.spec, setup.layout, setup.device
    model, groups = prepare_model(setup)
    model = model.to(device)
    parameters, blocks = count_parameters(model), workload.blocks(model)
    layers = [type(block).__name__ for block in blocks]
    config = accelerate_config.build_accelerate_config(spec, layout, device.type, layers)
    if context.rank_info.rank == 0:
        write_atomic(context.folder / accelerate_config.ACCELERATE_FILE, yaml.safe_dump(config, sort_keys=False))
    sharded = accelerate_config.is_sharding(layout)
    if sharded:
        fsdp.reject_unshardable(model, blocks, layout)
        init_single_rank_group(device)
        ddp.broadcast_model(model)  # no wrapper does it here
    several = sharded or layout.ranks > 1
    launched = engines.build_launch_variables(context.rank_info, device) if several else engines.NO_RANK_VARIABLES
    flags = {"ACCELERATE_USE_CPU": str(device.type == "cpu").lower(), "ACCELERATE_USE_FSDP": str(sharded).lower()}
    with set_environment({**launched, **flags, LOADING: None}):
        accelerator, net = _wrap_model(model, spec, device, config)
    facts = {
        "processes": (accelerator.num_processes, layout.ranks),
        "place": (accelerator.process_index, context.rank_info.rank),
        "kind": (accelerator.distributed_type.value, config["distributed_type"]),
        "device": (accelerator.device.type, device.type),
        "precision": (accelerator.mixed_precision, config["mixed_precision"]),
        **(_describe_shards(net, blocks, layout) if sharded else _describe_replicas(net, layout)),
    }
    engines.verify_engine("Accelerate", facts)  # it may drop a request
    if isinstance(net, DistributedDataParallel):
        net.register_comm_hook(None, ddp.make_sum_hook(setup.timer))
    elif sharded and layout.ranks > 1:
        for module in (module for module in net.modules() if isinstance(module, FSDPModule)):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by global counts
            module.set_force_sum_reduction_for_comms(True)
    local = collect_local_parameters([model], layout.ranks, dist.group.WORLD if sharded else None)
    state = State.new(ParallelModel(net, [model], local, parameters, groups=groups), spec.train, device, workload)
    return Step(workload, state, spec.train, setup.timer)


def _wrap_model(model: nn.Module, spec: RunSpec, device: torch.device, config: dict[str, Any]) -> tuple[Any, nn.Module]:
    """Return the Accelerator and the wrapped model."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    how = DistributedDataParallelKwargs(bucket_cap_mb=spec.parallel.bucket_mb, gradient_as_bucket_view=True)
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision=config["mixed_precision"],
        kwargs_handlers=[how],
        fsdp_plugin=_build_fsdp_plugin(config["fsdp_config"]) if config["distributed_type"] == "FSDP" else None,
    )
    if config["distributed_type"] != "FSDP":
        return accelerator, accelerator.prepare_model(model)
    # it requires an optimiser, whose state it shards; ours is built later
    net, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return accelerator, net


def _build_fsdp_plugin(config: dict[str, Any]) -> Any:
    """Build the FSDP plugin, without Accelerate's policy, which would sum gradients in bf16."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    layers = config.get("fsdp_transformer_layer_cls_to_wrap")
    return FullyShardedDataParallelPlugin(
        fsdp_version=config["fsdp_version"],
        reshard_after_forward=config["fsdp_reshard_after_forward"],
        mixed_precision_policy=MixedPrecisionPolicy(),
        auto_wrap_policy=config["fsdp_auto_wrap_policy"],
        transformer_cls_names_to_wrap=layers.split(",") if layers else None,
        cpu_offload=config["fsdp_offload_params"],
        cpu_ram_efficient_loading=config["fsdp_cpu_ram_efficient_loading"],
        activation_checkpointing=config["fsdp_activation_checkpointing"],
    )


def _describe_replicas(net: nn.Module, layout: Layout) -> dict[str, tuple[Any, Any]]:
    summing = net.process_group.size() if isinstance(net, DistributedDataParallel) else 1
    kind = type(net).__name__
    wrapper = (kind, "DistributedDataParallel" if layout.ranks > 1 else kind)
    return {"ranks that sum gradients": (summing, layout.ranks), "wrapper": wrapper}


def _describe_shards(net: nn.Module, blocks: Sequence[nn.Module], layout: Layout) -> dict[str, tuple[Any, Any]]:
    parameters = list(net.parameters())
    divided = [p for p in parameters if isinstance(p, DTensor) and [q.is_shard() for q in p.placements] == [True]]
    return {
        "wrapper FSDPModule": (isinstance(net, FSDPModule), True),
        "layers gathered one by one": (sum(isinstance(block, FSDPModule) for block in blocks), len(blocks)),
        "divided parameters": (len(divided), len(parameters)),
        "ranks that divide them": ({p.device_mesh.size() for p in divided}, {layout.ranks}),
        "parameters in half precision": (sum(p.dtype in HALF.values() for p in parameters), 0),
    }
