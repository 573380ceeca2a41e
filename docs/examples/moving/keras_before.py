"""Handwritten digits with Keras: model.fit on one device."""

import keras
import numpy as np
from sklearn.datasets import load_digits


def build(width=64, dropout=0.2):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(width, activation="relu"),
            layers.Dropout(dropout),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.AdamW(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def data():
    images, labels = load_digits(return_X_y=True)
    images, held_out = images.reshape(-1, 8, 8, 1) / 16, np.arange(len(labels)) % 5 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    (x, y), test = data()
    model = build()
    model.fit(x, y, batch_size=64, epochs=4, validation_data=test, verbose=2)
    model.save("digits.keras")
