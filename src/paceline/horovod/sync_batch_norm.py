"""Batch normalisation over the samples of all ranks, on CUDA devices by torch's own kernels and elsewhere by sums."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.horovod import collectives
from paceline.horovod.reduction import Sum
from paceline.horovod.world import size


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """In training, mean and variance are those of all ranks' samples; in evaluation, the running ones.

    As in torch, half precision is normalised in float32 and comes out as it came in.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or input.device.type == "cuda" or size() == 1:
            return super().forward(input)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        over = [dimension for dimension in range(input.dim()) if dimension != 1]
        own = values.new_tensor([input.numel() // input.shape[1]])
        count = collectives.allreduce(own, op=Sum)
        mean = collectives.allreduce(values.sum(over), op=Sum) / count
        centred = values - _by_channel(mean, input)
        variance = collectives.allreduce(centred.square().sum(over), op=Sum) / count
        self._follow(mean.detach(), variance.detach(), count)
        normal = centred * _by_channel(torch.rsqrt(variance + self.eps), input)
        if self.affine:
            normal = normal * _by_channel(self.weight, input) + _by_channel(self.bias, input)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """The running values, with the unbiased variance, as torch keeps them."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance * count / (count - 1), share)


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))
