"""Boosted trees: against the library called directly, on several ranks, on disk, killed, and as they were planned.

    python benchmarks/trees.py overhead [--table flights] [--repeat 3] [--rounds 100] [--turns 5]
    python benchmarks/trees.py ranks    [the same options]
    python benchmarks/trees.py quality  [--rounds 200]
    python benchmarks/trees.py same     [--rounds 200]
    python benchmarks/trees.py memory   [--gigabytes 10]
    python benchmarks/trees.py kills    [--times 20]
    python benchmarks/trees.py plan     [--fit] [--turns 5]

`overhead` and `ranks` take turns: each runs all sides one after the other, in processes of their own, and ratios are
taken within a turn, so that a machine that is slower for a while is slower for both. Beside the clock they say the
processor time, which other processes disturb less. `--repeat` writes each row so often: 3 makes 982,038 of flights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tree_tables import as_arrays, as_run_data

TREES = {"max_depth": 8, "learning_rate": 0.1}
DIRECT = """
import json, sys, time
import numpy as np, xgboost
began, ran = time.perf_counter(), time.process_time()
z = np.load(sys.argv[1])
matrix = xgboost.QuantileDMatrix(z["X"], z["y"], nthread=1)
parameters = dict(objective="binary:logistic", max_depth=8, learning_rate=0.1, nthread=1)
booster = xgboost.Booster(parameters, cache=[matrix])
middle, middle_ran = time.perf_counter(), time.process_time()
for number in range(int(sys.argv[2])):
    booster.update(matrix, number)
done = {"rounds_s": time.perf_counter() - middle, "rounds_cpu_s": time.process_time() - middle_ran}
booster.save_model(sys.argv[1] + ".json")
print(json.dumps({**done, "whole_s": time.perf_counter() - began, "whole_cpu_s": time.process_time() - ran}))
"""
OURS = """
import json, sys, time
from pathlib import Path
import torch.distributed.checkpoint, xgboost, paceline.config, paceline.trainer.rank, paceline.api
from paceline.workloads.trees.workload import TreePasses
spent, inside = [], []
step, update = TreePasses.step, xgboost.Booster.update
def timed(self, flag):
    ran = time.process_time()
    found = step(self, flag)
    spent.append(time.process_time() - ran)
    return found
def timed_update(self, *given):
    began = time.perf_counter()
    update(self, *given)
    inside.append(time.perf_counter() - began)
TreePasses.step, xgboost.Booster.update = timed, timed_update
began, ran = time.perf_counter(), time.process_time()
run = paceline.train(paceline.config.load(sys.argv[1]), Path(sys.argv[2]), show=False)
whole = {"whole_s": time.perf_counter() - began, "whole_cpu_s": time.process_time() - ran}
summary = json.loads((run.path / "summary.json").read_text())
rounds = {"rounds_s": summary["in_steps_s"], "rounds_cpu_s": sum(spent), "update_s": sum(inside[-len(spent):])}
print(json.dumps({**rounds, **whole}))
"""
WORKER = """
import json, sys, time
import numpy as np, xgboost
from xgboost import collective
rank, joined = int(sys.argv[3]), json.loads(sys.argv[4])
z = np.load(sys.argv[1])
rows = len(z["y"])
mine = slice(rows * rank // 2, rows * (rank + 1) // 2)
bins = xgboost.QuantileDMatrix(z["X"], z["y"], nthread=1)
matrix = xgboost.QuantileDMatrix(z["X"][mine], z["y"][mine], ref=bins, nthread=1)
parameters = dict(objective="binary:logistic", max_depth=8, learning_rate=0.1, nthread=1, base_score=0.3)
booster = xgboost.Booster(parameters, cache=[matrix])
with collective.CommunicatorContext(**joined, dmlc_task_id=f"{rank:08d}"):
    collective.allreduce(np.zeros(2), collective.Op.SUM)
    began = time.perf_counter()
    for number in range(int(sys.argv[2])):
        booster.update(matrix, number)
    print(json.dumps({"rounds_s": time.perf_counter() - began}))
"""


def run_file(folder: Path, data: dict[str, Any], rounds: int, **sections: Any) -> Path:
    """Of a run on one core."""
    train = {"steps": rounds, **sections.pop("train", {})}
    values = {"name": "trees", "workload": "trees", "model": {**TREES, **sections.pop("model", {})}}
    values |= {"data": {"cache": str(folder / "cache"), **data}, "train": train}
    values |= {"parallel": {"ranks": 1, "threads": 1, "device": "cpu", **sections.pop("parallel", {})}}
    assert not sections
    file = folder / "run.yaml"
    file.write_text(json.dumps(values))
    return file


def train(spec: Path, out: Path, *given: str) -> dict[str, Any]:
    """By the command; returns the summary, with the model's sha256 and the seconds of the whole process."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "paceline", "train", str(spec), *given, "--out", str(out), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((out / "trees" / "summary.json").read_text())
    model = (out / "trees" / "model.json").read_bytes()
    return {**found, "sha256": hashlib.sha256(model).hexdigest(), "process_s": time.perf_counter() - began}


def answer(code: str, *given: object) -> dict[str, float]:
    command = [sys.executable, "-c", code, *map(str, given)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def overhead(asked: argparse.Namespace, folder: Path) -> None:
    """One rank of one thread, called from Python once all is imported. "whole" reads the table and writes the model;
    for us, the first time, into the cache too. "beside" is what a round takes beside the library's own call, within one
    process and so without the difference of two."""
    file = as_arrays(asked.table, asked.repeat, folder)
    ratios: dict[str, list[float]] = {}
    for turn in range(asked.turns):
        direct = answer(DIRECT, file, asked.rounds)
        data = {"path": str(file), "test_fraction": 0, "bin_rows": 1 << 30}
        spec = run_file(folder, {**data, "cache": str(folder / f"cache{turn}")}, asked.rounds)
        ours = {name: answer(OURS, spec, folder / f"{name}{turn}") for name in ("first", "again")}
        shutil.rmtree(folder / f"cache{turn}")
        print(json.dumps({"direct": direct, **ours}), flush=True)
        for name, found in ours.items():
            ratios.setdefault(f"beside {name} (clock)", []).append(found["rounds_s"] / found["update_s"] - 1)
        for kind in ("rounds", "whole"):
            for clock in ("s", "cpu_s"):
                for name, found in ours.items():
                    ratio = found[f"{kind}_{clock}"] / direct[f"{kind}_{clock}"] - 1
                    ratios.setdefault(f"{kind} {name} ({'clock' if clock == 's' else 'processor'})", []).append(ratio)
    for name, found in ratios.items():
        print(f"overhead, {name}: {statistics.median(found):+.1%}  of {[f'{ratio:+.1%}' for ratio in found]}")


def ranks(asked: argparse.Namespace, folder: Path) -> None:
    """Two ranks of one thread against one, in the time of the rounds; a fifth of the rows is held out, so that flights
    has 785,000 to learn from. Beside them, two workers of XGBoost as it is, with as many rows."""
    file = as_arrays(asked.table, asked.repeat, folder)
    with np.load(file) as all_rows:
        some = {name: all_rows[name][: round(0.8 * len(all_rows["y"]))] for name in ("X", "y")}
    np.savez(folder / "some.npz", **some)
    found, workers = [], []
    for turn in range(asked.turns):
        data = {"path": str(file), "test_fraction": 0.2}
        spec = run_file(folder, data, asked.rounds, train={"evaluate_every": asked.rounds})
        one, two = (train(spec, folder / f"{n}-{turn}", f"parallel.ranks={n}") for n in (1, 2))
        found.append(one["in_steps_s"] / two["in_steps_s"])
        workers.append(one["in_steps_s"] / _two_workers(folder / "some.npz", asked.rounds))
        seconds = f"{one['in_steps_s']:.2f} s, {two['in_steps_s']:.2f} s"
        print(f"{seconds}: {found[-1]:.2f}; XGBoost's own workers {workers[-1]:.2f}", flush=True)
    print(f"two ranks of one thread: {statistics.median(found):.2f} times one")
    print(f"two workers of XGBoost as it is: {statistics.median(workers):.2f}")


def _two_workers(file: Path, rounds: int) -> float:
    """The seconds of the slower one."""
    from xgboost.tracker import RabitTracker

    tracker = RabitTracker(host_ip="127.0.0.1", n_workers=2, sortby="task")
    tracker.start()
    meeting = json.dumps(dict(tracker.worker_args()))
    command = [sys.executable, "-c", WORKER, str(file), str(rounds)]
    started = [
        subprocess.Popen([*command, str(rank), meeting], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for rank in (0, 1)
    ]
    seconds = [json.loads(one.communicate()[0].splitlines()[-1])["rounds_s"] for one in started]
    tracker.wait_for()
    return max(seconds)


def quality(asked: argparse.Namespace, folder: Path) -> None:
    """Held-out log loss and AUC against the library's own run on the same rows, with bins of all rows and of some."""
    import xgboost

    from paceline.config import load
    from paceline.data.prepared_table import prepare_table

    for name in ("adult", "flights"):
        data = as_run_data(name, folder)
        spec = run_file(folder, {**data, "bin_rows": 1 << 30}, asked.rounds, train={"evaluate_every": asked.rounds})
        table = prepare_table(load(spec).data, print)
        rows, test = table.split("train"), table.split("test")
        kinds = ["c" if column in table.facts.categories else "q" for column in table.facts.columns]
        named = {"feature_types": kinds, "feature_names": list(table.facts.columns), "enable_categorical": True}
        matrix = xgboost.QuantileDMatrix(rows.X, rows.y, **named)
        own = xgboost.train({**TREES, "objective": "binary:logistic", "nthread": 1}, matrix, asked.rounds)
        loss, auc = _scores(own.predict(xgboost.DMatrix(test.X, **named)).astype(np.float64), np.array(test.y))
        print(f"{name}: {len(rows):,} rows, {asked.rounds} rounds; XGBoost itself: log loss {loss:.6f}, AUC {auc:.5f}")
        for words, given in (
            ("bins of all rows, 1 rank", []),
            ("bins of all rows, 2 ranks", ["parallel.ranks=2"]),
            ("bins of a quarter of the rows", [f"data.bin_rows={len(rows) // 4}"]),
        ):
            run = train(spec, folder / f"{name}-{words}", *given)
            metrics = run["metrics"]
            trees = json.loads((folder / f"{name}-{words}" / "trees" / "model.json").read_bytes())["learner"]
            equal = trees["gradient_booster"] == json.loads(own.save_raw("json"))["learner"]["gradient_booster"]
            print(
                f"  {words}: log loss {metrics['loss'] / loss - 1:+.3%}, AUC {metrics['auc'] - auc:+.1e}, "
                f"trees {'equal' if equal else 'differ'}",
                flush=True,
            )


def _scores(said: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Log loss and AUC, by their definitions."""
    loss = -np.where(truth > 0, np.log(said), np.log1p(-said)).mean()
    order = np.argsort(said, kind="stable")
    places = np.empty(len(said))
    places[order] = np.arange(1, len(said) + 1)
    _, where, counts = np.unique(said, return_inverse=True, return_counts=True)
    places = (np.bincount(where, places) / counts)[where]
    positive = truth.sum()
    above = places[truth > 0].sum() - positive * (positive + 1) / 2
    return float(loss), float(above / (positive * (len(truth) - positive)))


def same(asked: argparse.Namespace, folder: Path) -> None:
    """The model's sha256 on 1, 2 and 4 ranks and from disk, with rows and columns drawn."""
    for name in ("adult", "flights"):
        data = as_run_data(name, folder)
        drawn = {"subsample": 0.8, "colsample_bytree": 0.7}
        spec = run_file(folder, data, asked.rounds, model=drawn, train={"evaluate_every": asked.rounds})
        layouts = {f"{n} rank{'s' * (n > 1)}": [f"parallel.ranks={n}"] for n in (1, 2, 4)}
        layouts |= {"2 ranks, on disk": ["parallel.ranks=2", "data.memory=disk"]}
        found = {}
        for words, given in layouts.items():
            found[words] = train(spec, folder / f"{name}-{words}", *given)["sha256"]
            print(f"{name}, {asked.rounds} rounds, {words}: {found[words]}", flush=True)
        print(f"{name}: {'identical' if len(set(found.values())) == 1 else 'DIFFERENT'}")


def memory(asked: argparse.Namespace, folder: Path) -> None:
    """A table larger than is resident: made up in blocks, written once, and trained on from disk."""
    columns = 64
    rows = int(asked.gigabytes * 1e9 / 4 / columns)
    needed = 2.2 * asked.gigabytes * 1e9
    if (free := shutil.disk_usage(folder).free) < needed:
        sys.exit(f"{folder} has {free / 1e9:.0f} GB free, and {needed / 1e9:.0f} are needed; set TMPDIR")
    data = {"rows": rows, "columns": columns, "test_fraction": 0.02, "memory": "disk"}
    spec = run_file(folder, data, 3, model={"max_depth": 4}, train={"log_every": 1, "evaluate_every": 3})
    out = folder / "run"
    command = [sys.executable, "-m", "paceline", "train", str(spec), "--out", str(out), "--quiet"]
    process = subprocess.Popen(command)
    most = 0
    while process.poll() is None:
        most = max(most, _resident(process.pid))
        time.sleep(0.1)
    written = sum(file.stat().st_size for file in (folder / "cache").rglob("*.npy"))
    print(f"{rows:,} rows × {columns} columns, {written / 1e9:.1f} GB on disk: {most / 1e9:.2f} GB resident at most")
    print(f"3 rounds in {json.loads((out / 'trees' / 'summary.json').read_text())['in_steps_s']:.0f} s")


def _resident(process: int) -> int:
    """Of a process and its children, mapped pages of files included."""
    import psutil

    try:
        first = psutil.Process(process)
        return sum(one.memory_info().rss for one in (first, *first.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def kills(asked: argparse.Namespace, folder: Path) -> None:
    """`kill -9` of all ranks at any moment, reading and writing included; resumed on another number of ranks."""
    draw = random.Random(3)
    model = {"max_depth": 6, "subsample": 0.8, "colsample_bytree": 0.7}
    given = {"checkpoint_every": 20, "evaluate_every": 50}
    spec = run_file(folder, {"rows": 60_000}, 60 * asked.times, model=model, train=given)
    whole = train(spec, folder / "whole")["sha256"]
    run, done, finished = folder / "killed" / "trees", 0, 0
    while done < asked.times or not finished:
        process = _started(spec, run, 1 + done % 3)
        moment = draw.uniform(0, 4)
        if done % 2:  # half of them once there is something new to lose, so that the run gets on
            before, moment = _saved(run), draw.uniform(0, 1)
            while process.poll() is None and _saved(run) == before:
                time.sleep(0.02)
        if done < asked.times:
            time.sleep(moment)
        else:
            process.wait()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            done += 1
            print(f"kill {done}, {1 + (done - 1) % 3} ranks, last checkpoint {_saved(run)}", flush=True)
            continue
        found = hashlib.sha256((run / "model.json").read_bytes()).hexdigest()
        if process.returncode or found != whole:
            sys.exit(f"after {done} kills the run ended with {process.returncode}, model {found}, not {whole}")
        finished += 1
        shutil.rmtree(run)
    print(f"{done} kills in {finished} runs: every model identical to that of the run which nobody killed")


def _started(spec: Path, run: Path, ranks: int) -> subprocess.Popen[bytes]:
    """The run, from its beginning or from where it was."""
    how = ["--resume", str(run)] if (run / "spec.yaml").exists() else [str(spec), "--out", str(run.parent)]
    command = [sys.executable, "-m", "paceline", "train", *how, f"parallel.ranks={ranks}", "--quiet"]
    return subprocess.Popen(command, start_new_session=True)


def _saved(run: Path) -> str:
    return max((file.name for file in (run / "checkpoints").glob("step-*")), default="none")


def main() -> None:
    from tree_plans import plan

    parts = {part.__name__: part for part in (overhead, ranks, quality, same, memory, kills, plan)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--table", default="flights", choices=("adult", "flights", "made-up"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--fit", action="store_true", help="print the prices of a round that fit this machine best")
    asked = parser.parse_args()
    asked.rounds = asked.rounds or (100 if asked.part in ("overhead", "ranks") else 200)
    with tempfile.TemporaryDirectory() as name:
        parts[asked.part](asked, Path(name))


if __name__ == "__main__":
    main()
