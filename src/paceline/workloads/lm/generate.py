"""Text from a trained language model, one token after the other."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from paceline.data.corpora.stream import END_ID
from paceline.errors import UserError
from paceline.record.events import read_events
from paceline.record.run_dir import RunDir
from paceline.training.checkpoints.saved import chosen, read_tensors
from paceline.workload import workload_of
from paceline.workloads.lm.decoder import Decoder
from paceline.workloads.lm.workload import LanguageModel


def generate(
    workload: LanguageModel, model: Decoder, prompt: str, tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """The prompt and up to `tokens` more tokens; see `paceline.sample`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device).eval()
    tokenizer = workload.corpus.tokenizer
    ids = [END_ID, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    given = len(ids)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits_V = next_logits(model, torch.tensor([ids[-workload.sequence :]], device=device)).cpu()
        logits_V = logits_V[: workload.corpus.vocab] / temperature
        if 0 < top_k < len(logits_V):
            logits_V[logits_V < logits_V.topk(top_k).values[-1]] = -torch.inf
        drawn = int(torch.multinomial(logits_V.softmax(0), 1, generator=generator))
        if drawn == END_ID:
            break
        ids.append(drawn)
    return prompt + tokenizer.decode(ids[given:])


@torch.no_grad()
def next_logits(model: Decoder, ids_1S: Tensor) -> Tensor:
    """Logits (V,) of the token that follows; those of all the others are never computed."""
    assert model.head is not None
    return model.head(model.hidden(ids_1S)[:, -1:], weight=model.shared_weight())[0, 0].double()


def load_model(run: str | Path, which: str = "newest") -> tuple[LanguageModel, Decoder]:
    """The workload of a run, and its model with the weights of the newest (or best) checkpoint."""
    folder = RunDir.open(Path(run))
    spec = folder.spec()
    if spec.workload != "lm":
        raise UserError(f"{folder.path} is a run of {spec.workload}; only language models (workload: lm) write text")
    checkpoint = chosen(folder, which)
    workload = workload_of(spec)
    assert isinstance(workload, LanguageModel)
    began = next(read_events(folder.events_file(0), "start"), {})
    if "data" in began and began["data"] != workload.fingerprint():
        raise UserError(
            f"{folder.path} was trained on other data: what data.path or the installed packages hold has changed "
            "since, and its vocabulary with it; bring it back, or train anew"
        )
    with torch.device("meta"):
        model = workload.model()
    model.load_state_dict(read_tensors(checkpoint), assign=True)
    return workload, model
