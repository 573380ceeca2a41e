"""`DistributedOptimizer`: gradients reduced over all ranks, in buckets and during the backward pass.

Buckets are filled from the last parameter to the first and sent in that order on every rank. Each carries a flag per
parameter, whether this rank has a gradient for it: a parameter that no rank has used keeps none. Ranks agree on sparse
gradients (`nn.Embedding(sparse=True)`) after the first backward pass; these are dense while in flight.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import UserError, join_names
from paceline.horovod import async_ops as ops
from paceline.horovod.world import AnySet, require_global_set, size

BUCKET_BYTES = 25_000_000
FIRST_BYTES = 1_000_000  # so that the first is sent early in the backward pass
Parameters = list[Parameter]
NamedParameters = Iterable[tuple[str, Parameter]] | None


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: NamedParameters = None,
    compression: type[ops.Compressor] = ops.Compression.none,
    backward_passes_per_step: int = 1,
    op: ops.Operation = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: AnySet = None,
) -> Any:
    """Return an optimiser that reduces gradients over ranks before `step`; it has the groups and state of `optimizer`.

    `gradient_predivide_factor` splits the averaging: divide by it before the sum, by the rest after. `num_groups`,
    `groups` and `sparse_as_dense` have no effect: buckets are filled by size, and sparse gradients are sent dense.
    """
    require_global_set(process_set)
    if isinstance(optimizer, _Distributed):
        raise UserError("this optimiser is a DistributedOptimizer already; give it the one of torch, once")
    if op not in (ops.Average, ops.Sum):
        ops.resolve_rule(op, None)  # rejects what is not a reduction
        raise UserError(f"op=hvd.{op.value}: gradients are summed or averaged; use hvd.Sum or hvd.Average")
    if gradient_predivide_factor != 1.0 and op is not ops.Average:
        raise UserError("gradient_predivide_factor= divides an average; use it with op=hvd.Average")
    names = _read_names(optimizer, named_parameters)
    rule = ops.ReduceRule(op, 1 / gradient_predivide_factor, gradient_predivide_factor)
    kind: Any = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    new = kind.__new__(kind)
    # An existing scheduler has replaced `step` of the old object by one that is bound to it.
    new.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    new._parameter_names = names
    new.exchange = GradientExchange(new, rule, compression, backward_passes_per_step)
    return new


def _read_names(optimizer: Optimizer, named_parameters: NamedParameters) -> dict[Parameter, str]:
    """Return the name of each parameter, generated if none are given; raise UserError if some lack one or share one."""
    if named_parameters is None:
        groups = enumerate(group["params"] for group in optimizer.param_groups)
        return {p: f"allreduce.noname.{i}.{j}" for i, group in groups for j, p in enumerate(group)}
    pairs = list(named_parameters)
    if twice := [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]:
        raise UserError(f"named_parameters= has several of the name {join_names(twice)}; names must differ")
    named = {parameter: name for name, parameter in pairs}
    if unnamed := sum(parameter not in named for parameter in _list_parameters(optimizer)):
        raise UserError(f"named_parameters= leaves out {unnamed} of the optimiser's; name all of them or none")
    return named


def _list_parameters(optimizer: Optimizer) -> Parameters:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass
class _BucketInFlight:
    """A bucket in flight: its flat gradients, and which of them this rank had."""

    bucket: Parameters
    handle: ops.Handle[Tensor]
    had: list[bool]
    sparse: set[Parameter]  # dense while in flight only

    @torch.no_grad()
    def unpack(self) -> None:
        summed = self.handle.wait()
        sizes = [parameter.numel() for parameter in self.bucket]
        *pieces, used = summed.split([*sizes, len(self.bucket)])
        # Asking a device for a value waits for it, and only a rank that lacks a gradient needs to know.
        any_has = [True] * len(sizes) if all(self.had) else used.gt(0).tolist()
        for parameter, piece, has in zip(self.bucket, pieces, any_has, strict=True):
            gradient = piece.view_as(parameter)
            if has and parameter in self.sparse:
                parameter.grad = gradient.to_sparse(1)
            elif has and parameter.grad is not None and not parameter.is_contiguous():
                parameter.grad.copy_(gradient)
            elif has:
                parameter.grad = gradient  # a view of the bucket, which saves a copy


class GradientExchange:
    """Exchange the gradients of one optimiser between ranks."""

    def __init__(
        self,
        optimizer: Optimizer,
        rule: ops.ReduceRule,
        compression: type[ops.Compressor],
        passes: int,
    ) -> None:
        self.rule, self.compression, self.passes = rule, compression, passes
        self.fresh = False  # the gradients are those of all ranks
        every = [parameter for parameter in _list_parameters(optimizer) if parameter.requires_grad]
        self.left = dict.fromkeys(every, passes)
        self.sparse: set[Parameter] = set()
        self.buckets: list[Parameters] = []
        self.sent: list[_BucketInFlight] = []
        if size() > 1:
            found = weakref.WeakMethod(self._on_gradient_ready)  # hooks do not keep a discarded optimiser alive
            for parameter in every:
                parameter.register_post_accumulate_grad_hook(lambda p: ready(p) if (ready := found()) else None)

    @property
    def begun(self) -> bool:
        """Return whether there was a backward pass since the last exchange."""
        return any(left != self.passes for left in self.left.values())

    def reset(self, passes: int) -> None:
        """Set the number of backward passes before the next exchange."""
        self.passes = passes
        self.left = dict.fromkeys(self.left, passes)

    def _on_gradient_ready(self, parameter: Parameter) -> None:
        if self.left[parameter] <= 0:
            often = f"a gradient was computed more than {self.passes} times before step()"
            raise AssertionError(f"{often}; give backward_passes_per_step=, or call step() or zero_grad() in between")
        self.left[parameter] -= 1
        self.fresh = False
        while len(self.sent) < len(self.buckets) and not any(self.left[p] for p in self.buckets[len(self.sent)]):
            self._send_next_bucket()

    def finish(self) -> None:
        """Send what has not been sent, wait for all of it, and put the reduced gradients in place."""
        if size() > 1:
            if not self.buckets:
                self._agree_on_sparse()
            while len(self.sent) < len(self.buckets):
                self._send_next_bucket()
            for sent in self.sent:
                sent.unpack()
            self.sent.clear()
            self.reset(self.passes)
        self.fresh = True

    def _agree_on_sparse(self) -> None:
        every = list(self.left)
        ops.require_same_call("DistributedOptimizer", every, self.rule.op.value)
        mine = torch.tensor([p.grad is not None and p.grad.is_sparse for p in every], device=every[0].device)
        sparse = ops.start_reduce(mine.to(torch.uint8), ops.ReduceRule(ops.Max)).wait().tolist()
        self.sparse = {parameter for parameter, is_sparse in zip(every, sparse, strict=True) if is_sparse}
        self.buckets = fill_buckets(every)

    def _send_next_bucket(self) -> None:
        bucket = self.buckets[len(self.sent)]
        had = [parameter.grad is not None for parameter in bucket]
        used = bucket[0].new_ones(len(had)) if all(had) else bucket[0].new_tensor(had)
        flat = torch.cat([*(self._flatten_gradient(parameter) for parameter in bucket), used])
        handle = ops.start_reduce_buffer(flat, self.rule, self.compression)
        self.sent.append(_BucketInFlight(bucket, handle, had, self.sparse))

    def _flatten_gradient(self, parameter: Parameter) -> Tensor:
        if parameter.grad is None:
            return parameter.new_zeros(parameter.numel())
        return parameter.grad.detach().to_dense().reshape(-1)


def fill_buckets(every: Parameters) -> list[Parameters]:
    """Group parameters, last first, into buckets of one dtype and device up to the bucket size."""
    buckets: list[Parameters] = []
    held = 0
    for parameter in reversed(every):
        last = buckets[-1] if buckets else []
        alike = last and (parameter.dtype, parameter.device) == (last[0].dtype, last[0].device)
        most = BUCKET_BYTES if len(buckets) > 1 else FIRST_BYTES
        if not alike or held + parameter.nbytes > most:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.nbytes
    return buckets


class _Distributed(Optimizer):
    """Mixin in front of the class of the user's optimiser."""

    exchange: GradientExchange
    _skip = False

    @property
    def backward_passes_per_step(self) -> int:
        return self.exchange.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.exchange.reset(passes)

    def synchronize(self) -> None:
        """Wait for the reduced gradients, for example to clip them before `step`."""
        self.exchange.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce gradients unless `synchronize` did so already, then update."""
        if closure is not None:

            def reduced() -> Any:
                loss = closure()
                self.synchronize()
                return loss

            return super().step(reduced)
        if not self._skip and self.exchange.fresh:
            message = "optimizer.step() after synchronize() without skip_synchronize(): gradients are reduced once"
            warnings.warn(message, stacklevel=2)
        elif not self._skip:
            self.synchronize()
        self.exchange.fresh = False
        return super().step()

    step.hooked = True  # type: ignore[attr-defined]  # the hooks of `step` run in that of the user's class

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Complete a started exchange on every rank, then discard the gradients."""
        if self.exchange.begun:
            self.exchange.finish()
        self.exchange.fresh = False
        super().zero_grad(*args, **options)
