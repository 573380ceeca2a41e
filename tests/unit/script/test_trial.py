"""A script that is asked something: it runs until the answer is there."""

import pytest
import torch

from paceline.errors import UserError
from paceline.script.probe import LossProbe, ProbeRun
from paceline.trials.check import check
from script_runs import HEAD, LOOP, script, script_spec

SUM = 'F.cross_entropy(model(x), y, reduction="sum")'


def test_model_data_and_loss_are_the_scripts_own(tmp_path, capsys):
    spec = script_spec(script(tmp_path, "print('hello')\n" + LOOP))
    model, (dataset, collate) = ProbeRun(spec, "model").ask(), ProbeRun(spec).ask()
    assert len(dataset) == 53
    assert collate is None
    x, y = torch.zeros(5, 6), torch.zeros(5, dtype=torch.long)
    total, count = LossProbe(spec, model, (x, y)).ask()
    assert count == 5
    assert total.item() == pytest.approx(torch.nn.functional.cross_entropy(model(x), y, reduction="sum").item())
    assert not capsys.readouterr().out


def test_what_a_pass_draws_does_not_depend_on_what_came_before_it(tmp_path):
    spec = script_spec(script(tmp_path, LOOP.replace(SUM, f"{SUM} * torch.rand(())", 1)))
    model, batch = ProbeRun(spec, "model").ask(), (torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
    torch.manual_seed(7)
    first, second = LossProbe(spec, model, batch).ask()[0], LossProbe(spec, model, batch).ask()[0]
    torch.manual_seed(7)
    assert first.item() == LossProbe(spec, model, batch).ask()[0].item() != second.item()


def test_a_script_that_does_not_answer_is_refused(tmp_path):
    with pytest.raises(UserError, match="never asked for a batch"):
        ProbeRun(script_spec(script(tmp_path, "print(1)\n"))).ask()


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        (SUM, "F.cross_entropy(model(x), y) * 1.0", "did you return a mean?"),
        ("nn.GELU()", "nn.RReLU()", "torch's generator"),
    ],
)
def test_causes_are_found_in_a_script(old, new, cause, tmp_path):
    file = script(tmp_path, LOOP.replace(old, new, 1), HEAD.replace(old, new, 1))
    parity = check(script_spec(file), ranks=(1,), accumulate=(1, 3), steps=1)
    assert not parity.holds
    assert cause in parity.causes[0]


def test_a_script_that_trains_by_itself_is_stopped_at_its_first_step(tmp_path):
    file = tmp_path / "train.py"
    lines = ("w = torch.nn.Linear(1, 1)", "optimizer = torch.optim.SGD(w.parameters(), 0.1)", "while True:")
    file.write_text("\n".join(("import torch", *lines, "    optimizer.step()\n")))
    with pytest.raises(UserError) as refused:
        ProbeRun(script_spec(file), "model").ask()
    assert (refused.value.code, refused.value.key) == ("invalid-workload", "run.batches")
