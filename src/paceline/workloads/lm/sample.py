"""The verb `sample`: text from a trained language model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("prompt", metavar="PROMPT", help='the beginning of a text, such as "Returns the"')
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="most tokens to add (100)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="lower is more cautious (0.8)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="draw from the K likeliest; 0 is all (40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, another text (0)")
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")


def run(arguments: argparse.Namespace, console: Any) -> int:
    given = {name: getattr(arguments, name) for name in ("tokens", "temperature", "top_k", "seed")}
    print(sample(arguments.run, arguments.prompt, **given, which="best" if arguments.best else "newest"))
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
    """The prompt and what the model makes of it: up to `tokens` more tokens, fewer where the document ends.

    Each token is drawn from the `top_k` most likely ones (0: from all), the likely ones the more so the lower the
    temperature is.
    """
    _check(prompt, tokens, temperature, top_k, seed)
    from paceline.workloads.lm.generate import generate, load_model

    workload, model = load_model(run, which)
    return generate(workload, model, prompt, tokens, temperature, top_k, seed)


def _check(prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> None:
    if not prompt:
        raise UserError('the prompt is empty; give the beginning of a text, as in  paceline sample RUN "Returns the"')
    if tokens < 1:
        raise UserError(f"--tokens {tokens}: use 1 or more")
    if not 0 < temperature < float("inf"):
        raise UserError(f"--temperature {temperature:g}: it must be above 0; 0.8 is usual, 0.01 takes the likeliest")
    if top_k < 0:
        raise UserError(f"--top-k {top_k}: use 1 or more, or 0 to draw from all tokens")
    if not 0 <= seed < 1 << 63:
        raise UserError(f"--seed {seed}: use a number from 0 on")
