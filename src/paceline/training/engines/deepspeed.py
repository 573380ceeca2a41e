"""DeepSpeed as the engine: ZeRO 0 to 3, under Paceline's loop.

DeepSpeed divides the state, sums gradients and gathers parameters. What decides the answer stays ours: the optimiser,
the learning rate, the division by the global count, the clipping of the global norm and what happens to a step that is
not finite. All of these happen in a hook before our optimiser's step, which DeepSpeed calls once per flat part.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.prefetch import RankBatch
from paceline.errors import UserError
from paceline.launch.environment import Place
from paceline.launch.group import group_of_one
from paceline.layout import Layout
from paceline.parallel.local_parameters import LocalParameters, local_parameters_of
from paceline.parallel.precision import Scaler, autocast
from paceline.parallel.wrapping import ModelSetup, ParallelModel, count, prepared
from paceline.record.files import write_json
from paceline.record.timers import CollectiveTimer
from paceline.spec import RunSpec
from paceline.training.context import RunContext
from paceline.training.engines import deepspeed_config, must_agree
from paceline.training.engines.deepspeed_state import ZeroState
from paceline.training.engines.torchrun_variables import environment_set, variables_of
from paceline.training.optim import optimizer_of
from paceline.training.state import State
from paceline.training.step import Step, loss_and_count

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


def start(setup: ModelSetup, context: RunContext) -> Step:
    """The model is built as for one rank; DeepSpeed divides it."""
    workload, spec, layout, device, place = setup.workload, setup.spec, setup.layout, setup.device, context.place
    model = prepared(setup)
    parameters, local = count(model), local_parameters_of([model], layout.ranks)
    optimizer = optimizer_of(spec.train, local)
    largest = max((p.numel() for p in model.parameters() if p.ndim < 2), default=0)
    config = deepspeed_config.config(spec, layout, device.type == "cuda", largest)
    if place.rank == 0:
        write_json(context.folder / deepspeed_config.FILE, config)
    group_of_one(device)
    try:
        engine = _initialize(model, optimizer, config, place, device)
    except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError) as error:
        if spec.parallel.engine_config is None:
            raise
        why = " ".join(str(error).split())[:300]
        raise UserError(f"{spec.parallel.engine_config}: DeepSpeed does not take it: {why}") from error
    stage = deepspeed_config.STAGES[layout.strategy]
    _prove(engine, layout, spec, stage, device)
    if device.type == "cpu":
        _time_collectives(setup.timer)
    scaler = Scaler(spec.train.precision, device)
    state: State
    if stage == 0:
        state = State(ParallelModel(engine, [model], local, parameters), optimizer, scaler)
    else:
        whole = ParallelModel(engine, [model], LocalParameters([]), parameters)
        state = ZeroState(whole, optimizer, scaler, engine=engine)
    state.allocate()
    return DeepSpeedStep(workload, state, spec.train, setup.timer, ranks=layout.ranks)


def _initialize(model: nn.Module, optimizer: Any, config: dict[str, Any], place: Place, device: torch.device) -> Any:
    with environment_set({**variables_of(place, device), "DS_ACCELERATOR": device.type}):
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
        if device.type == "cpu":  # would be compiled now, by a compiler that need not be there; training never uses it
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _prove(engine: Any, layout: Layout, spec: RunSpec, stage: int, device: torch.device) -> None:
    """DeepSpeed is as it was asked to be, or the run ends here."""
    joined = torch.ones((), device=device)
    dist.all_reduce(joined, group=engine.data_parallel_group)
    half = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    optimizer = type(engine.optimizer).__name__
    wanted = {0: ("AdamW", "SGD"), 3: ("DeepSpeedZeroOptimizer_Stage3",)}
    has: dict[str, tuple[Any, Any]] = {
        "ranks that sum gradients": (int(joined), layout.ranks),
        "world size": (engine.world_size, layout.ranks),
        "ZeRO stage": (int(engine.zero_optimization_stage()), stage),
        "clipping of its own": (engine.gradient_clipping(), 0.0),
        "device": (engine.device.type, device.type),
        "type of the weights": (next(engine.module.parameters()).dtype, half),
        "optimiser": (optimizer in wanted.get(stage, ("DeepSpeedZeroOptimizer", "BF16_Optimizer")), True),
        "autocast": (bool(engine.torch_autocast_enabled()), spec.train.precision == "bf16" and half == torch.float32),
    }
    must_agree("DeepSpeed", has)
    if stage:
        offload = engine.zero_offload_optimizer()
        has = _division(engine, layout.ranks, stage)
        has["offload"] = (offload is not None and offload.device == "cpu", spec.parallel.offload)
        must_agree("DeepSpeed", has)


def _division(engine: Any, ranks: int, stage: int) -> dict[str, tuple[Any, Any]]:
    """How much of the state this rank really holds."""
    zero = engine.optimizer
    params = [p for p in engine.module.parameters() if p.requires_grad]
    if stage == 3:
        parts = [(p.ds_tensor.numel(), math.ceil(p.ds_numel / ranks)) for p in params]
        small = engine.zero_param_persistence_threshold()
        whole = [p for p in params if p.ds_numel > small and p.numel() == p.ds_numel]
        return {
            "parts of parameters": (sum(got for got, _ in parts), sum(fair for _, fair in parts)),
            "matrices that stay whole": (len(whole), 0),
        }
    held = sum(p.numel() for group in zero.param_groups for p in group["params"])
    total = sum(p.numel() for p in params)
    room = len(zero.param_groups) * 4 * ranks  # each group is filled up so that it divides evenly
    return {"a part of the optimiser state": (total <= held * ranks <= total + room * ranks, True)}


@dataclass
class DeepSpeedStep(Step):
    """Micro-batches, one sum over ranks, and our update where DeepSpeed calls the optimiser."""

    ranks: int = field(kw_only=True)

    def __post_init__(self) -> None:
        self.factor = self.loss_sum = self.norm = torch.zeros(())
        self.fresh = False
        self.state.optimizer.register_step_pre_hook(self._before_update)

    def __call__(self, batch: RankBatch, stop: bool) -> Tensor:
        net, samples, last = self.net, batch.samples, len(batch.micro_batches) - 1
        found = torch.zeros(3, dtype=torch.float64, device=self.device)
        found[2] = float(stop)
        for index, micro in enumerate(batch.micro_batches):
            self.seed(batch, index)
            net.set_gradient_accumulation_boundary(index == last)
            with autocast(self.train.precision, self.device):
                total, count = self.workload.loss(net, self.moved(micro).batch)
            # DeepSpeed takes the mean over ranks, and the sum is wanted.
            net.backward(total * (self.ranks * micro.weight / samples), scale_wrt_gas=False)
            found[:2] += loss_and_count(total, count, micro.weight)
        with self.timer.blocking():
            dist.all_reduce(found)
        self.loss_sum, number, stops = found
        self.factor, self.fresh = samples / number.clamp(min=1), True
        self.norm = torch.full_like(number, math.inf)  # stays so where DeepSpeed passes the step over by itself
        net.step()
        return torch.stack([self.loss_sum, number, self.norm, stops])

    def _before_update(self, optimizer: Any, args: Any, options: Any) -> None:
        """Tell the optimiser by what to divide the gradients, and whether to apply them: the same for every part."""
        if not self.fresh:
            return
        self.fresh = False
        factor = self.factor
        self.norm = norm = self._raw_norm().to(factor) * factor
        if self.train.clip:
            factor = factor * (self.train.clip / (norm + 1e-12)).clamp(max=1.0)
        finite = torch.isfinite(norm) & torch.isfinite(self.loss_sum)
        where = next(p.device for group in optimizer.param_groups for p in group["params"])  # the host, if offloaded
        optimizer.grad_scale, optimizer.found_inf = (1 / factor).float().to(where), (~finite).float().to(where)

    def _raw_norm(self) -> Tensor:
        """Of the summed gradients, over all parts; DeepSpeed has -1 for what is not finite."""
        if not self.net.zero_optimization():
            return torch.nn.utils.get_total_norm([p.grad for p in self.net.module.parameters() if p.grad is not None])
        norm = torch.as_tensor(self.net.optimizer._global_grad_norm)
        return torch.where(norm < 0, math.inf, norm)


def _time_collectives(timer: CollectiveTimer) -> None:
    """On a CPU nothing else is done while DeepSpeed's collectives are under way."""
    from deepspeed.comm import comm

    def timed(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with timer.blocking():
                return collective(*args, **options)

        return call

    for name in COLLECTIVES:
        setattr(comm.cdb, name, timed(getattr(comm.cdb, name)))
