"""TF_CONFIG: how TensorFlow's MultiWorkerMirroredStrategy learns of its peers, each with an address of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence

TF_CONFIG = "TF_CONFIG"


def tf_configs(host: str, ports: Sequence[int]) -> list[str]:
    """The variable of each rank: all are workers, rank 0 is the chief, and rank n listens on the n-th port."""
    workers = [f"{host}:{port}" for port in ports]
    return [
        json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
        for rank in range(len(workers))
    ]
