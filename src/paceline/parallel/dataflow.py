"""Find out what each module is computed from, by running the loss once on tensors without memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from paceline.nn.experts import find_experts

Origins = frozenset[Any]
NOWHERE: Origins = frozenset()


class Dataflow(TorchFunctionMode):
    """Carries origins, which hooks give to tensors, on to all that is computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self._origins = WeakIdKeyDictionary()
        self._counter = FlopCounterMode(display=False)

    @property
    def flops(self) -> float:
        """Count the work so far."""
        return self._counter.get_total_flops()

    def __enter__(self) -> "Dataflow":
        self._counter.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._counter.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        origins = self.of((args, kwargs))
        if origins:
            written = args[0] if found is None and args else found  # as x[i] = y writes
            self.mark(written, lambda index, leaf: origins)
        return found

    def of(self, tree: Any) -> Origins:
        """Return where the tensors of a tree come from."""
        found = (self._origins.get(leaf, NOWHERE) for leaf in tree_iter(tree) if isinstance(leaf, Tensor))
        return NOWHERE.union(*found)

    def mark(self, tree: Any, origins: Callable[[int, Tensor], Origins]) -> None:
        """Set the origins of the tensors of a tree, by their index among its leaves."""
        for index, leaf in enumerate(tree_iter(tree)):
            if isinstance(leaf, Tensor):
                self._origins[leaf] = origins(index, leaf)


class _Loss(nn.Module):
    def __init__(self, workload: Any, model: nn.Module) -> None:
        super().__init__()
        self.workload, self.model = workload, model

    def forward(self, batch: Any) -> None:
        self.workload.loss(self.model, batch)


def _compute_as_much(experts: Any, x_TD: Tensor, chosen_Tk: Tensor, scores_Tk: Tensor) -> Tensor:
    """Compute as many products as a mixture, without asking which expert a token goes to."""
    found = torch.zeros_like(x_TD)
    for score, up, down in zip(scores_Tk.unbind(1), experts.gate_up_proj, experts.down_proj, strict=False):
        gate, value = F.linear(x_TD, up).chunk(2, -1)
        found = found + F.linear(experts.act_fn(gate) * value, down) * score[:, None]
    return found


@torch.no_grad()
def run_on_fakes(workload: Any, model: nn.Module, batch: Any, flow: Dataflow) -> None:
    """Run the loss on tensors without memory; on real ones if code asks for values."""
    whole, named = _Loss(workload, model), [*model.named_parameters(), *model.named_buffers()]
    kind = next((t.dtype for _, t in named if t.is_floating_point()), torch.float32)
    batch = tree_map_only(Tensor, lambda x: x.to(kind) if x.is_floating_point() else x, batch)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    mixtures = find_experts(model)
    try:
        for experts in mixtures:  # their kernels have no rules for tensors without memory
            experts.forward = partial(_compute_as_much, experts)
        with fake:
            made = {f"model.{name}": torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in named}
            given = tree_map_only(Tensor, fake.from_tensor, batch)
            with flow:
                torch.func.functional_call(whole, made, (given,))
        return
    except Exception:  # the user's own code
        if any(t.is_meta for _, t in named):
            raise
    finally:
        for experts in mixtures:
            del experts.forward
    with torch.random.fork_rng(devices=[]), flow:
        whole(batch)
