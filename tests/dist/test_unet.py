"""A segmentation on several ranks: the same answer, and pictures that one of them writes."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import paceline
from conftest import REPOSITORY
from paceline.config import build_spec
from paceline.reports.report import report
from paceline.runlog.run_dir import RunDir
from paceline.trials.check import check
from results import check_holds

pytestmark = pytest.mark.usefixtures("warm_ranks")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    data = {"scenes": 30, "size": 32, "digits_per_scene": 1, "cache": str(tmp_path_factory.mktemp("images"))}
    return build_spec(
        {
            "name": "scenes",
            "workload": "unet",
            "model": {"width": 8, "depth": 2},
            "data": {**data, "flip": "both", "brightness": 0.2},
            "train": {"steps": 4, "global_batch": 9, "evaluate_every": 2, "warmup": 0.5},
            "parallel": {"threads": 1, "device": "cpu", "timeout_s": 120},
        }
    )


@pytest.mark.parametrize(
    ("precision", "layouts"), [("fp64", ["single", "ddp:2", "fsdp:2"]), ("fp32", ["single", "ddp:4"])]
)
def test_any_layout_gives_the_same_answer(scenes, precision, layouts):
    parity = check_holds(scenes.replace({"train.precision": precision}), accumulate=[2], layouts=layouts, steps=3)
    assert parity.rows[1].metrics["dice"] == parity.rows[0].metrics["dice"]


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory):
    return paceline.train(scenes.replace({"parallel.ranks": 2}), tmp_path_factory.mktemp("runs"), show=False)


def test_the_main_rank_writes_pictures_that_the_report_shows(run, tmp_path):
    assert run.metrics["accuracy"] <= 1
    files = sorted(RunDir(run.path).pictures.iterdir())
    assert [file.name for file in files] == ["image_truth_found-000002.png", "image_truth_found-000004.png"]
    with Image.open(files[-1]) as picture:
        assert picture.size == (3 * 132, 3 * 132), "three scenes are held out, three pictures of each"
        pixels = np.asarray(picture)
    assert pixels[:, :132].std() > 10
    page = report([run.path], tmp_path / "report").page.read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "image truth found, step 4" in page


def test_an_exported_folder_finds_the_same_masks_without_paceline(run, tmp_path):
    paceline.export(run.path, tmp_path / "exported")
    large = np.random.default_rng(0).integers(0, 256, (40, 50), np.uint8)
    np.save(tmp_path / "large.npy", large)
    alone = (
        "import sys, numpy; sys.path.insert(0, 'exported'); from load import load; "
        "numpy.save('mask.npy', load().predict(numpy.load('large.npy'))); assert 'paceline' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", alone], cwd=tmp_path, check=True)
    (expected,) = paceline.open(run.path).predict([large])["mask"]
    assert np.array_equal(np.load(tmp_path / "mask.npy"), expected)


def test_the_diffusion_example_gives_the_same_answer_and_draws(tmp_path):
    small = {"model.width": 4, "model.depth": 2, "data.digits": 24, "train.warmup": 0.5, "train.precision": "fp64"}
    spec = paceline.load(REPOSITORY / "docs/examples/diffusion.yaml").replace({**small, "parallel.threads": 1})
    parity = check(spec, [1, 2], steps=2, out=tmp_path)
    assert parity.holds, parity.causes
    for run in tmp_path.iterdir():
        (file,) = RunDir(run).pictures.iterdir()
        with Image.open(file) as picture:
            assert picture.size == (8 * 32, 2 * 32)
