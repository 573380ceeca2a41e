"""The CUDA device of a benchmark."""

from __future__ import annotations

import torch


def device_name() -> str:
    """As its driver calls it. Without one there is nothing to measure, and the program ends."""
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device, and torch sees none here")
    return torch.cuda.get_device_name()
