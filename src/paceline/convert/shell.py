"""Shell as far as it is needed to find commands: words, continued lines, quotes, `bash -c`. Nothing of it is run."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
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
Known = Callable[[Sequence[str]], object]
"""Whether words are a command that adopt knows."""
QUOTES = ("'", '"')
ASSIGNMENT = re.compile(
    r"^\s*(?:export\s+|declare\s+-a\s+|local\s+)?([A-Za-z_]\w*)="
    r"(?:\(([^()]*)\)|(\"[^\"]*\"|'[^']*'|\$\(\([^()]*\)\)|[^\s;#]*))",
    re.MULTILINE,
)
USUALLY = re.compile(r"^\$\{\w+:?-([^}$]*)\}$")
"""`${NODES:-1}`: what a variable is unless the user sets it."""
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


def inner(words: list[str], is_known: Known) -> list[str]:
    """The command in `bash -c 'command'`; of several, one that is known."""
    if len(words) > 2 and Path(words[0]).name in SHELLS and re.fullmatch(r"-[a-z]*c", words[1]):
        found = (first_command(line, words[0], is_known) for _, line in lines_of(words[2]))
        return next((command for command in found if is_known(command)), split(words[2], words[0]))
    return words


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """(number, text) of each line, with those that it goes on in: after a backslash, or within quotes."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        start, line = number, lines[number]
        while number + 1 < len(lines) and _goes_on(line):
            number += 1
            joint = " " if line.endswith("\\") else "\n"
            line = f"{line.removesuffix(chr(92))}{joint}{lines[number].strip()}"
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


def first_command(line: str, name: str, is_known: Known) -> list[str]:
    """The first of a line that is known, as in `cd src && torchrun …`, up to where its output goes elsewhere."""
    commands: list[list[str]] = [[]]
    for word in split(line, name):
        if word in ENDS:
            commands.append([])
        elif word.endswith(";"):
            commands[-1].append(word.removesuffix(";"))
            commands.append([])
        else:
            commands[-1].append(word)
    found = next((words for words in commands if is_known(words)), commands[0])
    ends = [i for i, word in enumerate(found) if re.match(r"[\d&]?>{1,2}", word)]
    return found[: ends[0]] if ends else found


def assigned(text: str, known: Mapping[str, str]) -> dict[str, str]:
    """Variables and arrays that a script sets to a text, one after the other; not to what a command prints."""
    found = dict(known)
    for match in ASSIGNMENT.finditer(text):
        name, array, value = match.groups()
        if array is not None:
            value = " ".join(line.split(" #")[0].strip() for line in array.splitlines())
        elif value[:1] not in QUOTES and ("`" in value or re.search(r"\$\((?!\()", value)):
            continue
        elif value[:1] in QUOTES:
            value = value[1:-1]
        value = " ".join(value.replace("\\\n", " ").split())
        found[name] = USUALLY.sub(r"\1", expanded(value, found))
    return {name: value for name, value in found.items() if name not in known or known[name] != value}


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """With the variables, arrays and sums that are known; others stay as they are written."""
    text = re.sub(r'"?\$\{(\w+)\[[@*]\]\}"?', lambda match: variables.get(match[1], match[0]), text)
    text = re.sub(r"\$\(\(([^()]*)\)\)", lambda match: _sum(match[1], variables) or match[0], text)
    return re.sub(
        r"\$(?:\{([A-Za-z_]\w*)(?::-[^}]*)?\}|([A-Za-z_]\w*))",
        lambda match: variables.get(match[1] or match[2], match[0]),
        text,
    )


def _sum(text: str, variables: Mapping[str, str]) -> str:
    """`NODES * GPUS + 1` as a number; empty where it is more than sums and products."""
    plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: variables.get(match[1], match[0]), text)
    if not re.fullmatch(r"\s*\d{1,9}\s*([*+]\s*\d{1,9}\s*){0,9}", plain):
        return ""
    return str(sum(math.prod(int(factor) for factor in part.split("*")) for part in plain.split("+")))


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
