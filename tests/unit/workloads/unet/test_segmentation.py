"""The UNet, its loss and its scores."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.workload import build_workload
from paceline.workloads.unet.corpus import IGNORED
from paceline.workloads.unet.sections import UNetModel
from paceline.workloads.unet.workload import (
    UNet,
    compute_losses,
    compute_scores,
    count_confused_pixels,
    draw_side_by_side,
)

SMALL = {"width": 4, "depth": 2}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("images"))
    data = {"scenes": 10, "size": 32, "digits_per_scene": 1, "cache": cache}
    return build_workload(build_spec({"workload": "unet", "model": SMALL, "data": data}))


def test_a_logit_for_each_class_and_pixel_whatever_shares_the_batch():
    torch.manual_seed(0)
    net = UNet(UNetModel(**SMALL), channels=3, classes=5).double().train()
    images = torch.randint(0, 256, (4, 3, 16, 24), dtype=torch.uint8)
    out = net(images)
    assert out.shape == (4, 5, 16, 24)
    assert torch.allclose(out[1:2], net(images[1:2]), rtol=1e-12)
    assert [type(m).__name__ for m in net.modules()].count("GroupNorm") == 10


def test_channels_last_changes_the_memory_and_not_the_answer():
    images, found = torch.randint(0, 256, (2, 1, 16, 16), dtype=torch.uint8), {}
    for choice in ("on", "off", "auto"):
        torch.manual_seed(0)
        found[choice] = UNet(UNetModel(**SMALL, channels_last=choice), 1, 3)(images)
    assert found["on"].is_contiguous(memory_format=torch.channels_last)
    assert found["off"].is_contiguous()
    assert found["auto"].is_contiguous(), "auto is off on a CPU"
    assert torch.allclose(found["on"], found["off"], atol=1e-5)


def test_the_loss_of_a_sample_is_its_own():
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 8, 8, dtype=torch.float64)
    masks = torch.randint(0, 4, (3, 8, 8)).to(torch.uint8)
    masks[1, :4] = IGNORED
    masks[2] = IGNORED
    each, there = compute_losses(logits, masks)
    assert there.tolist() == [True, True, False]
    assert each[2] == 0
    alone, _ = compute_losses(logits[1:2, :, 4:], masks[1:2, 4:])
    assert torch.allclose(each[1], alone[0]), "ignored pixels count nothing"
    entropy = F.cross_entropy(logits[:1], masks[:1].long())
    chances = logits[:1].softmax(1)
    dice = [
        float((2 * chances[0, k][masks[0] == k].sum() + 1) / (chances[0, k].sum() + (masks[0] == k).sum() + 1))
        for k in range(4)
    ]
    assert float(each[0]) == pytest.approx(float(entropy) + 1 - np.mean(dice))


def test_scores_of_a_known_table_of_a_perfect_and_an_empty_answer(small):
    truth = torch.tensor([[[0, 0, 1, 1], [1, 1, 2, IGNORED]]], dtype=torch.uint8)
    found = torch.tensor([[[0, 1, 1, 1], [1, 0, 0, 2]]])
    assert compute_scores(count_confused_pixels(found, truth, 4).numpy()) == pytest.approx(
        {"dice": (6 / 8 + 0) / 2, "iou": (3 / 5 + 0) / 2, "accuracy": 4 / 7, "background": 2 / 7}
    )

    _, masks = small.data("test").batch(np.arange(1), np.zeros(1, np.int64))
    perfect, empty = (
        compute_scores(count_confused_pixels(found, masks, 11).numpy()) for found in (masks, torch.zeros_like(masks))
    )
    assert (perfect["dice"], perfect["iou"], perfect["accuracy"]) == (1.0, 1.0, 1.0)
    assert (empty["dice"], empty["accuracy"]) == (0.0, empty["background"])


def test_prediction_is_what_evaluation_finds(small):
    """Also of an image larger than a tile, tile by tile."""
    torch.manual_seed(0)
    model = small.model().eval()
    images, _ = small.data("test").batch(np.arange(1), np.zeros(1, np.int64))
    image = images[0, 0].numpy()
    large = np.tile(image, (2, 3))[:60]
    with torch.no_grad():
        found = small.predict(model, small.encode([image, large]))
        expected = model(images).argmax(1)[0].numpy()
    assert np.array_equal(found["mask"][0], expected)
    assert found["mask"][1].shape == (60, 96)
    assert np.array_equal(found["mask"][1][:32, 32:64], expected)
    named = [words.split(":")[0] for words in found["found"][0].split(", ")]
    assert set(named) == {small.classes()[k] for k in np.unique(expected) if k and (expected == k).mean() >= 0.001}
    assert 0 < found["sure"][0] <= 1
    for wrong in (np.zeros((8, 8, 3), np.uint8), ".", np.zeros((0, 8), np.uint8), {"text": "a"}):
        with pytest.raises(UserError):
            small.encode([image, wrong])


def test_what_a_run_keeps_is_enough_to_use_it(small, tmp_path):
    small.keep(tmp_path)
    opened = build_workload(small.spec.replace({"data.source": "folder", "data.path": "/nowhere"}))
    opened.kept = tmp_path
    assert opened.classes()[:3] == ("background", "0", "1")
    opened.model().load_state_dict(small.model().state_dict())
    assert opened.onnx(opened.model())[1]["images"].shape == (2, 1, 32, 32)


def test_pictures_stand_side_by_side(small):
    images, masks = small.data("test").batch(np.arange(1), np.zeros(1, np.int64))
    picture = small.pictures(small.model().eval(), (images, masks))["image_truth_found"]
    assert picture.dtype == np.uint8
    assert picture.shape == (132, 3 * 132, 3)
    masks[:, :9] = IGNORED
    grey = small.pictures(small.model().eval(), (images, masks))["image_truth_found"]
    assert np.array_equal(grey[2:38, 134:262], grey[2:38, 266:394])
    same = draw_side_by_side(images.permute(0, 2, 3, 1).numpy(), masks.numpy(), masks.numpy())
    assert np.array_equal(same[:, 132:264], same[:, 264:])
