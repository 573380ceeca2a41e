"""Training that goes on after a failure: state that is committed to disk, and ranks that a launcher starts again.

Horovod keeps committed state in the memory of the ranks that survive. Here a commit is also a file, the launcher
(`paceline launch --restarts 3`, `torchrun --max-restarts 3`, a requeued job) starts all ranks again, on the same or
another number of them, and `run` begins with what the file holds.
"""

from paceline.horovod.elastic.sampler import ElasticSampler
from paceline.horovod.elastic.state import ElasticState as State
from paceline.horovod.elastic.state import ObjectState, TorchState, run

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
