"""The verb `sample`: generate text with a trained language model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError
from paceline.io.files import print_json
from paceline.io.terminal import print_text

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.workloads.lm.decoder import Decoder
    from paceline.workloads.lm.workload import LanguageModel


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
    """Return the prompt and up to `tokens` more tokens, fewer if the document ends.

    Each token is drawn from the `top_k` most likely ones (0: from all); a lower temperature favours the likeliest.
    """
    _check(prompt, tokens, temperature, top_k, seed)
    import torch

    workload, model = load_language_model(run, which)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, vocabulary = model.to(device).eval(), workload.vocabulary
    tokenizer = vocabulary.tokenizer
    ids = [vocabulary.special, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    given = len(ids)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits_V = compute_next_logits(model, torch.tensor([ids[-workload.sequence :]], device=device)).cpu()
        logits_V = logits_V[: vocabulary.size] / temperature
        if 0 < top_k < len(logits_V):
            logits_V[logits_V < logits_V.topk(top_k).values[-1]] = -torch.inf
        drawn = int(torch.multinomial(logits_V.softmax(0), 1, generator=generator))
        if drawn == vocabulary.special:
            break
        ids.append(drawn)
    return prompt + tokenizer.decode(ids[given:])


def _check(prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> None:
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


def compute_next_logits(model: Decoder, ids_1S: Tensor) -> Tensor:
    """Return logits (V,) of the next token alone."""
    import torch

    assert model.head is not None
    with torch.no_grad():
        return model.head(model.hidden(ids_1S)[:, -1:], weight=model.shared_weight())[0, 0].double()


def load_language_model(run: str | Path, which: str = "newest") -> tuple[LanguageModel, Decoder]:
    """Return the workload of a run, and its model with the weights of the newest (or best) checkpoint."""
    from paceline.inference.trained_model import open as open_run
    from paceline.runlog.run_dir import RunDir

    folder = RunDir.open(Path(run))
    if (workload := folder.recorded_spec().workload) != "lm":
        raise UserError(f"{folder.path} is a run of {workload}, expected workload lm", code="not-supported")
    trained: Any = open_run(run, which)
    began, lm = folder.start(), trained.workload
    if lm.kept is None and "data" in began and began["data"] != lm.fingerprint():
        raise UserError(f"{folder.path}: its data have changed, and its vocabulary with them", code="conflict")
    return lm, trained.model
