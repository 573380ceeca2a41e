"""Arguments in, verbs called, exit codes out: 0 done, 1 the run failed, 2 the request was wrong."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import __version__
from paceline.cli.plan import add_plan_arguments
from paceline.config import registry
from paceline.errors import UserError
from paceline.io.terminal import build_console, print_text, warn

if TYPE_CHECKING:
    from paceline.config import RunSpec

RUN_A_COMMAND = ("launch", "measure", "adopt")  # the verbs with a command of the user's after  --
EXAMPLES = """examples:
  paceline train recipes/classifier_docstrings.yaml parallel.ranks=2
  paceline explain recipes/classifier_agnews.yaml train.lr=3e-4
  paceline check recipes/classifier_docstrings.yaml --ranks 1,2,4
  paceline plan recipes/classifier_agnews.yaml --cluster 4xV100@pcie
  paceline measure recipes/classifier_docstrings.yaml --ranks 1,2,4
  paceline report runs/docstrings-measure --out report
  paceline train --resume runs/docstrings parallel.ranks=1
  paceline train --resume runs/docstrings train.epochs=+2
  paceline train --from runs/docstrings train.lr=1e-4
  paceline adopt ds_config.json --command "torchrun --nproc_per_node=4 train.py" --out run.yaml
  paceline predict runs/docstrings "Returns the sum of an array"
  paceline export runs/docstrings --out model
  paceline launch --ranks 4 -- python train.py
"""


def main(argv: Sequence[str] | None = None) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × or ✓ shows a question mark
    words, command = _split(list(sys.argv[1:] if argv is None else argv))
    commands = parser(words)
    arguments, extra = commands.parse_known_args(words)
    arguments.command = command
    if arguments.verb is None:
        commands.error("what to do? the verbs are listed by  paceline --help")
    options = [word for word in extra if word.startswith("-") or not hasattr(arguments, "words")]
    if options:
        from paceline.config.keys import suggest_key

        after = words[words.index(options[0]) + 1 :][:1]
        hint = suggest_key(options[0], *after) if hasattr(arguments, "words") else ""
        commands.error(f"unknown argument {options[0]!r}{hint}; see  paceline {arguments.verb} --help")
    if extra:
        arguments.words += extra
    from paceline.launch.exit_codes import exit_command, exit_on_error
    from paceline.runlog.run_dir import trust_named_runs

    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `paceline.__main__` left it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with exit_on_error():
            if getattr(arguments, "trust", False):
                trust_named_runs(vars(arguments))
            exit_command(arguments.do(arguments))
    except KeyboardInterrupt:
        sys.exit(130)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and the user's command after `--` for the verbs that take one."""
    if not words or words[0] not in RUN_A_COMMAND or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def train_arguments(parser: argparse.ArgumentParser) -> None:
    _add_words(parser)
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs go (runs)")
    parser.add_argument("--resume", type=Path, metavar="RUN_FOLDER", help="resume from its newest whole checkpoint")
    parser.add_argument("--again", action="store_true", help="begin, go on or be done: the same command each time")
    parser.add_argument("--from", dest="start", type=Path, metavar="RUN_FOLDER", help="begin with its weights")
    parser.add_argument("--changed-code", action="store_true", help="resume although your own code has changed")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def do_train(arguments: argparse.Namespace) -> int:
    from paceline.api import is_rank, train
    from paceline.io.files import print_json, to_flat
    from paceline.trainer.run import build_follow_up_spec, build_resumed_spec

    words, resume, start = arguments.words, arguments.resume, arguments.start
    if arguments.quiet:
        registry.announce = lambda file: None
    if resume and start:
        raise UserError("--resume goes on with a run, --from begins another; give one of them")
    if arguments.again and not resume and words and Path(words[0], "spec.yaml").is_file():
        resume, words = Path(words[0]), words[1:]
    if (resume or start) and (not words or "=" in words[0]):
        spec = build_resumed_spec(resume, words) if resume else build_follow_up_spec(start, words)
    else:
        spec = _load([*words, f"model.start={start}"] if start else words, "train")
    ways = {"again": arguments.again, "changed_code": arguments.changed_code}
    result = train(spec, arguments.out, resume=resume, show=not (arguments.quiet or arguments.json), **ways)
    if arguments.json and not is_rank():
        print_json({"path": result.path, **to_flat(result.summary)})
    return 0 if result.status in ("finished", "stopped") else 1


def _load(words: Sequence[str], verb: str) -> RunSpec:
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        raise UserError(f"which run file? write it as  paceline {verb} RUN.yaml [section.key=value ...]")
    if registry.is_script(words[0]):
        from paceline.script.run import derive_script_spec

        return derive_script_spec(Path(words[0]), words[1:])
    from paceline.config import load

    return load(words[0], words[1:])


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    _add_words(parser)
    parser.add_argument("--data", action="store_true", help="read the data too: steps, warm-up, evaluation")


def do_explain(arguments: argparse.Namespace) -> int:
    from paceline.io.files import print_json
    from paceline.runlog.run_dir import find_recorded_spec
    from paceline.trainer import explain as of

    looked_at = None if arguments.data else find_recorded_spec(arguments.words)
    spec = looked_at or _load(arguments.words, "explain")
    samples, workload, more = None, None, list[str]()
    if arguments.data:
        from paceline.data.samples import count_samples
        from paceline.trainer.failures import translate_failures
        from paceline.workload import build_workload

        with translate_failures(spec):
            workload = build_workload(spec)
            workload.prepare(warn)
            samples = count_samples(workload)
            more = [*of.describe_evaluation(workload, samples), *of.describe_groups(workload)]
    how = [*of.describe_execution(spec, samples), *of.describe_network(spec)]
    derived = [*of.list_equations(spec, samples, workload), *more, *how]
    if arguments.json:
        print_json({"values": of.list_values(spec), "derived": derived})
        return 0
    show = build_console()
    show.print(of.build_value_table(spec))
    show.print("", *derived, sep="\n")
    return 0


def check_arguments(parser: argparse.ArgumentParser) -> None:
    _add_words(parser)
    parser.add_argument("--ranks", default="1,2", metavar="1,2,4", help="numbers of ranks; the first is the reference")
    parser.add_argument("--layouts", default="", metavar="single,fsdp:2,tensor:2", help="layouts, instead of --ranks")
    parser.add_argument("--accumulate", default="1", metavar="1,4", help="passes per step")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps to train (20)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the runs there")


def do_check(arguments: argparse.Namespace) -> int:
    from paceline.cli.check import run_check

    return run_check(_load(arguments.words, "check"), arguments, build_console())


def do_plan(arguments: argparse.Namespace) -> int:
    from paceline.cli.plan import build_spec_from_options, run_plan

    spec = build_spec_from_options(arguments) or _load(arguments.words, "plan")
    return run_plan(spec, Path(arguments.words[0] if arguments.words else ""), arguments, build_console())


def calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", default="1,2,4", metavar="1,2,4", help="numbers of ranks to measure with")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="per rank; 0 shares the cores (0)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to (~/.cache/paceline/calibration.json)")
    parser.add_argument(
        "--from", dest="measured", type=Path, metavar="FOLDER", help="correct it by what  paceline measure  found there"
    )


def do_calibrate(arguments: argparse.Namespace) -> int:
    if arguments.measured is not None:
        from paceline.cli.measure import run_recalibrate

        return run_recalibrate(arguments, build_console())
    from paceline.cli.plan import run_calibrate

    return run_calibrate(arguments, build_console())


def measure_arguments(parser: argparse.ArgumentParser) -> None:
    _add_words(parser)
    parser.add_argument("--ranks", default="", metavar="1,2,4", help="numbers of ranks (1,2)")
    parser.add_argument("--layouts", default="", metavar="ddp:2,fsdp:2", help="layouts, beside or instead of --ranks")
    parser.add_argument("--weak", action="store_true", help="let the batch grow with the ranks")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each row, in turns (3)")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="steps of each run (30)")
    parser.add_argument("--price", type=float, metavar="USD", help="per device and hour")
    parser.add_argument("--retry", action="store_true", help="try rows again that failed before")
    parser.add_argument("--links", action="store_true", help="measure the links between ranks instead of a run")
    parser.add_argument("--steps-by", default="", metavar="ADAM", help="of a command with several optimisers: whose")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (runs/NAME-measure)")


def do_measure(arguments: argparse.Namespace) -> int:
    from paceline.cli.measure import run_measure, run_measure_command, run_measure_links

    if arguments.links:
        return run_measure_links(arguments, build_console())
    if arguments.command:
        return run_measure_command(arguments, build_console())
    if not arguments.words:
        raise UserError(
            "measure what? write  paceline measure RUN.yaml [section.key=value ...]  or  paceline measure -- COMMAND"
        )
    return run_measure(_load(arguments.words, "measure"), arguments, build_console())


def report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", type=Path, metavar="RUN_FOLDER|MEASURE_FOLDER|TIMES.csv")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="FOLDER", help="where to (report)")
    parser.add_argument("--title", default="", metavar="TEXT", help="of the page")
    parser.add_argument("--price", type=float, metavar="USD", help="per device and hour")


def do_report(arguments: argparse.Namespace) -> int:
    from paceline.reports.report import run_report

    return run_report(arguments, build_console())


def launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", "-np", "-n", type=int, metavar="N", help="processes to start on this machine (1)")
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help="of all ranks, after one failed (0)")
    parser.add_argument("before", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def do_launch(arguments: argparse.Namespace) -> int:
    from paceline.launch.command import launch_command

    own = ["--", *arguments.command] if arguments.before and arguments.command else arguments.command
    return launch_command([*arguments.before, *own], arguments.ranks, arguments.restarts, arguments.json)


def watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER|JOB")
    parser.add_argument("--once", action="store_true", help="show the present state and leave")


def do_watch(arguments: argparse.Namespace) -> int:
    from paceline.reports.watch import watch
    from paceline.slurm.jobs import find_run

    return watch(find_run(arguments.run).path, once=arguments.once, as_json=arguments.json)


def predict_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("inputs", nargs="+", metavar="TEXT|FILE.csv|.jsonl|.parquet|.txt|IMAGE")
    parser.add_argument("--column", default="", metavar="NAME", help="of the file: the column of inputs (data.text)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.csv|.jsonl|FOLDER",
        help="write all columns and probabilities there, or pictures into a folder",
    )
    _add_which(parser)


def do_predict(arguments: argparse.Namespace) -> int:
    from paceline.cli.predict import run_predict

    return run_predict(arguments, build_console())


def export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors|FOLDER")
    parser.add_argument("--onnx", action="store_true", help="a model.onnx too, in the folder")
    _add_which(parser)


def do_export(arguments: argparse.Namespace) -> int:
    from paceline.inference.export import export
    from paceline.io.files import print_json

    which = "best" if arguments.best else "newest"
    written = export(arguments.run, arguments.out, which, onnx=arguments.onnx, code=arguments.code)
    if arguments.json:
        print_json({"written": written})
    else:
        print_text(written)
    return 0


def _add_which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    parser.add_argument("--code", type=Path, metavar="FILE.py", help="an own workload's file, where it is gone")
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help="execute the code that a run folder from elsewhere names")


def _add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]")
    _add_trust(parser)


VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "train": ("train a run file, on one rank or many", train_arguments, do_train),
    "explain": ("print every value, its unit and where it came from", explain_arguments, do_explain),
    "check": ("prove that the answer does not depend on the layout", check_arguments, do_check),
    "plan": ("say before a device is taken what fits, what pays and what it costs", add_plan_arguments, do_plan),
    "calibrate": ("measure this machine; plans for it then use what was measured", calibrate_arguments, do_calibrate),
    "measure": (
        "train under several layouts, or run a script as it is, and say where the time goes",
        measure_arguments,
        do_measure,
    ),
    "report": ("a page, figures and tables of runs, measurements or a table of times", report_arguments, do_report),
    "launch": ("start a command of your own as several ranks of this machine", launch_arguments, do_launch),
    "watch": ("a live view of a run in the terminal", watch_arguments, do_watch),
    "predict": ("say what a trained model makes of new texts, rows or images", predict_arguments, do_predict),
    "export": ("write the weights of a run, or a folder that loads without Paceline", export_arguments, do_export),
}
"""Name: what it is for, its arguments, what it does."""
LATER = {
    "runs": registry.Verb(
        "list the runs of a folder, or compare them", "paceline.cli.runs", "paceline runs runs --compare"
    ),
    "keys": registry.Verb(
        "what a run file may say: meaning, unit, default, limits", "paceline.cli.keys", "paceline keys train.lr"
    ),
    "completion": registry.Verb("complete words in bash, zsh or fish", "paceline.cli.completion"),
    "adopt": registry.Verb(
        "make a run file of what other tools have: configurations, job scripts, commands", "paceline.cli.adopt"
    ),
    "submit": registry.Verb(
        "send a run file to Slurm, with what the plan says it needs",
        "paceline.slurm.submit",
        "paceline submit recipes/classifier_agnews.yaml --nodes 2 --gpus-per-node 4 --time 2h",
    ),
    "jobs": registry.Verb("the jobs of your runs: state, step, time left, cost so far", "paceline.cli.jobs"),
    "logs": registry.Verb("what the jobs of a run have printed", "paceline.cli.jobs"),
    "cancel": registry.Verb("end the jobs of a run", "paceline.cli.jobs"),
    "doctor": registry.Verb(
        "look at this machine, or all nodes of a job, for what makes runs fail or slow",
        "paceline.cli.doctor",
        "paceline doctor recipes/classifier_docstrings.yaml",
    ),
    "sweep": registry.Verb(
        "train a run file with several values of its keys, and say which did best",
        "paceline.cli.sweep",
        "paceline sweep recipes/trees_made_up.yaml model.max_depth=4,6 model.learning_rate=0.05,0.1",
    ),
}
"""Verbs whose options are in their own modules, imported when one of them is typed."""


def verb_names() -> list[str]:
    return [*VERBS, *LATER, *registry.list_workload_verbs()]


def parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The commands. One that a workload adds is imported when its name is among the words given."""
    added = {**LATER, **registry.list_workload_verbs()}
    top = argparse.ArgumentParser(
        prog="paceline",
        description="Distributed training from one run file, with the same answer on any number of ranks.",
        epilog=EXAMPLES + "".join(f"  {verb.example}\n" for verb in added.values() if verb.example),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB")
    for name, (about, add_arguments, do) in VERBS.items():
        one = verbs.add_parser(name, help=about)
        add_arguments(one)
        if name != "plan":  # it has its own
            one.add_argument("--json", action="store_true", help="print JSON instead of text")
        one.set_defaults(do=do)
    for name, verb in added.items():
        one = verbs.add_parser(name, help=verb.help)
        if name in argv:
            module = import_module(verb.module)
            getattr(module, f"add_{name}_arguments")(one)
            run = getattr(module, f"run_{name}")
            one.set_defaults(do=lambda arguments, run=run: run(arguments, build_console()))
    return top
