"""Keras models and data that a run file of the tests names."""

import keras
import numpy as np


def build(dropout=0.0, norm=False, penalty=0.0):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            layers.Conv2D(3, 2, activation="relu"),
            *([layers.BatchNormalization()] if norm else []),
            layers.SpatialDropout2D(dropout),
            layers.Flatten(),
            layers.Dense(8, activation="relu", kernel_regularizer=keras.regularizers.L2(penalty) if penalty else None),
            layers.Dropout(dropout),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(
        "adam", "sparse_categorical_crossentropy", metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy()]
    )
    return model


def frozen():
    """A part that is not trained, with statistics, under a head without a softmax."""
    base = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(5)], name="base")
    base.trainable = False
    return keras.Sequential([base, keras.layers.Dense(3)])


def tokens():
    """A class for each token, where the zeros at the end of a text do not count."""
    layers = keras.layers
    words = keras.Input((None,), dtype="int32")
    model = keras.Sequential([words, layers.Embedding(9, 4, mask_zero=True), layers.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def noisy():
    layers = keras.layers
    model = keras.Sequential([keras.Input((4, 4, 1)), layers.Flatten(), layers.GaussianNoise(0.5), layers.Dense(1)])
    model.compile(loss="mse")
    return model


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.flat, self.out = keras.layers.Flatten(), keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.flat(x))


def dense(loss, *metrics, outputs=1, activation="sigmoid"):
    layers = keras.layers
    model = keras.Sequential([keras.Input((4, 4, 1)), layers.Flatten(), layers.Dense(outputs, activation)])
    model.compile("adam", loss, metrics=list(metrics))
    return model


def focal():
    return dense("binary_focal_crossentropy", "accuracy", "mae")


def questions():
    return dense("binary_crossentropy", "acc", outputs=3)


def by_number():
    own = keras.losses.sparse_categorical_crossentropy
    return dense(lambda y, p: own(y, p), "accuracy", outputs=2, activation="softmax")


def difference():
    return dense(lambda y, p: keras.ops.square(y - p), keras.metrics.MeanSquaredError(), "mae")


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return {}


def own_step():
    model = OwnStep([keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(loss="mse")
    return model


def squared(y, output):
    return keras.ops.square(y[:, 0] - output[:, 0])


def one_number(y, output):
    return keras.ops.mean(keras.ops.square(y - output))


def fails():
    return keras.layers.Dense(3)(np.zeros((2, 2)), wrong=1)


def nothing():
    return 3


def data(split):
    draw = np.random.default_rng(0 if split == "train" else 1)
    labels = draw.integers(0, 3, 41 if split == "train" else 17)
    images = draw.normal(size=(len(labels), 4, 4, 1)) + labels[:, None, None, None]
    return images, labels


def texts(split):
    words = np.random.default_rng(0).integers(1, 9, (14, 6))
    words[np.arange(6) >= 1 + np.arange(14)[:, None] % 6] = 0
    return words, words % 3


def both():
    return data("train"), data("test")


def numbers(split):
    images, labels = data(split)
    return images, labels[:, None].astype("float64"), np.ones(len(labels), "float32")


def yes_or_no(split):
    images, labels = data(split)
    return images, labels > 0, np.arange(len(labels), dtype="float32")


def three_answers(split):
    images, labels = data(split)
    return images, labels[:, None] > np.array([0, 1, 0])


def encode(inputs):
    return np.stack([np.full((4, 4, 1), len(text), "float32") if isinstance(text, str) else text for text in inputs])
