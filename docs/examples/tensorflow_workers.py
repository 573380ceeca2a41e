"""TensorFlow on several workers: the launcher writes TF_CONFIG, MultiWorkerMirroredStrategy reads it.

paceline launch --ranks 2 -- python docs/examples/tensorflow_workers.py
"""

import numpy as np
import tensorflow as tf

STEPS, GLOBAL_BATCH, RATE = 50, 64, 0.2
strategy = tf.distribute.MultiWorkerMirroredStrategy()  # first of all: it connects the workers

draw = np.random.default_rng(0)
x = draw.normal(size=(512, 8)).astype("float32")
y = np.tanh(x @ draw.normal(size=(8, 1)).astype("float32"))
rows = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(GLOBAL_BATCH)
batches = iter(strategy.experimental_distribute_dataset(rows))  # each worker gets its part of each global batch

with strategy.scope():
    shapes = ((8, 16), (16,), (16, 1), (1,))
    first = [draw.normal(size=shape, scale=0.3).astype("float32") for shape in shapes]
    weights = [tf.Variable(value, aggregation=tf.VariableAggregation.MEAN) for value in first]


def update(x, y):
    """On one worker: the sum of its losses over the global batch, so that the sum over workers is the mean."""
    with tf.GradientTape() as tape:
        hidden = tf.tanh(x @ weights[0] + weights[1])
        loss = tf.reduce_sum((hidden @ weights[2] + weights[3] - y) ** 2) / GLOBAL_BATCH
    gradients = tape.gradient(loss, weights)
    summed = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
    for weight, gradient in zip(weights, summed, strict=True):
        weight.assign_sub(RATE * gradient)
    return loss


@tf.function
def step(x, y):
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(update, (x, y)), axis=None)


for number in range(1, STEPS + 1):
    loss = step(*next(batches))
    if number in (1, STEPS) and strategy.cluster_resolver.task_id in (None, 0):
        print(f"{strategy.num_replicas_in_sync} workers, step {number}: loss {float(loss):.6f}", flush=True)
