"""The state of a run whose parts ZeRO keeps, in the same checkpoints and under the same names as every other run's.

DeepSpeed's own checkpoints cannot be read by another engine, another stage or, without a conversion, another number
of ranks. Here each tensor is put together when it is saved, and cut into parts when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.training.checkpoints import storage
from paceline.training.state import State


@dataclass
class ZeroState(State):
    engine: Any = field(kw_only=True)

    def allocate(self) -> None:
        """Give the optimiser all of its state, at zero, on the flat parts that ZeRO made of the parameters."""
        for flat in self._flats():
            state = {key: torch.zeros_like(flat) for key in self._moments()}
            if self._counts():
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            self.optimizer.state[flat] = state
        if not self._divided:
            self._zero._lazy_init_hp_params_optimizer_state()  # else done after the first step: too late to go back

    def tensors(self) -> dict[str, Any]:
        """What this rank writes is put together in host memory; of what others write it has the shape alone."""
        described = self._described()
        mine = set(storage.share(storage.flatten(described), dist.group.WORLD))
        model, optim = described["model"], described["optim"]
        for name, p in self._kept():
            model[name] = _in_host(self._whole(p), f"model.{name}" in mine)
        for name, p in self._updated():
            for key in self._moments():
                whole = self._whole(p, key)
                optim[f"{name}.{key}"] = _in_host(whole, f"optim.{name}.{key}" in mine)
        for name in optim:
            if name.endswith(".step"):
                optim[name] = self._steps()
        return described

    def restore(self, read: Callable[[dict[str, Any]], None]) -> None:
        """Read whole tensors into host memory, weights before the rest, and keep this rank's parts."""
        model = {name: _room(value) for name, value in self._described()["model"].items()}
        read({"model": model})
        self._put_weights(model)
        del model
        optim = {name: _room(value) for name, value in self._described()["optim"].items()}
        read({"optim": optim, "scaler": self.scaler.state()})
        for name, p in self._updated():
            for key in self._moments():
                self._put(p, optim[f"{name}.{key}"], key)
        counted = [value for name, value in optim.items() if name.endswith(".step")]
        for flat in self._flats() if counted else ():
            self.optimizer.state[flat]["step"].fill_(counted[0])

    # ------------------------------------------------------------------------------------------- what there is

    @property
    def _zero(self) -> Any:
        return self.engine.optimizer

    @property
    def _divided(self) -> bool:
        """ZeRO 3: parameters are divided too."""
        return self.engine.zero_optimization_stage() == 3

    @property
    def _model(self) -> nn.Module:
        return self.model.parts[0]

    def _moments(self) -> tuple[str, ...]:
        if isinstance(self.optimizer, torch.optim.AdamW):
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.optimizer.param_groups[0]["momentum"] else ()

    def _counts(self) -> bool:
        return isinstance(self.optimizer, torch.optim.AdamW)

    def _flats(self) -> list[Tensor]:
        if self._divided:
            return list(self._zero.fp32_partitioned_groups_flat)
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _steps(self) -> Tensor:
        return self.optimizer.state[self._flats()[0]]["step"].detach().cpu()

    def _kept(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by every name that a checkpoint has for them."""
        for name, value in self._model.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                yield name, value

    def _updated(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in self._model.named_parameters():
            if p.requires_grad:
                yield name, p

    def _described(self) -> dict[str, Any]:
        """Names, shapes and types of all that is saved; parameters without memory, the rest as it is."""
        model = {
            name: _shape(_size(value)) if isinstance(value, nn.Parameter) else value.detach()
            for name, value in self._model.state_dict(keep_vars=True).items()
        }
        optim: dict[str, Tensor] = {}
        for name, p in self._updated():
            optim |= {f"{name}.{key}": _shape(_size(p)) for key in self._moments()}
            if self._counts():
                optim[f"{name}.step"] = _shape(torch.Size([]))
        return {"model": model, "optim": optim, "scaler": self.scaler.state()}

    # ----------------------------------------------------------------------------------- together and apart again

    def _whole(self, p: nn.Parameter, key: str | None = None) -> Tensor:
        """A parameter, or what the optimiser keeps of it, put together from all ranks' parts."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not p.requires_grad:
            with self._gathered(p):
                return p.detach().float().clone()
        return safe_get_full_fp32_param(p) if key is None else safe_get_full_optimizer_state(p, key)

    def _put_weights(self, model: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, p in self._kept():
                if self._divided or not p.requires_grad:
                    with self._gathered(p, writer=0):
                        p.copy_(model[name])
                if p.requires_grad:
                    self._put(p, model[name])
            for name, value in self._model.state_dict(keep_vars=True).items():
                if not isinstance(value, nn.Parameter):
                    value.copy_(model[name])
        if not self._divided:
            self._zero.update_lp_params()

    def _put(self, p: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Keep this rank's part of a whole tensor."""
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        if self._divided:
            part = _part(value, p.ds_tensor.numel(), dist.get_rank())
            safe_set_local_fp32_param(p, part) if key is None else safe_set_local_optimizer_state(p, part, key)
        elif key is None:
            safe_set_full_fp32_param(p, value)
        else:
            safe_set_full_optimizer_state(p, value, key)

    def _gathered(self, p: nn.Parameter, writer: int | None = None) -> Any:
        import deepspeed

        return deepspeed.zero.GatheredParameters([p], modifier_rank=writer, enabled=self._divided)


def _size(p: Any) -> torch.Size:
    return torch.Size(getattr(p, "ds_shape", p.shape))


def _shape(size: torch.Size) -> Tensor:
    """A tensor of that shape in the memory of one number."""
    return torch.zeros(()).expand(size)


def _room(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype)


def _in_host(whole: Tensor, wanted: bool) -> Tensor:
    return whole.detach().cpu() if wanted else _shape(whole.shape)


def _part(value: Tensor, size: int, rank: int) -> Tensor:
    """The rank's part of a tensor that was cut into parts of that size, the last of them filled up with zeros."""
    part = torch.zeros(size, dtype=value.dtype)
    mine = value.flatten()[size * rank : size * (rank + 1)]
    part[: len(mine)] = mine
    return part
