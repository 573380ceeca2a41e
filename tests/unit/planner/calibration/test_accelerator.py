"""A measured CUDA device: fits of made-up measurements, plans that use them, and the probes themselves on a core."""

import math
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import paceline
from paceline.cli import plan as verb
from paceline.io.files import write_json
from paceline.planner import target
from paceline.planner.calibration import calibrate, calibration, gpu_probes
from paceline.planner.calibration.calibrate import build_calibration_table
from paceline.planner.calibration.calibration import (
    CALIBRATION_FORMAT,
    GPU_LAYER,
    GPU_LAYER_SAMPLES,
    parse_accelerator_rates,
    read_calibration,
)
from paceline.planner.formulas.compute import Roofline
from paceline.planner.formulas.placement import DTYPE_SIZES, Placement, Runtime
from paceline.planner.formulas.shape import build_decoder_blocks
from paceline.planner.plan import plan
from paceline.planner.show import render_plan
from paceline.planner.target import resolve_target
from plan_specs import classifier, lm
from results import expect_error

FACTS = {"host": "box", "cpu": "made up", "cores": 8, "memory_bytes": 64e9, "date": "2026-01-01", "torch": "2"}
RATE, HALF = 600e12, 16.0


def made_up(**more):
    """An H200 whose products reach 600 TFLOP/s, half of it at 16 tiles."""
    matmuls = []
    for m, k, n in gpu_probes.GPU_MATMULS:
        tiles = math.ceil(m / 128) * math.ceil(n / 128)
        matmuls.append([m, k, n, RATE * tiles / (tiles + HALF)])
    values = {"name": "NVIDIA H200", "memory_bytes": 150e9, "matmuls": matmuls}
    flops = [3.5 * 2.0 * b * h * s * s * d for b, h, s, d in gpu_probes.ATTENTIONS]
    values["attentions"] = [[*sides, n / 300e12] for sides, n in zip(gpu_probes.ATTENTIONS, flops, strict=True)]
    values["packed"] = [[*sides, 100e-6] for sides in gpu_probes.PACKED]
    values |= {"moved_bytes_s": 3.6e12, "update_bytes_s": 3e12, "launch_s": 1e-6, "kernel_s": 2e-6}
    return {**values, "pcie_bytes_s": 50e9, "layer_s": 8e-3, "layer_kernels": "compiled", **more}


def write(path, **more):
    write_json(path, {"format": CALIBRATION_FORMAT, **FACTS, "measured": [], "gpu": made_up(**more)})
    return path


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "list_gpu_names", list)
    return write(tmp_path / "calibration.json")


LM = lm("gpt2", 32, 1024, 50_257)


def test_fits_find_what_was_put_in():
    found = parse_accelerator_rates(made_up())
    assert found.matmul_fit() == pytest.approx((RATE, HALF))
    assert found.attention_flops_s == pytest.approx(300e12)
    assert found.attention_fit(RATE, math.inf) == pytest.approx(0.5, rel=0.3)  # and tiles on the diagonal are whole
    assert found.attention_fit(RATE, 67e12) > found.attention_fit(RATE, math.inf)  # scores are priced apart


def test_a_plan_of_this_machine_uses_the_measured_device(file):
    found = plan(LM, "local", [1], calibration=file)
    assert found.target.calibrated == str(file)
    assert "H200" in found.target.whole.device.name
    assert found.target.at(1).cluster.device.memory_bytes == 150e9
    assert found.rows[0].price.where.physics.launch_s == 1e-6


def test_the_layer_that_was_measured_whole_is_priced_at_what_it_took(file):
    where = resolve_target("local", file).at(1)
    placement = Placement(micro_batch=GPU_LAYER_SAMPLES, runtime=Runtime(kernels="compiled"))
    layer = build_decoder_blocks(GPU_LAYER, GPU_LAYER.context)[1]
    priced = Roofline(where.cluster.device, DTYPE_SIZES["amp_bf16"], where.physics).price_block(layer, placement)
    assert priced.total_s == pytest.approx(8e-3)


def test_a_slower_layer_makes_a_slower_plan(tmp_path, file):
    slow = write(tmp_path / "slow.json", layer_s=16e-3)
    fast_s, slow_s = (plan(LM, "local", [1], calibration=f).rows[0].price.time.compute_s for f in (file, slow))
    assert slow_s == pytest.approx(2 * fast_s, rel=0.05)


CLASSIFIER = classifier(width=256, heads=8, layers=2, ffn=1024).replace(
    {"train.steps": 100, "train.global_batch": 256, "train.precision": "bf16"}
)


def test_attention_over_short_texts_is_priced_as_it_was_measured(tmp_path, file):
    """Only the classifier has it."""
    sides = gpu_probes.PACKED
    slow = write(tmp_path / "slow.json", packed=[[*row, 900e-6] for row in sides])
    none = write(tmp_path / "none.json", packed=[])
    found = {
        (name, at): plan(spec, "local", [1], calibration=at).rows[0].price.time.compute_s
        for name, spec in (("classifier", CLASSIFIER), ("lm", LM))
        for at in (file, slow, none)
    }
    assert found["classifier", file] < found["classifier", slow]
    assert found["classifier", none] < found["classifier", slow]
    assert found["lm", none] == found["lm", file] == found["lm", slow]


def test_what_was_measured_is_shown(file, capsys):
    Console(width=120).print(build_calibration_table(file))
    assert "600,000 GF/s" in capsys.readouterr().out.replace("600000", "600,000")


def test_the_verb_measures_ranks_and_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(
        calibrate, "calibrate_machine", lambda *_: {"format": CALIBRATION_FORMAT, **FACTS, "measured": []}
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_probes, "measure_gpu", lambda _: made_up())
    path = tmp_path / "new" / "calibration.json"
    asked = Namespace(words=[], measured=None, out=path, ranks="1", threads=0, json=False)
    assert verb.run_calibrate(asked) == 0
    assert read_calibration(path).gpu == parse_accelerator_rates(made_up())


def test_ranks_of_cores_are_not_planned_from_a_device_alone(file):
    with pytest.raises(paceline.UserError, match="no calibration"):
        resolve_target("2x1xlocal+1Gb", file)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"moved_bytes_s": 0.0}, {"matmuls": []}, {"attentions": []}),
        *({"layer_kernels": "rubbish"}, {"layer_s": 1e-9}, {"layer_s": math.inf}),
    ],
)
def test_a_damaged_file_is_rejected_when_it_is_read(tmp_path, wrong):
    path = write(tmp_path / "damaged.json", **wrong)
    with expect_error("damaged", match=next(iter(wrong))):
        plan(LM, "local", calibration=path)


def test_starts_that_take_longer_than_the_layer_leave_rates_above_zero(tmp_path):
    device = resolve_target("local", write(tmp_path / "slow.json", kernel_s=1.0)).at(1).cluster.device
    assert min(device.flops_s.values()) > 0


@pytest.fixture
def usual(tmp_path, monkeypatch):
    """Set the GPUs of this machine, and the default file."""
    monkeypatch.setattr(target, "default_calibration_path", lambda: tmp_path / "calibration.json")
    return lambda *gpus: monkeypatch.setattr(target, "list_gpu_names", lambda: list(gpus))


@pytest.mark.parametrize(
    ("measured", "gpus", "name", "note"),
    [
        ("NVIDIA H200", ["NVIDIA H200"] * 2, "local (2xH200-SXM-141GB)", ""),
        ("NVIDIA H100 80GB HBM3", ["NVIDIA H100 80GB HBM3"], "local (1xH100-SXM5-80GB)", ""),
        ("", ["NVIDIA H100 80GB HBM3"], "local (1xH100-SXM5-80GB)", ""),
        ("NVIDIA H200", ["NVIDIA A100-SXM4-40GB"] * 2, "local (2xA100-SXM4-40GB)", "this machine has NVIDIA A100"),
        ("NVIDIA H200", [], "local", "no GPU can be seen"),
        ("", ["NVIDIA GeForce RTX 4070"], "local", "is not in the catalogue"),
    ],
)
def test_a_calibration_is_used_for_its_own_device_alone(usual, tmp_path, measured, gpus, name, note):
    """Any other device is planned from the catalogue, unknown ones are not, and both are mentioned."""
    usual(*gpus)
    path = write(tmp_path / "calibration.json", name=measured)
    if not measured:
        path.unlink()
    found = resolve_target("local")
    assert (found.name, bool(found.calibrated)) == (name, bool(measured and not note))
    assert note in found.note
    assert bool(note) == bool(found.note)
    shown = plan(LM, "local", calibration=path if measured and gpus else None)
    assert shown.as_json()["cluster"]["note"] == (found.note or None)
    assert not note or found.note in " ".join(part for part in render_plan(shown) if isinstance(part, str))


def test_a_device_that_is_not_in_the_catalogue_cannot_be_planned(tmp_path):
    with pytest.raises(paceline.UserError, match="RTX 4070 are not in"):
        resolve_target("local", write(tmp_path / "own.json", name="NVIDIA GeForce RTX 4070"))


def test_the_probes_run(monkeypatch):
    """On a core, on next to nothing: the rates are of no use, but a plan can be made with them."""
    small = {"GPU_MATMULS": ((64, 64, 64),), "ATTENTIONS": ((1, 2, 32, 16),), "MOVED": 1 << 12, "UPDATED": (100,)}
    small["PACKED"] = ((4, 2, 8, 16),)
    whole = replace(GPU_LAYER, width=32, heads=2, kv_heads=2, ffn=64, context=16)
    for name, value in {**small, "DEVICE": "cpu", "COPIED_BYTES": 1 << 10, "GPU_LAYER": whole}.items():
        monkeypatch.setattr(gpu_probes, name, value)
    monkeypatch.setattr(calibration, "GPU_LAYER", whole)
    monkeypatch.setattr(calibration, "MAX_OVER_PRODUCTS", 1e9)  # on a busy machine no time of this size fits another
    empty, properties = torch.empty, type("Properties", (), {"total_memory": 1 << 34})
    monkeypatch.setattr(torch, "empty", lambda *sides, pin_memory=False, **more: empty(*sides, **more))
    monkeypatch.setattr(torch, "compile", lambda work: work)
    monkeypatch.setattr(gpu_probes, "_record_graph", lambda work: work)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = parse_accelerator_rates(gpu_probes.measure_gpu(lambda _: None, enough_s=0.001))
    assert found.layer_kernels == "compiled"
    assert found.name == "NVIDIA H200"
    assert [row[:4] for row in found.packed] == [(4, 2, 8, 16)]
