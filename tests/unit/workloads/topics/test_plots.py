"""Pictures that are really drawn: their files, colours and labels."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from paceline.errors import RunFailed, UserError
from paceline.workloads.topics.result.plots import PALETTE, plot_loss, plot_structure, plot_top_terms, shorten_label
from results import expect_error
from topics_fits import small_fit


@pytest.fixture(scope="module")
def model():
    return small_fit()[1]


def rgb(colour):
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def pixels(figure):
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3]


def share(image, colour):
    """Of the picture, in this colour."""
    return (np.abs(image.astype(int) - rgb(colour)).max(axis=-1) < 3).mean()


@pytest.mark.parametrize("draw", [plot_loss, plot_structure, plot_top_terms])
def test_each_is_drawn_and_written(draw, model, tmp_path):
    for kind, start in {"png": b"\x89PNG", "svg": b"<?xml"}.items():
        figure = draw(model, output_file=tmp_path / f"picture.{kind}")
        content = (tmp_path / f"picture.{kind}").read_bytes()
        assert content.startswith(start)
        assert len(content) > 3_000
    assert len(np.unique(pixels(figure).reshape(-1, 3), axis=0)) > 20
    with pytest.raises(UserError, match="output_file="):
        draw(model, output_file=tmp_path / "picture.bmp")
    with pytest.raises(RunFailed, match="No such file"):
        draw(model, output_file=tmp_path / "nowhere" / "picture.png")


def test_nothing_is_left_behind(tmp_path):
    """No pyplot, no backend chosen, no style changed."""
    program = """if True:
        import sys, matplotlib, numpy as np
        before = list(dict.items(matplotlib.rcParams))  # as they are: to ask for the backend would choose one
        from paceline.workloads.topics.result.plots import plot_loss, plot_structure, plot_top_terms
        plot_loss([3, 2, 1]); plot_structure(np.eye(3)); plot_top_terms(np.eye(3))
        assert "matplotlib.pyplot" not in sys.modules
        assert before == list(dict.items(matplotlib.rcParams))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_loss_is_drawn_from_lists_and_tensors():
    figure = plot_loss(torch.tensor([5.0, 4.0, 3.5, 3.4]), title="Mine")
    assert figure.axes[0].get_title(loc="left") == "Mine"
    assert figure.axes[0].lines[0].get_ydata().tolist() == pytest.approx([5, 4, 3.5, 3.4])
    assert pixels(plot_loss([7.0])).min() < 100
    with pytest.raises(UserError, match="no losses"):
        plot_loss([])


def test_the_areas_of_a_structure_are_the_shares():
    L = np.random.default_rng(0).dirichlet([4, 2, 1], 300)
    image = pixels(plot_structure(L))
    areas = np.array([share(image, colour) for colour in PALETTE[:3]])
    assert areas / areas.sum() == pytest.approx(L.mean(axis=0), abs=0.02)


def test_many_topics_are_merged():
    L = np.random.default_rng(0).dirichlet(np.linspace(0.05, 1, 50), 400)
    figure = plot_structure(L)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(labels) == 21
    assert labels[-1] == "30 others"
    assert "topic 49" in labels


def test_a_structure_needs_shares():
    for wrong in (np.full((3, 2), 4.0), np.full((3, 2), -1.0)):
        with expect_error("invalid-value", "L"):
            plot_structure(wrong)
    with pytest.raises(UserError, match="a fit or an array"):
        plot_structure([1, 2])


def test_terms_are_written_as_they_are(tmp_path):
    F = np.array([[0.5, 0.3, 0.1, 0.1]])
    figure = plot_top_terms(F, 4, ["$\\frac$ and $", "line\nbreak", "  ", "x" * 60], output_file=tmp_path / "a.png")
    shown = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert shown == ["$\\frac$ and $", "line break", "(blank)", "x" * 21 + "…"]
    assert shorten_label("a" * 22) == "a" * 22


def test_some_topics_of_many():
    F = np.random.default_rng(0).dirichlet(np.ones(30), 40)
    assert len(plot_top_terms(F, 3).axes) == 24
    figure = plot_top_terms(F[:2], 3, by="lift", topic_names=["n0", "a name that is far too long to fit, in any way"])
    assert [axes.get_title(loc="left")[:2] for axes in figure.axes] == ["n0", "a "]
    with pytest.raises(UserError, match="2 term_names for 30"):
        plot_top_terms(F, term_names=["a", "b"])
