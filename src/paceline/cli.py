"""Arguments in, verbs called, exit codes out: 0 done, 1 the run failed, 2 the request was wrong."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import PacelineError, RunFailed, UserError

COLUMNS = 100
EXAMPLES = """examples:
  paceline train recipes/classifier_docstrings.yaml parallel.ranks=2
  paceline explain recipes/classifier_agnews.yaml train.lr=3e-4
  paceline check recipes/classifier_docstrings.yaml --ranks 1,2,4
  paceline train --resume runs/docstrings parallel.ranks=1
  paceline export runs/docstrings --out model.safetensors
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="paceline",
        description="Distributed training from one run file, with the same answer on any number of ranks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB")

    train = verbs.add_parser("train", help="train a run file, on one rank or many")
    train.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]")
    train.add_argument("--out", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs go (runs)")
    train.add_argument("--resume", type=Path, metavar="RUN_FOLDER", help="go on from its newest whole checkpoint")
    train.add_argument("--quiet", action="store_true", help="print nothing but errors")
    train.set_defaults(do=do_train)

    explain = verbs.add_parser("explain", help="print every value, its unit and where it came from")
    explain.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]")
    explain.add_argument("--data", action="store_true", help="read the data too, and derive steps and warm-up")
    explain.set_defaults(do=do_explain)

    check = verbs.add_parser("check", help="prove that the answer does not depend on the layout")
    check.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]")
    check.add_argument("--ranks", default="1,2", metavar="1,2,4", help="numbers of ranks; the first is the reference")
    check.add_argument("--accumulate", default="1", metavar="1,4", help="passes per step")
    check.add_argument("--steps", type=int, default=20, metavar="N", help="steps to train (20)")
    check.add_argument("--out", type=Path, metavar="FOLDER", help="keep the runs there")
    check.set_defaults(do=do_check)

    export = verbs.add_parser("export", help="write the weights of a run as safetensors")
    export.add_argument("run", type=Path, metavar="RUN_FOLDER")
    export.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors")
    export.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    export.set_defaults(do=do_export)
    return top


def main(argv: Sequence[str] | None = None) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × or ✓ shows a question mark
    arguments, extra = parser().parse_known_args(argv)
    if arguments.verb is None:
        parser().error("what to do? the verbs are listed by  paceline --help")
    options = [word for word in extra if word.startswith("-") or not hasattr(arguments, "words")]
    if options:
        parser().error(f"unknown argument {options[0]!r}; see  paceline {arguments.verb} --help")
    if extra:
        arguments.words += extra
    try:
        sys.exit(arguments.do(arguments))
    except PacelineError as error:
        if who := _speaker(error):
            print(f"{who}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _speaker(error: PacelineError) -> str:
    """What is wrong with a request is the same on every rank, and the main one says it; a run may fail on any."""
    from paceline.launch.environment import detect

    try:
        place = detect(os.environ)
    except UserError:
        place = None
    if place is None or place.world == 1:
        return "paceline"
    if isinstance(error, RunFailed):
        return f"paceline: rank {place.rank}"
    return "paceline" if place.rank == 0 else ""


def _split(words: Sequence[str], verb: str) -> tuple[Path, list[str]]:
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        raise UserError(f"which run file? write it as  paceline {verb} RUN.yaml [section.key=value ...]")
    return Path(words[0]), list(words[1:])


def do_train(arguments: argparse.Namespace) -> int:
    from paceline.training.run import resumed_spec, train

    words, show = arguments.words, not arguments.quiet
    if arguments.resume and (not words or "=" in words[0]):
        spec = resumed_spec(arguments.resume, words)
    else:
        spec = _load(words, "train")
    result = train(spec, arguments.out, resume=arguments.resume, show=show)
    return 0 if result.status in ("finished", "stopped") else 1


def _load(words: Sequence[str], verb: str):  # type: ignore[no-untyped-def]
    from paceline.spec import load

    return load(*_split(words, verb))


def _console() -> Any:
    """As wide as the terminal; in a pipe, as wide as our tables may be."""
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else COLUMNS)


def do_explain(arguments: argparse.Namespace) -> int:
    from paceline.explain import equations, explain

    spec = _load(arguments.words, "explain")
    samples = None
    if arguments.data:
        from paceline.training.rank import foreseen
        from paceline.workload import samples_of, workload_of

        with foreseen(spec):
            workload = workload_of(spec)
            workload.prepare(lambda text: print(text, file=sys.stderr))
            samples = len(samples_of(workload))
    derived = equations(spec, samples)
    console = _console()
    console.print(explain(spec))
    console.print("", *derived, sep="\n")
    return 0


def do_check(arguments: argparse.Namespace) -> int:
    from paceline.parity import check, numbers, table

    spec = _load(arguments.words, "check")
    ranks, accumulate = numbers(arguments.ranks, "--ranks"), numbers(arguments.accumulate, "--accumulate")
    if arguments.steps < 1:
        raise UserError(f"--steps: {arguments.steps} is not a number of steps; use 1 or more")
    parity = check(
        spec, ranks, accumulate, arguments.steps, out=arguments.out, say=lambda text: print(text, file=sys.stderr)
    )
    _console().print(table(parity))
    if not parity.holds:
        worst = next(row for row in parity.rows if not row.agrees(parity.tolerance))
        print(
            f"paceline: the answer depends on the layout: {worst.ranks} ranks with {worst.accumulate} accumulated "
            f"differ from the reference by more than {parity.tolerance:g}, most in {worst.worst}",
            file=sys.stderr,
        )
        return 1
    print(f"the answer is the same within {parity.tolerance:g} over {parity.steps} steps ({spec.train.precision})")
    return 0


def do_export(arguments: argparse.Namespace) -> int:
    from paceline.training.export import export

    print(export(arguments.run, arguments.out, "best" if arguments.best else "newest"))
    return 0
