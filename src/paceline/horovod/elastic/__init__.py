"""Resume after a failure: state that is committed to disk, and ranks that a launcher restarts.

Horovod keeps committed state in the memory of the ranks that survive. Here a commit is also a file, the launcher
(`paceline launch --restarts 3`, `torchrun --max-restarts 3`, a requeued job) restarts all ranks, in the same or
another number, and `run` starts from that file.
"""

from paceline.horovod.elastic.sampler import ElasticSampler
from paceline.horovod.elastic.state import ElasticState as State
from paceline.horovod.elastic.state import ObjectState, TorchState, run

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
