"""The palette in its three forms, and scales of any length."""

import numpy as np
import pytest
from matplotlib.colors import ListedColormap

from paceline.tinytopics.plot import convert_lab_to_rgb, convert_rgb_to_lab, pal_tinytopics, scale_color_tinytopics


def test_the_palette_in_three_forms():
    names, rgb, lab = pal_tinytopics(), pal_tinytopics(format="rgb"), pal_tinytopics(format="lab")
    assert len(set(names)) == 10
    assert names[0] == "#4269D0"
    assert rgb.shape == lab.shape == (10, 3)
    assert [round(255 * share) for share in rgb[0]] == [0x42, 0x69, 0xD0]
    names.clear()
    assert len(pal_tinytopics("hex")) == 10, "a new list each time"


def test_colours_in_cielab_are_the_standards():
    found = convert_rgb_to_lab(np.array([[1.0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 1]]))
    expected = [[100, 0, 0], [0, 0, 0], [53.24, 80.09, 67.2], [32.3, 79.19, -107.86]]
    np.testing.assert_allclose(found, expected, atol=0.02)
    some = np.random.default_rng(0).random((50, 3))
    np.testing.assert_allclose(convert_lab_to_rgb(convert_rgb_to_lab(some)), some, atol=1e-9)


def test_another_form_is_rejected():
    with pytest.raises(ValueError, match="cmyk"):
        pal_tinytopics("cmyk")


@pytest.mark.parametrize("n", [1, 10, 11, 60])
def test_a_scale_has_the_colours_asked_for(n):
    scale = scale_color_tinytopics(n)
    colours = np.asarray(scale.colors)
    assert isinstance(scale, ListedColormap)
    assert colours.shape == (n, 3)
    assert colours.min() >= 0
    assert colours.max() <= 1
    np.testing.assert_allclose(colours[0], pal_tinytopics("rgb")[0], atol=1e-6)
    if n > 10:
        np.testing.assert_allclose(colours[-1], pal_tinytopics("rgb")[-1], atol=1e-6)
        assert np.abs(np.diff(colours, axis=0)).max() < 0.8, "a curve, not a jump"
