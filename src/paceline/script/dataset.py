"""Data sets that a script gives to its run."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset

from paceline.errors import UserError


def refuse_unusable(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise UserError(
            "run.batches got a DataLoader; give it the data set:  run.batches(loader.dataset)  since the run file says "
            "how large a global batch is, and its order must not depend on the number of ranks"
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") or hasattr(dataset, "to_numpy")):
        raise UserError(
            f"run.batches got a stream, {type(dataset).__name__}, whose samples have no numbers: no run could be "
            "resumed or spread over ranks with each of them seen once; give it  list(stream)  if that fits in memory, "
            "or a data set with __len__ and __getitem__"
        )


def share_of(dataset: Any, rank: int, ranks: int, together: bool) -> Any:
    """Every `ranks`-th sample. `together`: a forward pass is work for all ranks, so all must make as many."""
    if together and len(dataset) % ranks:
        raise UserError(
            f"run.share: {len(dataset)} samples on {ranks} ranks are not equal parts, and in this layout no rank can "
            "compute without the others; use  run.evaluate(dataset, sums)"
        )
    if isinstance(dataset, tuple):
        return tuple(column[rank::ranks] for column in dataset)
    return Subset(dataset, range(rank, len(dataset), ranks))
