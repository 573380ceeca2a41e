"""Where labelled texts come from: two streams of (text, label), the names of the classes, and a fingerprint.

Opening a source reads nothing but the names of files. The streams can be started again and give the same rows in the
same order, so no stage of the work has to keep the texts in memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path

from paceline.data.corpora import ag_news, docstrings, tables
from paceline.data.files import check_file, digest, nearest
from paceline.errors import UserError
from paceline.workloads.classifier.sections import TextData

MAX_CLASSES = 10_000  # more distinct labels than this are an identifier or a measurement
WHOLE_NUMBER = re.compile(r"[+-]?\d+")

Sample = tuple[str, int]


@dataclass(frozen=True)
class Source:
    """Labelled texts in two splits. `train()` and `test()` start a fresh stream; `fingerprint()` names the content."""

    train: Callable[[], Iterator[Sample]]
    test: Callable[[], Iterator[Sample]]
    fingerprint: Callable[[], str]
    find_classes: Callable[[], tuple[str, ...]]

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels; for a table this reads the training file once."""
        return self.find_classes()


def open_source(data: TextData) -> Source:
    """The source that `data.source` names, with its files found."""
    match data.source:
        case "docstrings":
            return _docstrings(data)
        case "ag_news":
            return _ag_news(data)
        case _:
            return _table(data)


def _docstrings(data: TextData) -> Source:
    _refuse(data, "path", "test_path")

    @cache
    def both() -> tuple[list[Sample], list[Sample]]:
        return docstrings.extract(data.test_fraction)

    return Source(
        train=lambda: islice(iter(both()[0]), data.limit or None),
        test=lambda: iter(both()[1]),
        fingerprint=lambda: _fingerprint(data, docstrings.versions(), test_fraction=data.test_fraction),
        find_classes=lambda: docstrings.CLASSES,
    )


def _ag_news(data: TextData) -> Source:
    _refuse(data, "test_path")
    train, test = ag_news.find_files(data.path)
    classes = ag_news.topics(train.parent)
    return Source(
        train=lambda: islice(ag_news.samples(train, classes), data.limit or None),
        test=lambda: ag_news.samples(test, classes),
        fingerprint=lambda: _fingerprint(data, digest([train, test]), classes=classes, cleaning=ag_news.CLEANING),
        find_classes=lambda: classes,
    )


def _table(data: TextData) -> Source:
    if data.path is None:
        raise UserError(f"data.path: not given; source {data.source} reads a file; type  data.path=FILE.{data.source}")
    path = check_file(data.path, "data.path")
    test_path = None if data.test_path is None else check_file(data.test_path, "data.test_path")
    survey = cache(lambda: _survey(path, data, split=test_path is None))

    def train() -> Iterator[Sample]:
        label_of, cut = survey()
        samples = ((row.text, label_of[row.label]) for row in tables.rows(path, data) if _chance(row.text) >= cut)
        return islice(samples, data.limit or None)

    def test() -> Iterator[Sample]:
        label_of, cut = survey()
        if test_path is None:
            return ((row.text, label_of[row.label]) for row in tables.rows(path, data) if _chance(row.text) < cut)
        return _labelled(test_path, data, label_of)

    fields = {"text": data.text, "label": data.label}
    if test_path is None:
        fields["test_fraction"] = str(data.test_fraction)
    files = [path] if test_path is None else [path, test_path]
    return Source(
        train=train,
        test=test,
        fingerprint=lambda: _fingerprint(data, digest(files), **fields),
        find_classes=lambda: tuple(survey()[0]),
    )


def _survey(path: Path, data: TextData, split: bool) -> tuple[dict[str, int], int]:
    """One pass over the training file: label -> number, and the chance below which a row is held out (0: none).

    A row is held out by a hash of its text, so equal texts are on the same side. The cut is moved as little as it
    takes for both sides to have a row.
    """
    labels: set[str] = set()
    lowest, highest = 1 << 64, -1
    for row in tables.rows(path, data):
        labels.add(row.label)
        if len(labels) > MAX_CLASSES:
            raise UserError(
                f"{path}: column {data.label!r} has more than {MAX_CLASSES:,} distinct values "
                f"(such as {row.label!r:.40}), so it does not name classes; type  data.label=COLUMN"
            )
        if split:
            chance = _chance(row.text)
            lowest, highest = min(lowest, chance), max(highest, chance)
    if not labels:
        raise UserError(f"{path}: there are no rows; at least two rows of two classes are needed")
    if len(labels) == 1:
        raise UserError(
            f"{path}: every row has the same {data.label!r}, {labels.pop()!r}; at least two classes are needed "
            "(data.label=COLUMN)"
        )
    if split and lowest == highest:
        raise UserError(
            f"{path}: every row has the same {data.text!r}, so none can be held out; "
            "type  data.test_path=FILE  or  data.text=COLUMN"
        )
    numeric = all(WHOLE_NUMBER.fullmatch(label) for label in labels)
    ordered = sorted(labels, key=lambda label: (int(label) if numeric else 0, label))
    cut = min(max(int(data.test_fraction * 2**64), lowest + 1), highest) if split else 0
    return {label: number for number, label in enumerate(ordered)}, cut


def _labelled(path: Path, data: TextData, label_of: dict[str, int]) -> Iterator[Sample]:
    empty = True
    for row in tables.rows(path, data):
        empty = False
        if row.label not in label_of:
            known = ", ".join(list(label_of)[:12]) + (", …" if len(label_of) > 12 else "")
            raise UserError(
                f"{tables.place(path, row.number, data)}: label {row.label!r} is not in the training file "
                f"{data.path}{nearest(row.label, label_of)} (there: {known})"
            )
        yield row.text, label_of[row.label]
    if empty:
        raise UserError(
            f"data.test_path={path}: there are no rows; leave it out to hold out data.test_fraction of the rows"
        )


def _chance(text: str) -> int:
    """A number below 2^64 that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def _fingerprint(data: TextData, content: object, **fields: object) -> str:
    whole = json.dumps({"source": data.source, "limit": data.limit, "content": content, **fields}, sort_keys=True)
    return hashlib.sha256(whole.encode("utf-8")).hexdigest()


def _refuse(data: TextData, *keys: str) -> None:
    for key in keys:
        value = getattr(data, key)
        if value is not None:
            raise UserError(
                f"data.{key}={value}: source {data.source} does not read it; drop it, "
                "or type  data.source=csv  (or jsonl, parquet)"
            )
