"""Texts without labels, for language models: one stream of documents that can be started again, and a fingerprint.

A file longer than a piece is handed out in pieces, so that no file has to fit into memory and a single long one can be
divided into what is trained on and what is held out.
"""

from __future__ import annotations

import glob
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from paceline.data.corpora import docstrings
from paceline.data.files import digest, nearest, open_text
from paceline.errors import UserError
from paceline.workloads.lm.sections import LMData

PIECE_CHARACTERS = 16 << 10
SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".go", ".rs", ".sh")
READ = (*SUFFIXES, *(f"{suffix}.gz" for suffix in SUFFIXES))
"""What is read from a folder. A file that is named is read whatever it is called."""


class Piece(NamedTuple):
    text: str
    held_out: bool
    ends: bool
    """Its document ends here; if not, the next piece goes on with it."""


@dataclass(frozen=True)
class Documents:
    """`stream()` starts from the beginning and gives the same pieces each time; `fingerprint()` names the content."""

    stream: Callable[[], Iterator[Piece]]
    fingerprint: Callable[[], str]


def open_documents(data: LMData) -> Documents:
    """The documents that `data.source` names, with their files found."""
    return _docstrings(data) if data.source == "docstrings" else _text(data)


def _docstrings(data: LMData) -> Documents:
    if data.path is not None:
        raise UserError(
            f"data.path={data.path}: source docstrings does not read it; drop it, or type  data.source=text"
        )

    @cache
    def both() -> tuple[list[str], list[str]]:
        train, test = docstrings.extract(data.test_fraction, inspect.cleandoc)
        tested = max(1, round(data.limit * data.test_fraction)) if data.limit else len(test)
        trained = max(1, data.limit - tested) if data.limit else len(train)
        return [text for text, _ in train[:trained]], [text for text, _ in test[:tested]]

    def stream() -> Iterator[Piece]:
        for held_out, texts in enumerate(both()):
            yield from (Piece(text, bool(held_out), ends=True) for text in texts)

    return Documents(stream, lambda: _fingerprint(data, docstrings.versions()))


def _text(data: LMData) -> Documents:
    files = find_files(data.path)

    def pieces() -> Iterator[tuple[Path, str]]:
        return islice(((file, text) for file in files for text in _pieces_of(file)), data.limit or None)

    @cache
    def cut() -> int:
        """The chance below which a piece is held out, moved as little as it takes for both sides to have one."""
        lowest, highest = 1 << 64, -1
        for _, text in pieces():
            chance = _chance(text)
            lowest, highest = min(lowest, chance), max(highest, chance)
        if highest < 0:
            raise UserError(f"data.path={data.path}: there is no text in it")
        if lowest == highest:
            raise UserError(
                f"data.path={data.path}: all text is in one document, so none can be held out; "
                f"give several files, or one of more than {PIECE_CHARACTERS // 1024} KiB"
                + (f" (data.limit={data.limit})" if data.limit else "")
            )
        return min(max(int(data.test_fraction * 2**64), lowest + 1), highest)

    def stream() -> Iterator[Piece]:
        held_out_below, before = cut(), None
        for file, text in pieces():
            held_out = _chance(text) < held_out_below
            if before is not None:
                yield Piece(before[1], before[2], ends=(before[0], before[2]) != (file, held_out))
            before = file, text, held_out
        if before is not None:
            yield Piece(before[1], before[2], ends=True)

    return Documents(stream, lambda: _fingerprint(data, _digest(files, data.cache.expanduser())))


def find_files(path: Path | None) -> list[Path]:
    """The files behind `data.path`, in the order of their names."""
    if path is None:
        raise UserError("data.path: not given; source text reads a file, a folder or a pattern; type  data.path=FILE")
    path = path.expanduser()
    given = f"data.path={path}"
    kinds = " ".join(SUFFIXES)
    try:
        if path.is_file():
            files = [path]
        elif path.is_dir():
            inside = (file for file in path.rglob("*") if not _hidden(file.relative_to(path)))
            files = sorted(file for file in inside if file.name.endswith(READ) and file.is_file())
            if not files:
                raise UserError(f"{given}: the folder has no text files ({kinds}, or the same with .gz)")
        elif glob.has_magic(str(path)):
            files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
            if not files:
                raise UserError(f"{given}: no file matches this pattern")
        else:
            siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            missing = "" if path.parent.is_dir() else f" (nor does the folder {path.parent})"
            raise UserError(f"{given}: there is no such file or folder{missing}{nearest(path.name, siblings)}")
        if not any(file.stat().st_size for file in files):
            raise UserError(f"{given}: {'the file is' if len(files) == 1 else f'all {len(files)} files are'} empty")
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {error.strerror}") from None
    return files


def _hidden(inside: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in inside.parts)


def _pieces_of(file: Path) -> Iterator[str]:
    """The text of a file in pieces that end at a line or, if need be, at a word. Blank ones are left out."""
    rest = ""
    with open_text(file) as source:
        while block := source.read(PIECE_CHARACTERS - len(rest)):
            rest += block
            if len(rest) < PIECE_CHARACTERS:
                continue
            end = max(rest.rfind("\n"), 0) or max(rest.rfind(" "), 0) or len(rest) - 1
            piece, rest = rest[: end + 1], rest[end + 1 :]
            if piece.strip():
                yield piece
    if rest.strip():
        yield rest


def _chance(text: str) -> int:
    """A number below 2^64 that depends on the text alone, so equal pieces are on the same side."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def _fingerprint(data: LMData, content: object) -> str:
    settings = {"source": data.source, "limit": data.limit, "test_fraction": data.test_fraction, "content": content}
    return hashlib.sha256(json.dumps({"lm": settings}, sort_keys=True).encode("utf-8")).hexdigest()


def _digest(files: list[Path], folder: Path) -> str:
    """A hash of the contents. It is noted in the cache by sizes and times: each rank asks, and one reads the files."""
    facts = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file in files]
    note = folder / f"text-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.digest"
    try:
        return note.read_text(encoding="ascii")
    except OSError:
        from paceline.record.files import write_atomic

        found = digest(files)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(note, found)
        except OSError:
            pass  # said where the corpus is written
        return found
