"""Programs of tinytopics on ranks: the answer of one process, whoever started and joined them."""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
import torch
from as_main import run_as_main
from numpy.testing import assert_allclose
from topic_ranks import fit_three_times

import paceline.tinytopics as tt
from conftest import SHARED
from paceline.launch.local import run_ranks

SEEDS = sorted((SHARED / "seeds").glob("000*"))


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    file = tmp_path_factory.mktemp("counts") / "x.npy"
    tt.set_random_seed(1)
    np.save(file, tt.generate_synthetic_data(61, 40, 3, 200)[0])
    return file


@pytest.mark.usefixtures("warm_ranks")
def test_ranks_give_the_answer_of_one_process(counts, tmp_path):
    """61 documents do not divide by 2. Later each rank has a seed of its own: the first's counts."""
    tt.set_random_seed(5)
    model, losses = tt.fit_model(tt.NumpyDiskDataset(counts), 3, num_epochs=8)
    L, F = model.get_normalized_L().numpy(), model.get_normalized_F().numpy()
    of_ranks = run_ranks(fit_three_times, (str(counts), str(tmp_path)), 2)
    for of_rank in of_ranks:
        assert 2 <= len(of_rank) <= 3
        for found in of_rank:
            assert_allclose(found[0], losses, rtol=1e-7)
            assert_allclose(found[1], L, atol=1e-5)
            assert_allclose(found[2], F, atol=1e-6)
    (told, *_), (silent, *_) = of_ranks
    assert f"Epoch 8, Loss = {told[0][-1]:.4f}" in told[3]
    assert silent[3] == ""
    saved = tt.NeuralPoissonNMF(61, 40, 3)
    saved.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_allclose(saved.get_normalized_F().numpy(), F, atol=1e-6)


@pytest.mark.skipif(not SEEDS, reason="the article with the two scripts is not here")
@pytest.mark.usefixtures("warm_ranks")
def test_the_scripts_of_the_article_run_with_one_import_changed(tmp_path, monkeypatch, capfd):
    """One writes counts, here few, the other fits them on two ranks with torchrun's variables."""
    pytest.importorskip("accelerate")
    data, training = re.findall(
        r"^```python\n(.*?)^```", SEEDS[0].read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    for name, script in (("data.py", data), ("training.py", training)):
        assert script.count("import tinytopics as tt") == 1
        script = script.replace("import tinytopics as tt", "import paceline.tinytopics as tt")
        script = script.replace("n, m, k = 100_000, 100_000, 20", "n, m, k = 120, 90, 20").replace("256 * 256", "400")
        (tmp_path / name).write_text(script)
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}
    exec(compile((tmp_path / "data.py").read_text(), "data.py", "exec"), space)
    assert np.load("X.npy").shape == (120, 90)
    run_ranks(run_as_main, ("training.py",), 2)
    said = capfd.readouterr().out
    losses = [float(loss) for loss in re.findall(r"^Epoch \d+, Loss = ([\d.]+)$", said, re.MULTILINE)]
    assert losses
    assert losses == sorted(losses, reverse=True)
    assert said.count("Loading data from X.npy") == 2
    assert Path("loss.png").stat().st_size > 0
    assert torch.load("model.pt", weights_only=True)["L.weight"].shape == (120, 20)
