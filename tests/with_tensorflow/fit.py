"""Keras's `fit` with Horovod's optimiser and callbacks, as its users write it."""

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
rng = np.random.default_rng(0)
images, labels = rng.random((640, 8, 8, 1), np.float32), rng.integers(0, 10, 640)
images += labels[:, None, None, None] / 10
mine = np.arange(640).reshape(10, hvd.size(), -1)[:, hvd.rank()].ravel()  # this rank's part of each batch of 64
tf.random.set_seed(hvd.rank())
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(10)])
model.build((None, 8, 8, 1))
if hvd.rank() == 0:
    for at, weight in enumerate(model.trainable_variables):
        weight.assign(np.random.default_rng(at).normal(0, 0.1, weight.shape))
scaled_lr = 0.02
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(scaled_lr))
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
found = model.fit(
    images[mine], labels[mine], 64 // hvd.size(), 3, callbacks=callbacks, shuffle=False, verbose=0
).history
warm = hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=0)
rates = model.fit(images[mine], labels[mine], 64 // hvd.size(), 3, callbacks=[warm], verbose=0).history["lr"]
model.save(f"model-{hvd.rank()}.keras")
again = hvd.load_model(f"model-{hvd.rank()}.keras")
assert type(again.optimizer).__name__ == "Adam"
if hvd.rank() == 0:
    print("LOSSES", *found["loss"], *found["accuracy"])
    print("RATES", *rates)
