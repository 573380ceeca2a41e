"""The verb `topics`: counts or texts in; a run folder with the model, pictures and a page to explore it out."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.errors import UserError
from paceline.workloads.topics.fitting.options import FitOptions
from paceline.workloads.topics.result.model import TopicFit
from paceline.workloads.topics.result.model_file import MODEL_FILE

SHOWN_TERMS = 8
EXPLORER = "topics.html"
PICTURES = ("loss.png", "structure.png", "top_terms.png")


def run(arguments: argparse.Namespace, console: Any) -> int:
    """`paceline topics SOURCE -k K --out FOLDER`, or with --shards the conversion alone."""
    text = {"text": arguments.text, "min_df": arguments.min_df, "max_df": arguments.max_df}
    text |= {"max_terms": arguments.max_terms}
    if arguments.shards is not None:
        _convert(arguments, text, console)
        return 0
    if arguments.k is None:
        raise UserError("how many topics? give their number as  -k 20")
    asked = {field.name: getattr(arguments, field.name) for field in fields(FitOptions) if field.name in arguments}
    where = {"ranks": arguments.ranks, "show": not arguments.quiet, "data": text}
    folder = run_of(arguments.source, arguments.k, arguments.out, FitOptions(**asked), **where)
    if not (folder / MODEL_FILE).is_file():
        return 0  # asked to stop; how to go on was said
    model = TopicFit.load(folder / MODEL_FILE)
    if not arguments.quiet:
        console.print(topics_table(model))
    for name in write_pictures(model, folder):
        if not arguments.quiet:
            console.print(f"written: {folder / name}", soft_wrap=True)
    return 0


def run_of(
    source: Path,
    k: int,
    out: Path,
    options: FitOptions,
    *,
    ranks: int = 1,
    show: bool = True,
    data: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Fit as a run with its folder at `out`; returns the folder. `data`: more of that section, None is left out."""
    from paceline.spec import build
    from paceline.training.run import train

    out = Path(out).expanduser().absolute()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", out.name):
        raise UserError(f"--out {out}: the last part must be a name of letters, digits, '.', '_' and '-'")
    given = {key: value for key, value in data.items() if value is not None}
    values = {
        "name": out.name,
        "workload": "topics",
        "model": {"k": k, "start": options.start, "rows": options.rows, "tolerance": options.tolerance},
        "data": {"path": str(Path(source).expanduser().absolute()), "fractional": options.fractional, **given},
        "train": {"seed": options.seed, "steps": options.passes},
        "parallel": {"ranks": ranks, "device": options.device},
    }
    return train(build(values), out.parent, show=show).path


def write_pictures(model: TopicFit, folder: Path) -> list[str]:
    """The pictures and the page of a fit, into its folder; returns their names."""
    from paceline.workloads.topics.pictures.explorer import write_explorer
    from paceline.workloads.topics.pictures.plots import plot_loss, plot_structure, plot_top_terms

    loss, structure, terms = (str(folder / name) for name in PICTURES)
    plot_loss(model, output_file=loss)
    plot_structure(model, output_file=structure)
    plot_top_terms(model, output_file=terms)
    write_explorer(model, folder / EXPLORER)
    return [*PICTURES, EXPLORER]


def topics_table(model: TopicFit) -> Any:
    """Share and first terms of every topic, the largest first."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("topic", justify="right")
    table.add_column("share", justify="right")
    table.add_column("terms", overflow="fold")
    shares, terms = model.topic_shares(), model.top_terms(SHOWN_TERMS)
    for at in sorted(range(model.k), key=lambda at: -shares[at]):
        table.add_row(str(at), f"{100 * shares[at]:.1f} %", ", ".join(terms[at]))
    return table


def _convert(arguments: argparse.Namespace, text: dict[str, Any], console: Any) -> None:
    from paceline.workloads.topics.files.convert import convert
    from paceline.workloads.topics.files.texts import TextOptions

    given = {key: value for key, value in text.items() if value is not None and key != "text"}
    options = TextOptions(**({"column": text["text"]} if text["text"] else {}), **given)
    say = None if arguments.quiet else lambda line: print(line, file=sys.stderr)
    convert(arguments.source, arguments.shards, fractional=arguments.fractional, text=options, say=say)
    console.print(f"written: {arguments.shards}; fit it with  paceline topics {arguments.shards} -k 20", soft_wrap=True)
