"""More targets of fuzzing: files that Paceline wrote itself and reads back, in run folders, sweeps and caches.

Of a cache, damage ends in building it again; of what ranks say to each other, in passing it over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuzzing import TARGETS, target, tried

__all__ = ["TARGETS", "tried"]


def _quiet(line: str) -> None:
    pass


@target("sweep.json")
class SweepFile:
    def plan(folder: Path) -> Any:
        from paceline.config import build_spec
        from paceline.trials.sweep import build_sweep_plan

        values = {"train.lr": [0.001, 0.1], "model.layers": [1, 2], "train.optimizer": ["sgd", "adam"]}
        return build_sweep_plan(build_spec({"train": {"steps": 9}}), values, folder, {"halving": True})

    def make(folder: Path) -> None:
        from dataclasses import replace

        from paceline.trials.sweep import open_sweep

        begun = open_sweep(SweepFile.plan(folder))
        first, second, third, *_ = begun.trials
        facts: Any = {"seconds": 1.5, "metrics": {"accuracy": 0.5, "loss": 1.0}}
        first = replace(first, status="finished", score=0.5, length=9, history=((3, 0.25), (9, 0.5)), **facts)
        second = replace(second, status="dropped", score=0.25, length=3, history=((3, 0.25),), **facts)
        third = replace(third, status="failed", why="no reason\nat all")
        begun.with_row(first).with_row(second).with_row(third).write()

    def read(folder: Path) -> object:
        """All that is done with it until the next trial begins."""
        from paceline.cli.sweep import print_sweep
        from paceline.io.terminal import build_console
        from paceline.reports.sweep_page import build_sweep_table, describe_sweep, draw_sweep
        from paceline.trials.sweep import _run_halving, open_sweep

        plan = SweepFile.plan(folder)
        found = open_sweep(plan)
        with (screen := build_console()).capture():
            print_sweep(found, ["run.yaml"], screen)
        if found.best is not None:
            draw_sweep(found)
        done = [row.history or row.status != "to do" for row in found.trials]
        if all(done):
            _run_halving(plan, found, 1, _quiet)
        return describe_sweep(found), build_sweep_table(open_sweep(plan, retry=True)).rows


@target("made/jobs.jsonl")
class JobsFile:
    def make(folder: Path) -> None:
        from paceline.runlog.jobs import record_job_event
        from paceline.runlog.run_dir import RunDir
        from report_runs import make_run

        run = RunDir(make_run(folder, "made", steps=8))
        asked: Any = {"nodes": "2", "per_node": 4, "gpus": True, "usd_per_device_hour": 2.5}
        record_job_event(run, "submit", job="12", script="x.sh", log=str(folder / "slurm-12.out"), **asked)
        record_job_event(run, "ended", job="12", step=4, next="again", why="the time limit is near")
        record_job_event(run, "cancel", job="12")
        record_job_event(run, "ended", job="12", step=4, next="enough", why="no progress")

    def read(folder: Path) -> object:
        from paceline.cli.jobs import _build_jobs_table
        from paceline.io.terminal import build_console
        from paceline.runlog.jobs import decide_next_attempt, list_job_ids
        from paceline.runlog.run_dir import RunDir
        from paceline.slurm.jobs import JobRow, _build_job_row, find_log_files
        from paceline.slurm.submit import _last_machines

        run = RunDir.open(folder / "made")
        ids = list_job_ids(run)
        rows: list[JobRow] = [_build_job_row(run, job, None) for job in ids]
        with (screen := build_console()).capture():
            screen.print(_build_jobs_table(rows))
        return find_log_files(run, ids), decide_next_attempt(run, "USR1", job="12"), _last_machines(run)


@target("made/plan.json")
class PlanOfARun:
    def make(folder: Path) -> None:
        import json

        JobsFile.make(folder)
        (folder / "made" / "spec.yaml").write_text("name: made\nworkload: classifier\ntrain: {epochs: 2}\n")
        (folder / "made" / "plan.json").write_text(json.dumps({"run": {"steps": 100, "epochs": 2}}))

    read = JobsFile.read


@target("made/loggers.json")
class LoggersFile:
    def make(folder: Path) -> None:
        from report_runs import make_run

        make_run(folder, "made", steps=8)
        (folder / "made" / "loggers.json").write_text('{"tensorboard": "tensorboard", "wandb": "abc123"}')

    def read(folder: Path) -> object:
        from paceline.config import build_spec
        from paceline.runlog.loggers import KINDS, open_loggers
        from paceline.runlog.run_dir import RunDir

        class Known:
            def __init__(self, run: Any, spec: Any, run_id: str | None) -> None:
                assert run_id is None or isinstance(run_id, str)
                self.run_id = run_id or "new"

        before = KINDS["tensorboard"]
        KINDS["tensorboard"] = Known
        try:
            return open_loggers(["tensorboard"], RunDir(folder / "made"), build_spec({}), _quiet)
        finally:
            KINDS["tensorboard"] = before


@target("measured/measure.json")
class MeasurementThatGoesOn:
    def make(folder: Path) -> None:
        from paceline.io.files import read_json, to_flat, write_json
        from paceline.measurement.run_times import read_run_times
        from paceline.runlog.run_dir import RunDir
        from report_runs import make_measurement

        measured = make_measurement(folder / "measured", {1: 0.1, 2: 0.06}, repeats=1)
        values = read_json(measured / "measure.json")
        for label, name in (("1 rank", "1-rank-1"), ("2 ranks", "2-ranks-1")):
            times = to_flat(read_run_times(RunDir(measured / name)))
            values["done"][name] = {"label": label, "times": times, "usage": {"cores": 0.5}}
        write_json(
            measured / "measure.json", {**values, "failed": {"pipeline:8": "no room"}, "out_of_memory": ["8 ranks"]}
        )
        (folder / "begun.json").write_bytes((folder / "measured" / "measure.json").read_bytes())

    def read(folder: Path) -> object:
        from paceline.io.files import read_json
        from paceline.measurement.measure import count_total_samples, select_comparable
        from paceline.measurement.progress import build_rows, collect_times, forget_failures, load_state

        begun = read_json(folder / "begun.json")
        state = load_state(
            folder / "measured",
            {name: begun.get(name) for name in ("name", "kind", "steps", "spec")},
            select_comparable,
        )
        forget_failures(state, ())
        return build_rows((), state, collect_times((), state)), count_total_samples(folder / "measured", state)


@target("origin.json")
class OriginFile:
    def make(folder: Path) -> None:
        from paceline.config.trust import sign_run_folder

        with _state_in(folder):
            (folder / "origin.json").write_text(sign_run_folder(folder, {"workload": "own.py:Model"}) or "")

    def read(folder: Path) -> object:
        from paceline.config.trust import check_trusted

        with _state_in(folder):
            return check_trusted(folder, {"workload": "own.py:Model"})


@contextmanager
def _state_in(folder: Path) -> Iterator[None]:
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    try:
        yield
    finally:
        del os.environ["XDG_STATE_HOME"]
        os.environ.update({} if before is None else {"XDG_STATE_HOME": before})


@target("rank0.json")
class Heartbeat:
    def make(folder: Path) -> None:
        import json
        from dataclasses import asdict

        from paceline.launch.heartbeat import Beat

        (folder / "rank0.json").write_text(json.dumps(asdict(Beat(0, "desk", 12, 34, 5, "step", 1.5, 0.5))))

    def read(folder: Path) -> object:
        from paceline.launch.heartbeat import read_beats

        return [beat.position for beat in read_beats(folder)]


@target("rank0.collectives")
class Collectives:
    def make(folder: Path) -> None:
        import json

        call = {"group": "nccl 0", "number": 12, "name": "all_reduce", "done": False}
        (folder / "rank0.collectives").write_text(json.dumps({"nccl 0": call}))

    def read(folder: Path) -> object:
        from paceline.launch.hang_traces import count_calls, find_pending_call, read_calls

        calls = read_calls(folder, 0)
        return str(find_pending_call(calls)), count_calls(calls)


@target("state.safetensors")
class ElasticCommit:
    def make(folder: Path) -> None:
        import numpy as np
        import torch

        from paceline.horovod import elastic

        state = {
            "w": torch.ones(3),
            "epoch": 3,
            "mixed": {1: ("a", [1.5, {}])},
            "array": np.arange(3),
            "one": np.int64(7),
        }
        elastic.write_commit(folder / "state.safetensors", state)

    def read(folder: Path) -> object:
        from paceline.horovod import elastic

        return elastic.read_commit(folder / "state.safetensors")


@target("model/model.safetensors.index.json")
class WeightsIndex:
    def make(folder: Path) -> None:
        import json

        import torch
        from safetensors.torch import save_file

        (folder / "model").mkdir()
        for name in ("a", "b"):
            save_file({name: torch.ones(3)}, folder / "model" / f"{name}.safetensors")
        index = {"metadata": {"total_size": 24}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
        (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))

    def read(folder: Path) -> object:
        from paceline.trainer.init_from.weights import open_weights, read_model_type

        return read_model_type(folder / "model"), open_weights(folder / "model").shapes


@target("model/config.json")
class HuggingFaceConfig:
    def make(folder: Path) -> None:
        import json

        (folder / "model").mkdir()
        sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        more = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 64}
        (folder / "model" / "config.json").write_text(json.dumps({**more, **sizes, "rms_norm_eps": 1e-6}))

    def read(folder: Path) -> object:
        from paceline.config import build_spec
        from paceline.planner.plan import plan

        spec = {"workload": "transformers", "model": {"config": str(folder / "model" / "config.json")}}
        return plan(build_spec({**spec, "data": {"vocab": 300}, "train": {"steps": 3}}), "1xA10").rows


@target("kept/images.json")
class KeptImages:
    def make(folder: Path) -> None:
        import json

        (folder / "kept").mkdir()
        (folder / "kept" / "images.json").write_text(json.dumps({"channels": 3, "classes": ["a", "b"]}))

    def read(folder: Path) -> object:
        from paceline.config import build_spec
        from paceline.workload import build_workload

        work: Any = build_workload(build_spec({"workload": "unet", "model": {"depth": 2}}))
        work.kept = folder / "kept"
        return work.model(), list(work.classes())


@target("kept/table.json")
class KeptTrees:
    def make(folder: Path) -> None:
        import numpy as np
        import xgboost

        from paceline.workloads.trees.sections import OBJECTIVES, Task
        from paceline.workloads.trees.table import Coding, TreeTarget
        from paceline.workloads.trees.tree_model import FittedTrees

        random = np.random.default_rng(0)
        X, y = random.normal(size=(40, 2)).astype(np.float32), np.arange(40) % 2
        X[:, 1] = y
        given = {"max_depth": 2, "nthread": 1, "objective": "binary:logistic"}
        rows = xgboost.DMatrix(X, y, feature_types=["float", "c"], enable_categorical=True)
        raw = bytes(xgboost.train(given, rows, 2).save_raw("json"))
        (folder / "kept").mkdir()
        target = TreeTarget(OBJECTIVES[Task.BINARY], ("no", "yes"), (0.0, 1.0))
        FittedTrees("xgboost", raw, Coding(("size", "kind"), {"kind": ["a", "b"]}), target).write(folder / "kept")

    def read(folder: Path) -> object:
        from paceline.workloads.trees.tree_model import FittedTrees

        found = FittedTrees.read(folder / "kept")
        return found.predict([{"size": 1.0, "kind": "a"}]), found.rounds, found.leaves, found.classes


@target("kept/model.json")
class KeptXgboost:
    make = KeptTrees.make
    read = KeptTrees.read


@target("kept/model.txt")
class KeptLightgbm:
    def make(folder: Path) -> None:
        import lightgbm
        import numpy as np

        from paceline.workloads.trees.sections import OBJECTIVES, Task
        from paceline.workloads.trees.table import Coding, TreeTarget
        from paceline.workloads.trees.tree_model import FittedTrees

        X, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2
        given = {"objective": "binary", "min_data_in_leaf": 2, "num_leaves": 4, "verbose": -1, "num_threads": 1}
        text = lightgbm.train(given, lightgbm.Dataset(X, y), 2).model_to_string()
        (folder / "kept").mkdir()
        target = TreeTarget(OBJECTIVES[Task.BINARY], ("no", "yes"), (0.0, 1.0))
        FittedTrees("lightgbm", text.encode(), Coding(("size", "kind"), {}), target).write(folder / "kept")

    def read(folder: Path) -> object:
        from paceline.workloads.trees.tree_model import FittedTrees

        found = FittedTrees.read(folder / "kept")
        return found.predict([{"size": 1.0, "kind": 2.0}]), found.rounds, found.leaves


@target("run/ensemble.json")
class EnsembleFile:
    def make(folder: Path) -> None:
        import json

        (folder / "run").mkdir()
        calibration = {"weights": [1.1], "shifts": [0.1, -0.1]}
        curves = {"said": [[0.0, 1.0], [0.0, 0.5, 1.0]], "held": [[0.1, 0.9], [0.1, 0.4, 0.9]]}
        numbers = {"how": "weighted", "weights": [0.4, 0.6], "scales": [1.0, 1.2], "shifts": []}
        members = [{"name": name, "path": f"../{name}", "workload": "trees", "sha256": "0" * 64} for name in "ab"]
        told = {"format": 1, "members": members, "classes": ["no", "yes"], "held_out": {}}
        combination = {**numbers, "calibration": calibration, "curves": curves}
        (folder / "run" / "ensemble.json").write_text(json.dumps({**told, "combination": combination}))

    def read(folder: Path) -> object:
        from paceline.workloads.ensemble.fitted import read_manifest

        return read_manifest(folder / "run")


def _sealed(facts: dict[str, Any]) -> dict[str, Any]:
    from paceline.data.cache import add_seal

    return add_seal({name: value for name, value in facts.items() if name != "seal"})


@target("cache/entry/meta.json")
class CorpusMeta:
    def make(folder: Path) -> None:
        from paceline.data.corpora.labelled import LabelledCorpus
        from paceline.workloads.classifier.sections import TextData

        (folder / "rows.csv").write_text("text,label\n" + "".join(f"words {i},{i % 2}\n" for i in range(60)))
        data = TextData(source="csv", path=folder / "rows.csv", vocab=300, cache=folder / "cache")
        LabelledCorpus.prepare(data).folder.rename(folder / "cache" / "entry")

    def read(folder: Path) -> object:
        from paceline.data.corpora.labelled import LabelledCorpus

        if (found := LabelledCorpus._find(folder / "cache" / "entry", _quiet, verify=True)) is not None:
            return str(found), found.tokenizer, found.classes
        return None


@target("cache/entry/meta.json")
class StreamMeta:
    def make(folder: Path) -> None:
        from paceline.data.corpora.documents import TokenStreams
        from paceline.workloads.lm.sections import LMData

        (folder / "a.txt").write_text("some words\n" * 4000)
        data = LMData(source="text", path=folder / "a.txt", vocab=300, cache=folder / "cache")
        TokenStreams.prepare(data).folder.rename(folder / "cache" / "entry")

    def read(folder: Path) -> object:
        from paceline.data.corpora.documents import TokenStreams

        if (found := TokenStreams._find(folder / "cache" / "entry", _quiet, verify=True)) is not None:
            return str(found), found.tokenizer
        return None


@target("cache/entry/meta.json")
class ImagesMeta:
    def make(folder: Path) -> None:
        from paceline.workloads.unet.corpus import prepare_images
        from paceline.workloads.unet.scenes import SceneSource
        from paceline.workloads.unet.sections import ImageData

        few = {"scenes": 6, "size": 40, "digits_per_scene": 2, "test_fraction": 0.3}
        made = prepare_images(SceneSource(ImageData(**few)), "scenes", folder / "cache", _quiet)
        made.folder.rename(folder / "cache" / "entry")

    def read(folder: Path) -> object:
        from paceline.workloads.unet.corpus import _find

        if (found := _find(folder / "cache" / "entry", _quiet, verify=True)) is not None:
            return found.channels, found.classes, found.train
        return None


@target("cache/entry/facts.json", seal=_sealed)
class TableMeta:
    def make(folder: Path) -> None:
        from paceline.workloads.trees.sections import TreesData
        from paceline.workloads.trees.table import prepare_table

        rows = "".join(f"{i},{'ab'[i % 2]},{i % 3}\n" for i in range(60))
        (folder / "t.csv").write_text(f"size,kind,label\n{rows}")
        asked = TreesData(path=folder / "t.csv", label="label", categories=["kind"], cache=folder / "cache")
        made = prepare_table(asked, _quiet)
        made.folder.rename(folder / "cache" / "entry")

    def read(folder: Path) -> object:
        from paceline.workloads.trees.table import _read_cached

        if (found := _read_cached(folder / "cache" / "entry")) is not None:
            return found.split("train").X.sum(), found.bin_rows(), found.facts
        return None


@target("devices.csv")
class Catalogue:
    def make(folder: Path) -> None:
        from paceline.hardware import catalogue

        whole = (Path(catalogue.__file__).parent / "hardware.csv").read_bytes()
        (folder / "devices.csv").write_bytes(whole)
        (folder / "cluster.yaml").write_text("device: H100-SXM5-80GB\ncatalogue: devices.csv\n")

    def read(folder: Path) -> object:
        from paceline.hardware.catalogue import load_catalogue, parse_cluster

        load_catalogue.cache_clear()
        return str(parse_cluster(str(folder / "cluster.yaml")))


@target("times.csv")
class TimesFile:
    def make(folder: Path) -> None:
        (folder / "times.csv").write_text("name,devices,seconds\nmine,1,20.5\nmine,2,11\nmine,4,6.5\nother,1,3\n")

    def read(folder: Path) -> object:
        from paceline.reports.contents import gather_contents
        from paceline.reports.tables import build_tables

        return build_tables(gather_contents([folder / "times.csv"]))


@target("shards/terms.txt")
class ShardTerms:
    def make(folder: Path) -> None:
        import numpy as np

        from paceline.workloads.topics.counts.matrices import Counts
        from paceline.workloads.topics.files.shards import write_shards

        rows = np.random.default_rng(0).poisson(0.5, (12, 8)).astype(np.uint8)
        labels = Counts(vocabulary=[f"term{i}" for i in range(8)], names=[f"text{i}" for i in range(12)])
        write_shards(folder / "shards", [rows], 8, labels)

    def read(folder: Path) -> object:
        from paceline.workloads.topics.files.shards import read_shards

        return read_shards(folder / "shards").vocabulary
