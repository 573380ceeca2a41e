"""The command `paceline topics`: fit counts or texts, and write model, plots and explorer."""

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import InvalidValue, UserError, join_names
from paceline.io.files import print_json
from paceline.io.format import duration
from paceline.io.terminal import build_console, warn
from paceline.workloads.topics.counts.stream import compute_totals
from paceline.workloads.topics.result.model import MODEL_FILE, TopicFit
from paceline.workloads.topics.sections import STARTS, FitOptions

SHOWN_TERMS, SHOWN_TOPICS = 8, 20
READ_AGAIN = 1 << 28  # bytes of a file of counts that the page reads once more
FACTS = ("loss", "passes", "converged", "stopped_because", "seconds")
ALIKE = 0.9  # overlap of two topics that say the same
TEXT_OPTIONS = ("text", "min_df", "max_df", "max_terms", "stop_words", "name")
EXPLORER = "topics.html"
PICTURES = ("loss.png", "structure.png", "top_terms.png")


def add_topics_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `paceline topics` takes: options of the fit, and those of texts, which are None unless given."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help=".npy, .npz, .mtx, .parquet, shards or texts")
    for name, metavar, kind, default, help in (
        ("-k", "K", int, None, "number of topics"),
        ("--out", "FOLDER", Path, Path("runs/topics"), "(runs/topics)"),
        ("--ranks", "N", int, 1, "processes that share the documents (1)"),
        ("--passes", "N", int, None, "most passes over the documents (1000)"),
        ("--tolerance", "T", float, FitOptions.tolerance, "least gain of a pass (1e-7)"),
        ("--seed", "N", int, 0, "another seed, another optimum (0)"),
        ("--text", "COLUMN", str, None, "texts: the column or key of the text"),
        ("--min-df", "N", _count_or_share, None, "texts: leave out terms in fewer documents (2)"),
        ("--max-df", "N", _count_or_share, None, "texts: leave out terms in more documents (0.95)"),
        ("--stop-words", "WORDS.txt", str, None, "texts: a file of words to leave out, or none (english)"),
        ("--name", "COLUMN", str, None, "texts: the column with the title of a document"),
        ("--max-terms", "N", int, None, "texts: only the most frequent terms"),
        ("--shards", "FOLDER", Path, None, "only write the counts there, as compact shards"),
    ):
        parser.add_argument(name, metavar=metavar, type=kind, default=default, help=help)
    parser.add_argument("--start", default=FitOptions.start, choices=STARTS)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--fractional", action="store_true", help="allow numbers that are not whole")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _count_or_share(text: str) -> int | float:
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; 5 is five documents, 0.5 half of them") from None


def run_topics(arguments: argparse.Namespace) -> int:
    """`paceline topics SOURCE -k K --out FOLDER`, or with --shards the conversion alone."""
    console = build_console()
    text = {name: getattr(arguments, name) for name in TEXT_OPTIONS}
    if arguments.shards is not None:
        _convert_to_shards(arguments, text, console)
        return 0
    if arguments.k is None:
        raise UserError("-k is missing: give the number of topics, as  -k 20", code="missing-value", key="-k")
    quiet = arguments.quiet or arguments.json
    folder = _train_topics(arguments, text, "progress" if not quiet else False)
    if not (folder / MODEL_FILE).is_file():
        return 0  # stopped by the user; the command that resumes it was printed
    model = TopicFit.load(folder / MODEL_FILE)
    counts, texts = _read_documents(folder)
    lengths = None if counts is None else compute_totals(counts).per_document
    title = _build_title(model, arguments.source)
    write_topic_pictures(model, folder, counts, texts, title, lengths)
    if arguments.json:
        columns = (model.topic_shares().tolist(), model.topic_names(lengths), model.top_terms(SHOWN_TERMS))
        topics = [dict(zip(("of_documents", "name", "terms"), row, strict=True)) for row in zip(*columns, strict=True)]
        print_json({"folder": folder, **{name: getattr(model, name) for name in FACTS}, "topics": topics})
    if not quiet:
        console.print(*describe_fit(model, arguments.source), sep="\n", soft_wrap=True, highlight=False)
        console.print(build_topics_table(model, lengths))
        if model.k > SHOWN_TOPICS:
            console.print(f"and {model.k - SHOWN_TOPICS} smaller ones, on the page")
        written = f"Page: {folder / EXPLORER}; beside it {join_names([MODEL_FILE, *PICTURES])}"
        console.print(written, soft_wrap=True, highlight=False)
    return 0


def _build_title(model: TopicFit, source: Path) -> str:
    return f"{model.k:,} topics in {source.expanduser().absolute().name}"


def describe_fit(model: TopicFit, source: Path) -> list[str]:
    """Return the verdict on a fit, whether its topics differ, and what to type next."""
    from paceline.workloads.topics.result.explorer import compute_overlaps

    ended = "converged after" if model.converged else "not converged in"
    lines = [f"{_build_title(model, source)}: {ended} {model.passes:,} passes, {duration(model.seconds)}."]
    leading = 100 * np.median(model.L.max(axis=1))
    overlap = np.triu(compute_overlaps(model.F), 1)
    a, b = np.unravel_index(overlap.argmax(), overlap.shape)
    alike = f"; the two topics most alike, {a} and {b}, share {100 * overlap[a, b]:.0f} % of their terms"
    mixed = f"Half of the {len(model.L):,} documents have {leading:.0f} % or more of one topic"
    lines.append(f"{mixed}{alike * (model.k > 1)}.")
    if not model.converged:
        lines.append(f"Let it converge:  --passes {max(1000, 5 * model.passes)}")
    elif overlap[a, b] > ALIKE:
        lines.append(f"Try fewer topics:  -k {model.k - int((overlap.max(axis=0) > ALIKE).sum())}")
    return lines


def _train_topics(arguments: argparse.Namespace, text: dict[str, Any], show: Any) -> Path:
    """Train a run in `--out` and return the folder. `text`: more keys of `data`; None is left out."""
    from paceline.api import train
    from paceline.config import build_spec

    out = arguments.out.expanduser().absolute()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", out.name):
        raise InvalidValue(f"--out {out}: name it with letters, digits, '.', '_' and '-'", key="--out")
    given = {key: value for key, value in text.items() if value is not None}
    path = str(arguments.source.expanduser().absolute())
    values = {
        "name": out.name,
        "workload": "topics",
        "model": {"k": arguments.k, "start": arguments.start, "tolerance": arguments.tolerance},
        "data": {"path": path, "fractional": arguments.fractional, **given},
        "train": {"seed": arguments.seed, "steps": arguments.passes},
        "parallel": {"ranks": arguments.ranks, "device": arguments.device},
    }
    return train(build_spec(values), out.parent, show=show).path


def _read_documents(folder: Path) -> tuple[Any, Iterator[str] | None]:
    """Return the counts, unless they are large or no counts of words, and the texts where there are any."""
    from paceline.runlog.run_dir import RunDir
    from paceline.workload import build_workload
    from paceline.workloads.topics.files.texts import is_text, iterate_documents

    topics: Any = build_workload(RunDir.open(folder).recorded_spec())
    data = topics.spec.data
    if is_text(data.path):
        return topics.counts, (text for _, text in iterate_documents(data.path, data.text))
    small = data.path.is_file() and data.path.stat().st_size <= READ_AGAIN and not data.fractional
    return (topics.counts if small else None), None


def write_topic_pictures(
    model: TopicFit, folder: Path, counts: Any, texts: Iterable[str] | None, title: str, lengths: Any
) -> None:
    """Write the three plots and the explorer page into the folder, with the same names of topics."""
    from paceline.workloads.topics.result.explorer import write_explorer
    from paceline.workloads.topics.result.plots import plot_loss, plot_structure, plot_top_terms

    loss, structure, terms = (str(folder / name) for name in PICTURES)
    plot_loss(model, output_file=loss)
    names = [f"{at}: {name}" for at, name in enumerate(model.topic_names(lengths, 3))]
    plot_structure(model, output_file=structure, topic_names=names)
    plot_top_terms(model, output_file=terms, topic_names=names)
    write_explorer(model, folder / EXPLORER, counts, texts=texts, title=title)


def build_topics_table(model: TopicFit, lengths: Any) -> Any:
    """Build a table of the largest topics: share, of words if there are `lengths`, and name."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("topic", justify="right")
    table.add_column("of documents" if lengths is None else "of all words", justify="right")
    table.add_column("name", overflow="fold")
    shares, names = model.topic_shares(lengths), model.topic_names(lengths)
    for at in sorted(range(model.k), key=lambda at: -shares[at])[:SHOWN_TOPICS]:
        table.add_row(str(at), f"{100 * shares[at]:.1f} %", Text(names[at]))
    return table


def _convert_to_shards(arguments: argparse.Namespace, text: dict[str, Any], console: Any) -> None:
    from paceline.workloads.topics.files.reading import convert
    from paceline.workloads.topics.files.texts import TextOptions

    columns = {"text": "column", "name": "name_column"}
    given = {columns.get(key, key): value for key, value in text.items() if value not in (None, "")}
    log = None if arguments.quiet else warn
    convert(arguments.source, arguments.shards, fractional=arguments.fractional, text=TextOptions(**given), log=log)
    if arguments.json:
        print_json({"written": arguments.shards})
    else:
        said = f"written: {arguments.shards}; fit it with  paceline topics {arguments.shards} -k 20"
        console.print(said, soft_wrap=True)
