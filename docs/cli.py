"""Write docs/cli.md: every verb of the command line with its arguments, from the parser itself.

python docs/cli.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from paceline.cli.main import build_parser, list_verbs

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Command line

Written by `python docs/cli.py`. Values of the run file are typed as `section.key=value` and listed by `paceline keys`
([train.md](train.md)). Every verb takes `--json`. Exit codes: 0 done, 1 the run failed, 2 the request was wrong, 70 a
bug of ours, 130 after Ctrl-C.
"""


def page() -> str:
    """Return the whole page."""
    parser = build_parser(list(list_verbs()))
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = (_describe(name, verb.help, verbs.choices[name]) for name, verb in list_verbs().items())
    return "\n".join([HEAD, *(line for part in parts for line in part)])


def _describe(name: str, about: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {name}\n\n{about[:1].upper()}{about[1:]}.\n"
    rows = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    rows = [action for action in rows if not {"--help", "--json"} & set(action.option_strings)]
    if not rows:
        return
    yield "| argument | what it does |\n|---|---|"
    for action in rows:
        shown = action.metavar or "|".join(map(str, action.choices or ())) or action.dest
        names = ", ".join(action.option_strings)
        words = f"{names} {shown}" if names and action.nargs != 0 else names or str(shown)
        escaped = [text.replace("%%", "%").replace("|", "\\|") for text in (words, action.help or "")]
        yield f"| `{escaped[0]}` | {escaped[1]} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
