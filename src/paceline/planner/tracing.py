"""Build the cost model of a workload without formulas, such as a user's own, by tracing its code.

One pass forward and backward over a small batch is traced: products with their sides, element-wise traffic, kernels,
and live bytes. A second, larger batch shows what grows with the samples. A small model runs on the CPU. A large one
runs on fake tensors, which allocate and compute nothing, but make torch import its compiler, which takes longer.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.config import RunSpec
from paceline.config.registry import describe_error
from paceline.data.samples import as_samples, load_training_samples, samples_of, traits_of
from paceline.errors import UserError
from paceline.io.arguments import option_error
from paceline.layout import MAX_GROUP, Layout, layout_of
from paceline.nn import op_counter
from paceline.nn.keras_backend import has_keras
from paceline.nn.transformers_recording import patch_for_recording
from paceline.parallel.channels_last import prefers_channels_last
from paceline.parallel.parallelize import infer_division, reject_for_keras
from paceline.parallel.parameters import ParameterGroups, resolve_groups
from paceline.planner import eager_kernels as eager
from paceline.planner.candidates import SplitOptions
from paceline.planner.formulas.shape import LAUNCHES_PER_OPERATION, BlockShape, EagerTraffic, Matmul
from paceline.planner.training_cost import LengthStats, TrainingCostModel, dtype_sizes_of
from paceline.workload import Outline, Workload, build_workload

TRACED_BATCHES = (4, 8)
TraceMode = AbstractContextManager[Any]
MAX_SECONDS = 1.5  # by an estimate that is an upper bound; usually it takes half as long
SECONDS_PER_CALL, SECONDS_PER_ELEMENT, SECONDS_PER_DRAW, SECONDS_PER_PAIR = 2e-5, 1e-9, 4e-9, 2e-11
"""Of one core: to call an operation, to move an element, to draw one, to multiply and add a pair."""
DRAWS = ("uniform", "normal", "bernoulli", "dropout", "rand")
UNTOUCHED = {*op_counter.VIEWS, "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
FACTORED = 20  # products of a matrix with itself that take as long as to factor it


@dataclass
class RegionWork:
    """What one region of a model did in a pass; forward unless stated otherwise."""

    products: list[Matmul] = field(default_factory=list)
    moved: float = 0.0
    saved: float = 0.0
    given: float = 0.0
    """What layers are called with: all that is kept of a layer whose activations are computed again."""
    gathered: float = 0.0  # moved besides by convolutions, where they are compiled
    kernels: int = 0
    traffic: dict[str, eager.KernelTraffic] = field(default_factory=lambda: defaultdict(lambda: eager.NO_TRAFFIC))
    """As a GPU's kernels move it, forward and backward; with `_last` if images have channels innermost."""


class _RegionCounter(op_counter.OperationCounter):
    def __init__(self, more: float, grouped: bool) -> None:
        """A pass of the run has `more` times the samples; batch norms may be over groups of them."""
        super().__init__()
        self.more, self.grouped = more, grouped
        self.seen = {"layer": RegionWork(), "rest": RegionWork()}
        self.region = "rest"
        self.in_backward = False
        self.alive = eager.LiveBytes()

    def enter(self, region: str, given: Any = ()) -> None:
        """Count what follows as work of a repeated layer, called with `given`, or of the rest."""
        self.region = region
        self.seen[region].given += sum(leaf.numel() for leaf in tree_leaves(given) if isinstance(leaf, Tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.alive.track(out)
        return out

    def count(self, name: str, args: Any, out: Any) -> None:
        seen = self.seen[self.region]
        way = "backward" if self.in_backward else "forward"
        for form in ("", "_last"):
            seen.traffic[way + form] += eager.estimate_traffic(name, args, out, self.more, bool(form), self.grouped)
        if self.in_backward or name == "_to_copy":  # most are those of autocast
            return
        seen.kernels += 1
        seen.moved += op_counter.count_moved_elements(name, args, out)
        seen.gathered += eager.count_gathered(name, args, out)
        if op_counter.is_product(name):
            share = eager.estimate_kernel_efficiency(name, args, out)
            steps = eager.count_steps()
            seen.products += [Matmul(*sides, useful=share, steps=steps) for sides in _product_sides(name, args, out)]

    def split_backward_by_region(self) -> None:
        """Divide a backward pass that was not seen by region: each has as much of it as of the forward pass."""
        for ahead, back in (("forward", "backward"), ("forward_last", "backward_last")):
            each = [seen.traffic for seen in self.seen.values()]
            forward, backward = (sum((traffic[way] for traffic in each), eager.NO_TRAFFIC) for way in (ahead, back))
            for traffic in each:
                taken = backward.bytes * traffic[ahead].bytes / max(1.0, forward.bytes)
                kernels = backward.kernels * traffic[ahead].kernels / max(1, forward.kernels)
                traffic[back] = eager.KernelTraffic(taken, kernels)


def _product_sides(name: str, args: Any, out: Any) -> list[tuple[float, int, int]]:
    """Return (rows, inner, outer) of the products that an operation makes."""
    left, right = (args[1], args[2]) if name in ("addmm", "baddbmm") else (args[0], args[1])
    if name == "convolution":
        many, each = right.shape[0], right[0].numel()
        transposed = args[eager.TRANSPOSED_ARGUMENT]
        return [(left.numel() / many, many, each) if transposed else (out.numel() / many, each, many)]
    rows = float(left.numel() // left.shape[-1])
    if name in op_counter.PRODUCTS:
        return [(rows, left.shape[-1], right.shape[-1])]
    return [(rows, left.shape[-1], right.shape[-2]), (rows, right.shape[-2], left.shape[-1])]  # attention


def build_traced_cost_model(spec: RunSpec, samples: int | None = None, tokens: Any = None) -> TrainingCostModel:
    workload = build_workload(spec)
    outline = _read_outline(workload)
    if outline is None:
        workload.prepare(lambda text: None)
        outline = Outline(load_training_samples(workload), len(samples_of(workload, "test") or ()))
    data = outline.samples
    count = len(data)
    few, many = (min(size, count) for size in TRACED_BATCHES)
    keys = np.zeros(many, np.int64)
    costs = np.asarray(data.cost(np.arange(min(count, 1000))), dtype=float)
    ids = [np.argsort(np.abs(costs - costs.mean()), kind="stable")[:size] for size in (few, many)]  # of medium length
    batches = [data.batch(np.sort(chosen), keys[: len(chosen)]) for chosen in ids]
    model, groups, passes, how = _trace_model(workload, spec, batches)
    of_keras = has_keras(model)
    if of_keras and spec.parallel.strategy != "auto":
        reject_for_keras(spec, layout_of(spec))
    layers = workload.blocks(model)
    repeat = max(1, len(layers))
    inside, total = [p for layer in layers for p in layer.parameters()], count_params(model.parameters())
    growth = _SampleGrowth(few / outline.times, many / outline.times, dtype_sizes_of(spec.train).element_bytes)
    blocks = _build_blocks(passes, growth, repeat, count_params(inside), total)
    first, layer, rest = blocks
    held = count_params(p for p in inside if not p.requires_grad) if rest.params else groups.frozen
    layer = replace(layer, frozen_params=held / layer.repeat)
    blocks = (first, layer, replace(rest, frozen_params=float(groups.frozen - held)))
    splits = SplitOptions(recomputes=bool(layers), weights=not of_keras)
    tensor, pipeline = spec.parallel.tensor, spec.parallel.pipeline
    if tensor * pipeline > 1 and not of_keras:
        layout = Layout("ddp", 1, spec.train.global_batch, 1, tensor=tensor, pipeline=pipeline)
        inferred = infer_division(workload, model, lambda: batches[0], layout) != (None, None)  # or the reason why not
        splits = replace(splits, splits=(tensor,), layers=repeat, inferred=inferred)
        products = tuple(replace(product, split="outer") for product in layer.matmuls)
        blocks = (blocks[0], replace(blocks[1], matmuls=products), blocks[2])
    sample_bytes = sum(leaf.nbytes for leaf in tree_leaves(batches[0]) if isinstance(leaf, Tensor)) / few
    mean = float(costs.mean())
    return TrainingCostModel.of(
        spec,
        samples or count,
        workload=type(workload).__name__,
        blocks=blocks,
        traits=replace(traits_of(workload, data), compiles=not of_keras),
        unit=workload.unit or "samples",
        units_per_sample=mean if workload.unit else 1.0,
        sample_bytes=float(sample_bytes) * outline.times,
        probed=True,
        normalises_groups=_groups(spec) and prefers_channels_last(model),
        resident=hasattr(data, "resident"),
        held_out=outline.held_out,
        evaluation_chunk=workload.evaluation_chunk,
        splits=splits,
        lengths=LengthStats(float(costs.max()) / mean, float(costs.std()) / mean) if mean else LengthStats(),
        assumptions=(f"shape measured {how}, {total:,} parameters", *outline.assumptions),
    )


def _read_outline(workload: Workload) -> Outline | None:
    """Return what a workload declares about its data, with the samples in one form."""
    found = workload.outline()
    if found is None:
        return None
    if not isinstance(found, Outline):
        problem = f"outline() returned {type(found).__name__}; it must return paceline.Outline(samples, held_out)"
        raise option_error("workload", problem, "invalid-workload")
    samples = as_samples(found.samples, workload.collate, "workload: outline()")
    if not len(samples):
        raise option_error("workload", "outline() returned no samples to train on", "invalid-workload")
    return replace(found, samples=samples)


def _trace_model(
    workload: Workload, spec: RunSpec, batches: Sequence[Any]
) -> tuple[nn.Module, ParameterGroups, list[_RegionCounter], str]:
    """Return (the model, its groups of parameters, what a pass over each batch did, how that was seen)."""
    failures: dict[str, str] = {}
    for how, mode in _list_trace_modes(workload, batches):
        torch.manual_seed(spec.train.seed)
        try:
            with mode:
                model = workload.model()
                groups = resolve_groups(workload, spec.train, model)
            return model, groups, [_trace_pass(mode, model, workload, batch, spec) for batch in batches], how
        except UserError:
            raise
        except OverBudget:
            continue
        except Exception as error:
            failures[how] = describe_error(error)
    causes = "; ".join(f"{how}: {cause}" for how, cause in failures.items())
    problem = f"the model of {spec.workload} cannot be traced, {causes}"
    raise option_error("workload", problem, "user-code-failed") from None


def _list_trace_modes(workload: Workload, batches: Sequence[Any]) -> Iterator[tuple[str, TraceMode]]:
    """Yield modes to run a model in, the quickest first.

    Code that asks a tensor for its values, as Keras does for its seeds, cannot be run on fake ones: however large it
    is, the real model is.
    """
    on_cpu = f"on {len(tree_leaves(batches[-1])[0])} samples on the CPU"
    if not workload.asks_for_values:
        yield on_cpu, OpBudget()
        yield "on fake tensors", FakeTensorMode(allow_non_fake_inputs=True)
    yield on_cpu, nullcontext()


def _trace_pass(mode: TraceMode, model: nn.Module, workload: Any, batch: Any, spec: RunSpec) -> _RegionCounter:
    """Trace a pass forward and backward; what autograd saves is counted once per storage, without the weights."""
    samples = len(tree_leaves(batch)[0])
    counter = _RegionCounter((spec.parallel.micro_batch or spec.train.global_batch) / samples, _groups(spec))
    trained = [p for p in model.parameters() if p.requires_grad]
    own = {id(p) for p in model.parameters()}
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        fake = isinstance(tensor, FakeTensor)
        storage = tensor.untyped_storage()
        place = id(storage) if fake else storage.data_ptr()
        if id(tensor) not in own and place not in kept:
            kept.add(place)
            counter.seen[counter.region].saved += storage.nbytes()
        return tensor

    with mode:
        if isinstance(mode, FakeTensorMode):
            batch = tree_map_only(Tensor, mode.from_tensor, batch)
        saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with ExitStack() as regions, counter:
            for layer in workload.blocks(model):
                regions.enter_context(layer.register_forward_pre_hook(lambda _, given: counter.enter("layer", given)))
                regions.enter_context(layer.register_forward_hook(lambda *_: counter.enter("rest")))
            with saved, eager.simulate_cuda(spec.train.precision), patch_for_recording():
                total, _ = workload.loss(model, batch)
            counter.in_backward = True
            torch.autograd.grad(total, trained, allow_unused=True)
    counter.split_backward_by_region()
    return counter


def _groups(spec: RunSpec) -> bool:
    """Return whether a pass holds several groups of batch norm, as far as a run file without a layout shows."""
    wanted, samples = spec.train.batchnorm_group, spec.parallel.micro_batch or spec.train.global_batch
    return wanted not in ("as_is", "sync") and samples > (wanted if isinstance(wanted, int) else MAX_GROUP)


def _build_blocks(
    passes: list[_RegionCounter], growth: "_SampleGrowth", repeat: int, inside: int, total: int
) -> tuple[BlockShape, ...]:
    layer, rest = ([one.seen[region] for one in passes] for region in ("layer", "rest"))
    kept = sum(growth.each(seen[0].saved, seen[-1].saved) for seen in (layer, rest))
    more = growth.many - growth.few
    rest[-1].saved += more * max(0.0, eager.find_peak_growth(passes[0].alive, passes[-1].alive, more) - kept)
    if not inside:  # nothing is repeated: the whole is one layer
        layer, rest, repeat, inside = rest, [RegionWork(), RegionWork()], 1, total
    middle = _build_block("layer", repeat, inside / repeat, layer, growth)
    ends = _build_block("rest", 1, float(total - inside), rest, growth)
    return (BlockShape("first", 1, 0.0, (), None, 0.0, 0.0, 0.0, 0.0, 0), middle, ends)


def count_params(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters)


@dataclass(frozen=True)
class _SampleGrowth:
    """What each sample of the run adds, from a pass over a few of its samples and one over more."""

    few: float
    many: float
    element: float

    def each(self, a: float, b: float) -> float:
        more = self.many - self.few
        return max(0.0, (b - a) / more if more else b / self.many)

    def fixed(self, a: float, b: float) -> float:
        """Return what there is without any sample."""
        return max(0.0, b - self.many * self.each(a, b))


def _build_block(name: str, repeat: int, params: float, seen: list[RegionWork], growth: _SampleGrowth) -> BlockShape:
    """Build one of `repeat` equal blocks, per sample."""
    small, large = seen[0], seen[-1]
    products = [replace(product, rows=product.rows / growth.many) for product in large.products]
    if len(small.products) == len(large.products):
        pairs = zip(small.products, large.products, strict=True)
        products = [replace(b, rows=growth.each(a.rows, b.rows)) for a, b in pairs]
    share = max(1, len(products) // repeat)
    if products != products[:share] * repeat:  # layers of different sizes: each is taken for the mean of all
        products, share = [replace(one, rows=one.rows / repeat) for one in products], len(products)
    saved = growth.each(small.saved, large.saved) / growth.element / repeat
    return BlockShape(
        *(name, repeat, params, tuple(product for product in products[:share] if product.rows > 0), None),
        moved_elements=growth.each(small.moved, large.moved) / repeat,
        saved_split_elements=0.0,
        saved_whole_elements=saved,
        edge_elements=growth.each(small.given, large.given) / repeat or saved,
        gathered_elements=growth.each(small.gathered, large.gathered) / repeat,
        kernels=LAUNCHES_PER_OPERATION * large.kernels / repeat,
        eager=_build_traffic(repeat, small, large, growth),
        channels_last=_build_traffic(repeat, small, large, growth, "_last"),
    )


def _build_traffic(
    repeat: int, small: RegionWork, large: RegionWork, growth: _SampleGrowth, form: str = ""
) -> EagerTraffic:
    ways = [(small.traffic[way + form], large.traffic[way + form]) for way in ("forward", "backward")]
    unit = growth.element * repeat
    return EagerTraffic(
        *(growth.each(a.bytes, b.bytes) / unit for a, b in ways),
        *(growth.fixed(a.bytes, b.bytes) / unit for a, b in ways),
        *(b.kernels / repeat for _, b in ways),
    )


class OverBudget(Exception):
    """Tracing on the CPU would take too long."""


class OpBudget(op_counter.DispatchObserver):
    """`with OpBudget(): …` raises OverBudget before the operation that would exceed `MAX_SECONDS`."""

    spent_s = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) not in UNTOUCHED:
            self.spent_s += estimate_op_s(name, args)
            if self.spent_s > MAX_SECONDS:
                raise OverBudget
        return func(*args, **(kwargs or {}))


def estimate_op_s(name: str, args: Any) -> float:
    """Estimate an upper bound of the time of an aten operation from its arguments."""
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if given:
        elements = sum(x.numel() for x in given) + _broadcast_elements(given)
    else:  # factory functions have the sides of their tensor
        elements = max((math.prod(x) for x in args if isinstance(x, list | tuple)), default=0)
    each = SECONDS_PER_DRAW if any(word in name for word in DRAWS) else SECONDS_PER_ELEMENT
    return SECONDS_PER_CALL + each * elements + SECONDS_PER_PAIR * _count_multiply_adds(name, given)


def _broadcast_elements(given: list[Tensor]) -> int:
    """Count the elements of the result, if the operation is element-wise."""
    try:
        return math.prod(np.broadcast_shapes(*(x.shape for x in given)))  # torch's imports sympy
    except ValueError:
        return 0


def _count_multiply_adds(name: str, given: list[Tensor]) -> float:
    products = 2.0 if "backward" in name else 1.0
    if name.startswith("convolution"):
        *images, weight = given[: 3 if products > 1 else 2]
        return products * max(x.numel() / x.shape[1] for x in images) * weight.numel()
    if name in op_counter.PRODUCTS:
        left, right = given[1:3] if "add" in name else given[:2]
        return left.numel() * right.shape[-1]
    if "attention" in name:
        return 2 * products * given[0].numel() * max(x.shape[-2] for x in given[:3])
    if "_rnn" in name:
        return products * given[0].numel() / given[0].shape[-1] * sum(x.numel() for x in given[1:])
    if "linalg" in name:
        return FACTORED * given[0].numel() * given[0].shape[-1]
    return 0.0
