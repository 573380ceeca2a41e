"""The commands `predict` and `export`."""

import csv
import io
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.data.tables import format_label
from paceline.inference.trained_model import (
    PredictInputs,
    Predictions,
    TrainedModel,
    check_predicts,
    find_text_column,
    read_inputs,
)
from paceline.inference.trained_model import open as open_run
from paceline.io.arguments import option_error
from paceline.io.files import print_json, replace_nonfinite, write_atomic
from paceline.io.format import format_metrics
from paceline.io.table import Column, Table
from paceline.io.terminal import build_console, print_text
from paceline.nn.class_metrics import CONFUSION, compute_class_metrics
from paceline.trainer.evaluation import write_picture

SHOWN_ROWS = 20
MAX_INPUT_CHARS = 56


def run_predict(args: Namespace) -> int:
    console = build_console()
    out: Path | None = args.out
    if out is not None:
        _check_out_path(out)
    trained = open_run(args.run, "best" if args.best else "newest", code=args.code)
    if isinstance(trained, TrainedModel):
        check_predicts(trained.run, trained.workload)
    data = trained.workload.spec.data
    inputs = read_inputs(args.inputs, args.column, find_text_column(data))
    found: Predictions = trained.predict(inputs.values)
    if out is None and not args.json:
        _print_predictions(inputs, found, console)
    elif out is not None and not out.suffix:
        done = f"{out}: {_write_pictures(out, inputs, found):,} pictures"
    elif out is not None:
        _write_predictions(out, inputs, found)
        done = f"{out}: {len(found):,} predictions"
    if args.json:
        print_json([{"input": str(value), **row} for value, row in zip(inputs.values, found.rows(), strict=True)])
        return 0
    if out is not None:
        console.print(done)
    if agreement := format_agreement(inputs.rows, found, str(getattr(data, "label", ""))):
        console.print(agreement)
    return 0


def format_agreement(rows: Sequence[Mapping[str, Any]], found: Predictions, label: str) -> str:
    """Format how well predictions agree with the labels of the rows; "" if they have none."""
    if not found.of_classes or not label:
        return ""
    import numpy as np

    numbers = {format_label(name): number for number, name in enumerate(found.classes)}
    table = np.zeros((len(numbers), len(numbers)), np.int64)
    for row, predicted in zip(rows, found.numbers, strict=True):
        truth = numbers.get(format_label(row.get(label)))
        if truth is not None:
            table[truth, predicted] += 1
    if not table.sum():
        return ""
    metrics = {n: v for n, v in compute_class_metrics({CONFUSION: table}).items() if isinstance(v, float)}
    return f"{format_metrics(metrics)}  ({table.sum():,} rows with a known {label})"


def _check_out_path(out: Path) -> None:
    if out.suffix not in (".csv", ".jsonl", ""):
        raise option_error("--out", f"{out} is neither .csv, .jsonl nor a folder; type  --out {out.stem or 'out'}.csv")
    if out.is_dir() and out.suffix:
        raise option_error("--out", f"{out} is a folder; name a file")
    if not out.parent.is_dir():
        missing = f"there is no folder {str(out.parent)!r}; make it with  mkdir -p {out.parent}"
        raise option_error("--out", missing, "not-found")


def _write_predictions(out: Path, inputs: PredictInputs, found: Predictions) -> None:
    rows = [{**row, **predicted} for row, predicted in zip(inputs.rows, found.rows(), strict=True)]
    if out.suffix == ".jsonl":
        write_atomic(out, "".join(json.dumps(replace_nonfinite(row), ensure_ascii=False) + "\n" for row in rows))
        return
    text = io.StringIO()
    table = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_atomic(out, text.getvalue())


def _write_pictures(out: Path, inputs: PredictInputs, found: Predictions) -> int:
    """Write each picture under the name of its input, and return how many there are."""
    if not found.pictures:
        raise option_error("--out", f"this model predicts no pictures; type  --out {out}.csv")
    names = [v.stem if isinstance(v, Path) else f"{number:06d}" for number, v in enumerate(inputs.values, 1)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise option_error("--out", f"two inputs are called {twice[0]}, and one would replace the other", "conflict")
    for column, pictures in found.pictures.items():
        for name, picture in zip(names, pictures, strict=True):
            write_picture(out / (f"{name}.png" if len(found.pictures) == 1 else f"{name}-{column}.png"), picture)
    return len(names) * len(found.pictures)


def _print_predictions(inputs: PredictInputs, found: Predictions, console: Any) -> None:
    head = ("predicted", "probability") if found.of_classes else tuple(next(found.rows(), {}))
    table = Table(*(Column(name, "right" if name == "probability" else "left") for name in (*head, "input")))
    for value, row in list(zip(inputs.values, found.rows(), strict=True))[:SHOWN_ROWS]:
        cells = [f"{row[name]:.4f}" if isinstance(row[name], float) else str(row[name]) for name in head]
        text = " ".join(str(value).split())
        table.add_row(*cells, text if len(text) <= MAX_INPUT_CHARS else f"{text[: MAX_INPUT_CHARS - 1]}…")
    console.print(table)
    if len(found) > SHOWN_ROWS:
        console.print(f"and {len(found) - SHOWN_ROWS:,} more; all of them with  --out FILE.csv")


def run_export(args: Namespace) -> int:
    from paceline.inference.export import export

    which = "best" if args.best else "newest"
    written = export(args.run, args.out, which, onnx=args.onnx, code=args.code)
    if args.json:
        print_json({"written": written})
    else:
        print_text(written)
    return 0
