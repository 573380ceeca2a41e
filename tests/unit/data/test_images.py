"""Images in sub-folders named after their classes."""

import numpy as np
import pytest
from PIL import Image

from paceline.data import image_folder
from paceline.errors import RunFailed, UserError


@pytest.fixture
def photos(tmp_path):
    for name, shade, size in (("cat/1.png", 255, (6, 4)), ("cat/2.PNG", 0, (6, 4)), ("dog/deep/3.jpg", 128, (6, 4))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((size[1], size[0]), shade, np.uint8)).save(tmp_path / name)
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    return tmp_path


def test_a_sub_folder_is_a_class(photos):
    found = image_folder(photos)
    assert (len(found), found.classes, found.labels) == (3, ["cat", "dog"], [0, 0, 1])
    image, label = found[0]
    assert (tuple(image.shape), float(image.min()), label) == ((3, 4, 6), 1.0, 0)


def test_size_mode_and_transform(photos):
    assert tuple(image_folder(photos, size=8)[2][0].shape) == (3, 8, 8)
    assert tuple(image_folder(photos, size=(2, 3), mode="L")[2][0].shape) == (1, 2, 3)
    assert image_folder(photos, transform=lambda image: image.size)[2] == ((6, 4), 1)
    assert image_folder(photos, classes=["bird", "cat", "dog"]).labels == [1, 1, 2]


def test_what_is_refused(photos):
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(photos / "dog" / "4.png")
    for given, said in (
        ({}, "size=9"),
        ({"classes": ["cat"]}, "'dog'"),
        ({"path": photos / "cat"}, "no images"),
        ({"path": photos / "cats"}, "did you mean 'cat'"),
    ):
        with pytest.raises(UserError, match=said):
            image_folder(**{"path": photos, **given})
    (photos / "dog" / "4.png").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"4\.png"):
        image_folder(photos)
    with pytest.raises(RunFailed, match=r"4\.png"):
        image_folder(photos, size=4)[2]
