"""Configurations and commands as guides print them: each is adopted, and what comes out trains."""

import re
from collections import Counter

import pytest
import yaml

import paceline
from conftest import REPOSITORY, SHARED

SEEDS = {file.name[:3]: file for file in sorted((SHARED / "seeds").glob("0*.txt"))}
pytestmark = pytest.mark.skipif(len(SEEDS) < 5, reason="the guides are not on this machine")


def blocks(seed):
    text = SEEDS[seed].read_text(encoding="utf-8", errors="replace")
    return [body for _, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]


def block(seed, *marks):
    return next(body for body in blocks(seed) if all(mark in body for mark in marks))


def commands(seed, *marks):
    """Lines of a guide that begin a command with all of these words, continued ones joined."""
    lines = "\n".join(blocks(seed)).replace("\\\n", " ").splitlines()
    found = [" ".join(line.split(" # ")[0].split()) for line in lines if all(mark in line for mark in marks)]
    return [line for line in found if not line.startswith("#")]


FILES = {
    "deepspeed": ("001", ("ds_config = {", "scheduler"), "ds.py"),
    "deepspeed zero 3": ("001", ("ds_config_zero3",), "zero3.py"),
    "accelerate": ("001", ("compute_environment",), "accelerate_config.yaml"),
    "accelerator": ("001", ("accelerator = Accelerator(", "prepare"), "loop.py"),
    "ddp": ("001", ("init_process_group", "DataLoader("), "train_ddp.py"),
    "fsdp": ("001", ("setup_fsdp_model",), "train_fsdp.py"),
    "loader": ("002", ("num_workers=16",), "loader.py"),
    "environment": ("002", ("export NCCL_IB_DISABLE",), "env.sh"),
    "timeout": ("002", ("export NCCL_TIMEOUT",), "timeout.sh"),
    "more nodes": ("002", ("#SBATCH --nodes=4",), "nodes.sh"),
    "project": ("004", ("experiment_name",), "agnews.yaml"),
}
EXPECTED = yaml.safe_load("""
deepspeed: {train.global_batch: 256, train.steps: 100000, train.lr: 1.0e-4, train.schedule: linear,
  train.warmup_steps: 1000, train.precision: fp16, parallel.strategy: zero2, parallel.offload: true}
deepspeed zero 3: {parallel.strategy: zero3, parallel.offload: true, train.clip: 0.0}
accelerate: {parallel.ranks: 8, train.precision: bf16, parallel.strategy: ddp}
accelerator: {train.precision: bf16}
ddp: {parallel.strategy: ddp, train.optimizer: adamw}
fsdp: {parallel.strategy: fsdp, train.precision: bf16}
loader: {train.global_batch: 32}
environment: {}
timeout: {parallel.timeout_s: 7200.0}
more nodes: {cluster: 4x2xa100, parallel.ranks: 8}
project: {workload: classifier, model.width: 256, data.source: ag_news, train.global_batch: 128, train.epochs: 20,
  train.lr: 0.001}
""")
SMALL_CLASSIFIER = ("model.width=16", "model.layers=1", "model.ffn=16", "data.source=csv", "data.vocab=300")


def value(adopted, key):
    found = adopted.values
    for part in key.split("."):
        found = found[part]
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_guide_trains(name, tmp_path, monkeypatch, trains):
    seed, marks, file = FILES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).write_text(block(seed, *marks))
    adopted = paceline.adopt(file, out="run.yaml")
    assert {key: value(adopted, key) for key in EXPECTED[name]} == EXPECTED[name]
    assert all(row.reason for row in adopted.rows if row.outcome.value == "not supported")
    overrides = []
    if name == "project":
        (tmp_path / "rows.csv").write_text("text,label\n" + "red sun,warm\nblue ice,cold\n" * 20)
        overrides = ["workload=classifier", "data.path=rows.csv", "data.cache=cache", *SMALL_CLASSIFIER]
    _, result = trains("run.yaml", *overrides)
    assert result.status == "finished"


COMMANDS = [
    ("000", "accelerate launch", {"workload": "distributed_training.py"}),
    ("001", "torchrun --nproc_per_node=4 train.py", {"parallel.ranks": 4, "workload": "train.py"}),
    ("001", "--node_rank=0", {"parallel.ranks": 8}),
    ("001", "--node_rank=1", {"parallel.ranks": 8}),
    ("002", "sbatch --partition=main", {}),
    ("002", "sbatch train_multi_node.slurm", {}),
    ("002", "sbatch train_ultimate.slurm", {}),
    ("004", "python src/train.py", {"parallel.ranks": 1, "workload": "src/train.py"}),
    ("004", "torchrun", {"parallel.ranks": 4, "workload": "src/train.py"}),
    ("004", "sbatch scripts/run_agnews_ddp", {}),
]


@pytest.mark.parametrize(("seed", "mark", "expected"), COMMANDS, ids=[f"{s} {m}" for s, m, _ in COMMANDS])
def test_a_command_of_a_guide_trains(seed, mark, expected, tmp_path, monkeypatch, trains_a_script):
    monkeypatch.chdir(tmp_path)
    assert commands(seed, mark)
    for line in dict.fromkeys(commands(seed, mark)):
        adopted = paceline.adopt(command=line, out="run.yaml", force=True)
        assert {key: value(adopted, key) for key in expected} == expected
        assert trains_a_script("run.yaml").status == "finished"


def test_the_command_reads_the_file_that_it_names(tmp_path, monkeypatch, trains):
    monkeypatch.chdir(tmp_path)
    text = SEEDS["001"].read_text(encoding="utf-8", errors="replace")
    (line,) = re.findall(r"`(accelerate launch --config_file [^`]+)`", text)
    (tmp_path / "accelerate_config.yaml").write_text(block("001", "compute_environment"))
    adopted = paceline.adopt(command=line, out="run.yaml")
    assert value(adopted, "parallel.ranks") == 8
    assert value(adopted, "workload") == "train.py"
    spec, result = trains("run.yaml")
    assert spec.train.precision == "bf16"
    assert result.status == "finished"


def test_the_projects_command_and_file_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (line,) = commands("004", "torchrun")
    (tmp_path / "configs").mkdir()
    (tmp_path / line.split("--config ")[1]).write_text(block("004", "experiment_name"))
    adopted = paceline.adopt(command=line)
    assert value(adopted, "workload") == "classifier"
    assert value(adopted, "parallel.ranks") == 4
    assert value(adopted, "train.global_batch") == 128  # 32 on each of the four
    assert next(row for row in adopted.rows if row.key == "script").outcome.value == "replaced"


def test_the_page_counts_what_became_of_the_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds = ("kept", "translated", "derived", "noted", "not supported")
    counted = []
    for seed, marks, file in FILES.values():
        (tmp_path / file).write_text(block(seed, *marks))
        counted.append(paceline.adopt(file).counts())
        (tmp_path / file).unlink()
    lines = [line for seed, mark, _ in COMMANDS for line in dict.fromkeys(commands(seed, mark))]
    counted.append(sum((Counter(paceline.adopt(command=line).counts()) for line in lines), Counter()))
    rows = [[sum(counts.values()), *(counts.get(kind, 0) for kind in kinds)] for counts in counted]
    page = (REPOSITORY / "docs" / "adopt.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| [^|]+ ((?:\| \d+ ){6})\|$", page, re.MULTILINE)
    assert [[int(number) for number in re.findall(r"\d+", row)] for row in table] == rows
