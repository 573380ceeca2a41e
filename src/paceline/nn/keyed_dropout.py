"""Dropout drawn from sample keys: masks are a function of (sample, module, position), the same on any layout.

While a pass runs, torch's dropout functions draw from the keys of its samples, whoever calls them: `nn.Dropout`, the
attention of torch and of other libraries, a model's own forward. Modules whose forward mentions dropout are sites, each
with masks of its own; a site that is called again in the same pass draws others.
"""

import inspect
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from importlib.util import find_spec
from math import prod
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from paceline.nn.attention import hash32

STAGE_KEYS = "sample_keys"  # argument of a stage of a pipeline
SITE = "dropout_site"  # attribute of a module that is one
ALPHA = -1.7580993408473766  # where SELU saturates
TORCHS: dict[str, Callable[..., Tensor]] = {
    name: getattr(F, name)
    for name in (
        *("dropout", "dropout1d", "dropout2d", "dropout3d"),
        *("alpha_dropout", "feature_alpha_dropout", "scaled_dot_product_attention", "multi_head_attention_forward"),
    )
}


Noise = tuple[Sequence[int], int, int]
"""Arguments of `compare_noise`: rows, columns and threshold."""


@dataclass(eq=False)
class Site:
    """Where a model drops; `start` has a random number for each sample, `calls` counts those of a pass."""

    name: str
    batch_second: bool = False  # samples lie along the second dimension, without batch_first
    start: Tensor | None = None
    calls: int = 0
    last: Noise | None = None  # of the first call in the last pass
    steady: bool = False  # whether the pass before had the same
    made: Tensor | None = None  # the mask of the first call, if it was made ahead

    @property
    def number(self) -> int:
        return zlib.crc32(self.name.encode()) - 2**31

    def draw_kept(self, shape: Sequence[int], p: float, whole_channels: bool = False) -> Tensor | None:
        """Return the mask of what is kept; None if no dimension can be that of the samples."""
        if self.start is None:
            return None
        samples = len(self.start)
        second = len(shape) > 2 and shape[1] == samples and (self.batch_second or shape[0] % samples > 0)
        if not second and shape[0] % samples:
            PASS.misfits.add(self.name)
            return None
        start, self.calls = self.start, self.calls + 1
        if self.calls > 1:
            start = hash32(start + (self.calls - 1) * 0x3C6EF35F)
        drawn = [*shape[:2], *[1] * (len(shape) - 2)] if whole_channels else list(shape)
        if second:
            drawn[0], drawn[1] = drawn[1], drawn[0]
        rows: Sequence[int] = ()
        columns = prod(drawn) // samples
        if not whole_channels and not second and prod(shape[:-2]) > samples:
            rows, columns = (prod(shape[:-2]) // samples, shape[-2]), shape[-1]
        wanted, made = (rows, columns, int((p - 0.5) * 2**32)), None
        if self.calls == 1 and not torch.compiler.is_compiling():
            self.steady, self.last, made = self.last == wanted, wanted, self.made if self.last == wanted else None
        kept = (compare_noise(start, *wanted) if made is None else made).view(drawn)
        return kept.transpose(0, 1) if second else kept


@dataclass(eq=False)
class Pass:
    """The forward and backward pass that is running in this process, if any."""

    samples: int = 0
    counted: bool = True  # whether its samples have weight
    heads_of: tuple[int, int] = (0, 1)  # (rank, ranks) that divide the heads of the attention that is computed
    site: Site = field(default_factory=lambda: Site(""))
    misfits: set[str] = field(default_factory=set)  # modules that could not tell samples from each other


PASS = Pass()
"""A plain object, whose attributes compiled code reads and writes."""
ROOT = PASS.site
"""Of what is dropped outside of any module that mentions dropout."""


def compare_noise(start: Tensor, rows: Sequence[int], columns: int, threshold: int) -> Tensor:
    """Return (samples times rows, columns): whether the random number of each element is at least the threshold.

    `rows` are sides of scores of attention, whose elements keep their numbers where texts are padded to another length.
    """
    for side in rows:
        start = hash32(start[:, None] ^ hash32(torch.arange(side, device=start.device, dtype=torch.int32))).flatten()
    if start.is_cuda and not torch.compiler.is_compiling() and has_triton():
        from paceline.nn.triton_kernels import launch_compare_noise

        return launch_compare_noise(start, columns, threshold)
    column = hash32(torch.arange(columns, device=start.device, dtype=torch.int32))
    return hash32(start[:, None] ^ column) >= threshold


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def drop(name: str, x: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
    """Do what torch's function of that name does, by key."""
    channels = name[-2:] in ("1d", "2d", "3d") or name.startswith("feature")
    drops = training and 0 < p < 1 and PASS.site.start is not None
    kept = PASS.site.draw_kept(x.shape, p, channels) if drops else None
    if kept is None:
        return TORCHS[name](x, p, training, inplace)
    if name.endswith("alpha_dropout"):
        scale = ((ALPHA**2 * p + 1) * (1 - p)) ** -0.5
        return torch.where(kept, x, ALPHA) * scale - scale * ALPHA * p
    if channels:
        kept = kept.expand_as(x)
    dropped = mask_and_scale(x, kept, 1 / (1 - p))
    return x.copy_(dropped) if inplace else dropped


class _MaskAndScale(torch.autograd.Function):
    """Keeps the mask alone: what torch derives from its product of the three keeps the input too, to derive it again.

    Gradients are scaled as values are, where torch first rounds the scale to their type.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return _multiply_fused(x, kept, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _multiply_fused(gradient, *ctx.saved_tensors, ctx.scale), None, None


_multiply_fused = torch.ops.aten.native_dropout_backward


def mask_and_scale(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    """Return x * kept * scale, in one kernel; compilers decide by themselves what they keep."""
    product = _multiply_fused if torch.compiler.is_compiling() else _MaskAndScale.apply
    dropped: Tensor = product(x, kept, scale)
    return dropped


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do what torch's scaled_dot_product_attention does, its dropout by key: no fused kernel takes a mask of it."""
    rank, ranks = PASS.heads_of
    shape = [*query.shape[:-1], key.shape[-2]]
    if ranks > 1:  # a head has the same mask on whichever rank it is
        shape[-3] *= ranks
    kept = PASS.site.draw_kept(shape, dropout_p) if 0 < dropout_p < 1 else None
    if kept is None:
        given = query, key, value, attn_mask, dropout_p, is_causal
        return TORCHS["scaled_dot_product_attention"](*given, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1).to(value.dtype)
    own = kept if ranks == 1 else kept.chunk(ranks, -3)[rank]
    return mask_and_scale(weights, own, 1 / (1 - dropout_p)) @ value


def make_keyed(name: str) -> Callable[..., Tensor]:
    """Return what takes the place of torch's function of that name."""
    torchs = cast(FunctionType, TORCHS[name])
    if name == "scaled_dot_product_attention":
        return attend
    if name == "multi_head_attention_forward":  # a copy: the compiler looks into it, and not into torch's
        return FunctionType(torchs.__code__, torchs.__globals__, name, torchs.__defaults__, torchs.__closure__)

    @wraps(torchs)
    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return drop(name, x, p, training, inplace)

    return dropout


KEYED = {name: make_keyed(name) for name in TORCHS}


@cache
def fill_compiler_tables() -> None:
    """Let the compiler know torch's functions, and not those that take their place."""
    from torch._dynamo import trace_rules

    torch.overrides.get_testing_overrides()
    rules = cast(dict[Any, Any], trace_rules.get_torch_obj_rule_map())
    for name, function in KEYED.items():  # it may have looked while a pass was running
        if rule := rules.pop(function, None):
            rules[TORCHS[name]] = rule


class KeyedPasses:
    """The sites of a model, and the passes in which they draw from the keys of samples."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.sites = [ROOT, *(site for part in parts for site in list_sites(part))]
        self.numbers = torch.tensor([site.number for site in self.sites], dtype=torch.int32)[:, None]

    @contextmanager
    def running(self, keys: Tensor | None, counted: bool = True) -> Iterator[None]:
        """Draw from these keys in what runs inside: forward, and after `end_forward` backward."""
        PASS.counted, PASS.site = counted, ROOT
        if keys is None:
            yield
            return
        if "torch._dynamo" in sys.modules:
            fill_compiler_tables()
        for name, function in KEYED.items():
            setattr(F, name, function)
        try:
            self.begin_forward(keys)
            yield
        finally:
            PASS.samples = 0
            for name, function in TORCHS.items():
                setattr(F, name, function)
            for site in self.sites:
                site.start = site.made = None

    def begin_forward(self, keys: Tensor) -> None:
        """Derive a random number of each sample for each site."""
        PASS.samples, self.numbers = len(keys), self.numbers.to(keys.device)
        starts = hash32(self.numbers + hash32((keys & 0xFFFFFFFF).to(torch.int32)))
        for site, start in zip(self.sites, starts.unbind(), strict=True):
            site.start, site.calls, site.made = start, 0, None
        steady = [site for site in self.sites if site.steady]
        for wanted in {site.last for site in steady}:  # to launch a kernel takes longer than it runs
            assert wanted is not None
            alike = [site for site in steady if site.last == wanted]
            kept = compare_noise(torch.cat([cast(Tensor, site.start) for site in alike]), *wanted)
            for site, made in zip(alike, kept.view(len(alike), -1).unbind(), strict=True):
                site.made = made

    def take_keys(self, stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a forward pass of a stage with the keys among its arguments."""
        keys = kwargs.pop(STAGE_KEYS, None)
        if keys is not None:
            self.begin_forward(keys)
        return args, kwargs

    def end_forward(self) -> None:
        """Count calls anew: recomputed layers must draw the same masks."""
        for site in self.sites:
            site.calls = 0


def run_at_site(site: Site, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    outer, PASS.site = PASS.site, site
    found = forward(*args, **kwargs)
    PASS.site = outer
    return found


def run_module(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module that is a site; one compilation serves all of a class."""
    return run_at_site(getattr(module, SITE), type(module).forward, module, *args, **kwargs)


def run_again(forward: Callable[..., Any], sites: Sequence[Site]) -> Callable[..., Any]:
    """Return this call of a layer, to be computed twice: its sites draw the same both times."""
    began = [(site.start, site.calls) for site in sites]
    for site in sites:
        site.steady, site.made = False, None  # its mask is not to stay in memory

    def run(*args: Any, **kwargs: Any) -> Any:
        for site, (start, calls) in zip(sites, began, strict=True):
            site.start, site.calls = start, calls
        return forward(*args, **kwargs)

    return run


def mark_sites(model: nn.Module) -> None:
    """Attach a dropout site, named after the module, to each module that calls dropout itself."""
    sequence_first = any(getattr(module, "batch_first", True) is False for module in model.modules())
    for name, module in model.named_modules():
        if name and drops_itself(module) and not hasattr(module, SITE):
            site = Site(name, batch_second=sequence_first and not isinstance(module, nn.MultiheadAttention))
            setattr(module, SITE, site)
            replaced = vars(module).get("forward")
            module.forward = partial(run_at_site, site, replaced) if replaced else MethodType(run_module, module)


def drops_itself(module: nn.Module) -> bool:
    """Return whether its forward mentions dropout, of a probability that is not known to be 0."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    found = [getattr(module, name, name) for name in find_dropout_names(cast(Any, type(module)))]
    numbers = [value.p if isinstance(value, _DropoutNd) else value for value in found]
    return any(n > 0 if isinstance(n, int | float) else not isinstance(n, nn.Module | None) for n in numbers)


@cache
def find_dropout_names(kind: Any) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None or kind.__module__.startswith("paceline."):
        return ()
    return tuple(name for name in code.co_names if "drop" in name)


def list_sites(model: nn.Module) -> list[Site]:
    found = [getattr(module, SITE, ()) for module in model.modules()]
    return [site for own in found for site in ((own,) if isinstance(own, Site) else own)]
