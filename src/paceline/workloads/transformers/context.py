"""Context parallelism of the library's models: its attention interface calls ours, with the keys of all ranks."""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from paceline.errors import reject_value
from paceline.layout import Layout, check_context
from paceline.parallel.context import ContextGroup
from paceline.workloads.transformers.architectures import CAUSAL
from paceline.workloads.transformers.model_files import find_dropouts, iter_objects
from paceline.workloads.transformers.samples import Batch

NAME = "paceline_context"
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")  # kinds whose angles do not depend on the last position


def check_model_context(layout: Layout, config: Any, task: str, tokens: int) -> None:
    """Raise UserError for a model whose sequences cannot be divided."""
    named = (pair for part in iter_objects(config.to_dict()) for pair in part.items())
    kinds = {kind for key, kind in named if key in ("rope_type", "type") and isinstance(kind, str)}
    reason = ""
    if task != "causal_lm":
        reason = f"divides sequences of model.task=causal_lm, not of {task}"
    elif config.model_type not in CAUSAL:
        reason = f"is not known to give the same for {config.model_type}; it is for {', '.join(sorted(CAUSAL))}"
    elif getattr(config, "attn_logit_softcapping", None):
        reason = "does not compute attn_logit_softcapping of this config"
    elif dropouts := find_dropouts(config.to_dict()):
        reason = f"does not draw dropout ({', '.join(dropouts)}), which  model.dropout=false  switches off"
    elif kinds - {*FIXED_ROTARY}:
        reason = f"does not support rope_type={min(kinds - {*FIXED_ROTARY})}, whose angles depend on the last position"
    if reason:
        raise reject_value("parallel.context", layout.context, f"{reason}; use parallel.strategy=fsdp")
    check_context(layout, "data.sequence", tokens)


def gather_context(model: nn.Module, context: ContextGroup) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, partial(_attend, context))
    cast(Any, model).set_attn_implementation(NAME)


def divide_context(batch: Batch, context: ContextGroup) -> Batch:
    """Return this rank's part. A mask is needed for packed texts only, each of which begins at position 0."""
    tokens, packed = batch.inputs["input_ids"], batch.inputs.get("position_ids")
    inputs = {"input_ids": context.part(tokens)}
    if packed is None:
        places = context.positions(inputs["input_ids"].shape[1], tokens.device)
        inputs["position_ids"] = places.expand(len(tokens), -1)
    else:
        inputs["position_ids"] = context.part(packed)
        inputs["attention_mask"] = context.mask(inputs["input_ids"].shape[1], (packed == 0).cumsum(1))
    return Batch(inputs, context.part(batch.labels))


def _attend(
    context: ContextGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    tokens = query.shape[2]
    if sliding_window and sliding_window < tokens * context.ranks:
        near = context.mask(tokens, window=sliding_window, device=query.device)
        attention_mask = near if attention_mask is None else attention_mask & near
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return context.attend(q, k, v, attention_mask, scaling, dropout), None
