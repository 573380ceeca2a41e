"""Predictions of each task for new inputs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.nn.chunked_loss import NOT_COUNTED
from paceline.parallel.precision import to_at_least_fp32
from paceline.workloads.transformers.samples import Batch


def classify(work: Any, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
    logits = to_at_least_fp32(model(**batch.inputs).logits)
    return {"probabilities": logits.softmax(-1), "logits": logits}


def tag_words(work: Any, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    """Return the tags of each text, as many as it has words that are not cut."""
    found = model(**batch.inputs).logits.argmax(-1)
    names, rows = work.classes(), zip(found.tolist(), (batch.labels != NOT_COUNTED).tolist(), strict=True)
    return {"tags": np.array([" ".join(names[n] for n, own in zip(*row, strict=True) if own) for row in rows])}


def fill_masks(work: Any, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    """Return each text with the likeliest token in place of each mask, and how probable they are on average."""
    probabilities = to_at_least_fp32(model(**batch.inputs).logits).softmax(-1)
    best, ids = probabilities.max(-1), batch.inputs["input_ids"]
    masked = ids == work.mask_rule.mask
    filled = torch.where(masked, best.indices, ids)
    sure = (best.values * masked).sum(1) / masked.sum(1).clamp(min=1)
    return {"filled": _decode(work, filled, batch.inputs["attention_mask"]), "sure": sure}


def write_targets(work: Any, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    """Return what the decoder writes, always the likeliest token, up to data.max_length tokens."""
    library: Any = model
    inputs, config = batch.inputs, work.config
    encoded = library.get_encoder()(**inputs)
    ids = torch.full_like(inputs["input_ids"][:, :1], work.start_token)
    ended = torch.zeros_like(ids, dtype=torch.bool)
    for _ in range(work.texts.max_length):
        states = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"], "use_cache": False}
        following = library(decoder_input_ids=ids, **states).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, torch.where(ended, config.pad_token_id or 0, following)], 1)
        ended |= following == config.eos_token_id if config.eos_token_id is not None else ended
        if ended.all():
            break
    return {"text": _decode(work, ids[:, 1:], torch.ones_like(ids[:, 1:]))}


def continue_tokens(
    model: nn.Module, ids: list[int], ends: list[int], tokens: int, temperature: float, top_k: int, seed: int
) -> list[int]:
    """Return what the model draws after these tokens, without the one that ends it."""
    from transformers import GenerationConfig

    library: Any = model
    given = torch.tensor([ids], device=library.device)
    draw = {"do_sample": True, "temperature": temperature, "top_k": top_k, "max_new_tokens": tokens, "use_cache": True}
    config = GenerationConfig(**draw, eos_token_id=ends, pad_token_id=ends[0])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found = library.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
    written: list[int] = found[0, len(ids) :].tolist()
    return written[:-1] if written and written[-1] in ends else written


def _decode(work: Any, ids: Tensor, mask: Tensor) -> np.ndarray:
    rows = [[n for n, own in zip(*row, strict=True) if own] for row in zip(ids.tolist(), mask.tolist(), strict=True)]
    return np.array([work.tokenizer.decode(row) for row in rows])
