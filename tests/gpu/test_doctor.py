"""The doctor on a CUDA device: it is there, as fast as its data sheet says, and the driver was asked."""

import pytest
import torch

from paceline import doctor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_a_healthy_device_is_found_healthy(tmp_path):
    found = doctor(out=tmp_path)
    rows = {finding.check: finding for finding in found.findings if finding.topic in ("devices", "versions")}
    for finding in rows.values():
        print(f"{finding.verdict.value}: {finding.check}: {finding.found} ({finding.expected})")
    assert not [finding for finding in rows.values() if "could not be checked" in finding.found]
    for check in ("CUDA", "CUDA devices", "products of cuda:0", "memory of cuda:0"):
        assert rows[check].verdict in ("ok", "look"), rows[check]
    assert rows["products of cuda:0"].found.endswith("TFLOP/s")
    assert "heat and power" in rows
    assert found.seconds < 30
