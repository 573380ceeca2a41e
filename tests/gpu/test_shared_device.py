"""Two and four ranks that share one CUDA device under gloo: every layout has the answer of one rank."""

import numpy as np
import pytest
import torch
from layout_rows import train_rows
from synthetic_counts import generate_synthetic_data

from paceline import check, train
from paceline.config import build_spec
from paceline.errors import PacelineError, UserError
from paceline.launch.local import run_ranks
from paceline.layout import parse_layout
from paceline.runlog.events import read_events, read_steps
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint.reader import find_newest, read_tensors
from paceline.trials.check import compute_relative_difference
from results import losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PLAIN = ("ddp:2", "zero1:2", "zero2:2", "zero3:2", "fsdp:2", "tensor:2", "tensor:2+sequence", "context:2")
PIPELINES = tuple(f"pipeline:2:{schedule}" for schedule in ("gpipe", "1f1b", "interleaved"))
FOUR = ("ddp:4", "hsdp:2x2", "fsdp:2+tensor:2", "tensor:2+context:2", "fsdp:2+pipeline:2")
COMPILED = ("ddp:2", "zero1:2", "zero2:2", "fsdp:2", "pipeline:2:1f1b", "tensor:2")
WAYS = {
    "eager": {"train.compile": "off"},
    "compiled": {"train.compile": "on"},
    "bf16": {"train.compile": "on", "train.precision": "bf16"},
}
LAUNCHES = [
    [("single", "eager"), ("single", "bf16")],
    *([(layout, "eager") for layout in layouts] for layouts in (PLAIN, PIPELINES, FOUR)),
    [(layout, "compiled") for layout in COMPILED],
    [(layout, "bf16") for layout in ("ddp:2", "fsdp:2", "pipeline:2:1f1b")],
]
"""The rows of each are trained by the same ranks, one after the other."""
ROWS = [row for launch in LAUNCHES[1:] for row in launch]
STEPS = 6
KEYS = ("loss", "grad_norm")
TOLERANCE = {"eager": (1e-5, 1e-4, 1e-3), "compiled": (1e-4, 1e-3, 1e-2), "bf16": (1e-2, 5e-2, 1e-1)}
"""(loss, gradient norm, weights), relative."""


def keys_of(layout):
    return {f"parallel.{key}": value for key, value in parse_layout(layout).items()}


def named(layout, way):
    return f"{layout} {way}".replace(":", "-").replace(" ", "_")


def devices():
    return torch.cuda.device_count()


@pytest.fixture(scope="module")
def trained(tiny_lm, tmp_path_factory):
    """(layout, way) -> (steps, weights). The ranks of one size train all of their rows in one launch."""
    scratch = tmp_path_factory.mktemp("shared")
    few = {"train.steps": STEPS, "train.evaluate_every": STEPS, "train.evaluate_on": 8, "parallel.device": "cuda"}
    base, failed = tiny_lm.replace(few), []
    for launch in LAUNCHES:
        rows = [(named(*row), base.replace(keys_of(row[0]) | WAYS[row[1]])) for row in launch]
        try:
            run_ranks(train_rows, (rows, str(scratch), "cuda", "gloo"), rows[0][1].parallel.ranks)
        except PacelineError as error:  # the rows before it are compared all the same
            failed.append(str(error))

    def read(layout, way):
        folder = scratch / named(layout, way)
        found = find_newest(folder / "checkpoints", print) if folder.exists() else None
        assert found is not None, f"{layout} {way} did not finish: {failed}"
        return read_steps(folder / "rank0.jsonl"), read_tensors(found)

    return read


@pytest.mark.parametrize(("layout", "way"), ROWS)
def test_ranks_that_share_a_device_have_the_answer_of_one(trained, layout, way):
    if parse_layout(layout)["ranks"] <= devices():
        pytest.skip(f"{devices()} devices: these ranks have one each")
    ours, weights = trained("single", "bf16" if way == "bf16" else "eager")
    theirs, found = trained(layout, way)
    assert len(ours) == len(theirs) == STEPS
    assert ours[-1]["loss"] < ours[0]["loss"], "it learns, or there is nothing to compare"
    worst = [max(compute_relative_difference(a[k], b[k]) for a, b in zip(ours, theirs, strict=True)) for k in KEYS]
    worst.append(max(float((found[n] - t).float().norm() / t.float().norm()) for n, t in weights.items()))
    print(f"{layout} {way}: loss {worst[0]:.1e}, gradient norm {worst[1]:.1e}, weights {worst[2]:.1e}")
    assert found.keys() == weights.keys()
    for difference, most in zip(worst, TOLERANCE[way], strict=True):
        assert difference <= most


def test_through_the_front_door(tiny_lm, tmp_path, capfd):
    """The run file alone: it says that ranks share, and the four times add up on the device's own clock."""
    ranks = devices() + 1
    changes = {"train.steps": STEPS, "train.compile": "off", "parallel.device": "cuda", "parallel.ranks": ranks}
    result = train(tiny_lm.replace({**changes, "parallel.backend": "gloo"}), tmp_path)
    assert f"{ranks} ranks share {devices()} CUDA device" in capfd.readouterr().out
    assert result.status == "finished"
    events = RunDir(result.path).events_file(0)
    for step in read_steps(events)[2:]:
        assert step["data_s"] + step["compute_s"] + step["exposed_s"] == pytest.approx(step["step_s"], rel=0.05)
        assert 0 < step["exposed_s"] <= step["comm_s"]
    assert next(iter(read_events(events, "start")))["device"] == "cuda:0"
    assert len(result.summary.peak_bytes_per_rank) == ranks


def test_nccl_is_refused_with_the_line_to_type(tiny_lm, tmp_path):
    spec = tiny_lm.replace({"train.steps": 1, "parallel.device": "cuda", "parallel.ranks": devices() + 1})
    with pytest.raises(UserError, match=r"parallel\.backend=gloo"):
        train(spec, tmp_path, show=False)


def test_topics_on_ranks_that_share(tmp_path):
    counts, _, _ = generate_synthetic_data(n=301, m=90, k=4, avg_doc_length=60, seed=3, sparse=False)
    np.save(tmp_path / "x.npy", np.asarray(counts))
    found = []
    for ranks in (1, devices() + 1):
        run = {"name": f"on{ranks}", "workload": "topics", "model": {"k": 4, "tolerance": 0}, "train": {"steps": 20}}
        parallel = {"ranks": ranks, "device": "cuda", "backend": "gloo"}
        spec = build_spec({**run, "data": {"path": str(tmp_path / "x.npy")}, "parallel": parallel})
        found.append(losses(train(spec, tmp_path, show=False)))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


RECURRENT = """
import torch
from paceline import Workload

X = torch.randn(64, 9, 16, generator=torch.Generator().manual_seed(0))

class Next(Workload):
    def model(self):
        return torch.nn.LSTM(16, 16, 2, batch_first=True)

    def data(self, split):
        return (X,) if split == "train" else None

    def loss(self, model, batch):
        (x,) = batch
        return ((model(x[:, :-1])[0] - x[:, 1:]) ** 2).sum(), x[:, 1:].numel()
"""


def test_weights_of_recurrent_layers_follow_the_optimiser(tmp_path):
    (tmp_path / "own.py").write_text(RECURRENT)
    train = {"global_batch": 8, "lr": 1e-2, "warmup": 0, "precision": "fp64"}
    parallel = {"device": "cuda", "backend": "gloo", "threads": 1}
    spec = build_spec({"workload": f"{tmp_path / 'own.py'}:Next", "train": train, "parallel": parallel})
    assert check(spec, layouts=["single", "ddp:2", "fsdp:2"], steps=4).holds
