"""Tensor parallelism of models without shard rules: rules found by running the model once, applied to whole layers.

A layer of which rules divide a matrix computes on DTensors, which know what part of what they are: heads keep their
place, a product that is used in another way than its neighbour expects is gathered, and gradients are summed where a
parameter has seen a part only. Rules decide how much is sent, and never what is computed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, parallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.errors import join_names, reject_value
from paceline.layout import Layout
from paceline.nn.experts import find_experts
from paceline.nn.keyed_dropout import PASS, SITE, TORCHS
from paceline.parallel.dataflow import NOWHERE, Dataflow, run_on_fakes
from paceline.workload import Workload

WHOLE, HEADS = Replicate(), -3  # the axis of heads in (…, heads, tokens, features)
LEAST_ROWS = 64  # of a table for each rank
EMBEDS = parallel.RowwiseParallel(input_layouts=WHOLE)
GIVES_ALL = parallel.ColwiseParallel(output_layouts=WHOLE)
FLASH = (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_forward.default)
SPLITS = ("view", "reshape", "unflatten")
STREAM = "stream"  # origin of what a layer is given


@dataclass(frozen=True)
class InferredRules:
    rules: Mapping[str, str]  # name of a module -> column, row, heads or vocabulary
    whole: int  # linear layers of repeated layers that no rule divides

    def apply(self, model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        """Divide what rules name, and let the layers that hold it compute on DTensors."""
        DTensor._op_dispatcher._allow_implicit_replication = True  # masks and tables are whole on all ranks
        names, ranks = {id(module): name for name, module in model.named_modules()}, mesh.size()
        for block in blocks:
            rule_of = {module: self.rules.get(names[id(module)], "") for module in block.modules()}
            placed = {id(module): find_placements(module, rule, ranks) for module, rule in rule_of.items()}
            if not any(placed.values()):
                continue
            mixtures = find_experts(block)
            for module in block.modules():
                for name, weight in [] if module in mixtures else list(module.named_parameters(recurse=False)):
                    placement = placed[id(module)].get(name, WHOLE)
                    part = distribute_tensor(weight.data, mesh, [placement], src_data_rank=None)
                    module.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))
                if "in_proj_weight" in placed[id(module)]:
                    cast(Any, module).forward = partial(_attend_by_head, mesh, module)
            for module in mixtures:  # every rank computes them whole, or `expert` divides them
                module.register_forward_pre_hook(partial(_leave_dtensors, mesh), with_kwargs=True)
                module.register_forward_hook(lambda _, given, found: _enter_dtensors(mesh, found))
            cast(Any, block).forward = partial(_run_on_dtensors, mesh, block.forward)
        shared: dict[int, nn.Parameter] = {}
        for name, module in cast(Any, model.named_modules()):
            named = self.rules.get(name) == "vocabulary"
            divided = named and isinstance(module, nn.Embedding | nn.Linear)  # else it is of another stage
            if divided and len(whole := module.weight) >= LEAST_ROWS * ranks:
                parallel.parallelize_module(module, mesh, EMBEDS if isinstance(module, nn.Embedding) else GIVES_ALL)
                module.weight = shared.setdefault(id(whole), module.weight)

    def divide_attention(self, mesh: DeviceMesh, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `attend`, wrapped so that each rank computes its own of the heads on axis 2."""
        return partial(attend_by_head, mesh, attend, 2)

    def words(self) -> str:
        """Describe which modules are divided, those of all layers together."""
        kinds: dict[str, dict[str, None]] = {}
        for name, rule in self.rules.items():
            kinds.setdefault(rule, {})[re.sub(r"\b\d+\b", "*", name)] = None
        whole = f"; {self.whole} linear layers stay whole" if self.whole else ""
        return f"tensor, found by tracing: {'; '.join(f'{rule} {join_names([*kinds[rule]])}' for rule in kinds)}{whole}"


def infer_rules(workload: Workload, model: nn.Module, batch: Any, layout: Layout) -> InferredRules:
    """Find linear layers that meet in another (column, row), and tables of a vocabulary."""
    blocks = workload.blocks(model)
    names = {id(module): name for name, module in model.named_modules()}
    linears = {module: names[id(module)] for block in blocks for module in block.modules() if find_sides(module)}
    flow, rules = _HeadCounter(), dict[str, str]()
    inputs: dict[str, frozenset[str]] = {}

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        axes = next(((leaf.ndim, leaf.shape[-1]) for leaf in leaves if leaf.is_floating_point()), None)
        # a mask has other axes, and may be as wide
        flow.mark(leaves, lambda _, leaf: frozenset({STREAM} if (leaf.ndim, *leaf.shape[-1:]) == axes else ()))

    def leave(name: str, module: nn.Module, args: Any, out: Any) -> None:
        inputs[name] = flow.of(args)
        flow.mark(out, lambda *_: frozenset({name}))

    hooks = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    hooks += [module.register_forward_hook(partial(leave, name)) for module, name in linears.items()]
    try:
        run_on_fakes(workload, model, batch, flow)
    finally:
        for hook in hooks:
            hook.remove()
    for name, origins in inputs.items():  # in the order of their calls
        meets = origins and STREAM not in origins and all(rules.get(origin) == "column" for origin in origins)
        rules[name] = "row" if meets else "column"
    met = {origin for name, rule in rules.items() if rule == "row" for origin in inputs[name]}
    met -= {name for name, parts in flow.fused.items() if parts % layout.tensor}
    rules = {name: rule for name, rule in rules.items() if rule == "row" or name in met}
    for attention in (m for block in blocks for m in block.modules() if _has_heads(m)):
        flow.heads.add(attention.num_heads)
        rules |= {names[id(attention)]: "heads", names[id(attention.out_proj)]: "row"}
    _check_rules(rules, flow.heads, layout)
    whole = sum(name not in rules for name in linears.values())
    return InferredRules({**rules, **_find_tables(model, blocks)}, whole)


class _HeadCounter(Dataflow):
    """Notes into how many heads linear outputs are divided, too, and which are several in one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: set[int] = set()
        self.fused: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        origins = self.of(args[0]) - {STREAM} if getattr(func, "__name__", "") in SPLITS else NOWHERE
        if origins:
            axes = next((n for n in (2, 3) if found.shape[-n:].numel() == args[0].shape[-1] < found.numel()), 0)
            if axes == 2 and found.shape[-2] > 1:
                self.heads.add(found.shape[-2])
            self.fused |= dict.fromkeys(origins, found.shape[-3]) if axes == 3 else {}
        return found


def _has_heads(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Return whether it is torch's attention, of queries, keys and values of one width."""
    plain = isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None
    return plain and module.bias_k is None and not module.add_zero_attn


def find_sides(module: nn.Module) -> tuple[int, int] | None:
    """Return the axes (outputs, inputs) of the weight of a linear layer; None for other modules."""
    if isinstance(module, nn.Linear):
        return 0, 1
    return (1, 0) if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None  # of transformers


def _find_tables(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, str]:
    """Find embeddings outside of the layers, and heads of as many rows."""
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {name: module for name, module in model.named_modules() if id(module) not in inside}
    tables = {name: module for name, module in outside.items() if isinstance(module, nn.Embedding)}
    rows = {module.num_embeddings for module in tables.values()}
    heads = {n: m for n, m in outside.items() if isinstance(m, nn.Linear) and m.out_features in rows}
    whole = {id(m.weight) for m in tables.values() if m.padding_idx is not None or m.max_norm is not None}
    return {name: "vocabulary" for name, m in (tables | heads).items() if id(m.weight) not in whole}


def _check_rules(rules: Mapping[str, str], heads: set[int], layout: Layout) -> None:
    ranks, reason = layout.tensor, ""
    if not rules:
        reason = "no linear layers follow each other in repeated layers of the model; use parallel.strategy=fsdp"
    elif uneven := [count for count in heads if count % ranks]:
        fits = max(n for n in range(1, ranks) if not any(count % n for count in heads))
        reason = f"does not divide the {min(uneven)} heads of attention; use parallel.tensor={fits}"
    elif layout.sequence:
        reason = "parallel.sequence=true needs shard_rules in the Workload; use parallel.sequence=false"
    if reason:
        raise reject_value("parallel.tensor", ranks, reason, "conflict" if rules else "not-supported")


def find_placements(module: nn.Module, rule: str, ranks: int) -> dict[str, Placement]:
    """Return how parameters of a layer are divided; nothing if parts are not equal."""
    if rule == "heads":
        return {"in_proj_weight": Shard(0), "in_proj_bias": Shard(0)}
    sides = find_sides(module)
    if sides is None or not rule or cast(Any, module).weight.shape[sides[rule == "row"]] % ranks:
        return {}
    return {"weight": Shard(sides[0]), "bias": Shard(0)} if rule == "column" else {"weight": Shard(sides[1])}


def _attend_by_head(
    mesh: DeviceMesh,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """Return what torch's module does, from this rank's heads and without attention weights."""
    outer, PASS.site = PASS.site, getattr(module, SITE, PASS.site)
    ranks, rank, partial_sum = mesh.size(), mesh.get_local_rank(), Partial()
    weights = [module.in_proj_weight] + ([] if module.in_proj_bias is None else [module.in_proj_bias])
    whole = [w.redistribute(placements=[WHOLE]).to_local(grad_placements=[partial_sum]) for w in weights]
    own = [w.unflatten(0, (3, ranks, -1))[:, rank] for w in whole]  # those of queries, keys and values
    projected: list[Any] = []
    for index, x in enumerate((query, key, value)):
        x = take_local(x, mesh, WHOLE, partial_sum)
        x = F.linear(x if module.batch_first else x.transpose(0, 1), *(w[index] for w in own))
        heads = x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        projected.append(DTensor.from_local(heads, mesh, [Shard(1)], run_check=False))
    mask = None if attn_mask is None else _as_bias(attn_mask, projected[0].dtype)
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, module.num_heads))
    if key_padding_mask is not None:
        hidden = _as_bias(key_padding_mask, projected[0].dtype)[:, None, None]
        mask = hidden if mask is None else mask + hidden
    dropout = module.dropout if module.training else 0.0
    q, k, v = projected
    seen = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    found = module.out_proj(seen.transpose(1, 2).flatten(2))
    PASS.site = outer
    return found if module.batch_first else found.transpose(0, 1), None


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores; a mask of bools is true where nothing may look."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def _leave_dtensors(mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(DTensor, lambda x: take_local(x, mesh, WHOLE), (args, kwargs))


def _run_on_dtensors(mesh: DeviceMesh, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a layer with the stream as a DTensor; return plain tensors."""
    given, options = _enter_dtensors(mesh, (args, kwargs))
    with _LocalAttention(mesh):
        found = forward(*given, **options)
    return tree_map_only(DTensor, lambda x: x.redistribute(placements=[WHOLE]).to_local().clone(), found)


def _enter_dtensors(mesh: DeviceMesh, tree: Any) -> Any:
    """Return a tree with what has a gradient as DTensors, as its own would be."""

    def enter(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, [WHOLE], run_check=False) if x.requires_grad else x

    return tree_map_only(Tensor, enter, tree)


class _LocalAttention(TorchFunctionMode):
    """Computes attention on each rank's heads alone."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.attend = F.scaled_dot_product_attention

    def __enter__(self) -> "_LocalAttention":
        if self.attend is not TORCHS["scaled_dot_product_attention"]:  # one that draws by key, which no mode sees
            F.scaled_dot_product_attention = self.attend_by_head
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        F.scaled_dot_product_attention = self.attend

    def attend_by_head(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return attend_by_head(self.mesh, self.attend, query.ndim + HEADS, query, *args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, DTensor) for x in args[:3]):
            if func is TORCHS["scaled_dot_product_attention"]:
                return self.attend_by_head(*args, **(kwargs or {}))
            if func in FLASH:
                by_head = Shard(1)  # of (tokens, heads, features)
                found, *rest = func(*(take_local(x, self.mesh, by_head) for x in args[:3]), *args[3:])
                return DTensor.from_local(found, self.mesh, [by_head], run_check=False), *rest
        return func(*args, **(kwargs or {}))


def attend_by_head(
    mesh: DeviceMesh,
    attend: Callable[..., Tensor],
    axis: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Call `attend` with the heads of this rank, which are an axis of q, k and v; with all of them where they are not
    DTensors, or ranks cannot have as many."""
    if not any(isinstance(x, DTensor) for x in (q, k, v)):
        return attend(q, k, v, attn_mask, *args, **options)
    divides = all(x.shape[axis] % mesh.size() == 0 for x in (q, k, v))
    by_head: Placement = Shard(axis) if divides else WHOLE
    mask = attn_mask
    if mask is not None:
        per_head = divides and mask.ndim > 2 and mask.shape[HEADS] > 1
        placement: Placement = Shard(mask.ndim + HEADS) if per_head else WHOLE
        mask = take_local(mask, mesh, placement, Partial() if divides and not per_head else None)
    q, k, v = (take_local(x, mesh, by_head) for x in (q, k, v))
    outer = PASS.heads_of
    if divides:
        PASS.heads_of = mesh.get_local_rank(), mesh.size()
    try:
        found = attend(q, k, v, mask, *args, **options)
    finally:
        PASS.heads_of = outer
    return DTensor.from_local(found, mesh, [by_head], run_check=False)


def take_local(x: Tensor, mesh: DeviceMesh, placement: Placement, gradient: Placement | None = None) -> Tensor:
    """Return this rank's part; its gradient is `gradient`, if that is something else."""
    whole: Any = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [WHOLE], run_check=False)
    part = whole.redistribute(placements=[placement]).contiguous()
    local: Tensor = part.to_local(grad_placements=[gradient or placement])
    if local.requires_grad:  # DTensor takes the strides of a gradient for those of its tensor
        local.register_hook(lambda gradient: gradient.clone(memory_format=torch.contiguous_format))
    return local
