"""Plots: what they show, where they go, and their colours."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from paceline.tinytopics.plot import (
    convert_lab_to_rgb,
    convert_rgb_to_lab,
    pal_tinytopics,
    plot_loss,
    plot_structure,
    plot_top_terms,
    scale_color_tinytopics,
)

L = np.array([[3.0, 1.0], [1.0, 1.0], [0.0, 2.0]])
F = np.array([[0.1, 0.6, 0.3], [0.8, 0.0, 0.2]])
SMALL = {"figsize": (4, 3), "dpi": 40}


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    calls = []
    monkeypatch.setattr(plt, "show", lambda: calls.append(len(plt.get_fignums())))
    yield calls
    plt.close("all")


@pytest.mark.parametrize(("plot", "values"), [(plot_loss, [3, 2, 1]), (plot_structure, L), (plot_top_terms, F)])
def test_a_picture_is_shown_or_written(plot, values, shown, tmp_path):
    assert plot(values, **SMALL) is None
    assert shown == [1]
    assert plt.gcf().get_size_inches().tolist() == [4, 3]
    plt.close("all")
    assert plot(values, **SMALL, output_file=str(tmp_path / "a.png")) is None
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileNotFoundError):
        plot(values, **SMALL, output_file="/no/such/folder/a.png")
    assert not plt.get_fignums()
    assert shown == [1]


@pytest.mark.parametrize("given", [L, torch.from_numpy(L)])
def test_documents_are_stacked_bars_of_their_topics(given):
    plot_structure(given, normalize_rows=True, color_palette=["#ff0000", "#00ff00"], **SMALL)
    axes = plt.gca()
    first, second = axes.patches
    assert_allclose(first.get_data().values, [0.75, 0.5, 0])
    assert_allclose(second.get_data().baseline, [0.75, 0.5, 0])
    assert_allclose(second.get_data().values, 1)
    assert second.get_facecolor() == (0, 1, 0, 1)
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 3), (0, 1))


@pytest.mark.parametrize(
    ("asked", "grid"),
    [({}, (2, 5)), ({"nrows": 3}, (3, 2)), ({"ncols": 6}, (1, 6)), ({"nrows": 2, "ncols": 4}, (2, 4))],
)
def test_charts_are_on_the_grid_that_was_asked_for(asked, grid):
    plot_top_terms(np.full((6, 3), 1 / 3), n_top_terms=5, **asked, **SMALL)
    charts = plt.gcf().axes
    assert len(charts) == 6
    assert charts[0].get_gridspec().get_geometry() == grid
    plot_top_terms(F, n_top_terms=2, term_names=["a", "b", "c"], **SMALL)
    first, second = plt.gcf().axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["b", "c"]
    assert [bar.get_width() for bar in second.patches] == [0.8, 0.2]


def test_colours_in_cielab_are_the_standards():
    assert pal_tinytopics("lab").shape == pal_tinytopics("rgb").shape == (len(pal_tinytopics()), 3)
    with pytest.raises(ValueError, match="cmyk"):
        pal_tinytopics("cmyk")
    found = convert_rgb_to_lab(np.array([[1.0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 1]]))
    expected = [[100, 0, 0], [0, 0, 0], [53.24, 80.09, 67.2], [32.3, 79.19, -107.86]]
    assert_allclose(found, expected, atol=0.02)
    some = np.random.default_rng(0).random((50, 3))
    assert_allclose(convert_lab_to_rgb(convert_rgb_to_lab(some)), some, atol=1e-9)


@pytest.mark.parametrize("n", [1, 10, 60])
def test_a_scale_has_the_colours_asked_for(n):
    colours = np.asarray(scale_color_tinytopics(n).colors)
    assert colours.shape == (n, 3)
    assert 0 <= colours.min() <= colours.max() <= 1
    ends = pal_tinytopics("rgb")[[0, min(n, 10) - 1]]
    assert_allclose(colours[[0, -1]], ends, atol=1e-6)
    if n > 10:
        assert np.abs(np.diff(colours, axis=0)).max() < 0.8, "a curve, not a jump"
