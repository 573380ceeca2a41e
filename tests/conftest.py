"""What the tests share: a small corpus made once, and a run file on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"


@pytest.fixture(scope="session")
def corpus_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("corpora")


@pytest.fixture(scope="session")
def small(corpus_cache):
    """A small classifier on real text: 203 texts, which no batch and no number of ranks divides."""
    from paceline.spec import build

    return build(
        {
            "name": "small",
            "model": {"width": 32, "heads": 4, "layers": 2, "ffn": 64},
            "data": {"source": "docstrings", "max_length": 64, "vocab": 1024, "limit": 203, "cache": str(corpus_cache)},
            "train": {"steps": 12, "global_batch": 24, "lr": 3e-3, "log_every": 1},
            "parallel": {"threads": 1},
        }
    )


@pytest.fixture(scope="session")
def tiny_lm(corpus_cache, tmp_path_factory):
    """A tiny language model on this project's own pages; its last batch of an epoch is a smaller one."""
    from paceline.spec import build

    pages = tmp_path_factory.mktemp("pages")
    for page in ("train.md", "check.md", "formulas.md"):
        (pages / page).write_bytes((REPOSITORY / "docs" / page).read_bytes())
    return build(
        {
            "name": "tiny",
            "workload": "lm",
            "model": {
                "preset": "custom",
                "width": 32,
                "heads": 4,
                "kv_heads": 2,
                "layers": 4,
                "ffn": 64,
                "tied": False,
            },
            "data": {"source": "text", "path": str(pages), "sequence": 32, "vocab": 300, "cache": str(corpus_cache)},
            "train": {"steps": 20, "global_batch": 16, "lr": 3e-3, "warmup": 0.5, "log_every": 1},
            "parallel": {"threads": 1, "timeout_s": 120},
        }
    )
