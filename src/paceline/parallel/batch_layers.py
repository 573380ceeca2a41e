"""Make layers independent of who shares a pass: dropout by key, batch norm over groups."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.config import RunSpec
from paceline.errors import join_names, reject_value
from paceline.layout import Layout
from paceline.nn.batch_norm import GroupedBatchNorm, group_batch_norms, update_running_statistics
from paceline.nn.experts import balance_by_bias
from paceline.nn.keyed_dropout import PASS, KeyedPasses, mark_sites
from paceline.runlog.timers import CollectiveTimer

DEPENDS = "the answer depends on the layout"


@dataclass(frozen=True)
class BatchLayers:
    """Such layers of the parts of a model that this rank holds."""

    passes: KeyedPasses
    norms: Sequence[GroupedBatchNorm]
    mixtures: Sequence[nn.Module] = ()  # models that balance their experts after each step

    def __bool__(self) -> bool:
        return len(self.passes.sites) > 1 or bool(self.norms)

    @property
    def group(self) -> int:
        """Return how many samples must stay together."""
        return self.norms[0].group if self.norms else 1

    def update_statistics(self, several: bool, timer: CollectiveTimer | None = None) -> None:
        """Move running statistics and biases of experts by those of a step, of all ranks."""
        wait = timer.blocking if timer else nullcontext
        update_running_statistics(self.norms, several, wait)
        balance_by_bias(self.mixtures, several, wait)


def convert_batch_layers(model: nn.Module, spec: RunSpec, layout: Layout, device: torch.device) -> None:
    """Convert a model in place, before anything wraps it."""
    wanted = spec.train.batchnorm_group
    mark_sites(model)
    if wanted == "sync":
        if layout.ranks > 1 and device.type == "cpu" and any(isinstance(m, _NormBase) for m in model.modules()):
            raise reject_value("train.batchnorm_group", wanted, "needs CUDA devices; use a number of samples, or auto")
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    elif wanted != "as_is" and layout.pipeline == 1:
        group_batch_norms(model, layout.batchnorm_group(wanted))


def describe_dependence(draws: bool) -> str:
    """Describe what a pass has shown to depend on the layout; "" if nothing."""
    found = [join_names(sorted(PASS.misfits)) + " has rows that are not samples"] * bool(PASS.misfits)
    found += ["the model draws from torch's generator"] * draws
    return f"{DEPENDS}: {'; '.join(found)} (type  paceline check)" if found else ""


def describe_batch_layers(model: nn.Module, group: int, layout: Layout) -> list[str]:
    """Describe the groups of batch norm, and name layers whose results still depend on the layout."""
    batch = layout.global_batch
    lines = [f"batch norm over groups of {group} samples = {batch} global / {batch / group:.3g}"]
    found = [f"{name} ({type(module).__name__})" for name, module in model.named_modules() if _depends(module, layout)]
    return lines * (group > 1) + [f"{DEPENDS}: {join_names(found)} (type  paceline check)"] * bool(found)


def _depends(module: nn.Module, layout: Layout) -> bool:
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1  # inside of one kernel
    if isinstance(module, nn.SyncBatchNorm):
        return layout.passes(layout.global_batch) > 1
    return isinstance(module, _NormBase) and module.track_running_stats and not isinstance(module, GroupedBatchNorm)
