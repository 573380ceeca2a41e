"""The language model on a CUDA device: the loss kernel (also under TRITON_INTERPRET=1 on the CPU), and whole steps."""

import os

import pytest
import torch
import torch.nn.functional as F

from paceline import train
from paceline.config import build_spec
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir

pytest.importorskip("triton", reason="no Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
on_device = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


@pytest.mark.parametrize(("rows", "vocab", "width"), [(5, 11, 64), (7, 300, 320), (3, 5000, 5056), (2, 8192, 8192)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_losses_and_gradients_of_cross_entropy(rows, vocab, width, kind):
    from paceline.nn.triton_kernels import compute_losses_in_place

    torch.manual_seed(0)
    logits = (5 * torch.randn(rows, width)).to(DEVICE, kind)
    targets = torch.randint(0, vocab, (rows,), device=DEVICE)
    targets[-1] = -100
    exact = logits[:, :vocab].double().requires_grad_()
    theirs = F.cross_entropy(exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(theirs.sum(), exact)
    kept = logits.clone()
    ours = compute_losses_in_place(logits, targets, vocab, gradients=False)
    assert torch.equal(kept, logits)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-5)
    assert torch.equal(ours, compute_losses_in_place(logits, targets, vocab, gradients=True))
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if kind == torch.float32 else {"rtol": 8e-3, "atol": 1e-7}
    torch.testing.assert_close(logits[:, :vocab].double(), gradient, **tolerance)
    assert not logits[:, vocab:].any()
    assert not logits[-1].any()


SHAPE = {"width": 256, "heads": 4, "kv_heads": 2, "layers": 3, "ffn": 512}


def lm(**more):
    spec = build_spec(
        {
            "workload": "lm",
            "model": {"preset": "custom", **SHAPE},
            "data": {"sequence": 64, "vocab": 1000, "limit": 400},
            "train": {"steps": 20, "global_batch": 16, "lr": 1e-3, "precision": "bf16", "log_every": 5},
        }
    )
    return spec.replace({"train.evaluate_every": 10, **more})


def curve(spec, out):
    result = train(spec, out, show=False)
    steps = read_steps(RunDir(result.path).events_file(0))
    return [step["loss"] for step in steps], [step["grad_norm"] for step in steps], result


def furthest(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


WAYS = {
    "recorded": {},
    "layers compiled": {"parallel.micro_batch": 4},
    "fsdp": {"parallel.strategy": "fsdp"},
    "zero2": {"parallel.strategy": "zero2"},
    "recomputed": {"parallel.activation_checkpointing": "full"},
    "selective": {"parallel.activation_checkpointing": "selective"},
    "fsdp, recomputed": {"parallel.strategy": "fsdp", "parallel.activation_checkpointing": "full"},
    "fsdp, offloaded": {"parallel.strategy": "fsdp", "parallel.offload": True},
    "wide heads": {"model.heads": 2, "model.kv_heads": 1},
    "learned positions, tied": {"model.positions": "learned", "model.tied": True, "model.ffn_kind": "gelu"},
}


@on_device
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_a_step_follows_the_plain_one(way, tmp_path):
    spec = lm(**WAYS[way])
    plain = spec.replace({"train.compile": "off", "parallel.strategy": "single", "parallel.offload": False})
    losses, norms, _ = curve(plain.replace({"parallel.activation_checkpointing": "none"}), tmp_path)
    ours, our_norms, result = curve(spec, tmp_path)
    print(f"{way}: losses {furthest(ours, losses):.1e}, norms {furthest(our_norms, norms):.1e}")
    assert furthest(ours, losses) < 3e-3
    assert furthest(our_norms, norms) < 5e-2
    assert result.summary.trained.skipped_steps == 0


@on_device
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize(("sequence", "batch"), [(64, 16), (60, 15)], ids=["even", "odd"])
def test_fp8_follows_bf16(strategy, sequence, batch, tmp_path):
    spec = lm(**{"data.sequence": sequence, "train.global_batch": batch})
    half, _, _ = curve(spec, tmp_path)
    ours, _, result = curve(spec.replace({"train.precision": "fp8", "parallel.strategy": strategy}), tmp_path)
    print(f"fp8 {strategy}: losses {furthest(ours, half):.1e}")
    assert 1e-6 < furthest(ours, half) < 2e-2
    assert result.summary.trained.skipped_steps == 0


@on_device
def test_fp32_on_the_device_follows_the_cpu(tmp_path):
    spec = lm(**{"train.precision": "fp32"})
    ours, norms, _ = curve(spec, tmp_path)
    losses, their_norms, _ = curve(spec.replace({"parallel.device": "cpu"}), tmp_path)
    assert furthest(ours, losses) < 1e-4
    assert furthest(norms, their_norms) < 1e-3


@on_device
def test_bf16_on_the_device_follows_fp32(tmp_path):
    half, _, _ = curve(lm(), tmp_path)
    full, _, _ = curve(lm(**{"train.precision": "fp32"}), tmp_path)
    assert furthest(half, full) < 2e-2
