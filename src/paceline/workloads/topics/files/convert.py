"""Counts or texts as a folder of shards: smaller, and faster to read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.record.units import size
from paceline.workloads.topics.counts.blocks import Counts, Csr, Labelled, allows_fractions, dense_rows
from paceline.workloads.topics.counts.stream import blocks
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.files.shards import SHARD_BYTES, Say, ShardCounts, check_new, compact, write_shards
from paceline.workloads.topics.files.texts import Counting, TextOptions, describe, documents, is_text

SAMPLES, SAMPLE_ROWS = 8, 32  # groups of rows from all over a matrix


def convert(
    source: Any,
    out: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    fractional: bool = False,
    text: TextOptions | None = None,
    say: Say | None = None,
) -> ShardCounts:
    """Write counts from anything that `read_counts` takes as a folder of shards. Memory stays at a few shards."""
    folder = Path(out).expanduser().absolute()
    check_new(folder)
    if isinstance(source, str | Path) and is_text(Path(source).expanduser()):
        words, labels = _text_stream(Path(source).expanduser(), text or TextOptions())
        return write_shards(folder, words, len(labels.vocabulary or ()), labels, shard_bytes=shard_bytes, say=say)
    counts = read_counts(source, fractional=fractional)
    _check_space(folder, _estimated_bytes(counts))
    stream = (block.values for block in blocks(counts, block_bytes=min(shard_bytes, SHARD_BYTES)))
    labels = Labelled(vocabulary=counts.vocabulary, names=counts.names, fractional=allows_fractions(counts))
    return write_shards(folder, stream, counts.terms, labels, shard_bytes=shard_bytes, say=say)


def _text_stream(source: Path, options: TextOptions) -> tuple[Iterator[Csr], Labelled]:
    """The counts of texts, which are read twice: they are never all in memory."""
    first = Counting(options)
    for _ in first.count(documents(source, options.column, options.name_column)):
        pass
    _, terms = first.vocabulary(describe(source))
    second = Counting(options, terms).count(documents(source, options.column, options.name_column))
    return second, Labelled(vocabulary=terms, names=first.names or None)


def _estimated_bytes(counts: Counts) -> int:
    """About what the shards will take, from a sample where the counts are dense."""
    if counts.sparse:
        return int(4 * counts.documents + 4 * counts.weights().sum())
    starts = np.unique(np.linspace(0, max(0, counts.documents - SAMPLE_ROWS), SAMPLES).astype(int)).tolist()
    some = (counts.block(at, min(counts.documents, at + SAMPLE_ROWS)).values for at in starts)
    dense = [dense_rows(values, counts.terms) for values in some]
    per_row = sum(compact(rows)[1] for rows in dense) / sum(len(rows) for rows in dense)
    return int(1.1 * per_row * counts.documents)


def _check_space(folder: Path, needed_bytes: int) -> None:
    there = next(parent for parent in folder.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if needed_bytes > free:
        raise UserError(
            f"{folder}: about {size(needed_bytes)} are needed, {size(free)} are free; free some space, or give a "
            "folder on a larger disk"
        )
