"""What the ranks of test_axes.py do."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from paceline.launch.environment import detect_rank
from paceline.launch.process_group import create_device_mesh, join_ranks
from paceline.nn.attention import causal_attention
from paceline.nn.chunked_loss import NOT_COUNTED
from paceline.parallel.context import ContextGroup
from paceline.runlog.timers import CollectiveTimer
from paceline.workloads.transformers.context import divide_context, gather_context
from paceline.workloads.transformers.samples import Batch

TOKENS = 24


def build_packed_batch():
    """Two rows with texts end to end, as instruction data have them: each begins at position 0."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 97, (2, TOKENS), generator=generator)
    begins = torch.zeros(2, TOKENS, dtype=torch.bool)
    begins[:, 0] = begins[0, 7] = begins[1, 11] = begins[1, 20] = True
    places = torch.arange(TOKENS) - torch.where(begins, torch.arange(TOKENS), 0).cummax(1).values
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), NOT_COUNTED)], 1)
    labels[:, :-1][begins[:, 1:]] = NOT_COUNTED
    return Batch({"input_ids": ids, "position_ids": places}, labels)


def build_model(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 97, "use_cache": False}
    sizes |= {"sliding_window": 5} if kind == "mistral" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


def loss_of(model, batch):
    logits = model(**batch.inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=NOT_COUNTED, reduction="sum")


def compare_packed(kinds, ring):
    """The largest difference of losses, and of gradients relative to the largest, from those of whole sequences."""
    place, found, batch = detect_rank(os.environ), {}, build_packed_batch()
    with join_ranks(place, "cpu", 1, 120):
        mesh = create_device_mesh("cpu", (place.world,), ("context",))
        for kind in kinds:
            whole, model = build_model(kind), build_model(kind)
            gather_context(model, context := ContextGroup(mesh, CollectiveTimer(), ring))
            (wanted := loss_of(whole, batch)).backward()
            (total := loss_of(model, divide_context(batch, context))).backward()
            dist.all_reduce(total := total.detach())
            apart = []
            for ours, theirs in zip(whole.parameters(), model.parameters(), strict=True):
                dist.all_reduce(theirs.grad)
                apart.append(float((ours.grad - theirs.grad).abs().max() / ours.grad.abs().max()))
            found[kind] = abs(float(total - wanted)) / float(wanted), max(apart)
    return found


def compare_rings():
    """The largest difference of attention and its gradients from those of whole sequences, by type; and of attention
    with a mask, which is gathered, from that without a ring."""
    place, found = detect_rank(os.environ), {}
    with join_ranks(place, "cpu", 1, 120):
        mesh = create_device_mesh("cpu", (place.world,), ("context",))
        context, plain = (ContextGroup(mesh, CollectiveTimer(), ring) for ring in (True, False))
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            whole = [torch.randn(2, 8 * place.world, n, 8, generator=generator).to(dtype) for n in (4, 2, 2, 4)]
            *inputs, gradient = whole
            leaves, parts = ([f(x).clone().requires_grad_() for x in inputs] for f in (torch.clone, context.part))
            (wanted := causal_attention(*leaves)).backward(gradient)
            (seen := context.attend(*parts)).backward(context.part(gradient))
            pairs = [(seen, wanted), *((a.grad, b.grad) for a, b in zip(parts, leaves, strict=True))]
            apart = [(ours - context.part(theirs)).abs().max() for ours, theirs in pairs]
            found[str(dtype).removeprefix("torch.")] = float(torch.stack(apart).detach().max())
        mask = context.mask(8, window=5)
        masked, gathered = (group.attend(*parts, mask) for group in (context, plain))
        return {**found, "masked": float((masked - gathered).abs().max().detach())}
