"""On a CUDA device: a run that finds no memory goes on in smaller passes, and has the same answer."""

from pathlib import Path

import hungry
import pytest
import torch

from paceline import train
from paceline.errors import OutOfMemory
from paceline.runlog.run_dir import RunDir
from results import losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
HUNGRY = f"{Path(hungry.__file__)}:Hungry"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_smaller_passes_have_the_same_answer(small, precision, tmp_path):
    plain = small.replace({"train.steps": 3, "model.layers": 1, "train.precision": precision})
    full = losses(train(plain.replace({"train.compile": "off"}), tmp_path, show=False))
    spec = plain.replace({"workload": HUNGRY})
    with pytest.raises(OutOfMemory, match="there is no memory for"):
        train(spec, tmp_path, show=False)
    result = train(spec.replace({"train.on_oom": "retry"}), tmp_path, show=False)
    assert RunDir(result.path).spec().parallel.micro_batch == hungry.ENOUGH
    assert losses(result) == pytest.approx(full, rel=1e-4 if precision == "fp32" else 3e-2)
