"""Shell as far as it is needed to find commands: words, continued lines, quotes, `bash -c`. Nothing of it is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import UserError

CALLED_WITH = ("$@", "$*", "${@}", "${*}")
"""The words that a shell script itself was called with."""
OUTPUT = "\ue000"
"""A sign that no script has, while a text is searched."""
LONGEST = 80
"""Signs of a command that a message repeats."""
SHELLS = ("sh", "bash", "zsh", "dash")
ENDS = ("|", "&&", "||", ";", "&")
PER_NODE = re.compile(r"--?(node|machine)[-_]rank(=.*)?")


def split(text: str, name: str) -> list[str]:
    """The words of a command."""
    try:
        return shlex.split(_closed(text.replace("\\\n", " ").rstrip().rstrip("\\")), comments=True)
    except ValueError as error:
        start = " ".join(text.split())
        start = start if len(start) <= LONGEST else f"{start[: LONGEST - 1]}…"
        raise UserError(f"{name}: {start!r} is not a command: {str(error).lower()}") from None


def _closed(text: str) -> str:
    """With `$(…)` for each command whose output is a part of a word, whatever spaces and quotes it has."""
    while (start := text.find("$(")) >= 0:
        depth, end = 0, len(text)
        for place in range(start + 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[place], 0)
            if not depth:
                end = place + 1
                break
        text = f"{text[:start]}{OUTPUT}{text[end:]}"
    return re.sub(r"`[^`]*`", OUTPUT, text).replace(OUTPUT, "$(…)")


def inner(words: list[str]) -> list[str]:
    """The command in `bash -c 'command'`."""
    if len(words) > 2 and Path(words[0]).name in SHELLS and re.fullmatch(r"-[a-z]*c", words[1]):
        return split(words[2], words[0])
    return words


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """(number, text) of each line, with those that it goes on in: after a backslash, or within quotes."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        start, line = number, lines[number]
        while number + 1 < len(lines) and _goes_on(line):
            number += 1
            line = f"{line.removesuffix(chr(92))} {lines[number].strip()}"
        number += 1
        if line.strip() and not line.strip().startswith("#"):
            yield start + 1, line.strip().removeprefix("$ ").strip()


def _goes_on(line: str) -> bool:
    if line.endswith("\\"):
        return True
    try:
        shlex.split(_closed(line), comments=True)
    except ValueError:
        return not line.strip().startswith("#")
    return False


def first_command(line: str, name: str) -> list[str]:
    """Up to its end: what is piped or redirected is the shell's."""
    words = split(line, name)
    ends = [i for i, word in enumerate(words) if word in ENDS or re.match(r"\d?>{1,2}", word)]
    return words[: ends[0]] if ends else words


def node_free(words: Sequence[str]) -> tuple[str, ...]:
    """A command without what differs between the nodes of one run."""
    kept, skip = list[str](), False
    for word in words:
        if skip:
            skip = False
        elif PER_NODE.fullmatch(word):
            skip = "=" not in word
        else:
            kept.append(word)
    return tuple(kept)
