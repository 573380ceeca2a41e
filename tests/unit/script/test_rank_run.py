"""A script's run on one rank: what is recorded, what is refused, and where it goes on."""

from pathlib import Path

import pytest
import torch
import yaml

import paceline
from paceline.errors import RunFailed, UserError
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint.reader import find_newest
from results import expect_error, losses, steps_of
from script_runs import HEAD, LOOP, script, script_spec

PREPARED = "with paceline.run() as run:\n    model, optimizer = run.prepare(model, optimizer)\n"
BATCHES = f"{PREPARED}    for x, y in run.batches(train_set):\n"
STEP = 'run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))'
EPOCHS = f"""
class Counter:
    steps, seen = 0, torch.zeros(2)
    def state_dict(self): return {{"steps": self.steps, "seen": self.seen}}
    def load_state_dict(self, state): self.steps, self.seen = state["steps"], state["seen"]


counter = Counter()
{PREPARED}    run.keep(counter=counter)
    for epoch in run.epochs():
        for x, y in run.batches(train_set):
            {STEP}
            counter.steps, counter.seen = counter.steps + 1, counter.seen + 1
            if "fail" in sys.argv[1:] and counter.steps == 6:
                raise ValueError("as asked")
        run.evaluate(test_set, sums, best="accuracy")
        print("epoch", epoch, "after", counter.steps, int(counter.seen[0]))
"""


@pytest.fixture
def train(tmp_path):
    """Trains a script with this loop, quietly."""

    def train(loop, **sections):
        return paceline.train(script_spec(script(tmp_path, loop), **sections), tmp_path / "runs", show=False)

    return train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("script")


@pytest.fixture(scope="module")
def by_epochs(folder):
    return script_spec(script(folder, EPOCHS), train={"steps": None, "epochs": 3})


@pytest.fixture(scope="module")
def trained(by_epochs, folder):
    return paceline.train(by_epochs, folder / "runs", show=False)


def test_a_run_of_a_script_is_recorded_as_any_other(trained):
    run, steps = RunDir(trained.path), losses(trained)
    assert trained.status == "finished"
    assert len(steps) == 12
    assert steps[-1] < steps[0]
    assert [e["step"] for e in read_events(run.events_file(0), "evaluate")] == [4, 8, 12]
    assert trained.metrics.keys() == {"loss", "accuracy"}
    assert trained.summary.trained.samples == 3 * 53
    assert (run.kept / "source" / "train.py").is_file()


def test_rates_follow_the_schedule(trained):
    rates = [step["lr"] for step in steps_of(trained)]
    assert max(rates) == pytest.approx(1e-2, rel=0.1)  # those of the first group, not train.lr
    assert rates[-1] < max(rates) / 5


def test_a_failed_run_goes_on_to_the_same_bits(by_epochs, trained, folder, capsys):
    failing = by_epochs.replace({"data.arguments": ["fail"]})
    with pytest.raises(RunFailed, match="ValueError: as asked") as failed:
        paceline.train(failing, folder / "failing")
    assert "step 4 with  paceline train --resume" in str(failed.value)
    run = folder / "failing" / "script"
    text = (run / "spec.yaml").read_text().replace("arguments:\n  - fail\n", "arguments: []\n")
    (run / "spec.yaml").write_text(text)
    capsys.readouterr()
    resumed = paceline.resume(run)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")] == [
        "epoch 1 after 8 8",
        "epoch 2 after 12 12",
    ]
    assert losses(run)[-8:] == losses(trained)[-8:]
    ours, theirs = trained.weights(), resumed.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = paceline.resume(run)  # nothing is left to do, and nothing is recorded
    assert again.summary == resumed.summary
    assert len(list(read_events(RunDir(run).events_file(0), "evaluate"))) == 3


def test_checkpoint_has_its_score(trained):
    checkpoint = find_newest(RunDir(trained.path).checkpoints, print)
    assert checkpoint.step == 12
    assert checkpoint.score == trained.metrics["accuracy"] == checkpoint.meta["evaluation"]["accuracy"]


def test_optimizer_of_the_run_file_takes_a_schedule(train):
    loop = LOOP.replace("(model, optimizer)", "(model, schedule=lambda seen, total: 1 - seen / total)")
    result = train(loop, train={"optimizer": "sgd", "lr": 0.1, "steps": 4})
    rates = [step["lr"] for step in steps_of(result)]
    assert rates == pytest.approx([0.1 * (1 - seen / 53) for seen in (0, 16, 32, 48)])


def test_blocks_are_compiled(train):
    """On CPU cores too; the losses are those of the run that is not compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    blocks = "model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)], nn.Linear(6, 2))"
    loop = f"{blocks}\n{LOOP.replace('(model, optimizer)', '(model)')}"
    plain, compiled = (train(loop, train={"steps": 3, "optimizer": "sgd", "compile": way}) for way in ("off", "on"))
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    (start,) = read_events(RunDir(compiled.path).events_file(0), "start")
    assert start["execution"].startswith("compiled by layer")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_loop_that_is_left_ends_the_run(train):
    result = train(f"{BATCHES}        {STEP}\n        if y.sum() >= 0: break\n")
    assert (result.status, result.summary.why) == ("finished", "the script left its loop")
    assert len(losses(result)) == 1


def test_loop_entered_again_continues(trained, train):
    loop = f"{PREPARED}    next(run.batches(train_set))\n    for epoch in run.epochs():\n"
    loop += "        for i, (x, y) in enumerate(run.batches(train_set)):\n            if i == 3: break\n"
    two_passes = {"micro_batch": 8}  # the second is left, and both are computed again
    result = train(f"{loop}            {STEP}\n", train={"steps": None, "epochs": 3}, parallel=two_passes)
    assert result.status == "finished"
    assert losses(result) == pytest.approx(losses(trained), rel=1e-6)


def test_evaluation_inside_the_loop_sees_new_weights(train):
    loop = f"import copy\n{BATCHES}        {STEP}\n        found = run.evaluate(test_set, sums)['loss']\n"
    loop += "        fresh = F.cross_entropy(copy.deepcopy(model)(test_set.tensors[0]), test_set.tensors[1])\n"
    loop += "        assert abs(fresh.item() - found) < 1e-6\n"
    assert train(loop, train={"precision": "bf16", "steps": 2}).status == "finished"


def test_stopped_script_resumes(tmp_path, capsys):
    begun = PREPARED + "    print('begins at', run.steps)\n"
    loop = f"import os, signal\n{BATCHES}        {STEP}\n".replace(PREPARED, begun)
    loop += "        if run.steps == 4: os.kill(os.getpid(), signal.SIGTERM)\n"
    loop += "    run.evaluate(test_set, sums)\n"
    spec = script_spec(script(tmp_path, loop))
    stopped = paceline.train(spec, tmp_path / "runs")
    assert stopped.status == "stopped"
    assert len(losses(stopped)) == 5  # the request is seen at the end of the next step
    assert f"paceline train --resume {stopped.path}" in capsys.readouterr().out
    assert not stopped.metrics  # a run that is not stopped has no evaluation there
    assert paceline.resume(stopped.path).status == "finished"
    assert "begins at 5" in capsys.readouterr().out
    assert len(losses(stopped)) == 8


def test_ema_is_evaluated(train):
    loop = f"{BATCHES}        {STEP}\n    found = run.evaluate(test_set, sums)\n"
    loop += "    with run.evaluating():\n        own = sums(*test_set.tensors)\n"
    loop += "    assert abs(float(own['loss']) / 29 - found['loss']) < 1e-6 and model.training\n"
    assert train(loop, train={"ema": 0.9, "precision": "bf16", "steps": 3}).metrics["loss"] > 0


PARTS = {"LOOP": LOOP, "BATCHES": BATCHES, "PREPARED": PREPARED, "STEP": STEP}


@pytest.mark.parametrize(("loop", "key"), yaml.safe_load(Path(__file__).with_name("wrong_loops.yaml").read_text()))
def test_wrong_calls_are_rejected_by_name(loop, key, train):
    for name, part in PARTS.items():
        loop = loop.replace(name, part)
    with pytest.raises(UserError) as error:
        train(loop, train={"steps": 2})
    assert error.value.key == key


@pytest.mark.parametrize("optimizer", ["torch.optim.SGD(model[0].parameters(), lr=1)", "optimizer"])
def test_optimizer_has_the_model_parameters(optimizer, train):
    model = "model[0]" if optimizer == "optimizer" else "model"
    with pytest.raises(UserError):
        train(f"with paceline.run() as run:\n    run.prepare({model}, {optimizer})\n")


@pytest.mark.parametrize("loop", ["sys.exit(3)\n", f"{BATCHES}        {STEP}\n        sys.exit()\n"])
def test_a_script_that_exits_has_failed(loop, train):
    with expect_error("user-code-failed", kind=RunFailed):
        train(loop, train={"steps": 2})


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"train": {"lr": 1.0}}, "train.lr"),
        ({"train": {"groups": {"0.*": {"lr": 1.0}}}}, "train.groups"),
        ({"parallel": {"ranks": 2, "tensor": 2}}, "parallel.tensor"),
        ({"parallel": {"engine": "accelerate"}}, "parallel.engine"),
    ],
)
def test_keys_without_effect_are_rejected(sections, key, train, tmp_path):
    with pytest.raises(UserError) as error:
        train(LOOP, **sections)
    assert error.value.key == key
    assert not list(Path(tmp_path).glob("runs/*"))


def test_other_data_are_refused_when_a_run_goes_on(train, tmp_path):
    with pytest.raises(RunFailed):
        train(
            f"{BATCHES}        {STEP}\n        if 'stop' in sys.argv: raise ValueError\n", data={"arguments": ["stop"]}
        )
    script(tmp_path, LOOP, HEAD.replace("Noisy(), ", "Noisy(54), "))
    with expect_error("conflict", match="53 samples"):
        paceline.resume(tmp_path / "runs" / "script", show=False)


def test_other_verbs_say_what_they_can(trained, folder):
    model = paceline.open(trained.path).model
    assert {name: tuple(p.shape) for name, p in model.named_parameters()}["2.weight"] == (2, 16)
    assert paceline.export(trained.path, folder / "weights.safetensors").is_file()
    with pytest.raises(UserError, match="--out"):
        paceline.export(trained.path, folder / "exported")
    with pytest.raises(UserError, match="script"):
        paceline.open(trained.path).predict(["x"])


def test_a_plan_prices_the_passes_of_the_loop(by_epochs):
    found = paceline.plan(by_epochs, "2xV100")
    assert found.cost_model.params == 6 * 16 + 16 + 16 * 2 + 2
    sides = [(m.rows, m.inner, m.outer) for block in found.cost_model.blocks for m in block.matmuls]
    assert sides == [(1.0, 6, 16), (1.0, 16, 2)]
