"""What is not carried over from Horovod, and what is wrong with a call: each in one sentence."""

import sys

import pytest
import torch

import paceline.horovod as hvd
from paceline.errors import PacelineError, UserError
from paceline.horovod.__main__ import STAND_IN, run_horovod_script
from paceline.horovod.optimizer import _Distributed
from paceline.horovod.unsupported import run


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: hvd.join(), "no join; give every rank the same number of batches: torch's DistributedSampler does"),
        (lambda: hvd.start_timeline("t.json"), "no timelines; paceline measure  says where the time of a step goes"),
        (lambda: hvd.stop_timeline(), "no timelines; paceline measure  says where the time of a step goes"),
        (lambda: hvd.add_process_set([0]), "no process sets; use torch.distributed.new_group"),
        (lambda: hvd.ProcessSet([0, 1]), "no process sets; use torch.distributed.new_group"),
        (lambda: hvd.init(process_sets=[1]), "no process sets; use torch.distributed.new_group"),
        (lambda: hvd.allreduce(torch.ones(1), process_set=1), "no process sets; use torch.distributed.new_group"),
        (lambda: hvd.init(comm=[0, 1]), "no communicators of MPI; call hvd.init() without them"),
        (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), "no Adasum; use op=hvd.Average"),
        (lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum), "no Adasum; use op=hvd.Average"),
        (lambda: run(print, np=2), "no run(); start the script with  paceline launch --ranks N -- python -m"),
    ],
)
def test_what_is_not_carried_over_is_refused_by_name(call, sentence):
    with pytest.raises(NotImplementedError) as caught:
        call()
    assert isinstance(caught.value, PacelineError)
    assert str(caught.value).startswith(f"paceline.horovod has {sentence}")
    assert caught.value.exit_code == 2


def sgd():
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


def already():
    """Derived from the class that `DistributedOptimizer` puts before the optimiser's own."""
    return type("SGD", (_Distributed, torch.optim.SGD), {})(LINEAR.parameters(), lr=0.1)


LINEAR = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: hvd.rank(), "hvd.init() has not been called in this process; call it first"),
        (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "average= is the older name of op="),
        (lambda: hvd.allreduce(torch.ones(1), op="sum"), "op='sum' is not a reduction; use hvd.Average, hvd.Sum"),
        (lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Max), "op=hvd.Max: gradients are summed or averaged"),
        (lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0), "backward_passes_per_step=0; use 1"),
        (
            lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0),
            "gradient_predivide_factor= divides an average; use it with op=hvd.Average",
        ),
        (
            lambda: hvd.DistributedOptimizer(sgd(), LINEAR.named_parameters()),
            "named_parameters= leaves out 2 parameters of the optimiser; name all of them or none",
        ),
        (
            lambda: hvd.DistributedOptimizer(sgd(), [*LINEAR.named_parameters()] * 2),
            "named_parameters= has several parameters of the name weight, bias; names must differ",
        ),
        (lambda: hvd.DistributedOptimizer(LINEAR), "DistributedOptimizer: give an optimiser of torch, not a Linear"),
        (lambda: hvd.DistributedOptimizer(already()), "this optimiser is a DistributedOptimizer already"),
        (lambda: hvd.DistributedOptimizer(sgd(), LINEAR.parameters()), "named_parameters= takes pairs of name and"),
        (
            lambda: hvd.broadcast_parameters(torch.ones(1)),
            "broadcast_parameters: give model.state_dict(), not a Tensor",
        ),
    ],
)
def test_what_is_wrong_with_a_call_is_said(call, sentence):
    with pytest.raises(UserError) as caught:
        call()
    assert str(caught.value).startswith(sentence)


@pytest.fixture
def as_it_was():
    """A script may change these; and Horovod must not stay importable."""
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
        "try:\n    import horovod.tensorflow\nexcept ImportError as error:\n    print(error)\n"
        "print(sys.argv[1:], hvd.Sum, hvd.elastic.TorchState is TorchState, horovod.__version__, __name__)\n"
    )
    (tmp_path / "beside.py").write_text("")
    run_horovod_script([str(script), "--lr", "1"])
    assert capsys.readouterr().out.splitlines() == [
        "paceline.horovod has no horovod.tensorflow; it carries over horovod.torch alone",
        "['--lr', '1'] Operation.SUM True 0.28.1 __main__",
    ]
    assert str(STAND_IN) in sys.path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "which script? write it as  python -m paceline.horovod SCRIPT.py [ARGUMENTS …]"),
        (["--lr"], "which script? write it as  python -m paceline.horovod SCRIPT.py [ARGUMENTS …]"),
        (["none.py"], "none.py is not a file; write it as  python -m paceline.horovod SCRIPT.py [ARGUMENTS …]"),
    ],
)
def test_without_a_script_there_is_nothing_to_run(words, sentence, as_it_was):
    with pytest.raises(UserError) as caught:
        run_horovod_script(words)
    assert str(caught.value) == sentence


def test_both_imports_give_the_same_names():
    import paceline.horovod.torch as longer

    assert all(getattr(longer, name) is getattr(hvd, name) for name in hvd.__all__)
    assert {"init", "DistributedOptimizer", "elastic", "SyncBatchNorm"} <= set(hvd.__all__)
