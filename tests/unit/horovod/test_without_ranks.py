"""Horovod's names without other ranks: rejected calls, buckets, and committed states."""

import sys

import pytest
import torch

import paceline.horovod as hvd
from paceline.errors import UserError
from paceline.horovod import elastic
from paceline.horovod.__main__ import STAND_IN, USAGE
from paceline.horovod.optimizer import BUCKET_BYTES, _Distributed, fill_buckets
from paceline.horovod.world import UnsupportedHorovodFeature, run
from paceline.launch.command import run_with_stand_in
from results import expect_error


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: hvd.join(), "join"),
        (lambda: hvd.reducescatter(torch.ones(2)), "reducescatter"),
        (lambda: hvd.start_timeline("t.json"), "timelines"),
        (lambda: hvd.stop_timeline(), "timelines"),
        (lambda: hvd.add_process_set([0]), "process sets"),
        (lambda: hvd.remove_process_set(1), "process sets"),
        (lambda: hvd.ProcessSet([0, 1]), "process sets"),
        (lambda: hvd.init(process_sets=[1]), "process sets"),
        (lambda: hvd.allreduce(torch.ones(1), process_set=1), "process sets"),
        (lambda: hvd.init(comm=[0, 1]), "communicators of MPI"),
        (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), "Adasum"),
        (lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum), "Adasum"),
        (lambda: run(print, np=2), "run()"),
    ],
)
def test_what_is_not_carried_over_is_rejected_by_name(call, what):
    with pytest.raises(UnsupportedHorovodFeature) as caught:
        call()
    assert isinstance(caught.value, NotImplementedError)
    assert str(caught.value).startswith(f"paceline.horovod has no {what};")
    assert caught.value.exit_code == 2


def sgd():
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


def already():
    """Derived from the class that `DistributedOptimizer` puts before the optimiser's own."""
    return type("SGD", (_Distributed, torch.optim.SGD), {})(LINEAR.parameters(), lr=0.1)


LINEAR = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "about"),
    [
        (lambda: hvd.rank(), "hvd.init()"),
        (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "average="),
        (lambda: hvd.allreduce(torch.ones(1), op="sum"), "op='sum'"),
        (lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Max), "op=hvd.Max"),
        (
            lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0),
            "gradient_predivide_factor=",
        ),
        (lambda: hvd.DistributedOptimizer(sgd(), LINEAR.named_parameters()), "named_parameters= leaves out 2"),
        (lambda: hvd.DistributedOptimizer(sgd(), [*LINEAR.named_parameters()] * 2), "named_parameters= has several"),
        (lambda: hvd.DistributedOptimizer(already()), "this optimiser is a DistributedOptimizer"),
    ],
)
def test_a_wrong_call_is_rejected_with_the_argument(call, about):
    with pytest.raises(UserError) as caught:
        call()
    assert str(caught.value).startswith(about)


@pytest.fixture
def as_it_was(monkeypatch):
    """A script may change these; and Horovod must not stay importable."""
    monkeypatch.setenv("PYTHONPATH", "")
    before = sys.argv, sys.path[:], dict(sys.modules), sys.meta_path[:]
    yield
    sys.argv, sys.path[:], sys.meta_path[:] = before[0], before[1], before[3]
    for name in set(sys.modules) - set(before[2]):
        if name.split(".")[0] == "horovod":
            del sys.modules[name]


def test_a_script_is_run_with_its_arguments_and_finds_horovod(tmp_path, as_it_was, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nimport horovod, horovod.torch as hvd\nfrom horovod.torch.elastic import TorchState\n"
        "from horovod.torch.compression import Compression\nimport beside\n"
        "from horovod.torch.elastic.sampler import ElasticSampler\nfrom horovod.torch.elastic.state import TorchState\n"
        "from horovod.torch.optimizer import DistributedOptimizer\n"
        "from horovod.torch.sync_batch_norm import SyncBatchNorm\n"
        "for name in ('mxnet', 'tensorflow'):\n"
        "    try:\n        __import__(f'horovod.{name}')\n    except ImportError as error:\n        print(error)\n"
        "print(sys.argv[1:], hvd.Sum, hvd.elastic.TorchState is TorchState, horovod.__version__, __name__)\n"
    )
    (tmp_path / "beside.py").write_text("")
    run_with_stand_in([str(script), "--lr", "1"], STAND_IN, USAGE)
    assert capsys.readouterr().out.splitlines() == [
        "paceline.horovod has no horovod.mxnet; it carries over torch, tensorflow and keras",
        "TensorFlow is not installed; type  pip install 'paceline[tensorflow]'",
        "['--lr', '1'] Operation.SUM True 0.28.1 __main__",
    ]
    assert str(STAND_IN) in sys.path


@pytest.mark.parametrize("words", [[], ["--lr"], ["none.py"]])
def test_without_a_script_there_is_nothing_to_run(words, as_it_was):
    with pytest.raises(UserError, match=r"python -m paceline\.horovod"):
        run_with_stand_in(words, STAND_IN, USAGE)


def parameters(*sizes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.empty(size, dtype=dtype, device="meta")) for size in sizes]


def numbers(every):
    places = {id(parameter): place for place, parameter in enumerate(every)}
    return [[places[id(parameter)] for parameter in bucket] for bucket in fill_buckets(every)]


def test_buckets_go_backwards_and_hold_so_many_bytes_of_one_type():
    large = BUCKET_BYTES // 4
    assert numbers(parameters(5, 5, 5)) == [[2, 1, 0]]
    assert numbers(parameters(5, large, 5, 5)) == [[3, 2], [1], [0]]
    half = parameters(5, dtype=torch.float16)
    assert numbers(parameters(5, 5) + half + parameters(5)) == [[3], [2], [1, 0]]


def test_a_state_comes_back_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--name", "two words"])
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tied = torch.ones(2, 2, dtype=torch.bfloat16)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "best": float("inf"),
        "note": None,
        "both": [tied, tied.t()],
        "mixed": {1: ("a", True), "b": [1.5, {}], "list": ["tensor", "0"]},
    }
    file = tmp_path / "state.safetensors"
    elastic.write_commit(file, state)
    back, origin = elastic.read_commit(file)
    assert origin.startswith(str(file))
    assert origin.endswith("train.py --name 'two words'")
    for plain in ("epoch", "best", "note", "mixed"):
        assert back[plain] == state[plain]
        assert type(back[plain]) is type(state[plain])
    assert torch.equal(back["both"][1], tied.t())
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(back["optimizer"])
    for saved, loaded in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    model.load_state_dict(back["model"])


def test_what_cannot_be_written_is_rejected_before_the_work_begins():
    with pytest.raises(UserError, match="is a set") as error:
        elastic.pack_state({"log": {"x": [1, {2}]}})
    assert error.value.key == "state['log']['x'][1]"


@pytest.mark.parametrize("content", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", b"no safetensors at all"])
def test_another_file_is_not_taken_for_a_state(tmp_path, content):
    file = tmp_path / "elastic-train.safetensors"
    file.write_bytes(content)
    with expect_error("damaged", str(file)):
        elastic.read_commit(file)
