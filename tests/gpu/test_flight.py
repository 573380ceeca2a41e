"""On a device: what torch records of NCCL's collectives is read, and `watch` shows what a rank uses of it."""

import json
import time

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def recorded():
    from paceline.launch.flight import own_calls

    found = own_calls()
    return json.loads(found).get("nccl 0", {}) if found else {}


def until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, recorded()
        time.sleep(0.05)


def collectives_of_one(size):
    """(the last call while it runs, the last call afterwards)."""
    import os

    import torch.distributed as dist

    from paceline.launch.flight import keep_calls
    from paceline.launch.group import group_of_one

    keep_calls(os.environ)
    torch.cuda.set_device(0)
    group_of_one(torch.device("cuda", 0))
    dist.all_reduce(torch.zeros(size, device="cuda"))
    dist.broadcast(torch.zeros(size, device="cuda"), 0)
    called = recorded()
    torch.cuda.synchronize()
    until(lambda: recorded().get("done"))
    return called, recorded()


def test_collectives_of_nccl_are_read_from_torchs_recorder():
    from paceline.launch.local import run_ranks

    ((called, done),) = run_ranks(collectives_of_one, (1000,), 1)
    assert called["name"] == done["name"] == "broadcast"
    assert called["number"] == done["number"] == 2
    assert done["done"]


def test_watch_shows_what_a_rank_uses_of_its_device(tiny_lm, tmp_path, capsys):
    pytest.importorskip("pynvml")
    from paceline import train
    from paceline.cli import main

    result = train(tiny_lm.replace({"train.steps": 20, "parallel.device": "cuda"}), tmp_path, show=False)
    with pytest.raises(SystemExit) as ended:
        main(["watch", str(result.path), "--once"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rank 0 uses device" in shown
    assert "GB of it" in shown
    assert " W," in shown
