"""A reader of Paceline for every kind of file, a whole file of that kind, and ways to damage it.

A mutation is a function of the target's name and a number, so that each can be made again: `mutated(name, number)`.
What a reader may do with it is to read it, or to refuse it in one line.
"""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from paceline.config import build_spec, load
from paceline.convert.adopt import adopt
from paceline.data.corpora import tokenizer as bpe
from paceline.data.corpora.labelled import LabelledTable
from paceline.data.corpora.tokenised import Vocabulary
from paceline.data.tables import read_table
from paceline.errors import PacelineError
from paceline.hardware.catalogue import parse_cluster
from paceline.io.files import hash_value, read_bytes
from paceline.io.terminal import build_console
from paceline.layout import layout_of
from paceline.planner.calibration.calibration import CALIBRATION_FORMAT, read_calibration
from paceline.reports.contents import gather_contents
from paceline.reports.report import build_tables
from paceline.reports.watch import LiveView, render_view
from paceline.runlog.events import EventWriter, read_steps, sum_wall_seconds
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import print_summary, read_summary
from paceline.slurm.site_file import read_site
from paceline.trainer.checkpoint.reader import Checkpoint, find_best, find_newest, read_tensors
from paceline.trainer.checkpoint.writer import CheckpointWriter
from paceline.trainer.engines.user_config import read_user_config
from paceline.trainer.explain import build_value_table
from paceline.trainer.init_from import open_weights
from paceline.workloads.topics.counts.matrices import Counts
from paceline.workloads.topics.counts.stream import compute_totals
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.files.shards import write_shards
from paceline.workloads.topics.result.model import TopicFit
from report_runs import make_measurement, make_run
from topics_fits import small_fit

REPOSITORY = Path(__file__).resolve().parents[1]
ODD: list[Any] = [
    *(None, True, -1, 0, 1.5, 1e300, -1e300, 2**31, 2**63, 10**400, float("nan"), "", "x", "\0", "\x1b[2J", "../../x"),
    *("\ud800", "9" * 500, "é" * 40, [], {}, [[]], {"a": {}}, [1, "2", None], "object", "~nosuchuser/x"),
]
"""Values in place of others."""
PIECES = [
    *(b"\0", b"\xff\xfe", b"[" * 60, b"{" * 60, b'"', b"\n", b"\r"),
    *(b"NaN", b"1e999", b"-", b"9" * 400, b"&a *a", b"!!"),
]
"""Bytes in between."""


@dataclass(frozen=True)
class Target:
    """A file that is read."""

    file: str
    make: Callable[[Path], None]
    """Writes whole files into a folder."""
    read: Callable[[Path], object]
    """Reads that folder."""
    seal: Callable[[Any], Any] | None = None
    """Of a JSON file: what makes its checksum right again, so that damage is met by more than that."""


TARGETS: dict[str, Target] = {}


def add_target(
    name: str, file: str, make: object, read: Callable[[Path], object], seal: Callable[[Any], Any] | None = None
) -> None:
    """Add a target. `make` is a function of the folder, or what the file holds: text, bytes, or values for JSON."""
    TARGETS[name] = Target(file, make if callable(make) else partial(_write, file, make), read, seal)


def _write(file: str, content: Any, folder: Path) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())


def mutated(name: str, number: int, whole: bytes) -> bytes:
    """The content of a target's file, damaged in the way that has this number."""
    dice = random.Random(zlib.crc32(f"{name} {number}".encode()))
    if number % 2:
        lines = whole.splitlines(keepends=True) if TARGETS[name].file.endswith(".jsonl") else [whole]
        at = dice.randrange(len(lines)) if len(lines) > 1 else 0
        try:
            value = json.loads(lines[at])
        except ValueError:
            pass
        else:
            for _ in range(dice.choice((1, 1, 2))):
                value = _with_odd_value(value, dice)
            seal = TARGETS[name].seal
            text = json.dumps(seal(value) if seal and isinstance(value, dict) else value)
            return b"".join([*lines[:at], text.encode() + b"\n" * (len(lines) > 1), *lines[at + 1 :]])
    content = bytearray(whole)
    for _ in range(dice.choice((1, 1, 2, 4))):
        at, to = sorted(dice.randrange(len(content) + 1) for _ in range(2))
        to = min(to, at + dice.choice((1, 4, 30, 4000)))
        match dice.randrange(6):
            case 0 if at < len(content):
                content[at] ^= 1 << dice.randrange(8)
            case 1:
                del content[at:to]
            case 2:
                content[at:at] = content[at:to]
            case 3:
                content[at:at] = dice.choice(PIECES)
            case 4:
                del content[at:]
            case _:
                content[at:to] = dice.randbytes(to - at)
    return bytes(content)


def _with_odd_value(value: Any, dice: random.Random) -> Any:
    """One of the values inside replaced."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(list(value))
        if dice.random() < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: _with_odd_value(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.9:
        at = dice.randrange(len(value))
        return [*value[:at], _with_odd_value(value[at], dice), *value[at + 1 :]]
    return dice.choice(ODD)


def tried(name: str, numbers: Iterator[int] | range, folder: Path) -> Iterator[int]:
    """Each number, once the reader has met that mutation; what it raises beside a refusal is raised."""
    whole = _whole(name, folder)
    one = TARGETS[name]
    for number in numbers:
        (folder / one.file).write_bytes(mutated(name, number, whole))
        said = ""
        try:
            one.read(folder)
        except PacelineError as error:
            said = str(error)
        except Exception as error:
            error.add_note(f"target {name}, mutation {number}")
            raise
        listed = one.file.endswith(".yaml")  # of a file that people write, all that is wrong with it
        assert listed or "\n" not in said, f"target {name}, mutation {number}: {said}"
        yield number


@cache
def _whole(name: str, folder: Path) -> bytes:
    TARGETS[name].make(folder)
    content = (folder / TARGETS[name].file).read_bytes()
    TARGETS[name].read(folder)  # the whole file is read without a word
    return content


def _copy(path):
    return (REPOSITORY / "recipes" / path).read_bytes()


def show(*parts):
    """Render what a command prints."""
    with (screen := build_console()).capture():
        screen.print(*parts)


add_target(
    "RunFile", "run.yaml", _copy("classifier_docstrings.yaml"), lambda folder: layout_of(load(folder / "run.yaml"))
)


def make_run_folder(folder):
    made = RunDir.claim(folder, "r", build_spec({"train": {"steps": 3}}))
    made.spec_file.rename(folder / "spec.yaml")
    made.events.rename(folder / "events")


add_target(
    *("RunFolder", "spec.yaml", make_run_folder),
    read=lambda folder: build_value_table(RunDir.open(folder).recorded_spec()),
)
CLUSTER = "device: H100-SXM5-80GB\nnodes: 2\nper_node: 8\nnetwork: 8x400Gb\nprice: 2.5\ntflops: {bf16: 900}\n"
add_target("ClusterFile", "cluster.yaml", CLUSTER, lambda folder: str(parse_cluster(str(folder / "cluster.yaml"))))


def make_events(folder):
    with EventWriter(make_run(folder, "made", steps=8) / "events" / "rank0.jsonl") as events:
        events.write("notice", text="a word")
        events.write("usage", step=8, gpu=0.5)
        events.write("extend", key="train.steps", before=8, now=9)
        events.write("resume", step=4)
        events.write("checkpoint", step=8, save_s=0.1)
        events.write("done", step=8, why="enough")
        events.write("end", status="failed", why="no reason")


def read_run_events(folder):
    run = RunDir.open(folder / "made")
    view = LiveView(run, run.recorded_spec())
    view.look()
    show(render_view(view))
    return read_steps(run.events_file(0)), sum_wall_seconds(run.events_file(0)), run.start()


def read_made_summary(folder):
    with (screen := build_console()).capture():
        print_summary(read_summary(folder / "made" / "summary.json"), screen)


add_target("Events", "made/events/rank0.jsonl", make_events, read_run_events)
add_target("SummaryFile", "made/summary.json", partial(make_run, name="made", steps=8), read_made_summary)


def _sealed_manifest(manifest):
    plain = {name: value for name, value in manifest.items() if name != "seal"}
    return plain | {"seal": hash_value(plain)}


def make_checkpoints(folder):
    (folder / "checkpoints").mkdir()
    writer = CheckpointWriter(folder / "checkpoints", keep=2)
    for step in (1, 2):
        writer.save({"model": {"w": torch.arange(3.0)}}, {"step": step, "evaluation": {}, "best": None})
    writer.close()


def read_whole_checkpoints(folder):
    for find in (find_newest, find_best):
        found = find(folder / "checkpoints", lambda line: None)
        assert found is not None, "the one before is whole"
        assert read_tensors(found)["w"].tolist() == [0, 1, 2]


def read_first_checkpoint(folder):
    """As somebody who makes its checksum right would have it read."""
    return read_tensors(Checkpoint(folder / "checkpoints" / "step-00000001", 1, {}, None))


add_target(
    *("Manifest", "checkpoints/step-00000002/manifest.json", make_checkpoints, read_whole_checkpoints),
    seal=_sealed_manifest,
)
add_target("CheckpointMetadata", "checkpoints/step-00000001/.metadata", make_checkpoints, read_first_checkpoint)


def read_labelled(folder, kind):
    return list(LabelledTable(folder / f"t.{kind}", kind, "text", "label").rows())


def read_texts(folder, kind):
    return read_labelled(folder, kind), read_table(folder / f"t.{kind}").texts("text")


def write_parquet(folder, name, columns):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), folder / name)


def read_totals(folder, name):
    counts = read_counts(folder / name)
    return compute_totals(counts) if counts.documents * counts.terms < 1 << 24 else None


CSV = "text,label\n" + "".join(f'"some words {i}, ""quoted""",{i % 2}\n' for i in range(20))
JSON_LINES = "".join(f'{{"text": "words \\ud83d\\ude00 {i}", "label": {i % 2}}}\n' for i in range(20))
LABELLED = {"text": [f"words {i}" for i in range(20)], "label": [i % 2 for i in range(20)]}
LISTS = {"indices": [[0, 3], [1]] * 9, "counts": [[2, 1], [5]] * 9}
add_target("Csv", "t.csv", CSV, partial(read_texts, kind="csv"))
add_target("JsonLines", "t.jsonl", JSON_LINES, partial(read_texts, kind="jsonl"))
add_target(
    *("ParquetTexts", "t.parquet", partial(write_parquet, name="t.parquet", columns=LABELLED)),
    read=partial(read_labelled, kind="parquet"),
)
add_target(
    *("ParquetCounts", "counts.parquet", partial(write_parquet, name="counts.parquet", columns=LISTS)),
    read=partial(read_totals, name="counts.parquet"),
)


def make_npy(folder):
    np.save(folder / "x.npy", np.arange(40, dtype=np.float64).reshape(8, 5))


def make_npz(folder):
    import scipy.sparse

    scipy.sparse.save_npz(folder / "x.npz", scipy.sparse.random(9, 7, 0.5, "csr", random_state=0).ceil())


def make_shards(folder):
    rows = np.random.default_rng(0).poisson(0.2, (30, 40)).astype(np.uint8)
    write_shards(folder / "shards", [rows[:15], rows[15:]], 40, Counts(), shard_bytes=300)


def read_resealed_shards(folder):
    """Its checksum is made right again."""
    manifest = json.loads((folder / "shards" / "counts.json").read_text())
    content = read_bytes(folder / "shards" / "00000.bin")
    manifest["shards"][0]["crc32"] = f"{zlib.crc32(content):08x}"
    (folder / "shards" / "counts.json").write_text(json.dumps(manifest))
    return read_totals(folder, "shards")


add_target("Npy", "x.npy", make_npy, partial(read_totals, name="x.npy"))
add_target("Npz", "x.npz", make_npz, partial(read_totals, name="x.npz"))
add_target("ShardManifest", "shards/counts.json", make_shards, partial(read_totals, name="shards"))
add_target("ShardFile", "shards/00000.bin", make_shards, read_resealed_shards)


def make_weights(folder):
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")


def read_weights(folder):
    weights = open_weights(folder / "model.safetensors")
    small = {name: shape for name, shape in weights.shapes.items() if sum(shape) < 1 << 16}
    into = {name: torch.empty(shape) for name, shape in small.items()}
    weights.read(into)
    return into


def make_vocabulary(folder):
    (folder / "kept").mkdir()
    tokenizer = bpe.learn_bpe(["some words to learn from " * 9], 300, 8, False, "[MASK]")
    (folder / "kept" / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "kept" / "classes.json").write_text('["a", "b"]')
    (folder / "kept" / "vocabulary.json").write_text('{"size": 300, "special": 0}')


def read_vocabulary(folder):
    found = Vocabulary.open(folder / "kept")
    return found.encode(["some words"]), found.classes


add_target("Safetensors", "model.safetensors", make_weights, read_weights)
for name in ("Vocabulary", "Tokenizer", "Classes"):
    add_target(f"Kept{name}", f"kept/{name.lower()}.json", make_vocabulary, read_vocabulary)


def read_report(folder, name):
    return build_tables(gather_contents([folder / name]))


add_target(
    *("MeasurementFile", "measured/measure.json"),
    make=lambda folder: make_measurement(folder / "measured", {1: 0.1, 2: 0.06}, repeats=1),
    read=partial(read_report, name="measured"),
)
add_target(
    *("TopicModel", "topics.safetensors"),
    make=lambda folder: small_fit(documents=12)[1].save(folder / "topics.safetensors"),
    read=lambda folder: str(TopicFit.load(folder / "topics.safetensors")),
)
add_target("Site", "site.yaml", _copy("sites/several_nodes.yaml"), lambda folder: read_site(folder / "site.yaml"))


def make_calibration(folder):
    from unit.planner.calibration.test_calibration import made_up

    facts = {"host": "desk", "cpu": "made up", "cores": 2, "memory_bytes": 16e9, "date": "2026-01-01", "torch": "2"}
    values = {"format": CALIBRATION_FORMAT, **facts, "measured": [made_up(1), made_up(2)]}
    (folder / "calibration.json").write_text(json.dumps(values))


def read_fits(folder):
    row = read_calibration(folder / "calibration.json").nearest(2)
    return row.matmul_fit(), row.all_reduce_fit()


def read_deepspeed(folder):
    read_user_config(folder / "ds.json", {"a": "b"}, {"train_batch_size": (64, "train.global_batch=64")})
    return adopt([folder / "ds.json"])


DEEPSPEED = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "fp16": {"enabled": True, "loss_scale": 0},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
}
ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 2\n"
    "num_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_offload_params: false\n"
)
add_target("CalibrationFile", "calibration.json", make_calibration, read_fits)
add_target("DeepSpeed", "ds.json", DEEPSPEED, read_deepspeed)
add_target("Accelerate", "accelerate.yaml", ACCELERATE, lambda folder: adopt([folder / "accelerate.yaml"]))
