"""A reader of Paceline for every kind of file, a whole file of that kind, and ways to damage it.

A mutation is a function of the target's name and a number, so that each can be made again: `mutated(name, number)`.
What a reader may do with it is to read it, or to refuse it in one line.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
ODD: list[Any] = [
    *(None, True, -1, 0, 1.5, 1e300, -1e300, 2**31, 2**63, 10**400, float("nan"), "", "x", "\0", "\x1b[2J", "../../x"),
    *("\ud800", "9" * 500, "é" * 40, [], {}, [[]], {"a": {}}, [1, "2", None], "object", "~nosuchuser/x"),
]
"""Values in place of others."""
PIECES = [
    b"\0",
    b"\xff\xfe",
    b"[" * 60,
    b"{" * 60,
    b'"',
    b"\n",
    b"\r",
    b"NaN",
    b"1e999",
    b"-",
    b"9" * 400,
    b"&a *a",
    b"!!",
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


def target(file: str, seal: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """A class with `make(folder)` and `read(folder)`, under its own name."""

    def add(kind: Any) -> Any:
        TARGETS[kind.__name__] = Target(file, kind.make, kind.read, seal)
        return kind

    return add


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
    from paceline.errors import PacelineError

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


@target("run.yaml")
class RunFile:
    def make(folder: Path) -> None:
        (folder / "run.yaml").write_bytes((REPOSITORY / "recipes" / "classifier_docstrings.yaml").read_bytes())

    def read(folder: Path) -> object:
        from paceline.config import load
        from paceline.layout import layout_of

        return layout_of(load(folder / "run.yaml"))


@target("spec.yaml")
class RunFolder:
    def make(folder: Path) -> None:
        from paceline.config import build_spec
        from paceline.runlog.run_dir import RunDir

        made = RunDir.claim(folder, "r", build_spec({"train": {"steps": 3}}))
        made.spec_file.rename(folder / "spec.yaml")
        made.events.rename(folder / "events")

    def read(folder: Path) -> object:
        from paceline.runlog.run_dir import RunDir
        from paceline.trainer.explain import build_value_table

        return build_value_table(RunDir.open(folder).recorded_spec())


@target("cluster.yaml")
class ClusterFile:
    def make(folder: Path) -> None:
        text = "device: H100-SXM5-80GB\nnodes: 2\nper_node: 8\nnetwork: 8x400Gb\nprice: 2.5\ntflops: {bf16: 900}\n"
        (folder / "cluster.yaml").write_text(text)

    def read(folder: Path) -> object:
        from paceline.hardware.catalogue import parse_cluster

        return str(parse_cluster(str(folder / "cluster.yaml")))


@target("made/events/rank0.jsonl")
class Events:
    def make(folder: Path) -> None:
        from paceline.runlog.events import EventWriter
        from report_runs import make_run

        with EventWriter(make_run(folder, "made", steps=8) / "events" / "rank0.jsonl") as events:
            events.write("notice", text="a word")
            events.write("usage", step=8, gpu=0.5)
            events.write("extend", key="train.steps", before=8, now=9)
            events.write("resume", step=4)
            events.write("checkpoint", step=8, save_s=0.1)
            events.write("done", step=8, why="enough")
            events.write("end", status="failed", why="no reason")

    def read(folder: Path) -> object:
        from paceline.io.terminal import build_console
        from paceline.reports.watch import LiveView, render_view
        from paceline.runlog.events import read_steps, sum_wall_seconds
        from paceline.runlog.run_dir import RunDir

        run = RunDir.open(folder / "made")
        view = LiveView(run, run.recorded_spec())
        view.look()
        with (screen := build_console()).capture():
            screen.print(render_view(view))
        return read_steps(run.events_file(0)), sum_wall_seconds(run.events_file(0)), run.start()


@target("made/summary.json")
class SummaryFile:
    def make(folder: Path) -> None:
        from report_runs import make_run

        make_run(folder, "made", steps=8)

    def read(folder: Path) -> object:
        from paceline.io.terminal import build_console
        from paceline.runlog.summary import print_summary, read_summary

        with (screen := build_console()).capture():
            print_summary(read_summary(folder / "made" / "summary.json"), screen)
        return None


def _sealed_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    from paceline.io.files import compute_seal

    plain = {name: value for name, value in manifest.items() if name != "seal"}
    return plain | {"seal": compute_seal(plain)}


@target("checkpoints/step-00000002/manifest.json", seal=_sealed_manifest)
class Manifest:
    def make(folder: Path) -> None:
        import torch

        from paceline.trainer.checkpoint.writer import CheckpointWriter

        (folder / "checkpoints").mkdir()
        writer = CheckpointWriter(folder / "checkpoints", keep=2)
        for step in (1, 2):
            writer.save({"model": {"w": torch.arange(3.0)}}, {"step": step, "evaluation": {}, "best": None})
        writer.close()

    def read(folder: Path) -> object:
        from paceline.trainer.checkpoint.reader import find_best, find_newest, read_tensors

        for find in (find_newest, find_best):
            found = find(folder / "checkpoints", lambda line: None)
            assert found is not None, "the one before is whole"
            assert read_tensors(found)["w"].tolist() == [0, 1, 2]
        return None


@target("checkpoints/step-00000001/.metadata")
class CheckpointMetadata:
    make = Manifest.make

    def read(folder: Path) -> object:
        """As somebody who makes its checksum right would have it read."""
        from paceline.trainer.checkpoint.reader import Checkpoint, read_tensors

        return read_tensors(Checkpoint(folder / "checkpoints" / "step-00000001", 1, {}, None))


@target("t.csv")
class Csv:
    def make(folder: Path) -> None:
        rows = "".join(f'"some words {i}, ""quoted""",{i % 2}\n' for i in range(20))
        (folder / "t.csv").write_text(f"text,label\n{rows}")

    def read(folder: Path) -> object:
        from paceline.data.corpora.labelled import LabelledTable
        from paceline.data.tables import read_table

        rows = list(LabelledTable(folder / "t.csv", "csv", "text", "label").rows())
        return rows, read_table(folder / "t.csv").texts("text")


@target("t.jsonl")
class JsonLines:
    def make(folder: Path) -> None:
        (folder / "t.jsonl").write_text(
            "".join(f'{{"text": "words \\ud83d\\ude00 {i}", "label": {i % 2}}}\n' for i in range(20))
        )

    def read(folder: Path) -> object:
        from paceline.data.corpora.labelled import LabelledTable
        from paceline.data.tables import read_table

        rows = list(LabelledTable(folder / "t.jsonl", "jsonl", "text", "label").rows())
        return rows, read_table(folder / "t.jsonl").texts("text")


@target("t.parquet")
class ParquetTexts:
    def make(folder: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        columns = {"text": [f"words {i}" for i in range(20)], "label": [i % 2 for i in range(20)]}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet")

    def read(folder: Path) -> object:
        from paceline.data.corpora.labelled import LabelledTable

        return list(LabelledTable(folder / "t.parquet", "parquet", "text", "label").rows())


@target("counts.parquet")
class ParquetCounts:
    def make(folder: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        lists = {"indices": [[0, 3], [1]] * 9, "counts": [[2, 1], [5]] * 9}
        pyarrow.parquet.write_table(pyarrow.table(lists), folder / "counts.parquet")

    def read(folder: Path) -> object:
        return _counted(folder / "counts.parquet")


def _counted(path: Path) -> object:
    from paceline.workloads.topics.counts.stream import compute_totals
    from paceline.workloads.topics.files.reading import read_counts

    counts = read_counts(path)
    return compute_totals(counts) if counts.documents * counts.terms < 1 << 24 else None


@target("x.npy")
class Npy:
    def make(folder: Path) -> None:
        import numpy as np

        np.save(folder / "x.npy", np.arange(40, dtype=np.float64).reshape(8, 5))

    def read(folder: Path) -> object:
        return _counted(folder / "x.npy")


@target("x.npz")
class Npz:
    def make(folder: Path) -> None:
        import scipy.sparse

        scipy.sparse.save_npz(folder / "x.npz", scipy.sparse.random(9, 7, 0.5, "csr", random_state=0).ceil())

    def read(folder: Path) -> object:
        return _counted(folder / "x.npz")


@target("shards/counts.json")
class ShardManifest:
    def make(folder: Path) -> None:
        import numpy as np

        from paceline.workloads.topics.counts.matrices import Counts
        from paceline.workloads.topics.files.shards import write_shards

        rows = np.random.default_rng(0).poisson(0.2, (30, 40)).astype(np.uint8)
        write_shards(folder / "shards", [rows[:15], rows[15:]], 40, Counts(), shard_bytes=300)

    def read(folder: Path) -> object:
        return _counted(folder / "shards")


@target("shards/00000.bin")
class ShardFile:
    make = ShardManifest.make

    def read(folder: Path) -> object:
        """Its checksum is made right again."""
        from paceline.io.safe_open import read_bytes

        manifest = json.loads((folder / "shards" / "counts.json").read_text())
        content = read_bytes(folder / "shards" / "00000.bin")
        manifest["shards"][0]["crc32"] = f"{zlib.crc32(content):08x}"
        (folder / "shards" / "counts.json").write_text(json.dumps(manifest))
        return _counted(folder / "shards")


@target("model.safetensors")
class Safetensors:
    def make(folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        save_file(
            {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)},
            folder / "model.safetensors",
        )

    def read(folder: Path) -> object:
        import torch

        from paceline.trainer.init_from.weights import open_weights

        weights = open_weights(folder / "model.safetensors")
        small = {name: shape for name, shape in weights.shapes.items() if sum(shape) < 1 << 16}
        into = {name: torch.empty(shape) for name, shape in small.items()}
        weights.read(into)
        return into


@target("kept/vocabulary.json")
class KeptVocabulary:
    def make(folder: Path) -> None:
        from paceline.data.corpora import tokenizer as bpe

        (folder / "kept").mkdir()
        tokenizer = bpe.learn_bpe(["some words to learn from " * 9], 300, 8, False, "[MASK]")
        (folder / "kept" / "tokenizer.json").write_text(tokenizer.to_str())
        (folder / "kept" / "classes.json").write_text('["a", "b"]')
        (folder / "kept" / "vocabulary.json").write_text('{"size": 300, "special": 0}')

    def read(folder: Path) -> object:
        from paceline.data.corpora.tokenised import Vocabulary

        found = Vocabulary.open(folder / "kept")
        return found.encode(["some words"]), found.classes


@target("kept/tokenizer.json")
class KeptTokenizer:
    make = KeptVocabulary.make
    read = KeptVocabulary.read


@target("kept/classes.json")
class KeptClasses:
    make = KeptVocabulary.make
    read = KeptVocabulary.read


@target("measured/measure.json")
class MeasurementFile:
    def make(folder: Path) -> None:
        from report_runs import make_measurement

        make_measurement(folder / "measured", {1: 0.1, 2: 0.06}, repeats=1)

    def read(folder: Path) -> object:
        return _gathered(folder / "measured")


@target("links/links.json")
class LinksFile:
    def make(folder: Path) -> None:
        from report_runs import make_links

        make_links(folder / "links")

    def read(folder: Path) -> object:
        return _gathered(folder / "links")


def _gathered(folder: Path) -> object:
    from paceline.reports.contents import gather_contents
    from paceline.reports.tables import build_tables

    return build_tables(gather_contents([folder]))


@target("topics.safetensors")
class TopicModel:
    def make(folder: Path) -> None:
        from topics_fits import small_fit

        small_fit(documents=12)[1].save(folder / "topics.safetensors")

    def read(folder: Path) -> object:
        from paceline.workloads.topics.result.model import TopicFit

        return str(TopicFit.load(folder / "topics.safetensors"))


@target("site.yaml")
class Site:
    def make(folder: Path) -> None:
        (folder / "site.yaml").write_bytes((REPOSITORY / "recipes" / "sites" / "several_nodes.yaml").read_bytes())

    def read(folder: Path) -> object:
        from paceline.slurm.site_file import read_site

        return read_site(folder / "site.yaml")


@target("calibration.json")
class CalibrationFile:
    def make(folder: Path) -> None:
        from paceline.planner.calibration.calibration import CALIBRATION_FORMAT
        from unit.planner.calibration.test_calibration import made_up

        facts = {"host": "desk", "cpu": "made up", "cores": 2, "memory_bytes": 16e9, "date": "2026-01-01", "torch": "2"}
        values = {"format": CALIBRATION_FORMAT, **facts, "measured": [made_up(1), made_up(2)]}
        (folder / "calibration.json").write_text(json.dumps(values))

    def read(folder: Path) -> object:
        from paceline.planner.calibration.calibration import read_calibration

        row = read_calibration(folder / "calibration.json").nearest(2)
        return row.matmul_fit(), row.all_reduce_fit()


@target("ds.json")
class DeepSpeed:
    def make(folder: Path) -> None:
        values = {
            "train_batch_size": 64,
            "gradient_accumulation_steps": 2,
            "fp16": {"enabled": True, "loss_scale": 0},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        }
        (folder / "ds.json").write_text(json.dumps(values))

    def read(folder: Path) -> object:
        from paceline.convert.adopt import adopt
        from paceline.trainer.engines.user_config import read_user_config

        read_user_config(folder / "ds.json", {"a": "b"}, {"train_batch_size": (64, "train.global_batch=64")})
        return adopt([folder / "ds.json"])


@target("accelerate.yaml")
class Accelerate:
    def make(folder: Path) -> None:
        text = (
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 2\n"
            "num_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_offload_params: false\n"
        )
        (folder / "accelerate.yaml").write_text(text)

    def read(folder: Path) -> object:
        from paceline.convert.adopt import adopt

        return adopt([folder / "accelerate.yaml"])
