"""Training on real text learns something: far above the share of the largest class."""

import pytest

from conftest import SHARED
from paceline import train
from paceline.config import build_spec

pytestmark = pytest.mark.usefixtures("warm_ranks")

MODEL = {"width": 64, "heads": 4, "layers": 1, "ffn": 128, "dropout": 0.1, "word_dropout": 0.2}


def spec(cache, data, **changes):
    return build_spec(
        {
            "model": MODEL,
            "data": {"cache": str(cache), "max_length": 96, "vocab": 4096, **data},
            "train": {"global_batch": 32, "lr": 3e-3, "warmup": 0.1, "evaluate_every": 10**6, **changes},
            "parallel": {"ranks": 2, "threads": 1},
        }
    )


def test_docstrings(corpus_cache, tmp_path):
    result = train(spec(corpus_cache, {"source": "docstrings"}, epochs=1), tmp_path, show=False)
    assert result.summary.evaluation.evaluated > 400
    assert result.metrics["accuracy"] > 0.25 + 0.25, "four balanced classes"


def test_ag_news(corpus_cache, tmp_path):
    folder = SHARED / "data" / "ag_news"
    if not folder.is_dir():
        pytest.skip(f"AG News is not at {folder}")
    data = {"source": "ag_news", "path": str(folder), "limit": 6000, "lowercase": True}
    result = train(spec(corpus_cache, data, epochs=3), tmp_path, show=False)
    assert result.summary.evaluation.evaluated == 7600
    assert result.metrics["accuracy"] > 0.8, "6,000 of the 120,000 rows"
