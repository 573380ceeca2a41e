"""AG News as its authors publish it: a folder with train.csv and test.csv, four topics, no header.

Zhang, Zhao and LeCun, "Character-level Convolutional Networks for Text Classification", NIPS 2015.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.data.files import check_file, open_text
from paceline.data.tables import open_csv
from paceline.errors import Code, UserError

TOPICS = ("World", "Sports", "Business", "Sci/Tech")
COLUMNS = ("class", "title", "description")
TRAIN_NAMES = ("train.csv", "train.csv.gz", "train_subset.csv", "train_subset.csv.gz")
TEST_NAMES = ("test.csv", "test.csv.gz")
CLEANING = 1  # raise it when `clean` changes the texts: cached corpora are named by it

EXPECTED = (
    "a folder with train.csv and test.csv (or .csv.gz; rows of class 1-4, title, description, no header) was expected, "
    'the AG News set of Zhang, Zhao and LeCun, "Character-level Convolutional Networks for Text Classification" '
    "(NIPS 2015); type  data.path=FOLDER"
)

# The publication dropped the '&' of many entities: "Ravens #39; Reed", "a quot;crescent quot;".
DROPPED_AMPERSAND = re.compile(r"(?<![&\w])(#\d{2,5}|quot|amp|lt|gt|nbsp|hellip|[lr]squo|[lr]dquo|[mn]dash);")
SPACE_BEFORE_APOSTROPHE = re.compile(r"(?<=\w) (?=&#39;(?:s|t|d|m|re|ve|ll)\b)")


def find_ag_news_files(path: Path | None) -> tuple[Path, Path]:
    """(training file, test file) in the folder."""
    if path is None:
        raise _folder_error("data.path: not given", "missing-value")
    folder = path.expanduser()
    if folder.is_file():
        raise _folder_error(f"data.path={folder}: this is a file", "unreadable")
    if not folder.is_dir():
        raise _folder_error(f"data.path={folder}: no such folder", "not-found")
    return _find(folder, TRAIN_NAMES), _find(folder, TEST_NAMES)


def read_topics(folder: Path) -> tuple[str, ...]:
    """The names of the classes: classes.txt where there is one."""
    file = folder / "classes.txt"
    if not file.is_file():
        return TOPICS
    with open_text(file) as lines:
        names = tuple(line.strip() for line in lines if line.strip())
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(
            f"{file}: {len(set(names))} distinct class names, one per line was expected: {', '.join(TOPICS)}"
        )
    return names


def iter_ag_news(path: Path, classes: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """(text, label) of every row, the label from 0."""
    empty = True
    for number, fields in open_csv(path, names=COLUMNS)[1]:
        empty = False
        if len(fields) != len(COLUMNS):
            raise UserError(
                f"{path} row {number} has {len(fields)} columns; AG News has 3: {', '.join(COLUMNS)}",
                code="invalid-format",
            )
        given, title, description = fields
        label = int(given) if given.strip().isdecimal() else 0
        if not 1 <= label <= len(classes):
            hint = "; AG News has no header row" if number == 1 else ""
            raise UserError(
                f"{path} row {number}: class {given!r} is not known; expected 1 to {len(classes)}{hint}",
                code="invalid-data",
            )
        yield clean_text(f"{title} {description}"), label - 1
    if empty:
        raise UserError(f"{path}: there are no rows; {EXPECTED}", code="invalid-data")


def clean_text(text: str) -> str:
    """The text with its line breaks (written as backslashes) and its character entities restored."""
    text = text.replace("\\", " ")
    if ";" in text:
        text = DROPPED_AMPERSAND.sub(r"&\1;", text)
        text = html.unescape(SPACE_BEFORE_APOSTROPHE.sub("", text))
    return " ".join(text.split())


def _find(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (folder / name).exists():
            return check_file(folder / name, "data.path")
    raise _folder_error(f"data.path={folder}: there is no {names[0]}", "not-found")


def _folder_error(problem: str, code: Code) -> UserError:
    return UserError(f"{problem}; {EXPECTED}", code=code, key="data.path")
