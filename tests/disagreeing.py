"""Files of a run, as several nodes have them; and what one node has in their place."""

WORKLOAD = """
import csv, torch
from paceline import Workload
from beside import SCALE

class Line(Workload):
    def model(self):
        return torch.nn.Linear(2, 1)

    def data(self, split):
        rows = [[float(x) for x in row] for row in csv.reader(open("rows.csv"))]
        return torch.tensor(rows) if split == "train" else None

    def loss(self, model, batch):
        return ((SCALE * model(batch[:, :2])[:, 0] - batch[:, 2]) ** 2).sum(), len(batch)
"""
SCRIPT = """
import csv, torch, paceline
rows = [[float(x) for x in row] for row in csv.reader(open("rows.csv"))]
model = torch.nn.Linear(2, 1)
with paceline.run("script.yaml") as run:
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    for x in run.batches(torch.tensor(rows)):
        run.step(((model(x[:, :2])[:, 0] - x[:, 2]) ** 2).sum(), len(x))
"""
FILES = {
    "w.py": WORKLOAD,
    "beside.py": "SCALE = 1.0\n",
    "rows.csv": "".join(f"{i},{i % 3},{i % 5}\n" for i in range(16)),
    "run.yaml": "name: line\nworkload: w.py:Line\ntrain: {steps: 4, global_batch: 8, lr: 0.01}\n",
    "script.py": SCRIPT,
    "script.yaml": "name: script\nworkload: script.py\ntrain: {steps: 4, global_batch: 8}\n",
    "table.csv": "a,b,label\n" + "".join(f"{i},{i * i % 7},{i % 2}\n" for i in range(60)),
    "trees.yaml": "workload: trees\ndata: {path: table.csv, label: label}\ntrain: {steps: 2}\n",
    "texts.txt": "".join(f"wheel road {'hill' if i % 3 else 'chain'} saddle number{i % 4}\n" for i in range(40)),
}
TRAIN, TREES = ("train", "run.yaml"), ("train", "trees.yaml")
TOPICS = ("topics", "texts.txt", "-k", "2", "--passes", "3")
ROWS = {"rows.csv": FILES["rows.csv"].replace("7,1,2", "7,1,3")}
TABLE = {"table.csv": FILES["table.csv"].replace("9,4,1", "9,4,0")}
TEXTS = {"texts.txt": FILES["texts.txt"].replace("saddle number2", "bell number2", 1)}


def write_files(folder, changes):
    """Write the files of a run, some of them changed, into a new folder."""
    folder.mkdir()
    for name, text in {**FILES, **changes}.items():
        (folder / name).write_text(text)
