"""Run files that tests of the planner ask about."""

from paceline.config import build_spec


def lm(preset="7b", batch=256, sequence=2048, vocab=32_000, **more):
    """A language model; what is given of `train` is laid over the usual values."""
    train = {"steps": 100, "global_batch": batch, "precision": "bf16", **more.pop("train", {})}
    values = {"name": "lm", "workload": "lm", "model": {"preset": preset}}
    return build_spec({**values, "data": {"sequence": sequence, "vocab": vocab}, "train": train, **more})


def classifier(**model):
    """A classifier of texts that nobody has."""
    return build_spec({"workload": "classifier", "model": model, "data": {"source": "ag_news", "path": "/nowhere"}})
