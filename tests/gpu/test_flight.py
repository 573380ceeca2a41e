"""On a device: what torch records of NCCL's collectives is read, and `watch` shows what a rank uses of it."""

import pytest
import torch
from nccl_calls import collectives_of_one

from paceline import train
from paceline.cli.main import main
from paceline.launch.local import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_collectives_of_nccl_are_read_from_torchs_recorder():
    ((called, done),) = run_ranks(collectives_of_one, (1000,), 1)
    assert called["name"] == done["name"] == "broadcast"
    assert called["number"] == done["number"] == 2
    assert done["done"]


def test_watch_shows_what_a_rank_uses_of_its_device(tiny_lm, tmp_path, capsys):
    pytest.importorskip("pynvml")
    result = train(tiny_lm.replace({"train.steps": 20, "parallel.device": "cuda"}), tmp_path, show=False)
    with pytest.raises(SystemExit) as ended:
        main(["watch", str(result.path), "--once"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "device memory power" in shown
    assert " W " in shown
