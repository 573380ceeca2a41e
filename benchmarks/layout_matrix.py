"""The answer of every axis and model against that of one rank, as a table in Markdown.

    python benchmarks/layout_matrix.py [--models lm llama …] [--precision fp32 bf16] [--out FILE]
    torchrun --nproc-per-node 4 benchmarks/layout_matrix.py      # layouts of 4 ranks, started once for all: faster
    python benchmarks/layout_matrix.py --device cuda             # ranks share the device, by gloo

Tiny models, on CPU cores. Each cell is the largest relative difference of losses, gradient norms, weights and the
evaluation, in each precision; in fp32 a larger one than 1e-5 is repeated in fp64, and marked r if it shrinks to
rounding; not under torchrun, which marks it with ?. What a model does not take is printed with the reason. Exits with 1
where a check does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline import UserError
from paceline.config import build_spec
from paceline.io.files import write_atomic
from paceline.layout import layout_of, parse_layout
from paceline.trials.check import check
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
    *("fsdp:2", "context:2", "context:4", "fsdp:2+context:2"),
    *("ddp:2+expert:2", "ddp:4+expert:4", "fsdp:4+expert:2", "fsdp:4+expert:4"),
    *("tensor:2", "fsdp:2+tensor:2", "pipeline:2", "fsdp:2+pipeline:2", "tensor:2+context:2", "tensor:2+pipeline:2"),
    *("fsdp:2+tensor:2+pipeline:2", "fsdp:2+context:2+tensor:2", "fsdp:2+context:2+pipeline:2"),
    *("tensor:2+context:2+pipeline:2", "ddp:2+context:2+pipeline:2+expert:2"),
    *("fsdp:2+tensor:2+pipeline:2+expert:2", "fsdp:2+context:2+tensor:2+expert:2"),
)


def write_run_file(name: str, folder: Path, precision: str, device: str) -> Any:
    values = json.loads(json.dumps(MODELS[name]))
    if values["workload"] == "transformers":
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "config.json", json.dumps(values["model"]))
        values["model"] = {"config": str(folder / "config.json")}
    few = 256 if name == "classifier" else 16  # the area under a curve jumps where texts are few
    values["train"] = {"steps": 3, "global_batch": 16, "lr": 1e-3, "precision": precision, "evaluate_on": few}
    return build_spec({**values, "parallel": {"threads": 1, "timeout_s": 300, "device": device, "backend": "gloo"}})


def find_obstacle(spec: Any, layout: str) -> str:
    """Return why the model does not take a layout, as far as it is known before its data are read."""
    try:
        changed = spec.replace({f"parallel.{key}": value for key, value in parse_layout(layout).items()})
        build_workload(changed).suits(layout_of(changed))
    except UserError as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="which the ranks share")
    parser.add_argument("--out", type=Path, help="write the table here too, row by row")
    asked = parser.parse_args()
    launched = int(os.environ.get("WORLD_SIZE", "0"))
    layouts = [layout for layout in asked.layouts if launched in (0, parse_layout(layout)["ranks"])]
    cells: dict[str, list[list[str]]] = {layout: [[] for _ in asked.models] for layout in layouts}
    holds = True
    for (column, name), precision in itertools.product(enumerate(asked.models), asked.precision):
        spec = write_run_file(name, Path(tempfile.gettempdir(), "paceline-matrix", name), precision, asked.device)
        obstacles = {layout: find_obstacle(spec, layout) for layout in layouts}
        possible = [layout for layout, obstacle in obstacles.items() if not obstacle]
        if not possible:
            continue
        parity = check(spec, layouts=["single", *possible], steps=asked.steps)
        if not parity.rows:  # of the main rank alone
            continue
        for obstacle in dict.fromkeys(filter(None, obstacles.values())):
            print(f"{name} {precision} –: {obstacle}", flush=True)
        for row in parity.rows[1:]:
            wrong = " ?" if launched else " **wrong**"
            mark = "" if row.agrees(parity.tolerance) else " r" if parity.is_rounding(row) else wrong
            cells[row.name][column].append(f"{row.worst.value:.0e}{mark}")
            print(f"{name} {precision} {row.name}: {row.worst.value:.1e}{mark} ({row.worst.where})", flush=True)
        holds &= parity.holds
        if asked.out is not None:
            asked.out.write_text(format_table(asked.models, cells) + "\n")
    if os.environ.get("RANK", "0") == "0":
        print(format_table(asked.models, cells))
    sys.exit(0 if holds else 1)


def format_table(models: list[str], cells: dict[str, list[list[str]]]) -> str:
    """Format a row for each layout, and a column for each model with its precisions."""
    head = [f"| | {' | '.join(models)} |", f"|{'---|' * (len(models) + 1)}"]
    rows = [f"| `{name}` | {' | '.join(', '.join(each) or '–' for each in row)} |" for name, row in cells.items()]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    main()
