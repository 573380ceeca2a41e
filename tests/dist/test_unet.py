"""A segmentation on several ranks: the same answer, and pictures that one of them writes."""

import numpy as np
import pytest
from PIL import Image

import paceline
from paceline.parity import check
from paceline.record.run_dir import RunDir
from paceline.reporting.report import report
from paceline.spec import build

pytestmark = pytest.mark.usefixtures("warm_ranks")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """30 small scenes, in batches that ranks do not divide."""
    data = {"scenes": 30, "size": 32, "digits_per_scene": 1, "cache": str(tmp_path_factory.mktemp("images"))}
    return build(
        {
            "name": "scenes",
            "workload": "unet",
            "model": {"width": 8, "depth": 2},
            "data": {**data, "flip": "both", "brightness": 0.2},
            "train": {"steps": 4, "global_batch": 9, "evaluate_every": 2, "warmup": 0.5},
            "parallel": {"threads": 1, "device": "cpu", "timeout_s": 60},
        }
    )


@pytest.mark.parametrize(
    ("precision", "layouts"), [("fp64", ["single", "ddp:2", "fsdp:2"]), ("fp32", ["single", "ddp:4"])]
)
def test_any_layout_gives_the_same_answer(scenes, precision, layouts):
    parity = check(scenes.replace({"train.precision": precision}), accumulate=[2], layouts=layouts, steps=3)
    assert parity.holds, [row for row in parity.rows if not row.agrees(parity.tolerance)]
    assert parity.rows[1].metrics["dice"] == parity.rows[0].metrics["dice"]


def test_the_main_rank_writes_pictures_that_the_report_shows(scenes, tmp_path):
    result = paceline.train(scenes.replace({"parallel.ranks": 2}), tmp_path / "runs", show=False)
    assert result.metrics["accuracy"] <= 1
    files = sorted(RunDir(result.path).pictures.iterdir())
    assert [file.name for file in files] == ["image_truth_found-000002.png", "image_truth_found-000004.png"]
    with Image.open(files[-1]) as picture:
        assert picture.size == (3 * 132, 3 * 132), "three scenes are held out, three pictures of each"
        pixels = np.asarray(picture)
    assert pixels[:, :132].std() > 10
    page = report([result.path], tmp_path / "report").page.read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "image truth found, step 4" in page
