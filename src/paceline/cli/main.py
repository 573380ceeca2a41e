"""Parse the command line, run the verb, and exit: 0 done, 1 the run failed, 2 the request was wrong."""

import argparse
import csv
import io
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline import __version__
from paceline.config.registry import Verb, import_object, list_workload_verbs

COMMAND_VERBS = ("launch", "measure", "adopt", "submit")
"""Verbs that take the user's own command after `--`."""
EXAMPLES = """examples:
  paceline plan recipes/lm_7b.yaml --cluster 4x24GB            does it fit, how long, what does it cost
  paceline train recipes/classifier_docstrings.yaml parallel.ranks=2
  paceline measure recipes/classifier_docstrings.yaml --ranks 1,2        do more ranks pay, and why not
  paceline report runs/docstrings --out report                 a page: did it learn, how fast
  paceline train --resume runs/docstrings train.epochs=+2      continue, also after a crash
"""


def read_verbs() -> dict[str, Verb]:
    """Return our own verbs, in the order of `paceline --help`; the module of a verb in cli/ has `run_VERB`."""
    with Path(__file__).with_name("verbs.csv").open(encoding="utf-8", newline="") as file:
        return {
            row["verb"]: Verb(
                row["help"],
                "paceline.cli.arguments:add_arguments",
                f"paceline.cli.{row['module']}:run_{row['verb']}",
                row["example"],
                row["group"],
            )
            for row in csv.DictReader(file)
        }


VERBS = read_verbs()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command of `argv`, or of the process, and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × or ✓ shows a question mark
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words and words[0] in COMMAND_VERBS else len(words)
    words, command = words[:at], words[at + 1 :]
    parser = build_parser(words)
    if words and not words[0].startswith("-") and words[0] not in list_verbs():
        parser.error(f"unknown verb {words[0]!r}{_suggest_verb(words[0])}; see  paceline --help")
    args, extra = parser.parse_known_args(words)
    if args.verb is None:
        parser.error("no verb given; see  paceline --help")
    args.command = command
    _take_extra_words(parser, args, words, extra)
    from paceline.launch.exit_codes import exit_command, exit_on_error
    from paceline.runlog.run_dir import trust_named_runs

    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `paceline.__main__` left it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with exit_on_error():
            if getattr(args, "trust", False):
                trust_named_runs(vars(args))
            exit_command(import_object(list_verbs()[args.verb].run)(args))
    except KeyboardInterrupt:
        sys.exit(130)


def list_verbs() -> dict[str, Verb]:
    """Return every verb by name: ours, then those that workloads add."""
    return {**VERBS, **list_workload_verbs()}


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of all verbs; the arguments of a verb are imported only if its name is among the words."""
    verbs = list_verbs()
    lines = ["Distributed training from one run file, with the same answer on any number of ranks."]
    for group in dict.fromkeys(verb.group for verb in VERBS.values()):
        listed = [f"  {name:<11} {verb.help}" for name, verb in verbs.items() if verb.group == group]
        lines += ["", f"{group}:", *listed]
    parser = argparse.ArgumentParser(
        prog="paceline",
        usage="paceline VERB ...",
        description="\n".join(lines),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    choices = parser.add_subparsers(
        dest="verb", metavar="VERB", help="paceline VERB --help  prints its options", prog="paceline"
    )
    for name, verb in verbs.items():
        example = f"example:  {verb.example}" if verb.example else None
        subparser = choices.add_parser(name, description=verb.help, epilog=example)
        if name in words:
            import_object(verb.add_arguments)(subparser)
            if "--json" not in subparser._option_string_actions:
                subparser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _suggest_verb(word: str) -> str:
    from paceline.errors import did_you_mean

    if Path(word).suffix in (".yaml", ".py"):
        return f"; to train it, type  paceline train {word}"
    return did_you_mean(word, list_verbs(), cutoff=0.6)


def _take_extra_words(
    parser: argparse.ArgumentParser, args: argparse.Namespace, words: list[str], extra: list[str]
) -> None:
    """Add overrides that follow an option to the words of the verb; report an unknown option."""
    takes_words = hasattr(args, "words")
    options = [word for word in extra if word.startswith("-") or not takes_words]
    if options:
        from paceline.cli.keys import list_options, suggest_key
        from paceline.errors import did_you_mean

        after = words[words.index(options[0]) + 1 :][:1]
        hint = suggest_key(options[0], *after) if takes_words else ""
        hint = hint or did_you_mean(options[0], list_options(parser)[1][args.verb], cutoff=0.7)
        parser.error(f"unknown argument {options[0]!r}{hint}; see  paceline {args.verb} --help")
    if extra:
        args.words += extra
