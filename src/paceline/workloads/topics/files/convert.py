"""Counts or texts as a folder of shards: smaller, and faster to read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.record.units import size
from paceline.workloads.topics.counts.blocks import Counts, Labelled, allows_fractions
from paceline.workloads.topics.counts.memory import sampled
from paceline.workloads.topics.counts.stream import blocks
from paceline.workloads.topics.files.documents import documents, is_text
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.files.shards import SHARD_BYTES, Say, ShardCounts, check_new, compact, write_shards
from paceline.workloads.topics.files.texts import Counting, TextOptions, describe


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
        return convert_text(Path(source).expanduser(), folder, text, shard_bytes=shard_bytes, say=say)
    counts = read_counts(source, fractional=fractional)
    _check_space(folder, _estimated_bytes(counts))
    stream = (block.values for block in blocks(counts, block_bytes=min(shard_bytes, SHARD_BYTES)))
    return write_shards(
        folder,
        stream,
        counts.terms,
        Labelled(vocabulary=counts.vocabulary, names=counts.names, fractional=allows_fractions(counts)),
        shard_bytes=shard_bytes,
        say=say,
    )


def convert_text(
    source: Path,
    out: Path,
    options: TextOptions | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    say: Say | None = None,
) -> ShardCounts:
    """The same counts as a folder of shards. The texts are read twice, and their counts are never all in memory."""
    options = options or TextOptions()
    first = Counting(options)
    for _ in first.count(documents(source, options.column, options.name_column)):
        pass
    _, vocabulary = first.vocabulary(describe(source))
    second = Counting(options, vocabulary.terms)
    stream = second.count(documents(source, options.column, options.name_column))
    return write_shards(
        out,
        stream,
        len(vocabulary.terms),
        Labelled(vocabulary=vocabulary.terms, names=vocabulary.names),
        shard_bytes=shard_bytes,
        say=say,
    )


def _estimated_bytes(counts: Counts) -> int:
    """About what the shards will take, from a sample where the counts are dense."""
    if counts.sparse:
        return int(4 * counts.documents + 4 * counts.weights().sum())
    dense = sampled(counts)
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
