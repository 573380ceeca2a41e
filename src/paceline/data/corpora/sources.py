"""Where labelled texts come from: two streams of (text, label), the names of the classes, and a fingerprint.

Opening a source reads nothing but the names of files. The streams can be started again and give the same rows in the
same order, so no stage of the work has to keep the texts in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Protocol

from paceline.data.corpora import ag_news, docstrings
from paceline.data.corpora.digests import noted_digest
from paceline.data.corpora.tables import TextTable
from paceline.data.corpora.tokenised import CorpusSettings, HashRange
from paceline.data.files import check_file, digest_of_value, hash64
from paceline.errors import UserError, did_you_mean

MAX_CLASSES = 10_000  # more distinct labels than this are an identifier or a measurement
WHOLE_NUMBER = re.compile(r"[+-]?\d+")

Sample = tuple[str, int]


class LabelledTextSettings(CorpusSettings, Protocol):
    """Fields of the run file that say where labelled texts are and how they are tokenised."""

    test_path: Path | None
    text: str
    label: str
    max_length: int
    lowercase: bool


@dataclass(frozen=True)
class Source:
    """Labelled texts in two splits. `train()` and `test()` start a fresh stream; `fingerprint()` names the content."""

    train: Callable[[], Iterator[Sample]]
    test: Callable[[], Iterator[Sample]]
    fingerprint: Callable[[], str]
    classes: Callable[[], tuple[str, ...]]
    """Their names, in the order of the labels; for a table this reads the training file once."""


def open_source(data: LabelledTextSettings, looking: bool = False) -> Source:
    """The source that `data.source` names, with its files found. `looking`: refused where a hash would take a while."""
    return {"docstrings": _docstrings, "ag_news": _ag_news}.get(data.source, _table)(data, looking)


def _docstrings(data: LabelledTextSettings, looking: bool) -> Source:
    _refuse(data, "path", "test_path")
    splits = cache(lambda: docstrings.extract(data.test_fraction))
    return Source(
        train=lambda: islice(iter(splits()[0]), data.limit or None),
        test=lambda: iter(splits()[1]),
        fingerprint=lambda: _fingerprint(data, docstrings.versions(), test_fraction=data.test_fraction),
        classes=lambda: docstrings.CLASSES,
    )


def _ag_news(data: LabelledTextSettings, looking: bool) -> Source:
    _refuse(data, "test_path")
    train, test = ag_news.find_files(data.path)
    classes = ag_news.topics(train.parent)
    return Source(
        train=lambda: islice(ag_news.samples(train, classes), data.limit or None),
        test=lambda: ag_news.samples(test, classes),
        fingerprint=lambda: _fingerprint(
            data, _digest(data, [train, test], looking), classes=classes, cleaning=ag_news.CLEANING
        ),
        classes=lambda: classes,
    )


def _table(data: LabelledTextSettings, looking: bool) -> Source:
    if data.path is None:
        raise UserError(f"data.path: not given; source {data.source} reads a file; type  data.path=FILE.{data.source}")
    given, path = data.path, check_file(data.path, "data.path")
    test_path = None if data.test_path is None else check_file(data.test_path, "data.test_path")
    table = TextTable(path, data.source, data.text, data.label)
    survey = cache(lambda: _survey(table, data.test_fraction if test_path is None else None))

    def side(held_out: bool) -> Iterator[Sample]:
        numbers, held_out_below = survey()
        rows = (row for row in table.rows() if (hash64(row.text) < held_out_below) == held_out)
        return ((row.text, numbers[row.label]) for row in rows)

    def test() -> Iterator[Sample]:
        if test_path is None:
            return side(held_out=True)
        return _test_samples(replace(table, path=test_path), given, survey()[0])

    fields = {"text": data.text, "label": data.label}
    if test_path is None:
        fields["test_fraction"] = str(data.test_fraction)
    files = [path] if test_path is None else [path, test_path]
    return Source(
        train=lambda: islice(side(held_out=False), data.limit or None),
        test=test,
        fingerprint=lambda: _fingerprint(data, _digest(data, files, looking), **fields),
        classes=lambda: tuple(survey()[0]),
    )


def _survey(table: TextTable, test_fraction: float | None) -> tuple[dict[str, int], int]:
    """One pass over the training file: (label -> number, the hash below which a row is held out; 0: none is)."""
    path, labels, hashes = table.path, set[str](), HashRange()
    for row in table.rows():
        labels.add(row.label)
        if len(labels) > MAX_CLASSES:
            raise UserError(
                f"{path}: column {table.label!r} has more than {MAX_CLASSES:,} distinct values "
                f"(such as {row.label!r:.40}), so it does not name classes; type  data.label=COLUMN"
            )
        if test_fraction is not None:
            hashes.add(row.text)
    if not labels:
        raise UserError(f"{path}: there are no rows; at least two rows of two classes are needed")
    if len(labels) == 1:
        raise UserError(
            f"{path}: every row has the same {table.label!r}, {labels.pop()!r}; at least two classes are needed "
            "(data.label=COLUMN)"
        )
    if hashes.is_single:
        raise UserError(
            f"{path}: every row has the same {table.text!r}, so none can be held out; "
            "type  data.test_path=FILE  or  data.text=COLUMN"
        )
    numeric = all(WHOLE_NUMBER.fullmatch(label) for label in labels)
    ordered = sorted(labels, key=lambda label: (int(label) if numeric else 0, label))
    held_out_below = hashes.threshold(test_fraction) if test_fraction is not None else 0
    return {label: number for number, label in enumerate(ordered)}, held_out_below


def _test_samples(table: TextTable, train: Path, numbers: dict[str, int]) -> Iterator[Sample]:
    """The rows of the user's own test file, whose labels must be those of the training file."""
    empty = True
    for row in table.rows():
        empty = False
        if row.label not in numbers:
            known = ", ".join(list(numbers)[:12]) + (", …" if len(numbers) > 12 else "")
            raise UserError(
                f"{table.where(row.number)}: label {row.label!r} is not in the training file "
                f"{train}{did_you_mean(row.label, numbers)} (there: {known})"
            )
        yield row.text, numbers[row.label]
    if empty:
        raise UserError(
            f"data.test_path={table.path}: there are no rows; leave it out to hold out data.test_fraction of the rows"
        )


def _fingerprint(data: LabelledTextSettings, content: object, **fields: object) -> str:
    return digest_of_value({"source": data.source, "limit": data.limit, "content": content, **fields})


def _digest(data: LabelledTextSettings, files: list[Path], looking: bool) -> str:
    return noted_digest(files, data.cache.expanduser(), looking)


def _refuse(data: LabelledTextSettings, *keys: str) -> None:
    for key in keys:
        if (value := getattr(data, key)) is not None:
            raise UserError(
                f"data.{key}={value}: source {data.source} does not read it; drop it, "
                "or type  data.source=csv  (or jsonl, parquet)"
            )
