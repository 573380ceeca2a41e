"""Trees on a CUDA device where the package is made for it, and one line where it is not."""

import pytest
import torch

from paceline import train
from paceline.config import build_spec
from paceline.errors import UserError

xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_trees_on_the_device_do_as_well_as_on_cores(tmp_path):
    values = {"workload": "trees", "name": "trees", "model": {"max_depth": 5, "subsample": 0.5}, "train": {"steps": 20}}
    data = {"rows": 200_000, "cache": str(tmp_path / "cache")}
    cores, device = (build_spec({**values, "data": data, "parallel": {"device": name}}) for name in ("cpu", "cuda"))
    if not xgboost.build_info()["USE_CUDA"]:
        with pytest.raises(UserError, match="xgboost-cpu"):
            train(device, tmp_path / "device", show=False)
        return
    expected, found = (train(s, tmp_path / s.parallel.device, show=False) for s in (cores, device))
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=0.003)
    assert found.summary.peak_bytes_per_rank == ()  # XGBoost's memory is not torch's
