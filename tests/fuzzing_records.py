"""More targets of fuzzing: files that Paceline wrote itself and reads back, in run folders, sweeps and caches.

Of a cache, damage ends in building it again; of what ranks say to each other, in passing it over.
"""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

from fuzzing import TARGETS, add_target, read_report, show, tried
from paceline.cli.jobs import _build_jobs_table
from paceline.cli.sweep import print_sweep
from paceline.config import build_spec
from paceline.config.trust import check_trusted, sign_run_folder
from paceline.data.cache import open_entry
from paceline.data.corpora.documents import TokenStreams
from paceline.data.corpora.labelled import LabelledCorpus
from paceline.data.prepared_table import Coding, TableTarget, Task, _open_table, prepare_table
from paceline.hardware import catalogue
from paceline.horovod import elastic
from paceline.io.files import hash_value, read_json, to_flat, write_json
from paceline.io.terminal import build_console
from paceline.launch.hang_traces import find_pending_call, read_calls
from paceline.launch.heartbeat import Beat, read_beats
from paceline.measurement.measure import count_total_samples, select_comparable
from paceline.measurement.progress import build_rows, load_state
from paceline.measurement.run_times import read_run_times
from paceline.planner.plan import plan
from paceline.reports.sweep_page import build_sweep_charts, build_sweep_table, describe_sweep
from paceline.runlog.jobs import decide_next_attempt, list_job_ids, record_job_event
from paceline.runlog.loggers import KINDS, open_loggers
from paceline.runlog.run_dir import RunDir
from paceline.slurm.jobs import _build_job_row, find_log_files
from paceline.slurm.submit import _last_machines
from paceline.trainer.init_from import open_weights, read_model_type
from paceline.trials.sweep import _run_halving, build_sweep_plan, open_sweep
from paceline.workload import build_workload
from paceline.workloads.classifier.sections import TextData
from paceline.workloads.ensemble.members import read_manifest
from paceline.workloads.lm.sections import LMData
from paceline.workloads.topics.counts.matrices import Counts
from paceline.workloads.topics.files.shards import read_shards, write_shards
from paceline.workloads.trees.sections import TreesData
from paceline.workloads.trees.tree_model import FittedTrees
from paceline.workloads.unet import corpus as images
from paceline.workloads.unet.sections import ImageData
from paceline.workloads.unet.sources import SceneSource
from report_runs import make_measurement, make_run

__all__ = ["TARGETS", "tried"]


def _quiet(line: str) -> None:
    pass


def plan_sweep(folder):
    values = {"train.lr": [0.001, 0.1], "model.layers": [1, 2], "train.optimizer": ["sgd", "adam"]}
    return build_sweep_plan(build_spec({"train": {"steps": 9}}), values, folder, {"halving": True})


def make_sweep(folder):
    begun = open_sweep(plan_sweep(folder))
    first, second, third, *_ = begun.trials
    facts: Any = {"seconds": 1.5, "metrics": {"accuracy": 0.5, "loss": 1.0}}
    first = replace(first, status="finished", score=0.5, length=9, history=((3, 0.25), (9, 0.5)), **facts)
    second = replace(second, status="dropped", score=0.25, length=3, history=((3, 0.25),), **facts)
    third = replace(third, status="failed", why="no reason\nat all")
    begun.with_row(first).with_row(second).with_row(third).write()


def read_sweep(folder):
    """Do all that is done with it until the next trial begins."""
    plan = plan_sweep(folder)
    found = open_sweep(plan)
    with (screen := build_console()).capture():
        print_sweep(found, ["run.yaml"], screen)
    build_sweep_charts(found)
    done = [row.history or row.status != "to do" for row in found.trials]
    if all(done):
        _run_halving(plan, found, 1, _quiet)
    return describe_sweep(found), build_sweep_table(open_sweep(plan, retry=True)).rows


def make_jobs(folder):
    run = RunDir(make_run(folder, "made", steps=8))
    asked: Any = {"nodes": "2", "per_node": 4, "gpus": True, "usd_per_device_hour": 2.5}
    record_job_event(run, "submit", job="12", script="x.sh", log=str(folder / "slurm-12.out"), **asked)
    record_job_event(run, "ended", job="12", step=4, next="again", why="the time limit is near")
    record_job_event(run, "cancel", job="12")
    record_job_event(run, "ended", job="12", step=4, next="enough", why="no progress")


def make_planned_jobs(folder):
    make_jobs(folder)
    (folder / "made" / "spec.yaml").write_text("name: made\nworkload: classifier\ntrain: {epochs: 2}\n")
    (folder / "made" / "plan.json").write_text(json.dumps({"run": {"steps": 100, "epochs": 2}}))


def read_jobs(folder):
    run = RunDir.open(folder / "made")
    ids = list_job_ids(run)
    show(_build_jobs_table([_build_job_row(run, job, None) for job in ids]))
    return find_log_files(run, ids), decide_next_attempt(run, "USR1", job="12"), _last_machines(run)


add_target("SweepFile", "sweep.json", make_sweep, read_sweep)
add_target("JobsFile", "made/jobs.jsonl", make_jobs, read_jobs)
add_target("PlanOfARun", "made/plan.json", make_planned_jobs, read_jobs)


class KnownLogger:
    def __init__(self, run: Any, spec: Any, run_id: str | None) -> None:
        assert run_id is None or isinstance(run_id, str)
        self.run_id = run_id or "new"


def make_loggers(folder):
    make_run(folder, "made", steps=8)
    (folder / "made" / "loggers.json").write_text('{"tensorboard": "tensorboard", "wandb": "abc123"}')


def read_loggers(folder):
    with mock.patch.dict(KINDS, {"tensorboard": KnownLogger}):
        return open_loggers(["tensorboard"], RunDir(folder / "made"), build_spec({}), _quiet)


def make_unfinished_measurement(folder):
    measured = make_measurement(folder / "measured", {1: 0.1, 2: 0.06}, repeats=1)
    values = read_json(measured / "measure.json")
    for label, name in (("1 rank", "1-rank-1"), ("2 ranks", "2-ranks-1")):
        times = to_flat(read_run_times(RunDir(measured / name)))
        values["done"][name] = {"label": label, "times": times, "usage": {"cores": 0.5}}
    failed = {"failed": {"pipeline:8": "no room"}, "out_of_memory": ["8 ranks"]}
    write_json(measured / "measure.json", {**values, **failed})
    (folder / "begun.json").write_bytes((folder / "measured" / "measure.json").read_bytes())


def read_unfinished_measurement(folder):
    begun = read_json(folder / "begun.json")
    asked = {name: begun.get(name) for name in ("name", "kind", "steps", "spec")}
    state = load_state(folder / "measured", asked, select_comparable)
    return build_rows((), state), count_total_samples(folder / "measured", state)


def _state_in(folder):
    return mock.patch.dict("os.environ", {"XDG_STATE_HOME": str(folder / "state")})


def make_origin(folder):
    with _state_in(folder):
        (folder / "origin.json").write_text(sign_run_folder(folder, {"workload": "own.py:Model"}) or "")


def read_origin(folder):
    with _state_in(folder):
        return check_trusted(folder, {"workload": "own.py:Model"})


def read_collectives(folder):
    calls = read_calls(folder, 0)
    return str(find_pending_call(calls))


BEAT = Beat(0, "desk", 12, 34, 5, "step", 1.5, 0.5)
CALLS = {"nccl 0": {"group": "nccl 0", "number": 12, "name": "all_reduce", "done": False}}
add_target("LoggersFile", "made/loggers.json", make_loggers, read_loggers)
add_target("MeasurementThatGoesOn", "measured/measure.json", make_unfinished_measurement, read_unfinished_measurement)
add_target("OriginFile", "origin.json", make_origin, read_origin)
add_target("Heartbeat", "rank0.json", asdict(BEAT), lambda folder: [beat.position for beat in read_beats(folder)])
add_target("Collectives", "rank0.collectives", CALLS, read_collectives)


def make_commit(folder):
    values = {"epoch": 3, "mixed": {1: ("a", [1.5, {}])}}
    elastic.write_commit(folder / "state.safetensors", {"w": torch.ones(3), **values})


def make_weights_index(folder):
    (folder / "model").mkdir()
    for name in ("a", "b"):
        save_file({name: torch.ones(3)}, folder / "model" / f"{name}.safetensors")
    index = {"metadata": {"total_size": 24}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))


def plan_from_config(folder):
    spec = {"workload": "transformers", "model": {"config": str(folder / "model" / "config.json")}}
    return plan(build_spec({**spec, "data": {"vocab": 300}, "train": {"steps": 3}}), "1xA10").rows


def read_kept_images(folder):
    work: Any = build_workload(build_spec({"workload": "unet", "model": {"depth": 2}}))
    work.kept = folder / "kept"
    return work.model(), list(work.classes())


SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 64}
add_target(
    *("ElasticCommit", "state.safetensors", make_commit),
    read=lambda folder: elastic.read_commit(folder / "state.safetensors"),
)
add_target(
    *("WeightsIndex", "model/model.safetensors.index.json", make_weights_index),
    read=lambda folder: (read_model_type(folder / "model"), open_weights(folder / "model").shapes),
)
add_target("HuggingFaceConfig", "model/config.json", {**LLAMA, **SIZES, "rms_norm_eps": 1e-6}, plan_from_config)
add_target("KeptImages", "kept/images.json", {"channels": 3, "classes": ["a", "b"]}, read_kept_images)


def _write_trees(folder, kind, raw, categories):
    (folder / "kept").mkdir()
    target = TableTarget(Task.BINARY, ("no", "yes"), (0.0, 1.0))
    FittedTrees(kind, raw, Coding(("size", "kind"), categories), target).write(folder / "kept")


def make_xgboost(folder):
    import xgboost

    X, y = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32), np.arange(40) % 2
    X[:, 1] = y
    given = {"max_depth": 2, "nthread": 1, "objective": "binary:logistic"}
    rows = xgboost.DMatrix(X, y, feature_types=["float", "c"], enable_categorical=True)
    raw = bytes(xgboost.train(given, rows, 2).save_raw("json"))
    _write_trees(folder, "xgboost", raw, {"kind": ["a", "b"]})


def make_lightgbm(folder):
    import lightgbm

    X, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2
    given = {"objective": "binary", "min_data_in_leaf": 2, "num_leaves": 4, "verbose": -1, "num_threads": 1}
    text = lightgbm.train(given, lightgbm.Dataset(X, y), 2).model_to_string()
    _write_trees(folder, "lightgbm", text.encode(), {})


def read_trees(folder, kind):
    found = FittedTrees.read(folder / "kept")
    return found.predict([{"size": 1.0, "kind": kind}]), found.rounds, found.classes


CALIBRATION = {"weights": [1.1], "shifts": [0.1, -0.1]}
CURVES = {"said": [[0.0, 1.0], [0.0, 0.5, 1.0]], "held": [[0.1, 0.9], [0.1, 0.4, 0.9]]}
NUMBERS = {"how": "weighted", "weights": [0.4, 0.6], "scales": [1.0, 1.2], "shifts": []}
MEMBERS = [{"name": name, "path": f"../{name}", "workload": "trees", "sha256": "0" * 64} for name in "ab"]
ENSEMBLE = {"format": 1, "members": MEMBERS, "classes": ["no", "yes"], "held_out": {}}
ENSEMBLE["combination"] = {**NUMBERS, "calibration": CALIBRATION, "curves": CURVES}
add_target("KeptTrees", "kept/table.json", make_xgboost, partial(read_trees, kind="a"))
add_target("KeptXgboost", "kept/model.json", make_xgboost, partial(read_trees, kind="a"))
add_target("KeptLightgbm", "kept/model.txt", make_lightgbm, partial(read_trees, kind=2.0))
add_target("EnsembleFile", "run/ensemble.json", ENSEMBLE, lambda folder: read_manifest(folder / "run"))


def _sealed(facts):
    inside = {name: value for name, value in facts.items() if name != "seal"}
    return {**inside, "seal": hash_value(inside)}


def make_corpus(folder):
    (folder / "rows.csv").write_text("text,label\n" + "".join(f"words {i},{i % 2}\n" for i in range(60)))
    data = TextData(source="csv", path=folder / "rows.csv", vocab=300, cache=folder / "cache")
    LabelledCorpus.prepare(data).folder.rename(folder / "cache" / "entry")


def make_stream(folder):
    (folder / "a.txt").write_text("some words\n" * 4000)
    data = LMData(source="text", path=folder / "a.txt", vocab=300, cache=folder / "cache")
    TokenStreams.prepare(data).folder.rename(folder / "cache" / "entry")


def make_images(folder):
    few = {"scenes": 6, "size": 40, "digits_per_scene": 2, "test_fraction": 0.3}
    made = images.prepare_images(SceneSource(ImageData(**few)), "scenes", folder / "cache", _quiet)
    made.folder.rename(folder / "cache" / "entry")


def make_table(folder):
    rows = "".join(f"{i},{'ab'[i % 2]},{i % 3}\n" for i in range(60))
    (folder / "t.csv").write_text(f"size,kind,label\n{rows}")
    asked = TreesData(path=folder / "t.csv", label="label", categories=["kind"], cache=folder / "cache")
    prepare_table(asked, _quiet).folder.rename(folder / "cache" / "entry")


def add_cached(name, file, make, read, tell, **options):
    def look(folder):
        entry = folder / "cache" / "entry"
        found = open_entry(entry, read)
        return None if found is None else tell(found)

    add_target(name, f"cache/entry/{file}", make, look, **options)


def tell_table(found):
    return found.split("train").X.sum(), found.bin_rows(), found.facts


add_cached("CorpusMeta", "meta.json", make_corpus, LabelledCorpus.open, lambda c: (str(c), c.tokenizer, c.classes))
add_cached("StreamMeta", "meta.json", make_stream, TokenStreams.open, lambda c: (str(c), c.tokenizer))
add_cached("ImagesMeta", "meta.json", make_images, images.open_image_corpus, lambda found: (found.kind, found.train))
add_cached("TableMeta", "facts.json", make_table, _open_table, tell_table, seal=_sealed)


def make_catalogue(folder):
    whole = (Path(catalogue.__file__).parent / "hardware.csv").read_bytes()
    (folder / "devices.csv").write_bytes(whole)
    (folder / "cluster.yaml").write_text("device: H100-SXM5-80GB\ncatalogue: devices.csv\n")


def read_catalogue(folder):
    catalogue.load_catalogue.cache_clear()
    return str(catalogue.parse_cluster(str(folder / "cluster.yaml")))


def make_shard_terms(folder):
    rows = np.random.default_rng(0).poisson(0.5, (12, 8)).astype(np.uint8)
    labels = Counts(vocabulary=[f"term{i}" for i in range(8)], names=[f"text{i}" for i in range(12)])
    write_shards(folder / "shards", [rows], 8, labels)


TIMES = "name,devices,seconds\nmine,1,20.5\nmine,2,11\nmine,4,6.5\nother,1,3\n"
add_target("Catalogue", "devices.csv", make_catalogue, read_catalogue)
add_target("TimesFile", "times.csv", TIMES, partial(read_report, name="times.csv"))
add_target(
    *("ShardTerms", "shards/terms.txt", make_shard_terms),
    read=lambda folder: read_shards(folder / "shards").vocabulary,
)
