"""The arguments of every verb, apart from what they do: they are imported for `--help` too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import registry
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.config import RunSpec


def _add_run_file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]")
    _add_trust_argument(parser)


def _add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    parser.add_argument("--code", type=Path, metavar="FILE.py", help="your workload's file, if it has moved")
    _add_trust_argument(parser)


def _add_trust_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help="execute the code that a run folder from elsewhere names")


def load_spec(words: Sequence[str], verb: str) -> RunSpec:
    """Load the run file or the script that comes first, with the overrides that follow it."""
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        usage = f"paceline {verb} RUN.yaml [section.key=value ...]"
        raise UserError(f"no run file given; write it as  {usage}", code="missing-value")
    if registry.is_script(words[0]):
        from paceline.script.run import derive_script_spec

        return derive_script_spec(Path(words[0]), words[1:])
    from paceline.config import load

    return load(words[0], words[1:])


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_file_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs go (runs)")
    parser.add_argument("--resume", type=Path, metavar="RUN_FOLDER", help="resume from its newest whole checkpoint")
    parser.add_argument("--resume-or-start", action="store_true", help="start, resume, or exit 0 if finished")
    parser.add_argument("--from", dest="start", type=Path, metavar="RUN_FOLDER", help="start with its weights")
    parser.add_argument("--changed-code", action="store_true", help="resume although your own code has changed")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_file_arguments(parser)
    parser.add_argument("--data", action="store_true", help="read the data too: steps, warm-up, evaluation")


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", "-np", "-n", type=int, metavar="N", help="processes to start on this machine (1)")
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help="of all ranks, after one failed (0)")
    parser.add_argument("before", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]")
    parser.add_argument("--cluster", metavar="2x8xH100|FILE.yaml", help="devices and links; without it the run file's")
    parser.add_argument("--devices", default="", metavar="1,2,4", help="numbers of devices to try")
    parser.add_argument("--deadline", metavar="24h", help="recommend the cheapest row that meets it")
    parser.add_argument("--budget", type=float, metavar="USD", help="skip rows that cost more")
    parser.add_argument("--min-efficiency", type=float, metavar="0.5", help="skip rows below this efficiency")
    parser.add_argument("--price", type=float, metavar="USD", help="per device and hour, instead of the catalogue's")
    parser.add_argument("--spot-price", type=float, metavar="USD", help="the same for preemptible devices")
    parser.add_argument("--spot", action="store_true", help="count with the spot price: cost, budget and the page")
    parser.add_argument("--samples", type=int, metavar="N", help="training samples, if the data are not here")
    parser.add_argument("--tokens", type=float, metavar="N", help="mean length of a text, if they are not")
    parser.add_argument(
        "--what-if",
        metavar="WORDS",
        help="price what training does not support: pure-bf16, 8bit-states, context=N, separated by commas",
    )
    parser.add_argument("--calibration", type=Path, metavar="FILE.json", help="measured by  paceline calibrate")
    parser.add_argument("--page", type=Path, metavar="plan.html", help="write a page with sliders that opens offline")
    parser.add_argument("--json", action="store_true", help="print every term as JSON instead of tables")
    kinds = ("torchrun", "slurm", "kubernetes", "skypilot", "accelerate", "deepspeed")
    parser.add_argument("--emit", choices=kinds, help="launch files")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write plan.json and the launch files there")
    for option, (_, what) in registry.list_plan_options().items():
        parser.add_argument(option, dest=what.key, metavar=what.metavar, help=what.help)


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", default="1,2,4", metavar="1,2,4", help="numbers of ranks to measure with")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="per rank; 0 shares the cores (0)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file (~/.cache/paceline/calibration.json)")
    parser.add_argument(
        "--from", dest="measured", type=Path, metavar="FOLDER", help="correct it by a result of  paceline measure"
    )


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_file_arguments(parser)
    parser.add_argument("--ranks", default="", metavar="1,2,4", help="numbers of ranks (1,2)")
    parser.add_argument("--layouts", default="", metavar="ddp:2,fsdp:2", help="layouts, beside or instead of --ranks")
    parser.add_argument("--weak", action="store_true", help="let the batch grow with the ranks")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each row, interleaved (3)")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="steps of each run (30)")
    parser.add_argument("--price", type=float, metavar="USD", help="per device and hour")
    parser.add_argument("--retry", action="store_true", help="run rows again that failed before")
    parser.add_argument("--links", action="store_true", help="measure the links between ranks instead of a run")
    parser.add_argument("--steps-by", default="", metavar="ADAM", help="optimizer whose step() ends a training step")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="output (runs/NAME-measure)")


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_file_arguments(parser)
    parser.add_argument("--ranks", default="1,2", metavar="1,2,4", help="numbers of ranks; the first is the reference")
    parser.add_argument("--layouts", default="", metavar="single,fsdp:2,tensor:2", help="layouts, instead of --ranks")
    parser.add_argument("--accumulate", default="1", metavar="1,4", help="passes per step")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps to train (20)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the runs there")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", type=Path, metavar="RUN_FOLDER|MEASURE_FOLDER|TIMES.csv")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="FOLDER", help="output (report)")
    parser.add_argument("--title", default="", metavar="TEXT", help="title of the page")
    parser.add_argument("--price", type=float, metavar="USD", help="per device and hour")


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER|JOB")
    parser.add_argument("--once", action="store_true", help="print the present state and exit")


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER|RUN_FOLDER", help="(runs)")
    parser.add_argument("--compare", action="store_true", help="side by side, the best score first, with what differs")


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("inputs", nargs="+", metavar="TEXT|FILE.csv|.jsonl|.parquet|.txt|IMAGE")
    parser.add_argument("--column", default="", metavar="NAME", help="of the file: the column of inputs (data.text)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.csv|.jsonl|FOLDER",
        help="write all columns and probabilities there, or pictures into a folder",
    )
    _add_checkpoint_arguments(parser)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors|FOLDER")
    parser.add_argument("--onnx", action="store_true", help="write a model.onnx into the folder too")
    _add_checkpoint_arguments(parser)


def add_keys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("asked", nargs="*", metavar="SECTION|KEY|WORD", help="train, train.lr, or a word to look for")
    parser.add_argument(
        "--workload", default=registry.DEFAULT_WORKLOAD, metavar="NAME", help="whose model and data (classifier)"
    )


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=("bash", "zsh", "fish"), help="whose script to print")
    parser.add_argument("--json", action="store_true", help="print verbs, options and keys as JSON instead")


def add_adopt_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="configurations, job scripts, scripts")
    parser.add_argument(
        "--command", dest="line", default="", metavar="'torchrun …'", help="the command that starts it; or after --"
    )
    parser.add_argument("--out", type=Path, default=Path("run.yaml"), metavar="RUN.yaml", help="output (run.yaml)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml|RUN_FOLDER [section.key=value ...]")
    parser.add_argument("--site", metavar="NAME|FILE.yaml", help="what the cluster needs (~/.config/paceline/sites)")
    parser.add_argument("--nodes", metavar="2|1-2", help="default: what the plan chooses")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="a rank for each")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="on cores (1)")
    parser.add_argument("--time", metavar="2h", help="of one job; default: 1.3 times the planned time")
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument("--memory", metavar="64G", help="of a node")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where runs go (runs, or that of the site file)")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, and submit nothing")
    parser.add_argument("--anyway", action="store_true", help="submit even if the plan says it cannot work")
    parser.add_argument("--measure", action="store_true", help="submit  paceline measure, a task for each of --ranks")
    parser.add_argument("--ranks", default="2", metavar="2,4,8", help="with --measure: numbers to compare with 1 (2)")


def add_jobs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of runs (runs, and the site's)")
    parser.add_argument("--json", action="store_true", help="print every value as JSON")


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_FOLDER|JOB")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-f", "--follow", action="store_true", help="keep printing until the last job has ended")
    how.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_cancel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN_FOLDER|JOB")


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]", help="check its data too")
    parser.add_argument("--nodes", default="", metavar="HOST,HOST", help="start it on these hosts, one rank each")
    from paceline.diagnostics.nodes import SSH

    parser.add_argument("--by", default=SSH, metavar="COMMAND", help=f"what starts a command on a host ({SSH})")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs go (runs)")
    parser.add_argument("--json", action="store_true", help="print every finding as JSON instead of a table")


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml section.key=VALUE,VALUE|LOW..HIGH[:log] ...")
    parser.add_argument("--random", action="store_true", help="draw trials instead of all combinations")
    parser.add_argument("--optuna", action="store_true", help="draw them where Optuna expects most")
    parser.add_argument("--trials", type=int, metavar="N", help="how many to draw (20)")
    parser.add_argument("--halving", action="store_true", help="train all for a while, then the best third")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trials that are trained at once (1)")
    parser.add_argument("--score", default="", metavar="[-]METRIC", help="that ranks trials; - says lower is better")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (0)")
    parser.add_argument("--retry", action="store_true", help="try trials again that failed before")
    parser.add_argument("--trial", type=int, metavar="K", help="train this trial alone, from 1 on: for a job array")
    parser.add_argument("--show", action="store_true", help="show what is there, and train nothing")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="output (runs/NAME-sweep)")
    parser.add_argument("--json", action="store_true", help="print sweep.json instead of a table")
