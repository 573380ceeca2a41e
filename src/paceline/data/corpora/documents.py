"""Texts without labels, for language models: one stream of documents that can be started again, and a fingerprint.

A file longer than a part is handed out in parts, so that no file has to fit into memory and a single long one can be
divided into what is trained on and what is held out.
"""

from __future__ import annotations

import glob
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from paceline.data.corpora import docstrings
from paceline.data.corpora.digests import noted_digest
from paceline.data.corpora.tokenised import CorpusSettings, HashRange
from paceline.data.files import digest_of_value, hash64, not_there, open_text
from paceline.data.finding import LOOKED_AT, Walk
from paceline.errors import UserError

PART_CHARACTERS = 16 << 10
SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".go", ".rs", ".sh")
READ = (*SUFFIXES, *(f"{suffix}.gz" for suffix in SUFFIXES))
"""What is read from a folder. A file that is named is read whatever it is called."""


class DocumentPart(NamedTuple):
    text: str
    held_out: bool
    ends: bool
    """Its document ends here; if not, the next part goes on with it."""


@dataclass(frozen=True)
class DocumentSource:
    """`parts()` starts from the beginning and gives the same parts each time; `fingerprint()` names the content."""

    parts: Callable[[], Iterator[DocumentPart]]
    fingerprint: Callable[[], str]


def open_documents(data: CorpusSettings, looking: bool = False) -> DocumentSource:
    """The documents that `data.source` names, with their files found. `looking`: refused where that takes a while."""
    return _docstrings(data) if data.source == "docstrings" else _text(data, looking)


def _docstrings(data: CorpusSettings) -> DocumentSource:
    if data.path is not None:
        raise UserError(
            f"data.path={data.path}: source docstrings does not read it; drop it, or type  data.source=text"
        )

    @cache
    def splits() -> tuple[list[str], list[str]]:
        train, test = docstrings.extract(data.test_fraction, inspect.cleandoc)
        n_test = max(1, round(data.limit * data.test_fraction)) if data.limit else len(test)
        n_train = max(1, data.limit - n_test) if data.limit else len(train)
        return [text for text, _ in train[:n_train]], [text for text, _ in test[:n_test]]

    def parts() -> Iterator[DocumentPart]:
        for held_out, texts in enumerate(splits()):
            yield from (DocumentPart(text, bool(held_out), ends=True) for text in texts)

    return DocumentSource(parts, lambda: _fingerprint(data, docstrings.versions()))


def _text(data: CorpusSettings, looking: bool) -> DocumentSource:
    files = find_files(data.path, looking)

    def texts() -> Iterator[tuple[Path, str]]:
        return islice(((file, text) for file in files for text in _parts_of(file)), data.limit or None)

    @cache
    def threshold() -> int:
        hashes = HashRange()
        for _, text in texts():
            hashes.add(text)
        if hashes.is_empty:
            raise UserError(f"data.path={data.path}: there is no text in it")
        if hashes.is_single:
            raise UserError(
                f"data.path={data.path}: all text is in one document, so none can be held out; "
                f"give several files, or one of more than {PART_CHARACTERS // 1024} KiB"
                + (f" (data.limit={data.limit})" if data.limit else "")
            )
        return hashes.threshold(data.test_fraction)

    def parts() -> Iterator[DocumentPart]:
        held_out_below = threshold()
        sides = ((file, text, hash64(text) < held_out_below) for file, text in texts())
        for (file, text, held_out), after in pairwise(chain(sides, [(None, "", False)])):
            yield DocumentPart(text, held_out, ends=(file, held_out) != (after[0], after[2]))

    return DocumentSource(parts, lambda: _fingerprint(data, noted_digest(files, data.cache.expanduser(), looking)))


def find_files(path: Path | None, looking: bool = False) -> list[Path]:
    """The files behind `data.path`, in the order of their names. `looking`: TooMany where there are very many."""
    if path is None:
        raise UserError("data.path: not given; source text reads a file, a folder or a pattern; type  data.path=FILE")
    path = path.expanduser()
    given = f"data.path={path}"
    kinds, walk = " ".join(SUFFIXES), Walk(LOOKED_AT if looking else None)
    try:
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = sorted(file for file in walk.below(path, _shown) if file.name.endswith(READ))
            if not files:
                raise UserError(f"{given}: the folder has no text files ({kinds}, or the same with .gz)")
        elif glob.has_magic(str(path)):
            files = sorted(walk.matching(path))
            if not files:
                raise UserError(f"{given}: no file matches this pattern")
        else:
            raise not_there(path, "data.path", "file or folder")
        if not any(file.stat().st_size for file in files):
            raise UserError(f"{given}: {'the file is' if len(files) == 1 else f'all {len(files)} files are'} empty")
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {error.strerror}") from None
    return files


def _shown(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _parts_of(file: Path) -> Iterator[str]:
    """The text of a file in parts that end at a line or, if need be, at a word. Blank ones are left out."""
    rest = ""
    with open_text(file) as source:
        while block := source.read(PART_CHARACTERS - len(rest)):
            rest += block
            if len(rest) < PART_CHARACTERS:
                continue
            end = max(rest.rfind("\n"), 0) or max(rest.rfind(" "), 0) or len(rest) - 1
            part, rest = rest[: end + 1], rest[end + 1 :]
            if part.strip():
                yield part
    if rest.strip():
        yield rest


def _fingerprint(data: CorpusSettings, content: object) -> str:
    settings = {"source": data.source, "limit": data.limit, "test_fraction": data.test_fraction, "content": content}
    return digest_of_value({"lm": settings})
