"""The arguments of every verb, and the run file or script that comes first among them."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import registry
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.config import RunSpec

Argument = tuple[tuple[str, ...], dict[str, Any]]
"""What argparse's `add_argument` is called with."""


def flag(names: str, help: str) -> Argument:
    return tuple(names.split()), {"action": "store_true", "help": help}


def option(names: str, metavar: str, help: str, kind: Any = str, default: Any = None, **more: Any) -> Argument:
    return tuple(names.split()), {"metavar": metavar, "help": help, "type": kind, "default": default, **more}


def words(metavar: str, name: str = "words", nargs: Any = "*", help: str | None = None, kind: Any = str) -> Argument:
    return (name,), {"metavar": metavar, "nargs": nargs, "help": help, "type": kind}


RUN_FILE = "RUN.yaml [section.key=value ...]"
TRUST = flag("--trust", "execute the code that a run folder from elsewhere names")
RUN = words("RUN_FOLDER", "run", None, kind=Path)
RUN_OR_JOB = words("RUN_FOLDER|JOB", "run", None)
CHECKPOINT = (
    flag("--best", "the best checkpoint instead of the newest"),
    option("--code", "FILE.py", "your workload's file, if it has moved", Path),
    TRUST,
)
OUT = option("--out", "FOLDER", "where runs go (runs)", Path, Path("runs"))
PRICE = option("--price", "USD", "per device and hour", float)
LAUNCHERS = ("torchrun", "slurm", "kubernetes", "skypilot", "accelerate", "deepspeed")
ARGUMENTS: dict[str, Sequence[Argument]] = {
    "train": (
        *(words(RUN_FILE), TRUST, OUT),
        option("--resume", "RUN_FOLDER", "resume from its newest whole checkpoint", Path),
        flag("--resume-or-start", "start, resume, or exit 0 if finished"),
        option("--from", "RUN_FOLDER", "start with its weights", Path, dest="start"),
        flag("--changed-code", "resume although your own code has changed"),
        flag("--quiet", "print nothing but errors"),
    ),
    "explain": (
        words(RUN_FILE),
        TRUST,
        flag("--data", "read the data too: steps, warm-up, evaluation"),
        flag("--all", "defaults too"),
    ),
    "launch": (
        option("--ranks -np -n", "N", "processes to start on this machine (1)", int),
        option("--restarts", "N", "of all ranks, after one failed (0)", int, 0),
        words("-- COMMAND ...", "before", argparse.REMAINDER),
    ),
    "plan": (
        words(RUN_FILE),
        option(
            *("--cluster", "2x8xH100|FILE.yaml", "devices and links; without it the run file's; several are compared"),
            action="append",
        ),
        option("--devices", "1,2,4", "numbers of devices to try", default=""),
        option("--deadline", "24h", "recommend the cheapest row that meets it"),
        option("--budget", "USD", "skip rows that cost more", float),
        option("--min-efficiency", "0.5", "skip rows below this efficiency", float),
        option("--price", "USD", "per device and hour, instead of the catalogue's", float),
        option("--spot-price", "USD", "the same for preemptible devices", float),
        flag("--spot", "count with the spot price: cost, budget and the page"),
        option("--grid", "GRAMS", "of CO2 per kWh of your electricity (473, the world's mean)", float, 473.0),
        option("--mtbf", "HOURS", "of one device, between failures (published rates); preemption too", float),
        option("--restart", "10m", "from a failure to the next new step (11m)"),
        option("--samples", "N", "training samples, if the data are not here", int),
        option("--tokens", "N", "mean length of a text, if they are not", float),
        option(
            "--assert",
            "'step_s<0.5'",
            "exit code 1 if it does not hold: fits, hours<24",
            action="append",
            dest="claims",
        ),
        option("--calibration", "FILE.json", "measured by  paceline calibrate", Path),
        option("--page", "plan.html", "write a page with sliders that opens offline", Path),
        option("--trace", "FILE.json", "write what each rank does in a step, for Perfetto or Chrome", Path),
        flag("-v --verbose", "print layouts, limits, terms of time and memory too"),
        flag("--json", "print every term as JSON instead of tables"),
        flag("--queue", "ask Slurm when each number of nodes would start, and which finishes first"),
        option("--site", "NAME|FILE.yaml", "with --queue: what the cluster needs"),
        (("--emit",), {"choices": LAUNCHERS, "help": "launch files"}),
        option("--out", "FOLDER", "write plan.json and the launch files there", Path),
    ),
    "calibrate": (
        *(words(RUN_FILE, help="whose steps are timed too"), TRUST),
        option("--ranks", "1,2,4", "numbers of ranks to measure with", default="1,2,4"),
        option("--threads", "N", "per rank; 0 shares the cores (0)", int, 0),
        option("--out", "FILE.json", "file (~/.cache/paceline/calibration.json)", Path),
        option("--from", "FOLDER", "correct it by a result of  paceline measure", Path, dest="measured"),
    ),
    "measure": (
        *(words(RUN_FILE), TRUST),
        option("--ranks", "1,2,4", "numbers of ranks (1,2)", default=""),
        option("--layouts", "ddp:2,fsdp:2", "layouts, beside or instead of --ranks", default=""),
        flag("--weak", "let the batch grow with the ranks"),
        option("--repeats", "N", "runs of each row, interleaved (3)", int, 3),
        option("--steps", "N", "steps of each run (30)", int, 30),
        PRICE,
        flag("--retry", "run rows again that failed before"),
        option("--baseline", "FILE.json", "write it, or compare: exit code 1 if slower, larger or another loss", Path),
        flag("--links", "measure the links between ranks instead of a run"),
        option("--steps-by", "ADAM", "optimizer whose step() ends a training step", default=""),
        flag("-v --verbose", "print all tables and findings"),
        option("--out", "FOLDER", "output (runs/NAME-measure)", Path),
    ),
    "check": (
        *(words(RUN_FILE), TRUST),
        option("--ranks", "1,2,4", "numbers of ranks; the first is the reference", default="1,2"),
        option("--layouts", "single,fsdp:2,tensor:2", "layouts, instead of --ranks", default=""),
        option("--accumulate", "1,4", "passes per step", default="1"),
        option("--steps", "N", "steps to train (20)", int, 20),
        option("--out", "FOLDER", "keep the runs there", Path),
    ),
    "report": (
        words("RUN_FOLDER|MEASURE_FOLDER|TIMES.csv", "inputs", "+", kind=Path),
        option("--out", "FOLDER", "output (report)", Path, Path("report")),
        option("--title", "TEXT", "title of the page", default=""),
        option("--warmup", "N|'N steps'", "leave the first N epochs, or steps, out of speeds", default=""),
        option("--only", "GLOB", "of a folder of results, those whose names match", default=""),
        PRICE,
    ),
    "watch": (
        words("RUN_FOLDER|JOB", "run", None, kind=Path),
        flag("--once", "print the present state and exit"),
        option("--page", "FILE.html", "keep a page current until the run ends", Path),
        option("--serve", "PORT", "show the page on http://localhost:PORT (8000)", int, nargs="?", const=8000),
    ),
    "runs": (
        words("FOLDER|RUN_FOLDER", "folders", help="(runs)", kind=Path),
        flag("--compare", "side by side, the best score first, with what differs"),
    ),
    "predict": (
        *(RUN, words("TEXT|FILE.csv|.jsonl|.parquet|.txt|IMAGE", "inputs", "+")),
        option("--column", "NAME", "of the file: the column of inputs (data.text)", default=""),
        option("--out", "FILE.csv|.jsonl|FOLDER", "write all columns and probabilities, or pictures", Path),
        *CHECKPOINT,
    ),
    "export": (
        *(RUN, option("--out", "FILE.safetensors|FOLDER", "", Path, required=True)),
        flag("--onnx", "write a model.onnx into the folder too"),
        *CHECKPOINT,
    ),
    "keys": (
        words("SECTION|KEY|WORD", "asked", help="train, train.lr, or a word to look for"),
        option("--workload", "NAME", "whose model and data (classifier; a word is looked for in all)"),
    ),
    "schema": ((("kind",), {"choices": ("run", "cluster", "site"), "help": "whose schema to print"}),),
    "mcp": (),
    "completion": (
        (("shell",), {"nargs": "?", "choices": ("bash", "zsh", "fish"), "help": "whose script to print"}),
        flag("--json", "print verbs, options and keys as JSON instead"),
    ),
    "adopt": (
        words("FILE", "files", help="configurations, job scripts, scripts", kind=Path),
        option("--command", "'torchrun …'", "the command that starts it; or after --", dest="line", default=""),
        option("--out", "RUN.yaml", "output (run.yaml)", Path, Path("run.yaml")),
        flag("--force", "overwrite an existing file"),
        flag("--json", "print the table as JSON"),
    ),
    "submit": (
        words("RUN.yaml|RUN_FOLDER [section.key=value ...]"),
        option("--site", "NAME|FILE.yaml", "what the cluster needs (~/.config/paceline/sites)"),
        option("--nodes", "2|1-2", "default: what the plan chooses"),
        option("--gpus-per-node", "N", "a rank for each", int),
        option("--ranks-per-node", "N", "on cores (1)", int),
        option("--time", "2h", "of one job; default: 1.3 times the planned time"),
        option("--partition", "NAME", ""),
        option("--account", "NAME", ""),
        option("--memory", "64G", "of a node"),
        option("--out", "FOLDER", "where runs go (runs, or that of the site file)", Path),
        flag("--dry-run", "print the batch script, and submit nothing"),
        flag("--queue", "ask when each number of nodes would start, and submit nothing"),
        flag("--anyway", "submit even if the plan says it cannot work"),
        option("--checkpoints", "'out/**/*.pt'", "of a command after -- : requeue while it saves them", default=""),
        flag("--measure", "submit  paceline measure, a task for each of --ranks"),
        option("--ranks", "2,4,8", "with --measure: numbers to compare with 1 (2)", default="2"),
    ),
    "jobs": (
        words("FOLDER", "folders", help="of runs (runs, and the site's)", kind=Path),
        flag("--json", "print every value as JSON"),
    ),
    "logs": (RUN_OR_JOB, flag("-f --follow", "keep printing until the last job has ended")),
    "cancel": (words("RUN_FOLDER|JOB", "runs", "+"),),
    "doctor": (
        words(RUN_FILE, help="check its data too"),
        option("--nodes", "HOST,HOST", "start it on these hosts, one rank each", default=""),
        option("--by", "COMMAND", "what starts a command on a host (ssh)", default=""),
        flag("--links", "measure the links between ranks, for later plans"),
        OUT,
        flag("--json", "print every finding as JSON instead of a table"),
    ),
    "sweep": (
        words("RUN.yaml section.key=VALUE,VALUE|LOW..HIGH[:log] ..."),
        flag("--random", "draw trials instead of all combinations"),
        flag("--optuna", "draw them where Optuna expects most"),
        option("--trials", "N", "how many to draw (20)", int),
        flag("--halving", "train all for a while, then the best third"),
        option("--jobs", "N", "trials that are trained at once (1)", int, 1),
        option("--score", "[-]METRIC", "that ranks trials; - says lower is better", default=""),
        option("--seed", "N", "of what is drawn (0)", int, 0),
        flag("--retry", "try trials again that failed before"),
        option("--trial", "K", "train this trial alone, from 1 on: for a job array", int),
        flag("--show", "show what is there, and train nothing"),
        option("--out", "FOLDER", "output (runs/NAME-sweep)", Path),
        flag("--json", "print sweep.json instead of a table"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb that the parser's name ends with."""
    verb = parser.prog.rpartition(" ")[2]
    for names, how in ARGUMENTS[verb]:
        parser.add_argument(*names, **how)
    for name, (_, what) in registry.list_plan_options().items() if verb == "plan" else ():
        parser.add_argument(name, dest=what.key, metavar=what.metavar, help=what.help)


def load_spec(words: Sequence[str], verb: str) -> "RunSpec":
    """Load the run file or the script that comes first, with the overrides that follow it."""
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        raise UserError(f"no run file given; write it as  paceline {verb} {RUN_FILE}", code="missing-value")
    if registry.is_script(words[0]):
        from paceline.script.run import derive_script_spec

        return derive_script_spec(Path(words[0]), words[1:])
    from paceline.config import load

    return load(words[0], words[1:])
