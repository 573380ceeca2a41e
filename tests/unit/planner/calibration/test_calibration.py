"""A measured machine or device: fits of made-up measurements, plans that use them, and probes on a core."""

import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import TypeAdapter

import paceline
from paceline.cli import plan as verb
from paceline.io.files import write_json
from paceline.planner import target
from paceline.planner.calibration import calibrate, gpu_probes
from paceline.planner.calibration.calibrate import CPU_MATMULS, product_name
from paceline.planner.calibration.calibration import (
    CALIBRATION_FORMAT,
    GPU_LAYER,
    GPU_LAYER_SAMPLES,
    AcceleratorRates,
    default_calibration_path,
    describe_calibration_file,
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

DEVICES = yaml.safe_load(Path(__file__).with_name("local_devices.yaml").read_text(encoding="utf-8"))
PEAK = 50e9
FACTS = {"host": "desk", "cpu": "made up", "cores": 2, "memory_bytes": 16e9, "date": "2026-01-01", "torch": "2"}
ROOT = Path(__file__).resolve().parents[4]


def rates_by_tiles(sides, peak, half):
    tiles = [math.ceil(m / 128) * math.ceil(n / 128) for m, _, n in sides]
    return [[*of, peak * count / (count + half)] for of, count in zip(sides, tiles, strict=True)]


def made_up(ranks, crowd=1.0, half=0.4):
    """A machine whose products reach PEAK, with half of it at 0.4 tiles, and whose ring moves 1 GB/s after 1 ms."""
    matmuls = rates_by_tiles(CPU_MATMULS, PEAK / crowd, half)
    sent = [4e3, 4e6, 1.6e7]
    reduces = [[s, 1e-3 + 2 * (ranks - 1) / ranks * s / 1e9] for s in sent] if ranks > 1 else []
    return {
        "ranks": ranks,
        "threads": 1,
        "matmuls": matmuls,
        "attention_flops_s": 20e9 / crowd,
        "moved_bytes_s": 8e9 / crowd,
        "update_bytes_s": 10e9 / crowd,
        "launch_s": 1e-6 * crowd,
        "layer_s": 0.04 * crowd,
        "all_reduces": reduces,
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "calibration.json"
    rows = [made_up(1), made_up(2), made_up(4, crowd=2.0)]
    write_json(path, {"format": CALIBRATION_FORMAT, **FACTS, "measured": rows})
    return path


def docstrings(*words):
    recipe = ROOT / "recipes/classifier_docstrings.yaml"
    return paceline.load(recipe, [*words, "train.epochs=null", "train.steps=100"])


def test_fits_find_what_was_put_in(file):
    found = read_calibration(file)
    assert [found.nearest(n).ranks for n in (1, 2, 3, 4, 16)] == [1, 2, 4, 4, 4]
    two = found.nearest(2)
    assert two.matmul_fit() == pytest.approx((PEAK, 0.4))
    call_s, ring = two.all_reduce_fit()
    assert call_s == pytest.approx(1e-3, rel=0.01)
    assert ring == pytest.approx(1e9, rel=0.01)


def test_a_local_plan_uses_the_file_and_says_so(file):
    spec = docstrings("parallel.strategy=ddp")
    found = plan(spec, "local", [1, 2, 4], calibration=file)
    assert found.target.calibrated == str(file)
    one, two, four = found.rows
    assert two.speedup == pytest.approx(2, rel=0.1)  # two cores
    assert four.speedup == pytest.approx(two.speedup, rel=0.15)  # four ranks take turns on them
    assert two.price.time.comm_s == pytest.approx(1e-3 + found.cost_model.params * 4 / 1e9, rel=0.1)
    assert one.price.time.comm_s == 0
    slow = plan(spec, "4x1xlocal+100Mb", [2], calibration=file).rows[0]
    assert slow.price.time.comm_s == pytest.approx(found.cost_model.params * 4 * 8 / (100e6 * 0.95), rel=0.02)
    assert slow.speedup < two.speedup
    assert describe_calibration_file(file).endswith(f"--calibration {file}")


def test_without_a_calibration_cores_share_nominal_rates(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    target = resolve_target("local")
    if not target.shared:
        pytest.skip("this machine has devices of the catalogue")
    assert target.calibration is None
    assert "plans for cluster: local use it" in describe_calibration_file(default_calibration_path())
    part, whole = target.at(2).cluster.device, target.at(1).cluster.device
    assert part.flops_s["fp32"] == whole.flops_s["fp32"] / 2
    with expect_error("not-found", "--calibration"):
        resolve_target("2x1xlocal+1Gb")


def test_ranks_without_cores_take_turns():
    names = ["attention", "moved", "update", "launches", "layer", *(product_name(*sides) for sides in CPU_MATMULS)]
    rates, reduces = {2: dict.fromkeys(names, 8.0)}, {4: [0.1, 0.2, 0.3, 0.4]}
    row = calibrate._average_ranks(4, 1, [(rates, reduces)] * 4, most=2, cores=2)
    assert row["moved_bytes_s"] == 4
    assert row["launch_s"] == 1 / 4
    assert [s for _, s in row["all_reduces"]] == reduces[4]


def test_a_real_measurement_can_be_planned_with(tmp_path):
    path = tmp_path / "real.json"
    write_json(path, calibrate.calibrate_machine([1, 2], lambda text: None, threads=1, enough_s=0.01))
    found = read_calibration(path)
    assert [row.ranks for row in found.measured] == [1, 2]
    for row in found.measured:
        assert 1e8 < row.matmul_fit()[0] < 1e13
        assert 1e7 < row.moved_bytes_s < 1e12
        assert 1e-8 < row.launch_s < 1e-3
    assert found.measured[1].all_reduce_fit() > (1e-6, 1e5)
    assert plan(docstrings(), "local", [1, 2], calibration=path).chosen is not None


# ── a CUDA device

RATE, HALF = 600e12, 16.0


def made_up_gpu(**more):
    """An H200 whose products reach 600 TFLOP/s, half of it at 16 tiles."""
    matmuls = rates_by_tiles(gpu_probes.GPU_MATMULS, RATE, HALF)
    values = {"name": "NVIDIA H200", "memory_bytes": 150e9, "matmuls": matmuls}
    flops = [3.5 * 2.0 * b * h * s * s * d for b, h, s, d in gpu_probes.ATTENTIONS]
    values["attentions"] = [[*sides, n / 300e12] for sides, n in zip(gpu_probes.ATTENTIONS, flops, strict=True)]
    values["packed"] = [[*sides, 100e-6] for sides in gpu_probes.PACKED]
    values |= {"moved_bytes_s": 3.6e12, "update_bytes_s": 3e12, "launch_s": 1e-6, "kernel_s": 2e-6}
    return {**values, "pcie_bytes_s": 50e9, "layer_s": 8e-3, "layer_kernels": "compiled", **more}


def write(path, **more):
    write_json(path, {"format": CALIBRATION_FORMAT, **FACTS, "measured": [], "gpu": made_up_gpu(**more)})
    return path


@pytest.fixture
def gpu_file(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "list_gpu_names", list)
    return write(tmp_path / "calibration.json")


LM = lm("gpt2", 32, 1024, 50_257)


def test_fits_of_a_device_find_what_was_put_in(gpu_file):
    found = read_calibration(gpu_file).gpu
    assert found.matmul_fit() == pytest.approx((RATE, HALF))
    assert found.attention_fit(RATE, math.inf) == pytest.approx(0.5, rel=0.3)  # and tiles on the diagonal are whole
    assert found.attention_fit(RATE, 67e12) > found.attention_fit(RATE, math.inf)  # scores are priced apart


def test_a_plan_of_this_machine_uses_the_measured_device(gpu_file):
    found = plan(LM, "local", [1], calibration=gpu_file)
    assert found.target.calibrated == str(gpu_file)
    assert "H200" in found.target.whole.device.name
    assert found.target.at(1).cluster.device.memory_bytes == 150e9
    assert found.rows[0].price.where.physics.launch_s == 1e-6
    with expect_error("not-found", "--calibration"):  # of cores
        resolve_target("2x1xlocal+1Gb", gpu_file)


def test_the_layer_that_was_measured_whole_is_priced_at_what_it_took(gpu_file, tmp_path):
    where = resolve_target("local", gpu_file).at(1)
    placement = Placement(micro_batch=GPU_LAYER_SAMPLES, runtime=Runtime(kernels="compiled"))
    layer = build_decoder_blocks(GPU_LAYER, GPU_LAYER.context)[1]
    priced = Roofline(where.cluster.device, DTYPE_SIZES["amp_bf16"], where.physics).price_block(layer, placement)
    assert priced.total_s == pytest.approx(8e-3)
    slow = write(tmp_path / "slow.json", layer_s=16e-3)
    fast_s, slow_s = (plan(LM, "local", [1], calibration=f).rows[0].price.time.compute_s for f in (gpu_file, slow))
    assert slow_s == pytest.approx(2 * fast_s, rel=0.05)
    device = resolve_target("local", write(slow, kernel_s=1.0)).at(1).cluster.device
    assert min(device.flops_s.values()) > 0, "also where starts take longer than the layer"


def test_attention_over_short_texts_is_priced_as_it_was_measured(tmp_path, gpu_file):
    """Only the classifier has it."""
    slow = write(tmp_path / "slow.json", packed=[[*row, 900e-6] for row in gpu_probes.PACKED])
    none = write(tmp_path / "none.json", packed=[])
    texts = classifier(width=256, heads=8, layers=2, ffn=1024)
    texts = texts.replace({"train.steps": 100, "train.global_batch": 256, "train.precision": "bf16"})
    of_texts, of_lm = (
        [plan(spec, "local", [1], calibration=at).rows[0].price.time.compute_s for at in (slow, gpu_file, none)]
        for spec in (texts, LM)
    )
    assert max(of_texts[1:]) < of_texts[0]
    assert min(of_lm) == max(of_lm)


def test_the_verb_measures_ranks_and_the_device(tmp_path, monkeypatch):
    cores = {"format": CALIBRATION_FORMAT, **FACTS, "measured": []}
    monkeypatch.setattr(calibrate, "calibrate_machine", lambda *_: cores)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_probes, "measure_gpu", lambda _: made_up_gpu())
    path = tmp_path / "new" / "calibration.json"
    asked = Namespace(words=[], measured=None, out=path, ranks="1", threads=0, json=False)
    assert verb.run_calibrate(asked) == 0
    assert read_calibration(path).gpu.name == "NVIDIA H200"


@pytest.mark.parametrize("wrong", [{"moved_bytes_s": 0.0}, {"matmuls": []}, {"layer_kernels": "rubbish"}])
def test_a_damaged_file_is_rejected_when_it_is_read(tmp_path, wrong):
    path = write(tmp_path / "damaged.json", **wrong)
    with expect_error("damaged", match=next(iter(wrong))):
        plan(LM, "local", calibration=path)


@pytest.fixture
def usual(tmp_path, monkeypatch):
    """Set the GPUs of this machine, and the default file."""
    monkeypatch.setattr(target, "default_calibration_path", lambda: tmp_path / "calibration.json")
    return lambda *gpus: monkeypatch.setattr(target, "list_gpu_names", lambda: list(gpus))


@pytest.mark.parametrize(("measured", "gpus", "name", "note"), DEVICES)
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


def test_the_probes_run(monkeypatch):
    """On a core, on next to nothing: the rates are of no use, but a plan can be made with them."""
    small = {"GPU_MATMULS": ((64, 64, 64),), "ATTENTIONS": ((1, 2, 32, 16),), "MOVED": 1 << 12, "UPDATED": (100,)}
    small["PACKED"] = ((4, 2, 8, 16),)
    whole = replace(GPU_LAYER, width=32, heads=2, kv_heads=2, ffn=64, context=16)
    for name, value in {**small, "DEVICE": "cpu", "COPIED_BYTES": 1 << 10, "GPU_LAYER": whole}.items():
        monkeypatch.setattr(gpu_probes, name, value)
    empty, properties = torch.empty, type("Properties", (), {"total_memory": 1 << 34})
    monkeypatch.setattr(torch, "empty", lambda *sides, pin_memory=False, **more: empty(*sides, **more))
    monkeypatch.setattr(torch, "compile", lambda work: work)
    monkeypatch.setattr(gpu_probes, "_record_graph", lambda work: work)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = TypeAdapter(AcceleratorRates).validate_python(gpu_probes.measure_gpu(lambda _: None, enough_s=0.001))
    assert found.layer_kernels == "compiled"
    assert found.name == "NVIDIA H200"
    assert [row[:4] for row in found.packed] == [(4, 2, 8, 16)]
