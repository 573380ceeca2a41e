"""A network for tables: numbers are scaled and cut into bins, words are one-hot, and two hidden layers follow."""

import json

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from paceline import Workload, class_sums
from paceline.config import Section, field
from paceline.data import read_table

MOST_CUTS = 128


def numbers(texts):
    """What is no number is NaN."""

    def number(text):
        try:
            return float(text)
        except ValueError:
            return np.nan

    return np.array([number(text) for text in texts])


class Coding:
    """What is learned of the columns of a table, for any rows that have them."""

    def __init__(self, means, spreads, cuts, words, classes):
        self.means, self.spreads, self.cuts, self.words, self.classes = means, spreads, cuts, words, classes

    @classmethod
    def of(cls, table, label):
        means, spreads, cuts, words = {}, {}, {}, {}
        for name in table.columns:
            texts = table.texts(name)
            values = numbers(texts)
            if name == label:
                continue
            if np.isnan(values).any():
                words[name] = sorted(set(texts))
            else:
                means[name], spreads[name] = values.mean(), values.std() or 1.0
                known = np.unique(values)
                shares = np.linspace(0, 1, MOST_CUTS + 2)[1:-1]
                cuts[name] = (known[1:] if len(known) <= MOST_CUTS else np.quantile(known, shares)).tolist()
        return cls(means, spreads, cuts, words, sorted(set(table.texts(label))))

    @property
    def width(self):
        return 2 * len(self.means) + sum(map(len, (*self.cuts.values(), *self.words.values())))

    def matrix(self, columns):
        """Of a number: scaled, and between which cuts it is. Of a word: which of those known it is."""
        parts = []
        for name, mean in self.means.items():
            values, cuts = np.nan_to_num(numbers(columns[name]), nan=mean)[:, None], self.cuts[name]
            parts += [(values - mean) / self.spreads[name], np.digitize(values, cuts) == np.arange(len(cuts) + 1)]
        parts += [np.array(columns[name], str)[:, None] == np.array(known, str) for name, known in self.words.items()]
        return np.concatenate(parts, axis=1).astype("float32")


class TableNet(Workload):
    class Model(Section):
        width: int = field(128, "features", "of the first hidden layer; the second has half", gt=1)
        dropout: float = field(0.0, "share", "of the first hidden layer, left out in each step", ge=0, lt=1)

    class Data(Section):
        path: str = field("train.csv", "path", "table to learn from")
        test_path: str = field("test.csv", "path", "table to test on")
        label: str = field("label", "column", "what is to be predicted")
        ignore: tuple[str, ...] = field((), "columns", "left out")

    _coding = None

    @property
    def coding(self):
        if self._coding is None:
            if self.kept is not None:
                self._coding = Coding(**json.loads((self.kept / "coding.json").read_text()))
            else:
                self._coding = Coding.of(self.table(self.spec.data.path), self.spec.data.label)
        return self._coding

    def table(self, path):
        found = read_table(path)
        found.columns = {name: values for name, values in found.columns.items() if name not in self.spec.data.ignore}
        return found

    def keep(self, folder):
        (folder / "coding.json").write_text(json.dumps(vars(self.coding)))

    def data(self, split):
        table = self.table(self.spec.data.path if split == "train" else self.spec.data.test_path)
        labels = table.codes({self.spec.data.label: self.coding.classes})[:, 0]
        return self.coding.matrix({name: table.texts(name) for name in table.columns}), labels

    def model(self):
        wide, half = self.spec.model.width, self.spec.model.width // 2
        return nn.Sequential(
            *(nn.Linear(self.coding.width, wide), nn.GELU(), nn.Dropout(self.spec.model.dropout)),
            *(nn.Linear(wide, half), nn.GELU()),
            nn.Linear(half, len(self.coding.classes)),
        )

    def loss(self, model, batch):
        rows, labels = batch
        return F.cross_entropy(model(rows), labels, reduction="sum"), len(labels)

    def evaluate(self, model, batch):
        rows, labels = batch
        logits = model(rows)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": loss, "count": len(labels), **class_sums(logits, labels)}

    def classes(self):
        return self.coding.classes

    def encode(self, inputs):
        names = [*self.coding.means, *self.coding.words]
        return torch.from_numpy(
            self.coding.matrix({name: [str(row[name]).strip() for row in inputs] for name in names})
        )

    def predict(self, model, batch):
        return {"probabilities": model(batch).softmax(1)}
