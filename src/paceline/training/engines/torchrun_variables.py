"""What libraries expect to find around them: the variables that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from paceline.launch.environment import Place


def variables_of(place: Place, device: torch.device) -> dict[str, str | None]:
    """Where this rank is in torchrun's words, whoever started it.

    Libraries take LOCAL_RANK for the number of the device. It is not where each rank sees a single device, its own.
    """
    local = str(device.index if device.type == "cuda" else place.local_rank)
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        **({"OMPI_COMM_WORLD_LOCAL_RANK": local} if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ else {}),
    }


def without_ranks() -> dict[str, str | None]:
    """No word of ranks: a library that finds none does not look for peers."""
    return dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


@contextmanager
def environment_set(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, or take them away where None, for as long as a library sets itself up."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
