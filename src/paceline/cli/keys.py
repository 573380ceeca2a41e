"""The commands `keys` and `completion`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.config import registry
from paceline.config.keys import Key, list_keys, list_sections
from paceline.errors import UserError, did_you_mean
from paceline.io.files import print_json
from paceline.io.terminal import build_console, print_text

NEAR = 0.75
"""Similarity of a word to a section, above which it is a misspelling."""


def add_keys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("asked", nargs="*", metavar="SECTION|KEY|WORD", help="train, train.lr, or a word to look for")
    parser.add_argument(
        "--workload", default=registry.DEFAULT_WORKLOAD, metavar="NAME", help="whose model and data (classifier)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_keys(arguments: argparse.Namespace) -> int:
    console = build_console()
    known = list_keys(arguments.workload)
    exact = [key for key in known if key.name in arguments.asked]
    found = exact or [key for key in known if not arguments.asked or _matches(key, arguments.asked)]
    sections = list(list_sections(arguments.workload))
    slips = [word for word in arguments.asked if not exact and _is_misspelt(word, sections, known)]
    if not found or slips:
        word = (slips or arguments.asked)[0]
        names = sections if slips else [*sections, *(key.name for key in known)]
        hint = did_you_mean(word, names) or f"; the sections are {', '.join(sections)}"
        message = f"no key of {arguments.workload} has {word!r} in its name or meaning{hint}"
        raise UserError(message, code="unknown-key", key=word)
    if arguments.json:
        print_json([{**asdict(key), "allowed": key.allowed} for key in found])
        return 0
    for key in found:
        console.print(_render_key(key), soft_wrap=False)
    if not arguments.asked:
        workloads = ", ".join(registry.BUILT_IN)
        console.print(f"model and data are those of {arguments.workload}; --workload takes {workloads}")
    return 0


def _matches(key: Key, words: Sequence[str]) -> bool:
    """Return whether a word names the key or its section, or occurs in its name or meaning."""
    for word in words:
        if word == "run" and "." not in key.name:
            return True
        if key.name == word or key.name.startswith(f"{word}.") or key.name.endswith(f".{word}"):
            return True
        if len(word) > 2 and word.lower() in f"{key.name} {key.meaning}".lower() and word not in ("run", "train"):
            return True
    return False


def _is_misspelt(word: str, sections: Sequence[str], known: Sequence[Key]) -> bool:
    """Return whether a word looks like a section and occurs in no key."""
    words = {part for key in known for part in re.split(r"\W+|_", f"{key.name} {key.meaning}".lower())}
    return word not in sections and word.lower() not in words and bool(did_you_mean(word, sections, cutoff=NEAR))


def _render_key(key: Key) -> Any:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    default = f"  {key.default}" if key.default else "  none"
    head = Text.assemble((key.name, "bold"), default, (f" {key.unit}" if key.unit else "", "dim"))
    allowed = f" ({key.allowed})" if key.allowed else ""
    return Group(head, Padding(Text(f"{key.meaning}{allowed}"), (0, 0, 0, 4)))


BASH = """# paceline completion for bash: put this line into ~/.bashrc
#   eval "$(paceline completion bash)"
_paceline() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" verb="${{COMP_WORDS[1]}}" options=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {verbs} -- "$word"))
    return
  fi
  case "$verb" in
{cases}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    *.*) COMPREPLY=($(compgen -S = -W {keys} -- "$word") $(compgen -f -- "$word")); compopt -o nospace ;;
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _paceline paceline
"""
ZSH = """#compdef paceline
# paceline completion for zsh: put this line into ~/.zshrc, after compinit
#   eval "$(paceline completion zsh)"
_paceline() {{
  local -a verbs options keys
  verbs=({described})
  keys=({keys})
  if (( CURRENT == 2 )); then
    _describe verb verbs
    return
  fi
  case "$words[2]" in
{cases}
  esac
  if [[ "$PREFIX" == -* ]]; then
    compadd -- $options
  else
    compadd -S '=' -- $keys
    _files
  fi
}}
compdef _paceline paceline
"""
FISH = """# paceline completion for fish: put this line into ~/.config/fish/config.fish
#   paceline completion fish | source
"""


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=("bash", "zsh", "fish"), help="whose script to print")
    parser.add_argument("--json", action="store_true", help="print verbs, options and keys as JSON instead")


def run_completion(arguments: argparse.Namespace) -> int:
    from paceline.cli.main import build_parser, list_verbs
    from paceline.config.keys import list_keys

    commands, keys = build_parser(list(list_verbs())), [key.name for key in list_keys() if "." in key.name]
    if arguments.json:
        about, options = _verbs(commands)
        verbs = {verb: {"about": help, "options": options[verb]} for verb, help in about.items()}
        print_json({"verbs": verbs, "keys": keys})
    elif arguments.shell is None:
        usage = 'eval "$(paceline completion bash)",  or zsh or fish'
        raise UserError(f"no shell given; write it as  {usage}", code="missing-value")
    else:
        print_text(build_completion_script(arguments.shell, commands, keys))
    return 0


def build_completion_script(shell: str, top: argparse.ArgumentParser, keys: Sequence[str]) -> str:
    """Build a script that completes words without starting Python."""
    about, options = _verbs(top)
    make = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    return make(about, options, keys)


def _verbs(top: argparse.ArgumentParser) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the help and the options of each verb."""
    (verbs,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    about = {choice.dest: choice.help or "" for choice in verbs._choices_actions}
    options = {
        name: [word for action in parser._actions for word in action.option_strings if word.startswith("--")]
        for name, parser in verbs.choices.items()
    }
    return about, options


def _bash(about: Mapping[str, str], options: Mapping[str, Sequence[str]], keys: Sequence[str]) -> str:
    cases = "\n".join(f"    {verb}) options={shlex.quote(' '.join(found))} ;;" for verb, found in options.items())
    return BASH.format(verbs=shlex.quote(" ".join(about)), cases=cases, keys=shlex.quote(" ".join(keys)))


def _zsh(about: Mapping[str, str], options: Mapping[str, Sequence[str]], keys: Sequence[str]) -> str:
    described = " ".join(shlex.quote(f"{verb}:{help}") for verb, help in about.items())
    cases = "\n".join(f"    {verb}) options=({' '.join(found)}) ;;" for verb, found in options.items())
    return ZSH.format(described=described, cases=cases, keys=" ".join(keys))


def _fish(about: Mapping[str, str], options: Mapping[str, Sequence[str]], keys: Sequence[str]) -> str:
    lines = [
        f"complete -c paceline -n __fish_use_subcommand -f -a {verb} -d {shlex.quote(help)}"
        for verb, help in about.items()
    ]
    for verb, found in options.items():
        used = f"complete -c paceline -n '__fish_seen_subcommand_from {verb}'"
        lines += [f"{used} -l {word.removeprefix('--')}" for word in found]
    lines += [f"complete -c paceline -n 'not __fish_use_subcommand' -a '{key}='" for key in keys]
    return FISH + "\n".join(lines) + "\n"
