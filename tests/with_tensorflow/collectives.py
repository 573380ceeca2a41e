"""What the collectives answer, eager and inside a tf.function, on two ranks."""

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_array_equal

import paceline.horovod.tensorflow as hvd
from paceline.errors import PacelineError, UserError

with pytest.raises(UserError, match=r"hvd\.init"):
    hvd.allreduce(1.0)
hvd.init()
rank, size = hvd.rank(), hvd.size()
assert size == 2


def answers(x):
    tower = [hvd.allreduce(x * (at + rank), op=hvd.Sum) for at in range(4)]
    whole = hvd.allreduce(tf.constant([rank, 7], tf.int64), op=hvd.Max)
    half = hvd.allreduce(tf.cast(x, tf.bfloat16))
    first = hvd.broadcast(tf.constant([rank + 5], tf.uint32), 1)
    return [*tower, whole, half, first, hvd.allgather(tf.fill([rank + 1, 2], rank))]


x = tf.constant([1.0, 2.0])
for found in (answers(x), tf.function(answers)(x)):
    for at in range(4):
        assert_array_equal(found[at], (2 * at + 1) * x.numpy())
    assert_array_equal(found[4], [1, 7])
    assert_array_equal(tf.cast(found[5], tf.float32), [1, 2])
    assert_array_equal(found[6], [6])
    assert_array_equal(found[7], [[0, 0], [1, 1], [1, 1]])
with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) * (rank + 1))
assert_array_equal(tape.gradient(y, x), [3, 3])
table = tf.Variable(np.ones((4, 2), np.float32))
with tf.GradientTape() as tape:
    y = tf.reduce_sum(tf.gather(table, [rank]))  # its gradient is IndexedSlices
tape = hvd.DistributedGradientTape(tape)
assert_array_equal(tape.gradient(y, table), [[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0]])
for wrong in (lambda: hvd.DistributedOptimizer(object()), lambda: hvd.allreduce(x, op=hvd.Adasum)):
    with pytest.raises(PacelineError):
        wrong()
print(f"ANSWERS {rank}\n", end="")  # written at once
