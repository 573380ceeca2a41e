"""The answer of every axis and model against that of one rank, as a table in Markdown.

    python benchmarks/layout_matrix.py [--models lm llama …] [--precision fp32 bf16] [--layouts …] [--out rows.jsonl]
    python benchmarks/layout_matrix.py --device cuda --seconds 540 --out rows.jsonl    # ranks share the device, by gloo

Tiny models. Each cell is the largest relative difference of losses, gradient norms, weights and the evaluation, as
`check` finds it; in fp32 a larger one than 1e-5, and in bf16 one of the evaluation alone, is repeated in fp64, and
marked r if it shrinks to rounding. Layouts of as many ranks are trained in one launch, one after the other; where a
rank dies, its layout is marked, with the stacks of its threads, and the rest is launched again. `--out` gets a row of
JSON for each, and cells that it has are not repeated. What a model does not take is printed with the reason. Exits
with 1 where an answer differs or a launch fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from paceline import UserError
from paceline.api import RunResult, train
from paceline.config import build_spec
from paceline.errors import PacelineError
from paceline.io.files import write_atomic
from paceline.launch.environment import SINGLE_RANK, detect_rank
from paceline.launch.local import run_ranks
from paceline.layout import layout_of, parse_layout
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary
from paceline.trials.check import SHRINKS, TOLERANCE, Variant, build_variant_spec, compare_results
from paceline.workload import build_workload

DOCS = Path(__file__).resolve().parents[1] / "docs"
DENSE = {"preset": "custom", "width": 32, "heads": 4, "kv_heads": 4, "layers": 4, "ffn": 64, "tied": True}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 300, "tie_word_embeddings": True, "max_position_embeddings": 64}
LLAMA = {"model_type": "llama", **SIZES}
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
TEXTS = {"source": "text", "path": str(DOCS / "*.md"), "sequence": 32, "vocab": 300}
DOCSTRINGS = {"source": "docstrings", "max_length": 32, "vocab": 400, "limit": 400}
MODELS: dict[str, dict[str, Any]] = {
    "lm": {"workload": "lm", "model": DENSE, "data": TEXTS},
    "lm with experts": {"workload": "lm", "model": {**DENSE, "experts": 4, "ffn": 32}, "data": TEXTS},
    "llama": {"workload": "transformers", "model": LLAMA, "data": TEXTS},
    "mixtral": {"workload": "transformers", "model": MIXTRAL, "data": TEXTS},
    "classifier": {
        "workload": "classifier",
        "model": {"width": 32, "heads": 4, "layers": 4, "ffn": 64},
        "data": DOCSTRINGS,
    },
    "own encoder": {"workload": f"{DOCS / 'examples' / 'own_encoder.py'}:Encoder"},
}
LAYOUTS = (
    *("fsdp:2", "context:2", "context:4", "context:2:ring", "context:4:ring", "fsdp:2+context:2"),
    *("ddp:2+expert:2", "ddp:4+expert:4", "fsdp:4+expert:2", "fsdp:4+expert:4"),
    *("tensor:2", "fsdp:2+tensor:2", "pipeline:2", "fsdp:2+pipeline:2", "tensor:2+context:2", "tensor:2+pipeline:2"),
    *("fsdp:2+tensor:2+pipeline:2", "fsdp:2+context:2+tensor:2", "fsdp:2+context:2+pipeline:2"),
    *("tensor:2+context:2+pipeline:2", "ddp:2+context:2+pipeline:2+expert:2"),
    *("fsdp:2+tensor:2+pipeline:2+expert:2", "fsdp:2+context:2+tensor:2+expert:2"),
)


STACK_LINES = 30  # of a rank that died


class Cell(NamedTuple):
    model: str
    precision: str
    layout: str

    @property
    def ranks(self) -> int:
        return int(parse_layout(self.layout)["ranks"])

    @property
    def single(self) -> Cell:
        return self._replace(layout="single")

    def folder(self, scratch: Path) -> Path:
        return scratch / "_".join(self).replace(" ", "-").replace(":", "-")


class Task(NamedTuple):
    """What the ranks of a launch do."""

    cells: Sequence[Cell]
    scratch: Path
    rows_file: Path
    launch: int
    steps: int
    device: str
    deadline: float


def build_base_spec(name: str, precision: str, folder: Path, device: str) -> Any:
    values = json.loads(json.dumps(MODELS[name]))
    if values["workload"] == "transformers":
        config = folder / f"{name}.json"
        if not config.exists():
            write_atomic(config, json.dumps(values["model"]))
        values["model"] = {"config": str(config)}
    few = 256 if name == "classifier" else 16  # the area under a curve jumps where texts are few
    steps = {"steps": 3, "global_batch": 16, "lr": 1e-3, "evaluate_on": few}
    values["train"] = {**steps, "precision": precision, "compile": "off"}
    return build_spec({**values, "parallel": {"threads": 1, "timeout_s": 120, "device": device, "backend": "gloo"}})


def find_obstacle(spec: Any, layout: str) -> str:
    """Return why the model does not take a layout, as far as it is known before its data are read."""
    try:
        changed = spec.replace({f"parallel.{key}": value for key, value in parse_layout(layout).items()})
        build_workload(changed).suits(layout_of(changed))
    except UserError as error:
        return str(error)
    return ""


def train_cells(task: Task) -> None:
    """Train cells of as many ranks one after the other; the main rank appends a row for each."""
    info = detect_rank(os.environ) or SINGLE_RANK
    stacks = (task.scratch / f"stacks-{task.launch}-{info.rank}").open("w")
    faulthandler.enable(stacks)
    warnings.simplefilter("ignore")  # of torch, once for each layout
    for number, cell in enumerate(task.cells):
        if not agree_to_begin(task.scratch / f"begin-{task.launch}-{number}", info.rank == 0, task.deadline):
            return
        began, spec = time.perf_counter(), build_base_spec(cell.model, cell.precision, task.scratch, task.device)
        variant = build_variant_spec(spec, parse_layout(cell.layout), 1, task.steps)
        try:
            result = train(variant, cell.folder(task.scratch), show=False)
            row = {} if cell.layout == "single" or info.rank else compare(result, cell, task.scratch, variant)
        except UserError as error:  # on all ranks
            row = {"rejected": str(error)}
        if info.rank == 0:
            add_row(task.rows_file, {**cell._asdict(), **row, "seconds": time.perf_counter() - began})


def agree_to_begin(file: Path, main: bool, deadline: float) -> bool:
    """Return whether there is time left, by the clock of the main rank."""
    if main:
        write_atomic(file, "yes" if time.time() < deadline else "no")
    while not file.exists():
        time.sleep(0.005)
    return file.read_text() == "yes"


def compare(result: RunResult, cell: Cell, scratch: Path, spec: Any) -> dict[str, Any]:
    (first,) = cell.single.folder(scratch).iterdir()
    reference = RunResult(first, read_summary(RunDir(first).summary_file))
    row = compare_results(reference, result, Variant(cell.layout, cell.layout, 1, spec))
    found = {name: getattr(row, name) for name in ("loss", "grad_norm", "weights", "evaluation")}
    return {**found, "worst": row.worst.value, "where": row.worst.where}


def add_row(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    if row["layout"] != "single" or "failed" in row:
        print(show(row), flush=True)


def show(row: dict[str, Any]) -> str:
    name = f"{row['model']:<16} {row['precision']} {row['layout']:<36}"
    if "worst" not in row:
        return f"{name} {'FAILED' if 'failed' in row else 'rejected'}: {row.get('failed') or row['rejected']}"
    differences = " ".join(f"{key} {row[key] or 0:.1e}" for key in ("loss", "grad_norm", "weights", "evaluation"))
    return f"{name} {differences} {row['seconds']:5.1f} s {'' if agrees(row) else 'DIFFERS in ' + row['where']}"


def agrees(row: dict[str, Any]) -> bool:
    return bool(row["worst"] <= TOLERANCE[row["precision"]])


def is_settled_by_fp64(row: dict[str, Any]) -> bool:
    """Return whether fp64 can show that what differs is rounding: in bf16, of metrics where training agrees."""
    if agrees(row) or row["precision"] == "fp64":
        return False
    trained = max(row[name] or 0.0 for name in ("loss", "grad_norm", "weights"))
    return row["precision"] == "fp32" or trained <= TOLERANCE[row["precision"]]


def run_cells(cells: Iterable[Cell], asked: argparse.Namespace, scratch: Path, deadline: float) -> None:
    """Train the cells, and those of one rank that they are compared with."""
    for ranks, group in groupby(sorted(cells, key=lambda cell: cell.ranks), key=lambda cell: cell.ranks):
        left = list(group)
        while left and time.time() < deadline:
            before, launch = len(read_rows(asked.out)), next(LAUNCHES)
            task = Task(left, scratch, asked.out, launch, asked.steps, asked.device, deadline)
            failed = ""
            try:
                run_ranks(train_cells, (task,), ranks)
            except PacelineError as error:
                failed = str(error)
            left = left[len(read_rows(asked.out)) - before :]
            if not failed:
                break  # all are done, or the time is up
            found = [text for file in sorted(scratch.glob(f"stacks-{launch}-*")) if (text := file.read_text())]
            stacks = "\n".join(text for each in found[:1] for text in each.splitlines()[:STACK_LINES])
            if left:
                add_row(asked.out, {**left[0]._asdict(), "failed": failed[:2000], "stacks": stacks, "seconds": 0})
                left = left[1:]
            print(stacks, flush=True)


LAUNCHES = itertools.count()


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="only layouts of so many")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="which the ranks share")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so long")
    parser.add_argument("--out", type=Path, help="append every row there, as JSON; those that it has are not repeated")
    asked = parser.parse_args()
    deadline = (began := time.time()) + asked.seconds
    with tempfile.TemporaryDirectory(prefix="paceline-matrix-") as name:
        scratch = Path(name)
        asked.out = (asked.out or scratch / "rows.jsonl").resolve()
        known = {cell_of(row) for row in read_rows(asked.out) if "worst" in row}
        cells = []
        for model, precision in itertools.product(asked.models, asked.precision):
            spec = build_base_spec(model, precision, scratch, asked.device)
            obstacles = {layout: find_obstacle(spec, layout) for layout in asked.layouts}
            for obstacle in dict.fromkeys(filter(None, obstacles.values())) if precision == asked.precision[0] else ():
                print(f"{model} –: {obstacle}", flush=True)
            cells += [Cell(model, precision, layout) for layout, obstacle in obstacles.items() if not obstacle]
        cells = [cell for cell in cells if cell not in known and cell.ranks in asked.ranks]
        run_cells(dict.fromkeys([*(cell.single for cell in cells), *cells]), asked, scratch, deadline)
        apart = [row for row in read_rows(asked.out) if "worst" in row and is_settled_by_fp64(row)]
        exact = [cell for row in apart if (cell := cell_of(row)._replace(precision="fp64")) not in known]
        run_cells(dict.fromkeys([*(cell.single for cell in exact), *exact]), asked, scratch, deadline)
        rows = {cell_of(row): row for row in read_rows(asked.out) if row["layout"] != "single"}
    marked = {cell: mark(cell, rows) for cell in rows if cell.precision != "fp64"}
    print(format_table(asked, marked))
    left = sum(cell not in rows for cell in cells)
    print(f"{len(cells) - left} cells, {left} left, {time.time() - began:.0f} s")
    sys.exit(1 if any(text.startswith("**") for text in marked.values()) else 0)


def cell_of(row: dict[str, Any]) -> Cell:
    return Cell(row["model"], row["precision"], row["layout"])


def mark(cell: Cell, rows: dict[Cell, dict[str, Any]]) -> str:
    """Return what the table has for a cell: rounding in fp32 is what fp64 shrinks by its digits."""
    row = rows[cell]
    if "worst" not in row:
        return "**failed**" if "failed" in row else "–"
    found = f"{row['worst']:.0e}"
    exact = rows.get(cell._replace(precision="fp64"), {}).get("worst", math.inf)
    if agrees(row):
        return found
    return f"{found} r" if exact <= max(TOLERANCE["fp64"], row["worst"] * SHRINKS) else f"**{found}**"


def format_table(asked: argparse.Namespace, marked: dict[Cell, str]) -> str:
    """Format a row for each layout, and a column for each model with its precisions."""
    lines = [f"| | {' | '.join(asked.models)} |", f"|{'---|' * (len(asked.models) + 1)}"]
    for layout in asked.layouts:
        cells = [[Cell(model, precision, layout) for precision in asked.precision] for model in asked.models]
        texts = [", ".join(marked[cell] for cell in each if cell in marked) or "–" for each in cells]
        lines += [f"| `{layout}` | {' | '.join(texts)} |"]
    return "\n".join(lines)


if __name__ == "__main__":
    import layout_matrix  # ranks import what they run by the name of this file

    layout_matrix.main()
