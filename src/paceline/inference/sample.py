"""The verb `sample`: generate text with a trained language model."""

import argparse
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.io.files import print_json
from paceline.io.terminal import print_text
from paceline.runlog.run_dir import RunDir
from paceline.workload import Workload


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("prompt", metavar="PROMPT", help='the beginning of a text, such as "Returns the"')
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="most tokens to add (100)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="lower is more cautious (0.8)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="draw from the K likeliest; 0 is all (40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, another text (0)")
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_sample(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in ("tokens", "temperature", "top_k", "seed")}
    text = sample(arguments.run, arguments.prompt, **given, which="best" if arguments.best else "newest")
    print_json({"text": text}) if arguments.json else print_text(text)
    return 0


def sample(
    run: str | Path,
    prompt: str,
    tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    which: str = "newest",
) -> str:
    """Return the prompt and up to `tokens` more tokens, fewer if the document ends; of a chat model, its answer.

    Each token is drawn from the `top_k` most likely ones (0: from all); a lower temperature favours the likeliest.
    """
    _check_options(prompt, tokens, temperature, top_k, seed)
    from paceline.inference.trained_model import open as open_run
    from paceline.trainer.evaluation import use_evaluation_mode

    folder = RunDir.open(Path(run))
    recorded = folder.recorded_spec()
    trained: Any = open_run(run, which)
    workload = trained.workload
    if not (isinstance(workload, Workload) and workload.has("generate")):
        message = f"{folder.path} is a run of {recorded.workload}, which writes no text; a language model does"
        raise UserError(message, code="not-supported")
    given = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    with use_evaluation_mode(trained.model, workload.spec.train.precision, trained.device):
        return str(workload.generate(trained.model, prompt, **given))


def _check_options(prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> None:
    if not prompt:
        raise UserError('the prompt is empty; type  paceline sample RUN "Returns the"', code="missing-value")
    for option, value, allowed, hint in (
        ("--tokens", tokens, tokens >= 1, "use 1 or more"),
        ("--temperature", temperature, 0 < temperature < float("inf"), "use a number above 0"),
        ("--top-k", top_k, top_k >= 0, "use 0 or more"),
        ("--seed", seed, 0 <= seed < 1 << 63, "use 0 or more"),
    ):
        if not allowed:
            raise UserError(f"{option} {value:g}: {hint}", code="invalid-value", key=option)
