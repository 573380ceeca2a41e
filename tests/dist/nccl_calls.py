"""What the rank of tests/gpu/test_flight.py does; in a file of its own, since looking for a device ends all forking."""

import json
import os
import time

from paceline.launch.hang_traces import dump_own_calls, enable_flight_recorder


def recorded():
    found = dump_own_calls()
    return json.loads(found).get("nccl 0", {}) if found else {}


def until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, recorded()
        time.sleep(0.05)


def collectives_of_one(size):
    """(the last call while it runs, the last call afterwards)."""
    import torch
    import torch.distributed as dist

    from paceline.launch.process_group import init_single_rank_group

    enable_flight_recorder(os.environ)
    torch.cuda.set_device(0)
    init_single_rank_group(torch.device("cuda", 0))
    dist.all_reduce(torch.zeros(size, device="cuda"))
    dist.broadcast(torch.zeros(size, device="cuda"), 0)
    called = recorded()
    torch.cuda.synchronize()
    until(lambda: recorded().get("done"))
    return called, recorded()
