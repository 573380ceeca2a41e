"""The answer of every axis and model against that of one rank, as a table in Markdown.

    python benchmarks/layout_matrix.py [--models lm llama …] [--precision fp32 bf16] [--ranks 8] [--out FILE]

Tiny models, on CPU cores. Each cell is the largest relative difference of losses, gradient norms, weights and the
evaluation; in fp32 a larger one than 1e-5 is repeated in fp64, and marked r if it shrinks to rounding. Exits with 1
where a check does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline import UserError
from paceline.config import build_spec
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
    *("fsdp:2", "context:2", "context:4", "fsdp:2+context:2", "ddp:2+expert:2", "ddp:4+expert:4", "fsdp:4+expert:2"),
    *("tensor:2", "fsdp:2+tensor:2", "pipeline:2", "fsdp:2+pipeline:2", "tensor:2+pipeline:2"),
    *("fsdp:2+tensor:2+pipeline:2", "fsdp:2+context:2+tensor:2", "fsdp:2+context:2+pipeline:2"),
    "ddp:2+context:2+pipeline:2+expert:2",
)


def write_run_file(name: str, folder: Path, precision: str, ranks: int) -> Any:
    values = json.loads(json.dumps(MODELS[name]))
    if values["workload"] == "transformers":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(values["model"]))
        values["model"] = {"config": str(folder / "config.json")}
    values["train"] = {"steps": 3, "global_batch": 16, "lr": 1e-3, "precision": precision, "evaluate_on": 16}
    return build_spec({**values, "parallel": {"threads": 1, "timeout_s": 300}})


def is_possible(spec: Any, layout: str) -> bool:
    """Return whether the model takes a layout, as far as it is known before its data are read."""
    try:
        changed = spec.replace({f"parallel.{key}": value for key, value in parse_layout(layout).items()})
        build_workload(changed).suits(layout_of(changed))
    except UserError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8, help="the most that a layout may have")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--out", type=Path, help="write the table here too, row by row")
    asked = parser.parse_args()
    layouts = [layout for layout in asked.layouts if parse_layout(layout)["ranks"] <= asked.ranks]
    lines = [f"| | {' | '.join(f'`{layout}`' for layout in layouts)} |", f"|{'---|' * (len(layouts) + 1)}"]
    holds = True
    for name in asked.models:
        for precision in asked.precision:
            with tempfile.TemporaryDirectory() as scratch:
                spec = write_run_file(name, Path(scratch), precision, asked.ranks)
                possible = [layout for layout in layouts if is_possible(spec, layout)]
                parity = check(spec, layouts=["single", *possible], steps=asked.steps)
            holds &= parity.holds
            cells = dict.fromkeys(layouts, "–")
            for row in parity.rows[1:]:
                mark = "" if row.agrees(parity.tolerance) else " r" if parity.is_rounding(row) else " **wrong**"
                cells[row.name] = f"{row.worst.value:.0e}{mark}"
                print(f"{name} {precision} {row.name}: {row.worst.value:.1e}{mark} ({row.worst.where})", flush=True)
            lines.append(f"| {name}, {precision} | {' | '.join(cells.values())} |")
            if asked.out is not None:
                asked.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
