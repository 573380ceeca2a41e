"""Batch norm over fixed groups of consecutive samples: the same statistics on any layout.

A group is computed whole on one rank. Running statistics move once per step, by the mean over all of its groups.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.nn.keyed_dropout import PASS, has_triton

NORMS = "grouped_norms"  # of a module that computes norms which are not its modules


def divide_into_groups(samples: int, group: int) -> list[int]:
    """Return the sizes of the groups: the last has what is left, and is no single sample."""
    whole, left = divmod(samples, group)
    if left == 1 and whole:
        return [group] * (whole - 1) + [group + 1]
    return [group] * whole + [left] * (left > 0)


class GroupedBatchNorm(_BatchNorm):
    """Set as the class of an existing batch norm, whose names and evaluation stay."""

    group: int
    name: str
    found: tuple[tuple[Tensor, int], ...] = ()  # (mean and variance, rows) of each group of this step

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and PASS.samples):
            return super().forward(input)
        rows, left = divmod(input.shape[0], PASS.samples)
        if left or not rows:
            PASS.misfits.add(self.name)
            return super().forward(input)
        self._check_input_dim(input)
        sizes = [size * rows for size in divide_into_groups(PASS.samples, self.group)]
        if len(sizes) > 1 and self._has_kernel(input):
            return self._normalise_at_once(input, sizes)
        if len(sizes) > 1 and len(set(sizes)) == 1 and torch.compiler.is_compiling():
            return self._normalise_compiled(input, sizes)
        kind = torch.promote_types(input.dtype, torch.float32)
        statistics = torch.zeros(len(sizes), 2, self.num_features, dtype=kind, device=input.device)
        if PASS.counted and self.running_mean is not None:
            self.found = (*self.found, *zip(statistics.unbind(), sizes, strict=True))
        found = [self._normalise(x, each) for x, each in zip(input.split(sizes), statistics, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _has_kernel(self, x: Tensor) -> bool:
        innermost = x.movedim(1, -1).is_contiguous() and x.dtype != torch.float64 and self.weight is not None
        return x.is_cuda and innermost and has_triton() and not torch.compiler.is_compiling()

    def _normalise_at_once(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        from paceline.nn.triton_batch_norm import GroupNormalise

        innermost = x.movedim(1, -1)
        rows, each = innermost.flatten(0, -2), innermost[0].numel() // self.num_features
        moments = torch.empty(len(sizes), 3, self.num_features, device=x.device)
        if PASS.counted and self.running_mean is not None:
            self.found = (*self.found, *zip(moments[:, :2].unbind(), sizes, strict=True))
        affine, counts = (self.weight, self.bias), [size * each for size in sizes]
        normal: Tensor = GroupNormalise.apply(rows, *affine, moments, counts, self.eps)
        return normal.view(innermost.shape).movedim(-1, 1)

    def _normalise(self, x: Tensor, statistics: Tensor) -> Tensor:
        """Normalise a group, and keep its mean and variance: with a momentum of 1 torch does."""
        return F.batch_norm(x, statistics[0], statistics[1], self.weight, self.bias, True, 1.0, self.eps)

    def _normalise_compiled(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Normalise groups of one size as channels of their own, which a compiler reads where they are.

        Of one batch norm it keeps the input; of its operations one by one it would keep an fp32 copy too.
        """
        groups = len(sizes)
        channels = x.unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2)
        kind = torch.promote_types(x.dtype, torch.float32)
        mean, variance = torch.zeros(2, groups * self.num_features, dtype=kind, device=x.device).unbind()
        weight, bias = (None if one is None else one.repeat(groups) for one in (self.weight, self.bias))
        normal = F.batch_norm(channels, mean, variance, weight, bias, True, 1.0, self.eps)
        if PASS.counted and self.running_mean is not None:
            each = torch.stack([mean.view(groups, -1), variance.view(groups, -1)], 1)
            self.found = (*self.found, *zip(each.unbind(), sizes, strict=True))
        return normal.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)


class GroupedBatchNorm1d(GroupedBatchNorm, nn.BatchNorm1d):
    pass


class GroupedBatchNorm2d(GroupedBatchNorm, nn.BatchNorm2d):
    pass


class GroupedBatchNorm3d(GroupedBatchNorm, nn.BatchNorm3d):
    pass


GROUPED = {nn.BatchNorm1d: GroupedBatchNorm1d, nn.BatchNorm2d: GroupedBatchNorm2d, nn.BatchNorm3d: GroupedBatchNorm3d}


def group_batch_norms(model: nn.Module, group: int) -> None:
    for name, module in model.named_modules():
        if type(module) in GROUPED:
            module.__class__ = GROUPED[type(module)]
            module.group, module.name = group, name
        for norm in getattr(module, NORMS, ()):
            norm.group = group


def list_batch_norms(parts: Sequence[nn.Module]) -> list[GroupedBatchNorm]:
    """Return the batch norms that have groups, those of Keras models too."""
    modules = [module for part in parts for module in part.modules()]
    modules += [norm for module in modules for norm in getattr(module, NORMS, ()) if norm.group]
    return [module for module in modules if isinstance(module, GroupedBatchNorm)]


@torch.no_grad()
def update_running_statistics(
    norms: Sequence[GroupedBatchNorm], several: bool, wait: Callable[[], AbstractContextManager[object]] = nullcontext
) -> None:
    """Move the running statistics by the mean of the step's groups, of `several` ranks."""
    norms = [norm for norm in norms if norm.running_mean is not None]
    if not norms:
        return
    flat = _sum_over_groups(norms)
    if several and dist.is_initialized():
        with wait():
            dist.all_reduce(flat)
    sizes = [size for norm in norms for size in (2 * norm.num_features, 1)]
    sums = flat.split(sizes)
    counts = [count.expand(len(mine)) for mine, count in zip(sums[::2], sums[1::2], strict=True)]
    means = torch.cat(sums[::2]).div_(torch.cat(counts)).to(cast(Tensor, norms[0].running_mean).dtype)
    moved = means.split([norm.num_features for norm in norms for _ in range(2)])
    kept = [cast(Tensor, buffer) for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    steps = [cast(Tensor, norm.num_batches_tracked) for norm in norms]
    torch._foreach_add_(steps, 1)
    for momentum in {norm.momentum for norm in norms}:
        mine = [place for place, norm in enumerate(norms) for _ in range(2) if norm.momentum == momentum]
        chosen = [2 * place + number % 2 for number, place in enumerate(mine)]
        if momentum is not None:
            torch._foreach_lerp_([kept[i] for i in chosen], [moved[i] for i in chosen], momentum)
            continue
        for i in chosen:
            kept[i].lerp_(moved[i], 1 / steps[i // 2].to(means.dtype))


def _sum_over_groups(norms: Sequence[GroupedBatchNorm]) -> Tensor:
    """Return the sums of mean and variance over this rank's samples, and their number."""
    first = cast(Tensor, norms[0].running_mean)
    flat = first.new_zeros(sum(2 * norm.num_features + 1 for norm in norms), dtype=torch.float64)
    one, longest = first.new_ones(1), max(norms, key=lambda norm: len(norm.found)).found
    for number, (_, rows) in enumerate(longest):
        pieces: list[Tensor] = []
        for norm in norms:
            statistics, own = norm.found[number] if number < len(norm.found) else (None, 0)
            share = own / rows  # 1, unless norms are called with other rows
            both = first.new_zeros(2 * norm.num_features) if statistics is None else statistics.flatten()
            pieces += [both, one] if share == 1 else [both * share, one * share]
        flat.add_(torch.cat(pieces), alpha=rows)
    for norm in norms:
        norm.found = ()
    return flat
