"""Parse the command line, run the verb, and exit: 0 done, 1 the run failed, 2 the request was wrong."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Sequence

from paceline import __version__
from paceline.config.registry import Verb, import_object, list_workload_verbs

COMMAND_VERBS = ("launch", "measure", "adopt")
"""Verbs that take the user's own command after `--`."""
EXAMPLES = """examples:
  paceline train recipes/classifier_docstrings.yaml parallel.ranks=2
  paceline train --resume runs/docstrings parallel.ranks=1
  paceline train --resume runs/docstrings train.epochs=+2
  paceline train --from runs/docstrings train.lr=1e-4
"""
RENAMED_OPTIONS = {"--again": "--resume-or-start"}
VERBS = {
    "train": Verb(
        "train a run file, on one rank or many",
        "paceline.cli.train:add_train_arguments",
        "paceline.cli.train:run_train",
    ),
    "explain": Verb(
        "print every value, its unit and where it came from",
        "paceline.cli.train:add_explain_arguments",
        "paceline.cli.train:run_explain",
        "paceline explain recipes/classifier_agnews.yaml train.lr=3e-4",
    ),
    "check": Verb(
        "prove that the answer does not depend on the layout",
        "paceline.cli.check:add_check_arguments",
        "paceline.cli.check:run_check",
        "paceline check recipes/classifier_docstrings.yaml --ranks 1,2,4",
    ),
    "plan": Verb(
        "predict what fits, what pays and what it costs, before a device is used",
        "paceline.cli.plan:add_plan_arguments",
        "paceline.cli.plan:run_plan",
        "paceline plan recipes/classifier_agnews.yaml --cluster 4xV100@pcie",
    ),
    "calibrate": Verb(
        "measure this machine, so that plans for it use measured rates",
        "paceline.cli.plan:add_calibrate_arguments",
        "paceline.cli.plan:run_calibrate",
    ),
    "measure": Verb(
        "train under several layouts, or run an unmodified script, and report where the time goes",
        "paceline.cli.measure:add_measure_arguments",
        "paceline.cli.measure:run_measure",
        "paceline measure recipes/classifier_docstrings.yaml --ranks 1,2,4",
    ),
    "report": Verb(
        "write a page, figures and tables of runs, measurements or a table of times",
        "paceline.cli.report:add_report_arguments",
        "paceline.cli.report:run_report",
        "paceline report runs/docstrings-measure --out report",
    ),
    "launch": Verb(
        "start your own command as several ranks on this machine",
        "paceline.cli.train:add_launch_arguments",
        "paceline.cli.train:run_launch",
        "paceline launch --ranks 4 -- python train.py",
    ),
    "watch": Verb(
        "show a live view of a run in the terminal",
        "paceline.cli.report:add_watch_arguments",
        "paceline.cli.report:run_watch",
    ),
    "predict": Verb(
        "apply a trained model to new texts, rows or images",
        "paceline.cli.predict:add_predict_arguments",
        "paceline.cli.predict:run_predict",
        'paceline predict runs/docstrings "Returns the sum of an array"',
    ),
    "export": Verb(
        "write the weights of a run, or a folder that loads without Paceline",
        "paceline.cli.predict:add_export_arguments",
        "paceline.cli.predict:run_export",
        "paceline export runs/docstrings --out model",
    ),
    "runs": Verb(
        "list the runs of a folder, or compare them",
        "paceline.cli.runs:add_runs_arguments",
        "paceline.cli.runs:run_runs",
        "paceline runs runs --compare",
    ),
    "keys": Verb(
        "list the keys of a run file: meaning, unit, default, limits",
        "paceline.cli.keys:add_keys_arguments",
        "paceline.cli.keys:run_keys",
        "paceline keys train.lr",
    ),
    "completion": Verb(
        "print a completion script for bash, zsh or fish",
        "paceline.cli.completion:add_completion_arguments",
        "paceline.cli.completion:run_completion",
    ),
    "adopt": Verb(
        "convert other tools' configurations, job scripts and commands into a run file",
        "paceline.cli.adopt:add_adopt_arguments",
        "paceline.cli.adopt:run_adopt",
        'paceline adopt ds_config.json --command "torchrun --nproc_per_node=4 train.py" --out run.yaml',
    ),
    "submit": Verb(
        "submit a run file to Slurm, with the resources that the plan recommends",
        "paceline.slurm.submit:add_submit_arguments",
        "paceline.slurm.submit:run_submit",
        "paceline submit recipes/classifier_agnews.yaml --nodes 2 --gpus-per-node 4 --time 2h",
    ),
    "jobs": Verb(
        "list the Slurm jobs of your runs: state, step, time left, cost so far",
        "paceline.cli.jobs:add_jobs_arguments",
        "paceline.cli.jobs:run_jobs",
    ),
    "logs": Verb(
        "print the output of a run's jobs",
        "paceline.cli.jobs:add_logs_arguments",
        "paceline.cli.jobs:run_logs",
    ),
    "cancel": Verb(
        "cancel the jobs of a run",
        "paceline.cli.jobs:add_cancel_arguments",
        "paceline.cli.jobs:run_cancel",
    ),
    "doctor": Verb(
        "examine this machine, or all nodes of a job, for what makes runs fail or slow",
        "paceline.cli.doctor:add_doctor_arguments",
        "paceline.cli.doctor:run_doctor",
        "paceline doctor recipes/classifier_docstrings.yaml",
    ),
    "sweep": Verb(
        "train a run file with several values of its keys, and rank the trials",
        "paceline.cli.sweep:add_sweep_arguments",
        "paceline.cli.sweep:run_sweep",
        "paceline sweep recipes/trees_made_up.yaml model.max_depth=4,6 model.learning_rate=0.05,0.1",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command of `argv`, or of the process, and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × or ✓ shows a question mark
    words, command = _split_command(list(sys.argv[1:] if argv is None else argv))
    parser = build_parser(words)
    arguments, extra = parser.parse_known_args(words)
    if arguments.verb is None:
        parser.error("no verb given; see  paceline --help")
    arguments.command = command
    _take_extra_words(parser, arguments, words, extra)
    from paceline.launch.exit_codes import exit_command, exit_on_error
    from paceline.runlog.run_dir import trust_named_runs

    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `paceline.__main__` left it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with exit_on_error():
            if getattr(arguments, "trust", False):
                trust_named_runs(vars(arguments))
            exit_command(import_object(list_verbs()[arguments.verb].run)(arguments))
    except KeyboardInterrupt:
        sys.exit(130)


def list_verbs() -> dict[str, Verb]:
    """Return every verb by name: ours, then those that workloads add."""
    return {**VERBS, **list_workload_verbs()}


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of all verbs; the arguments of a verb are imported only if its name is among the words."""
    verbs = list_verbs()
    examples = "".join(f"  {verb.example}\n" for verb in verbs.values() if verb.example)
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Distributed training from one run file, with the same answer on any number of ranks.",
        epilog=EXAMPLES + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    choices = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, verb in verbs.items():
        one = choices.add_parser(name, help=verb.help)
        if name in words:
            import_object(verb.add_arguments)(one)
    return parser


def _split_command(words: list[str]) -> tuple[list[str], list[str]]:
    """Return our own words, and the user's command after `--` for the verbs that take one."""
    if not words or words[0] not in COMMAND_VERBS or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _take_extra_words(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: list[str], extra: list[str]
) -> None:
    """Add overrides that follow an option to the words of the verb; report an unknown option."""
    takes_words = hasattr(arguments, "words")
    options = [word for word in extra if word.startswith("-") or not takes_words]
    if options and options[0] in RENAMED_OPTIONS:
        parser.error(f"unknown argument {options[0]!r}; it is now called {RENAMED_OPTIONS[options[0]]}")
    if options:
        from paceline.config.keys import suggest_key

        after = words[words.index(options[0]) + 1 :][:1]
        hint = suggest_key(options[0], *after) if takes_words else ""
        parser.error(f"unknown argument {options[0]!r}{hint}; see  paceline {arguments.verb} --help")
    if extra:
        arguments.words += extra
