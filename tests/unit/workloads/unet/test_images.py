"""Scenes, folders of pairs, and the samples that are cut from them."""

import shutil

import numpy as np
import pytest
from PIL import Image

from paceline.config import build_spec
from paceline.data.samples import traits_of
from paceline.errors import UserError
from paceline.planner.cost_model import build_cost_model
from paceline.workload import build_workload
from paceline.workloads.unet.corpus import IGNORED, Tiles, iter_tiles, make_crops
from paceline.workloads.unet.sections import ImageData
from paceline.workloads.unet.sources import SceneSource

SCENES = {"scenes": 12, "size": 40, "digits_per_scene": 2, "test_fraction": 0.3}


def workload(cache, model=None, **data):
    values = {"model": model or {"depth": 2}, "data": {"size": 32, **data, "cache": str(cache)}}
    return build_workload(build_spec({"workload": "unet", **values}))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def folder(tmp_path):
    """Three colour images of different sizes, with masks of classes 0, 1, 2 and pixels that do not count."""
    rng = np.random.default_rng(0)
    for part in ("images", "masks"):
        (tmp_path / part).mkdir()
    for name, (height, width) in {"a": (40, 50), "b": (32, 32), "c": (20, 70)}.items():
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(tmp_path / f"images/{name}.png")
        mask = rng.integers(0, 3, (height, width), dtype=np.uint8)
        mask[0, 0] = IGNORED
        Image.fromarray(mask).save(tmp_path / f"masks/{name}.tif")
    return tmp_path


def test_a_scene_is_a_function_of_its_number():
    """Another number of scenes does not change those that both have."""
    few, many = (list(SceneSource(ImageData(**{**SCENES, "scenes": n})).pairs("train")) for n in (3, 5))
    assert [len(few), len(many)] == [3, 5]
    for (image, mask), same in zip(few, many, strict=False):
        np.testing.assert_equal((image, mask), same)
        assert image.shape == (40, 40, 1)
        assert 1 <= len(set(mask.flat) - {0}) <= 2
    for seed, split in ((1, "train"), (0, "test")):
        other, _ = next(SceneSource(ImageData(**SCENES, seed=seed)).pairs(split))
        assert not np.array_equal(other, few[0][0])


def test_prepared_images_are_found_again_and_rebuilt_if_damaged(tmp_path):
    said = []
    first, again, third = (workload(tmp_path, **SCENES) for _ in range(3))
    first.prepare(said.append)
    again.prepare(said.append)
    assert said == ["images: 12 training and 4 test images in 11 classes prepared"]
    assert again.fingerprint() == first.fingerprint()
    (first.corpus.folder / "train.masks.npy").write_bytes(b"half")
    third.prepare(said.append)
    assert len(said) == 3
    assert "damaged (train.masks.npy" in said[1]
    assert (len(third.data("train")), third.classes()) == (12, ("background", *map(str, range(10))))


def test_tiles_show_every_pixel_once(folder, tmp_path):
    corpus = workload(tmp_path / "cache", source="folder", path=folder).corpus
    for images in (corpus.train, corpus.test):
        tiles = Tiles(images, 32)
        for image in range(len(images)):
            mine = [i for i, place in enumerate(tiles.places) if place[0] == image]
            seen = sum(int((tiles.pair(i, 0)[1] != IGNORED).sum()) for i in mine)
            assert seen == int((images.pair(image)[1] != IGNORED).sum())
            assert any(i in tiles.pictured for i in mine)
        assert all(tiles.places[i][2] == tiles.places[i][4] == 0 for i in tiles.pictured), "no part was shown before"
    assert list(iter_tiles(70, 20, 32)) == [(0, 0, 0, 0), (32, 0, 0, 0), (38, 26, 0, 0)]


def test_a_key_decides_the_crop_and_all_that_is_random(folder, tmp_path):
    data = {"source": "folder", "path": folder, "flip": "both", "brightness": 0.3, "size": 16}
    train = workload(tmp_path / "cache", **data).data("train")
    ids = np.zeros(8, np.int64)
    first, again, other = (train.batch(ids, np.arange(8) + begin) for begin in (0, 0, 100))
    assert first[0].equal(again[0])
    assert first[1].equal(again[1])
    assert not first[0].equal(other[0])
    assert (first[0].shape, set(first[1].unique().tolist()) <= {0, 1, 2, IGNORED}) == ((8, 3, 16, 16), True)
    alone = train.batch(ids[3:4], np.array([3]))
    assert alone[0][0].equal(first[0][3]), "not on who shares the batch"
    assert not hasattr(train, "resident")


def test_whole_images_can_be_resident(cache):
    """Where nothing is random, a batch is no more than rows of all samples."""
    found = workload(cache, **SCENES)
    train = found.data("train")
    assert traits_of(found, train).few_shapes, "its steps can be recorded"
    ids, keys = np.array([3, 1]), np.array([7, 8])
    for everything, batch in zip(train.resident(), train.batch(ids, keys), strict=True):
        assert everything[ids].equal(batch)
    assert not hasattr(make_crops(train.images, ImageData(size=16 * 2, flip="both")), "resident")


def test_black_and_white_masks_are_two_classes(tmp_path):
    for name in "ab":
        for part in ("images", "masks"):
            (tmp_path / part).mkdir(exist_ok=True)
        np.save(tmp_path / f"images/{name}.npy", np.full((16, 16), 9, np.uint8))
        Image.fromarray(np.eye(16, dtype=np.uint8) * 255).save(tmp_path / f"masks/{name}.png")
    found = workload(tmp_path / "cache", source="folder", path=tmp_path, size=16)
    assert found.classes() == ("0", "1")
    assert found.data("train").batch(np.array([0]), np.array([0]))[1].sum() == 16


def _multiply(masks, factor):
    for file in masks.iterdir():
        mask = np.asarray(Image.open(file))
        Image.fromarray(np.where(mask == IGNORED, mask, mask * np.uint8(factor))).save(file)


def _save(folder, part, name, array):
    np.save(folder / part / f"{name}.npy", array)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda f: (f / "masks/a.tif").unlink(), "for a"),
        (lambda f: (f / "images/a.png").write_bytes(b"no"), "a.png cannot be read"),
        (lambda f: [(f / "masks/a.tif").unlink(), _save(f, "masks", "a", np.zeros((3, 3), np.uint8))], "50 × 40"),
        (lambda f: [(f / "masks/a.tif").unlink(), _save(f, "masks", "a", np.zeros((40, 50, 3)))], "one class number"),
        (lambda f: [(f / "images/a.png").unlink(), _save(f, "images", "a", np.zeros((40, 50)))], "8 bits are read"),
        (lambda f: [(f / "images/a.png").unlink(), _save(f, "images", "a", np.zeros((40, 50), np.uint8))], "channels"),
        (lambda f: (f / "images").rename(f / "pictures"), "no folder images/"),
        (lambda f: shutil.rmtree(f), "no such folder"),
        (lambda f: _save(f, "images", "a", np.zeros((40, 50), np.uint8)), "a.npy and a.png"),
        (lambda f: (f / "masks/a.tif").rename(f / "masks/a.jpg"), "a.jpg: JPEG"),
        (lambda f: _multiply(f / "masks", 50), "values 0, 50, 100, 255"),
        (lambda f: [file.unlink() for file in (f / "masks").iterdir()], "masks/ has none of"),
    ],
)
def test_a_wrong_folder_is_refused_in_one_line(folder, tmp_path, harm, said):
    harm(folder)
    with pytest.raises(UserError, match=said) as refused:
        workload(tmp_path / "cache", source="folder", path=folder).prepare(print)
    assert "\n" not in str(refused.value)


def test_a_plan_makes_and_prepares_no_images(tmp_path):
    spec = workload(tmp_path / "cache", scenes=10**9, size=16384).spec
    found = build_cost_model(spec.replace({"train.steps": 5}))
    assert (found.samples, found.held_out) == (10**9, 10**8)
    assert found.sample_bytes == 2 * 16384**2
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_small_image_tells_what_a_larger_one_takes(tmp_path, precision, monkeypatch):
    spec = workload(tmp_path, scenes=20, size=128).spec.replace({"train.precision": precision})
    by_small = build_cost_model(spec)
    monkeypatch.setattr("paceline.workloads.unet.workload.OUTLINE_SIDE", 128)
    by_large = build_cost_model(spec)
    assert by_small.flops_per_sample == by_large.flops_per_sample
    for small, large in zip(by_small.blocks, by_large.blocks, strict=True):
        for name in ("params", "moved_elements", "saved_whole_elements", "edge_elements", "kernels"):
            assert getattr(small, name) == pytest.approx(getattr(large, name), rel=0.01)


def test_a_plan_of_a_folder_looks_at_a_few_pairs_and_says_so(folder, tmp_path_factory, monkeypatch):
    images = workload(tmp_path_factory.mktemp("cache"), source="folder", path=str(folder))
    seen = images.outline()
    assert (images.kind.channels, images.kind.classes) == (3, ("0", "1", "2"))
    assert (len(seen.samples), seen.assumptions) == (2, ())
    assert seen.held_out == round((4 + 1 + 3) / 3), "tiles of 32 × 32 pixels, of the mean image"
    monkeypatch.setattr("paceline.workloads.unet.sources.MAX_PIXELS", 1)
    assert images.outline().assumptions == ("3 classes, and images as large, as in 1 of 3 pairs",)
