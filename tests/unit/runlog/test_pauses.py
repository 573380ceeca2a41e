"""What is done between steps, counted as the loop does it."""

import pytest

from paceline.config import Train
from paceline.runlog.progress import COPY_BYTES_S, WRITE_BYTES_S, PauseSchedule
from paceline.trainer.loop import is_due


@pytest.mark.parametrize("every", [0, 1, 4, 7, 100])
@pytest.mark.parametrize("steps", [1, 12, 20, 21])
def test_as_many_are_to_come_as_the_loop_makes(every, steps):
    train = Train(evaluate_every=every, checkpoint_every=every)
    pauses = PauseSchedule.of(train, steps, steps_per_epoch=6, evaluated=30)
    for done in range(steps + 1):
        made = [step for step in range(done + 1, steps + 1) if step == steps or is_due(step, every, step % 6 == 0)]
        assert pauses.evaluations(done) == pauses.checkpoints(done) == len(made)


def test_an_evaluation_has_no_backward_pass_and_the_last_checkpoint_is_waited_for():
    pauses = PauseSchedule.of(Train(), steps=12, steps_per_epoch=6, evaluated=300)
    assert pauses.evaluate_s(0.01) == pytest.approx(1.0)
    assert pauses.checkpoints_s(8e9) == pytest.approx(2 * 8e9 / COPY_BYTES_S + 8e9 / WRITE_BYTES_S)
    nothing_held_out = PauseSchedule.of(Train(), 12, 6, 0)
    assert nothing_held_out.evaluations() == 0
