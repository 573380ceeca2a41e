"""A loop with a gradient tape, as Horovod's users write it: every rank takes its part of each batch of 64."""

import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    local_rank = hvd.local_rank()
    tf.config.experimental.set_visible_devices(gpus[local_rank], "GPU")

tf.random.set_seed(hvd.rank())  # ranks begin with different weights, until the first broadcast
rng = np.random.default_rng(0)
images, labels = rng.random((640, 8, 8, 1), np.float32), rng.integers(0, 10, 640)
images += labels[:, None, None, None] / 10
rows = [slice(at + hvd.rank() * 64 // hvd.size(), at + (hvd.rank() + 1) * 64 // hvd.size()) for at in range(0, 640, 64)]
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(10)])
model.build((None, 8, 8, 1))
if hvd.size() == 1 or hvd.rank() == 0:  # the same first weights for any number of ranks
    for at, weight in enumerate(model.trainable_variables):
        weight.assign(np.random.default_rng(at).normal(0, 0.1, weight.shape))
lr_init = 0.02 / hvd.size()
optimizer = tf.optimizers.Adam(lr_init * hvd.size())
loss_of = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
compression = hvd.Compression.fp16 if "fp16" in sys.argv else hvd.Compression.none


@tf.function
def step(x, y, first):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    if first:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


hvd.broadcast_variables(model.variables, root_rank=0)
if "eager" in sys.argv:
    tf.config.run_functions_eagerly(True)
losses = []
for epoch in range(2):
    for number, part in enumerate(rows):
        loss = step(images[part], labels[part], epoch == number == 0)
        losses.append(float(hvd.allreduce(loss)))
sums = [float(np.abs(v.numpy()).sum()) for v in model.trainable_variables]
assert np.allclose(hvd.allgather(tf.constant([sums])).numpy(), sums, rtol=0)  # equal on all ranks, to the last bit
if hvd.rank() == 0:
    print("LOSSES", *losses)
