"""Run files that tests of the planner ask about."""

from paceline.config import build_spec

LM_FILE = """name: lm
workload: lm
model: {{preset: {preset}}}
data: {{sequence: {sequence}, vocab: 32000}}
train: {{steps: 1000, global_batch: 64, precision: bf16}}
"""


def lm(preset="7b", batch=256, sequence=2048, vocab=32_000, **more):
    """A language model; what is given of `train` is laid over the usual values."""
    train = {"steps": 100, "global_batch": batch, "precision": "bf16", **more.pop("train", {})}
    values = {"name": "lm", "workload": "lm", "model": {"preset": preset}}
    return build_spec({**values, "data": {"sequence": sequence, "vocab": vocab}, "train": train, **more})


def classifier(**model):
    """A classifier of texts that nobody has."""
    return build_spec({"workload": "classifier", "model": model, "data": {"source": "ag_news", "path": "/nowhere"}})
