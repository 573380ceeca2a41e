"""Training on real text learns something: far above the share of the largest class."""

import pytest

from paceline import train
from paceline.config import build_spec

pytestmark = pytest.mark.usefixtures("warm_ranks")

MODEL = {"width": 64, "heads": 4, "layers": 1, "ffn": 128, "dropout": 0.1, "word_dropout": 0.2}


def test_docstrings(corpus_cache, tmp_path):
    data = {"source": "docstrings", "cache": str(corpus_cache), "max_length": 96, "vocab": 4096}
    length = {"epochs": 1, "global_batch": 32, "lr": 3e-3, "warmup": 0.1, "evaluate_every": 10**6}
    spec = build_spec({"model": MODEL, "data": data, "train": length, "parallel": {"ranks": 2, "threads": 1}})
    result = train(spec, tmp_path, show=False)
    assert result.summary.evaluation.evaluated > 400
    assert result.metrics["accuracy"] > 0.25 + 0.25, "four balanced classes"
