"""DeepSpeed as the engine: ZeRO 0 to 3, under Paceline's loop.

DeepSpeed divides the state, sums gradients and gathers parameters. What decides the answer stays ours: the optimiser,
the learning rate, the division by the global count, the clipping of the global norm and what happens to a step that is
not finite. All of these happen in a hook before our optimiser's step, which DeepSpeed calls once per flat part.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import RunSpec
from paceline.data.prefetch import RankBatch
from paceline.errors import UserError, reject_value
from paceline.io.files import write_json
from paceline.launch.environment import RankInfo, set_environment
from paceline.launch.process_group import init_single_rank_group
from paceline.layout import Layout
from paceline.parallel.parallelize import ModelSetup, ParallelModel, count_parameters, prepare_model
from paceline.parallel.parameters import LocalParameters, collect_local_parameters
from paceline.parallel.precision import Scaler, autocast
from paceline.trainer.checkpoint.staging import flatten_state, select_own_tensors
from paceline.trainer.context import RunContext
from paceline.trainer.engines import build_launch_variables, deepspeed_config, verify_engine
from paceline.trainer.optim.optimizers import build_optimizer
from paceline.trainer.step.step import State, Step, get_divisor, stack_loss_and_count

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


def start_deepspeed(setup: ModelSetup, context: RunContext) -> Step:
    """Build the model as for one rank and let DeepSpeed shard it."""
    workload, spec, layout, device = setup.workload, setup.spec, setup.layout, setup.device
    if workload.has("optimizer"):
        raise reject_value("parallel.engine", "deepspeed", "it does not take the workload's own optimizer(); use torch")
    model, groups = prepare_model(setup)
    if spec.train.precision == "fp16":
        # inside of what DeepSpeed wraps, so that it sees a run in fp32: with fp16 it would scale the loss itself at
        # some stages, and sum gradients in fp16 at others
        model.forward = torch.autocast(device.type, torch.float16)(model.forward)
    parameters, local = count_parameters(model), collect_local_parameters([model], layout.ranks)
    optimizer = build_optimizer(spec.train, local, groups)
    largest = max((p.numel() for p in model.parameters() if p.ndim < 2), default=0)
    config = deepspeed_config.build_deepspeed_config(spec, layout, device.type == "cuda", largest)
    if context.rank_info.rank == 0:
        write_json(context.folder / deepspeed_config.DEEPSPEED_FILE, config)
    init_single_rank_group(device)
    try:
        engine = _start_engine(model, optimizer, config, context.rank_info, device)
    except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError) as error:
        if spec.parallel.engine_config is None:
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{spec.parallel.engine_config}: DeepSpeed does not take it: {reason}") from error
    stage = deepspeed_config.STAGES[layout.strategy]
    _verify_engine(engine, layout, spec, stage, device)
    if device.type == "cpu":  # where nothing else is done during collectives, so that they can be timed
        from deepspeed.comm import comm

        for name in COLLECTIVES:
            setattr(comm.cdb, name, setup.timer.blocking()(getattr(comm.cdb, name)))
    scaler = Scaler(spec.train, device)
    whole = ParallelModel(engine, [model], LocalParameters([]) if stage else local, parameters, groups=groups)
    state = ZeroState(whole, optimizer, scaler, engine=engine) if stage else State(whole, optimizer, scaler)
    state.allocate()
    return DeepSpeedStep(workload, state, spec.train, setup.timer, ranks=layout.ranks)


def _start_engine(
    model: nn.Module, optimizer: Any, config: dict[str, Any], place: RankInfo, device: torch.device
) -> Any:
    with set_environment({**build_launch_variables(place, device), "DS_ACCELERATOR": device.type}):
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
        if device.type == "cpu":  # would be compiled now; training never uses it
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _verify_engine(engine: Any, layout: Layout, spec: RunSpec, stage: int, device: torch.device) -> None:
    """Raise RunFailed if DeepSpeed dropped a request."""
    joined = torch.ones((), device=device)
    dist.all_reduce(joined, group=engine.data_parallel_group)
    half = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    facts: dict[str, tuple[Any, Any]] = {
        "ranks that sum gradients": (int(joined), layout.ranks),
        "world size": (engine.world_size, layout.ranks),
        "ZeRO stage": (int(engine.zero_optimization_stage()), stage),
        "own clipping": (engine.gradient_clipping(), 0.0),
        "device": (engine.device.type, device.type),
        "type of the weights": (next(engine.module.parameters()).dtype, half),
        "autocast": (bool(engine.torch_autocast_enabled()), spec.train.precision == "bf16" and half == torch.float32),
    }
    if stage:
        offload = engine.zero_offload_optimizer()
        facts["offload"] = offload is not None and offload.device == "cpu", spec.parallel.offload
    verify_engine("DeepSpeed", facts)
    if stage == 3:
        params, small = list(engine.module.parameters()), engine.zero_param_persistence_threshold()
        whole = [p for p in params if p.requires_grad and p.ds_numel > small and p.numel() == p.ds_numel]
        verify_engine("DeepSpeed", {"matrices that stay whole": (len(whole), 0)})


@dataclass
class DeepSpeedStep(Step):
    """Micro-batches, one sum over ranks, and our update where DeepSpeed calls the optimiser."""

    _: KW_ONLY
    ranks: int

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
            with self.running_pass(self.move_to_device(micro)) as moved:
                with autocast(self.train.precision, self.device):
                    total, count = self.workload.loss(net, moved)
                self.state.model.batch_layers.passes.end_forward()
                # DeepSpeed takes the mean over ranks, and the sum is wanted.
                scale = self.state.scaler.scale * (self.ranks * micro.weight / samples)
                net.backward(total * scale, scale_wrt_gas=False)
            found[:2] += stack_loss_and_count(total, count, micro.weight)
        self.state.model.batch_layers.update_statistics(several=True)
        self.local_sums = found.clone()
        with self.timer.blocking():
            dist.all_reduce(found)
        self.loss_sum, number, stops = found
        self.factor, self.fresh = samples / (get_divisor(number) * self.state.scaler.scale), True
        self.norm = torch.full_like(number, math.inf)  # stays so where DeepSpeed passes the step over by itself
        net.step()
        self.state.scaler.update(torch.isfinite(self.norm) & torch.isfinite(self.loss_sum))
        return torch.stack([self.loss_sum, number, self.norm, stops])

    def _before_update(self, optimizer: Any, args: Any, options: Any) -> None:
        """Set on the optimiser what divides the gradients and whether to skip the update; once per step."""
        if not self.fresh:
            return
        self.fresh = False
        factor = self.factor
        self.norm = norm = self._compute_raw_norm().to(factor) * factor
        if self.train.clip:
            factor = factor * (self.train.clip / (norm + 1e-12)).clamp(max=1.0)
        finite = torch.isfinite(norm) & torch.isfinite(self.loss_sum)
        where = next(p.device for group in optimizer.param_groups for p in group["params"])  # the host, if offloaded
        optimizer.grad_scale, optimizer.found_inf = (1 / factor).float().to(where), (~finite).float().to(where)

    def _compute_raw_norm(self) -> Tensor:
        """Return that of the summed gradients, over all parts; DeepSpeed has -1 for what is not finite."""
        if not self.net.zero_optimization():
            return torch.nn.utils.get_total_norm([p.grad for p in self.net.module.parameters() if p.grad is not None])
        norm = torch.as_tensor(self.net.optimizer._global_grad_norm)
        return torch.where(norm < 0, math.inf, norm)


@dataclass
class ZeroState(State):
    """The state of a run whose parts ZeRO keeps, saved under the same names as every other run's.

    DeepSpeed's own checkpoints cannot be read by another engine or stage. Here each tensor is put together when it is
    saved, and cut into parts when it is read.
    """

    _: KW_ONLY
    engine: Any

    def __post_init__(self) -> None:
        self.divided: bool = self.engine.zero_optimization_stage() == 3  # parameters are divided too
        self.counts = isinstance(self.optimizer, torch.optim.Adam)
        self.moments = ["exp_avg", "exp_avg_sq"] if self.counts else ["momentum_buffer"]
        if not self.counts and not self.optimizer.param_groups[0]["momentum"]:
            self.moments = []

    def allocate(self) -> None:
        """Allocate the optimiser's state, at zero, on the flat parts that ZeRO made."""
        for flat in self._list_flat_weights():
            state = {key: torch.zeros_like(flat) for key in self.moments}
            if self.counts:
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            self.optimizer.state[flat] = state
        if not self.divided:  # DeepSpeed would do it after the first step: too late to go back
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def tensors(self) -> dict[str, Any]:
        """Return a checkpoint's tensors, gathered from all ranks: those this rank writes, of others the shape alone."""
        described = self._described()
        mine = set(select_own_tensors(flatten_state(described), dist.group.WORLD))
        model, optim = described["model"], described["optim"]
        for name, p in self._saved().items():
            if isinstance(p, nn.Parameter):
                model[name] = _to_host(self._whole(p), f"model.{name}" in mine)
        for name, p in self._updated():
            for key in self.moments:
                optim[f"{name}.{key}"] = _to_host(self._whole(p, key), f"optim.{name}.{key}" in mine)
            if self.counts:
                optim[f"{name}.step"] = self.optimizer.state[self._list_flat_weights()[0]]["step"].detach().cpu()
        return described

    def replicas(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        return {} if self.divided else dict(self.model.parts[0].named_parameters())

    def restore(self, read: Callable[[dict[str, Any]], None]) -> None:
        """Read whole tensors into host memory, weights first, and keep this rank's parts."""
        model = _allocate(self._described()["model"])
        read({"model": model})
        self._put_weights(model)
        del model
        optim = _allocate(self._described()["optim"])
        read({"optim": optim, "scaler": self.scaler.state()})
        for name, p in self._updated():
            for key in self.moments:
                self._put(p, optim[f"{name}.{key}"], key)
        counted = [value for name, value in optim.items() if name.endswith(".step")]
        for flat in self._list_flat_weights() if counted else ():
            self.optimizer.state[flat]["step"].fill_(counted[0])

    def _list_flat_weights(self) -> list[Tensor]:
        if self.divided:
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _saved(self) -> dict[str, Any]:
        """Return parameters, and the rest, by every name that a checkpoint has for them."""
        return self.model.parts[0].state_dict(keep_vars=True)

    def _updated(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.parts[0].named_parameters() if p.requires_grad)

    def _described(self) -> dict[str, Any]:
        """Return all that is saved: parameters without memory, the rest as it is."""
        saved = self._saved().items()
        model = {name: _shape(x) if isinstance(x, nn.Parameter) else x.detach() for name, x in saved}
        optim: dict[str, Tensor] = {}
        for name, p in self._updated():
            optim |= {f"{name}.{key}": _shape(p) for key in self.moments}
            if self.counts:
                optim[f"{name}.step"] = torch.zeros(())
        return {"model": model, "optim": optim, "scaler": self.scaler.state()}

    def _whole(self, p: nn.Parameter, key: str | None = None) -> Tensor:
        """Return a parameter, or a moment of it, from all ranks' parts."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not p.requires_grad:
            with self._gather_parameter(p):
                return p.detach().float().clone()
        return safe_get_full_fp32_param(p) if key is None else safe_get_full_optimizer_state(p, key)

    def _put_weights(self, model: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, p in self._saved().items():
                if not isinstance(p, nn.Parameter):
                    p.copy_(model[name])
                    continue
                if self.divided or not p.requires_grad:
                    with self._gather_parameter(p, writer=0):
                        p.copy_(model[name])
                if p.requires_grad:
                    self._put(p, model[name])
        if not self.divided:
            self.engine.optimizer.update_lp_params()

    def _put(self, p: Any, value: Tensor, key: str | None = None) -> None:
        """Set this rank's part of a weight, or of its moment `key`, from the whole tensor."""
        from deepspeed import utils

        set_weight, set_moment = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
        if self.divided:
            size = p.ds_tensor.numel()  # the last part is filled up with zeros
            mine = value.flatten()[size * dist.get_rank() :][:size]
            value = F.pad(mine, (0, size - len(mine)))
            set_weight, set_moment = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state
        if key is None:
            set_weight(p, value)
        else:
            set_moment(p, value, key)

    def _gather_parameter(self, p: nn.Parameter, writer: int | None = None) -> Any:
        import deepspeed

        return deepspeed.zero.GatheredParameters([p], modifier_rank=writer, enabled=self.divided)


def _shape(like: Any) -> Tensor:
    """Return a tensor of that shape in the memory of one number."""
    return torch.zeros(()).expand(torch.Size(getattr(like, "ds_shape", like.shape)))


def _allocate(described: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty(value.shape, dtype=value.dtype) for name, value in described.items()}


def _to_host(whole: Tensor, wanted: bool) -> Tensor:
    return whole.detach().cpu() if wanted else _shape(whole)
