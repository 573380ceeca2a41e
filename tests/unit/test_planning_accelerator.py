"""A measured CUDA device: fits of made-up measurements, plans that use them, and the probes themselves on a core."""

import math
from dataclasses import replace

import pytest
import torch

import paceline
from paceline.planning import gpu_probes
from paceline.planning.accelerator import WHOLE, WHOLE_SAMPLES, accelerator_of
from paceline.planning.calibrate import table
from paceline.planning.calibration import FORMAT, read_calibration
from paceline.planning.compute import block_pass
from paceline.planning.decoder import decoder_blocks
from paceline.planning.plan import plan
from paceline.planning.site import site_of
from paceline.planning.spread import NUMBERS, Spread
from paceline.record.files import write_json
from paceline.spec import build

FACTS = {"host": "box", "cpu": "made up", "cores": 8, "memory_bytes": 64e9, "date": "2026-01-01", "torch": "2"}
RATE, HALF = 600e12, 16.0


def made_up(**more):
    """An H200 whose products reach 600 TFLOP/s, half of it at 16 tiles."""
    matmuls = []
    for m, k, n in gpu_probes.MATMULS:
        tiles = math.ceil(m / 128) * math.ceil(n / 128)
        matmuls.append([m, k, n, RATE * tiles / (tiles + HALF)])
    values = {"name": "NVIDIA H200", "memory_bytes": 150e9, "matmuls": matmuls}
    flops = [3.5 * 2.0 * b * h * s * s * d for b, h, s, d in gpu_probes.ATTENTIONS]
    values["attentions"] = [[*sides, n / 300e12] for sides, n in zip(gpu_probes.ATTENTIONS, flops, strict=True)]
    values |= {"moved_bytes_s": 3.6e12, "update_bytes_s": 3e12, "launch_s": 1e-6, "kernel_s": 2e-6}
    return {**values, "pcie_bytes_s": 50e9, "layer_s": 8e-3, "layer_kernels": "compiled", **more}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "calibration.json"
    write_json(path, {"format": FORMAT, **FACTS, "measured": [], "gpu": made_up()})
    return path


def lm(batch=32):
    return build(
        {
            "workload": "lm",
            "model": {"preset": "gpt2"},
            "data": {"sequence": 1024, "vocab": 50_257},
            "train": {"steps": 100, "global_batch": batch, "precision": "bf16"},
        }
    )


def test_fits_find_what_was_put_in():
    found = accelerator_of(made_up())
    assert found.matmul_fit() == pytest.approx((RATE, HALF))
    assert found.attention_flops_s == pytest.approx(300e12)
    assert found.attention_fit(RATE, math.inf) == pytest.approx(0.5, rel=0.3)  # and tiles on the diagonal are whole
    assert found.attention_fit(RATE, 67e12) > found.attention_fit(RATE, math.inf)  # scores are priced apart


def test_a_plan_of_this_machine_uses_the_measured_device(file):
    found = plan(lm(), "local", [1], calibration=file)
    assert found.site.calibrated == str(file)
    assert "H200" in found.site.whole.device.name
    assert found.site.at(1).cluster.device.memory_bytes == 150e9
    assert found.rows[0].price.where.physics.launch_s == 1e-6


def test_the_layer_that_was_measured_whole_is_priced_at_what_it_took(file):
    where = site_of("local", file).at(1)
    spread = Spread(micro_batch=WHOLE_SAMPLES, kernels="compiled")
    layer = decoder_blocks(WHOLE, WHOLE.context)[1]
    priced = block_pass(layer, spread, where.cluster.device, NUMBERS["amp_bf16"], where.physics)
    assert priced.total_s == pytest.approx(8e-3)


def test_a_slower_layer_makes_a_slower_plan(tmp_path, file):
    slow = tmp_path / "slow.json"
    write_json(slow, {"format": FORMAT, **FACTS, "measured": [], "gpu": made_up(layer_s=16e-3)})
    fast_s, slow_s = (plan(lm(), "local", [1], calibration=f).rows[0].price.time.compute_s for f in (file, slow))
    assert slow_s == pytest.approx(2 * fast_s, rel=0.05)


def test_what_was_measured_is_shown(file, capsys):
    from rich.console import Console

    Console(width=120).print(table(file))
    assert "600,000 GF/s" in capsys.readouterr().out.replace("600000", "600,000")


def test_ranks_of_cores_are_not_planned_from_a_device_alone(file):
    with pytest.raises(paceline.UserError, match="no calibration of this machine yet"):
        site_of("2x1xlocal+1Gb", file)


@pytest.mark.parametrize(
    "wrong", [{"moved_bytes_s": 0.0}, {"matmuls": []}, {"attentions": []}, {"layer_s": float("inf")}]
)
def test_rates_that_cannot_be_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="cannot be"):
        accelerator_of(made_up(**wrong))


def test_a_file_without_any_measurement_is_refused(tmp_path):
    write_json(tmp_path / "none.json", {"format": FORMAT, **FACTS, "measured": []})
    with pytest.raises(paceline.UserError, match="nothing was measured"):
        read_calibration(tmp_path / "none.json")


def test_the_probes_run(monkeypatch):
    """On a core, on next to nothing: what they measure is of no use, but all of it is there and can be planned with."""
    small = {"MATMULS": ((64, 64, 64),), "ATTENTIONS": ((1, 2, 32, 16),), "MOVED": 1 << 12, "UPDATED": (100,)}
    whole = replace(WHOLE, width=32, heads=2, kv_heads=2, ffn=64, context=16)
    for name, value in {**small, "DEVICE": "cpu", "COPIED_BYTES": 1 << 10, "WHOLE": whole}.items():
        monkeypatch.setattr(gpu_probes, name, value)
    empty, properties = torch.empty, type("Properties", (), {"total_memory": 1 << 34})
    monkeypatch.setattr(torch, "empty", lambda *sides, pin_memory=False, **more: empty(*sides, **more))
    monkeypatch.setattr(torch, "compile", lambda work: work)
    monkeypatch.setattr(gpu_probes, "_recorded", lambda work: work)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = accelerator_of(gpu_probes.measure_gpu(lambda _: None, enough_s=0.001))
    assert found.layer_kernels == "compiled"
    assert found.name == "NVIDIA H200"
