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
  paceline plan recipes/classifier_agnews.yaml --cluster 4xV100@pcie
  paceline measure recipes/classifier_docstrings.yaml --ranks 1,2,4
  paceline report runs/docstrings-measure --out report
  paceline train --resume runs/docstrings parallel.ranks=1
  paceline export runs/docstrings --out model.safetensors
  paceline sample runs/lm_tiny "Returns the"
  paceline topics counts.npz -k 20 --out runs/fit
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
    check.add_argument("--layouts", default="", metavar="single,fsdp:2,tensor:2", help="layouts, instead of --ranks")
    check.add_argument("--accumulate", default="1", metavar="1,4", help="passes per step")
    check.add_argument("--steps", type=int, default=20, metavar="N", help="steps to train (20)")
    check.add_argument("--out", type=Path, metavar="FOLDER", help="keep the runs there")
    check.set_defaults(do=do_check)

    plan = verbs.add_parser("plan", help="say before a device is taken what fits, what pays and what it costs")
    plan.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]")
    plan.add_argument("--cluster", metavar="2x8xH100|FILE.yaml", help="devices and links; without it the run file's")
    plan.add_argument("--devices", default="", metavar="1,2,4", help="numbers of devices to try")
    plan.add_argument("--price", type=float, metavar="USD", help="per device and hour, instead of the catalogue's")
    plan.add_argument("--samples", type=int, metavar="N", help="training samples, where the data are not here")
    plan.add_argument("--tokens", type=float, metavar="N", help="mean length of a text, where the data are not here")
    plan.add_argument("--calibration", type=Path, metavar="FILE.json", help="measured by  paceline calibrate")
    plan.add_argument("--json", action="store_true", help="print every term as JSON instead of tables")
    plan.add_argument("--emit", choices=("torchrun", "slurm", "accelerate", "deepspeed"), help="launch files")
    plan.add_argument("--out", type=Path, metavar="FOLDER", help="write plan.json and the launch files there")
    plan.set_defaults(do=do_plan)

    calibrate = verbs.add_parser("calibrate", help="measure this machine; plans for it then use what was measured")
    calibrate.add_argument("--ranks", default="1,2,4", metavar="1,2,4", help="numbers of ranks to measure with")
    calibrate.add_argument("--threads", type=int, default=0, metavar="N", help="per rank; 0 shares the cores (0)")
    calibrate.add_argument(
        "--out", type=Path, metavar="FILE.json", help="where to (~/.cache/paceline/calibration.json)"
    )
    calibrate.add_argument(
        "--from", dest="measured", type=Path, metavar="FOLDER", help="correct it by what  paceline measure  found there"
    )
    calibrate.set_defaults(do=do_calibrate)

    measure = verbs.add_parser("measure", help="train under several layouts and say where the time goes")
    measure.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]")
    measure.add_argument("--ranks", default="", metavar="1,2,4", help="numbers of ranks (1,2)")
    measure.add_argument("--layouts", default="", metavar="ddp:2,fsdp:2", help="layouts, beside or instead of --ranks")
    measure.add_argument("--weak", action="store_true", help="let the batch grow with the ranks")
    measure.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each row, in turns (3)")
    measure.add_argument("--steps", type=int, default=30, metavar="N", help="steps of each run (30)")
    measure.add_argument("--price", type=float, metavar="USD", help="per device and hour")
    measure.add_argument("--retry", action="store_true", help="try rows again that failed before")
    measure.add_argument("--links", action="store_true", help="measure the links between ranks instead of a run")
    measure.add_argument("--out", type=Path, metavar="FOLDER", help="where to (runs/NAME-measure)")
    measure.set_defaults(do=do_measure)

    report = verbs.add_parser("report", help="a page, figures and tables of runs, measurements or a table of times")
    report.add_argument("inputs", nargs="+", type=Path, metavar="RUN_FOLDER|MEASURE_FOLDER|TIMES.csv")
    report.add_argument("--out", type=Path, default=Path("report"), metavar="FOLDER", help="where to (report)")
    report.add_argument("--title", default="", metavar="TEXT", help="of the page")
    report.add_argument("--price", type=float, metavar="USD", help="per device and hour")
    report.set_defaults(do=do_report)

    watch = verbs.add_parser("watch", help="a live view of a run in the terminal")
    watch.add_argument("run", type=Path, metavar="RUN_FOLDER")
    watch.add_argument("--once", action="store_true", help="show the present state and leave")
    watch.set_defaults(do=do_watch)

    topics = verbs.add_parser("topics", help="topics of word counts or texts, with pictures and a page")
    topics.add_argument("source", type=Path, metavar="SOURCE", help=".npy, .npz, .mtx, .parquet, shards or texts")
    topics.add_argument("-k", type=int, metavar="K", help="number of topics")
    topics.add_argument("--out", type=Path, default=Path("runs/topics"), metavar="FOLDER", help="(runs/topics)")
    topics.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that share the documents (1)")
    topics.add_argument("--passes", type=int, metavar="N", help="most passes over the documents (1000)")
    topics.add_argument("--tolerance", type=float, default=1e-7, metavar="T", help="least gain of a pass (1e-7)")
    topics.add_argument("--start", default="auto", choices=("auto", "race", "least_squares", "random"))
    topics.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, another optimum (0)")
    topics.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    topics.add_argument("--fractional", action="store_true", help="allow numbers that are not whole")
    topics.add_argument("--text", metavar="COLUMN", help="texts: the column or key of the text")
    topics.add_argument(
        "--min-df", type=_count_or_share, metavar="N", help="texts: leave out terms in fewer documents (2)"
    )
    topics.add_argument(
        "--max-df", type=_count_or_share, metavar="N", help="texts: leave out terms in more documents (0.95)"
    )
    topics.add_argument("--max-terms", type=int, metavar="N", help="texts: only the most frequent terms")
    topics.add_argument("--shards", type=Path, metavar="FOLDER", help="only write the counts there, as compact shards")
    topics.add_argument("--quiet", action="store_true", help="print nothing but errors")
    topics.set_defaults(do=do_topics)

    export = verbs.add_parser("export", help="write the weights of a run as safetensors")
    export.add_argument("run", type=Path, metavar="RUN_FOLDER")
    export.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors")
    export.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    export.set_defaults(do=do_export)

    sample = verbs.add_parser("sample", help="let a trained language model go on with a text")
    sample.add_argument("run", type=Path, metavar="RUN_FOLDER")
    sample.add_argument("prompt", metavar="PROMPT", help='the beginning of a text, such as "Returns the"')
    sample.add_argument("--tokens", type=int, default=100, metavar="N", help="most tokens to add (100)")
    sample.add_argument("--temperature", type=float, default=0.8, metavar="T", help="lower is more cautious (0.8)")
    sample.add_argument("--top-k", type=int, default=40, metavar="K", help="draw from the K likeliest; 0 is all (40)")
    sample.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, another text (0)")
    sample.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    sample.set_defaults(do=do_sample)
    return top


def _count_or_share(text: str) -> int | float:
    """5 is five documents, 0.5 half of them."""
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; 5 is five documents, 0.5 half of them") from None


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
    from paceline.training.explain import equations, explain

    spec = _load(arguments.words, "explain")
    samples = None
    if arguments.data:
        from paceline.training.failures import expected_failures
        from paceline.workload import samples_of, workload_of

        with expected_failures(spec):
            workload = workload_of(spec)
            workload.prepare(lambda text: print(text, file=sys.stderr))
            samples = workload.documents() if workload.fits else len(samples_of(workload))
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
        spec,
        ranks,
        accumulate,
        arguments.steps,
        layouts=[word for word in arguments.layouts.split(",") if word],
        out=arguments.out,
        say=lambda text: print(text, file=sys.stderr),
    )
    _console().print(table(parity))
    if not parity.holds:
        worst = next(row for row in parity.rows if not row.agrees(parity.tolerance))
        print(
            f"paceline: the answer depends on the layout: {worst.layout} differs from the reference by more than "
            f"{parity.tolerance:g}, most in {worst.worst}",
            file=sys.stderr,
        )
        return 1
    print(f"the answer is the same within {parity.tolerance:g} over {parity.steps} steps ({spec.train.precision})")
    return 0


def do_plan(arguments: argparse.Namespace) -> int:
    from paceline.planning.verb import run

    return run(_load(arguments.words, "plan"), Path(arguments.words[0]), arguments, _console())


def do_calibrate(arguments: argparse.Namespace) -> int:
    from paceline.planning.verb import calibrate

    return calibrate(arguments, _console())


def do_measure(arguments: argparse.Namespace) -> int:
    from paceline.measuring.verb import run, run_links

    if arguments.links:
        return run_links(arguments, _console())
    return run(_load(arguments.words, "measure"), arguments, _console())


def do_report(arguments: argparse.Namespace) -> int:
    from paceline.reporting.verb import run

    return run(arguments, _console())


def do_watch(arguments: argparse.Namespace) -> int:
    from paceline.reporting.watch import watch

    return watch(arguments.run, once=arguments.once)


def do_topics(arguments: argparse.Namespace) -> int:
    from paceline.workloads.topics.verb import run

    return run(arguments, _console())


def do_export(arguments: argparse.Namespace) -> int:
    from paceline.training.export import export

    print(export(arguments.run, arguments.out, "best" if arguments.best else "newest"))
    return 0


def do_sample(arguments: argparse.Namespace) -> int:
    from paceline.workloads.lm.sample import sample

    given = {name: getattr(arguments, name) for name in ("tokens", "temperature", "top_k", "seed")}
    print(sample(arguments.run, arguments.prompt, **given, which="best" if arguments.best else "newest"))
    return 0
