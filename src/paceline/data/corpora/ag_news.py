"""AG News as its authors publish it: a folder with train.csv and test.csv, four topics, no header.

Zhang, Zhao and LeCun, "Character-level Convolutional Networks for Text Classification", NIPS 2015.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.data.files import check_file, invalid_data, invalid_format, iter_lines
from paceline.data.tables import open_csv
from paceline.errors import UserError

TOPICS = ("World", "Sports", "Business", "Sci/Tech")
COLUMNS = ("class", "title", "description")
TRAIN_NAMES = ("train.csv", "train.csv.gz", "train_subset.csv", "train_subset.csv.gz")
TEST_NAMES = ("test.csv", "test.csv.gz")
CLEANING = 1  # raise it when `clean` changes the texts: cached corpora are named by it

EXPECTED = (
    "a folder with train.csv and test.csv (or .csv.gz; rows of class 1-4, title, description, no header) was expected; "
    "type  data.path=FOLDER"
)

# The publication dropped the '&' of many entities: "Ravens #39; Reed", "a quot;crescent quot;".
DROPPED_AMPERSAND = re.compile(r"(?<![&\w])(#\d{2,5}|quot|amp|lt|gt|nbsp|hellip|[lr]squo|[lr]dquo|[mn]dash);")
SPACE_BEFORE_APOSTROPHE = re.compile(r"(?<=\w) (?=&#39;(?:s|t|d|m|re|ve|ll)\b)")


def find_ag_news_files(path: Path | None) -> tuple[Path, Path]:
    if path is None:
        raise UserError(f"data.path: not given; {EXPECTED}", code="missing-value", key="data.path")
    folder = path.expanduser()
    files = [[folder / name for name in names if (folder / name).exists()] for names in (TRAIN_NAMES, TEST_NAMES)]
    for names, existing in zip((TRAIN_NAMES, TEST_NAMES), files, strict=True):
        if not existing:
            problem = f"there is no {names[0]}" if folder.is_dir() else "not a folder"
            raise UserError(f"data.path={folder}: {problem}; {EXPECTED}", code="not-found", key="data.path")
    return check_file(files[0][0], "data.path"), check_file(files[1][0], "data.path")


def read_topics(folder: Path) -> tuple[str, ...]:
    file = folder / "classes.txt"
    if not file.is_file():
        return TOPICS
    names = tuple(line.strip() for line in iter_lines(file) if line.strip())
    if len(names) < 2 or len(set(names)) < len(names):
        raise invalid_data(f"{file}: {len(set(names))} distinct names, expected one per line: {', '.join(TOPICS)}")
    return names


def iter_ag_news(path: Path, classes: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    empty = True
    for number, fields in open_csv(path, names=COLUMNS)[1]:
        empty = False
        if len(fields) != len(COLUMNS):
            raise invalid_format(f"{path} row {number} has {len(fields)} columns; AG News has 3: {', '.join(COLUMNS)}")
        given, title, description = fields
        label = int(given) if given.strip().isdecimal() else 0
        if not 1 <= label <= len(classes):
            hint = "; AG News has no header row" if number == 1 else ""
            raise invalid_data(f"{path} row {number}: class {given!r} is not one of 1 to {len(classes)}{hint}")
        yield clean_text(f"{title} {description}"), label - 1
    if empty:
        raise invalid_data(f"{path}: there are no rows; {EXPECTED}")


def clean_text(text: str) -> str:
    """Restore line breaks (written as backslashes) and character entities."""
    text = text.replace("\\", " ")
    if ";" in text:
        text = DROPPED_AMPERSAND.sub(r"&\1;", text)
        text = html.unescape(SPACE_BEFORE_APOSTROPHE.sub("", text))
    return " ".join(text.split())
