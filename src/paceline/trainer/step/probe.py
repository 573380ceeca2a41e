"""Find out by passes without effect whether a step can be recorded: a graph repeats nothing that Python did."""

import random
import statistics
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import paceline
from paceline.config.registry import StepWork
from paceline.data.prefetch import MicroBatch
from paceline.data.samples import preserve_generators
from paceline.execution import NoGraphReason
from paceline.nn.op_counter import OperationCounter
from paceline.nn.transformers_recording import patch_for_recording
from paceline.parallel.channels_last import use_channels_last
from paceline.parallel.precision import autocast
from paceline.trainer.step.step import Step

PLAIN = (bool, int, float, str)
TIMED_PASSES = 5
AHEAD_CYCLES = 50_000_000
"""Of the device, about 25 ms: in these the host fills the queue of launches, which holds about 1,000."""
LEAST_GAIN = 0.97  # of the time, for a format other than the user's
Attribute = tuple[str, str]  # (module, attribute)


@dataclass(frozen=True)
class ProbeResult:
    """What is known of a step once its passes were made."""

    reason: NoGraphReason = NoGraphReason.RECORDED
    detail: str = ""
    draws: bool = False  # whether it draws on the device, as nn.Dropout does


def probe_step(step: Step, batch: Any) -> ProbeResult:
    """Run passes over a batch and return whether its step can be recorded; restore what they changed."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not leaves or any(leaf.device.type != "cpu" or leaf.layout is not torch.strided for leaf in leaves):
        return ProbeResult(NoGraphReason.NOT_ON_HOST)
    if not getattr(step.state.optimizer, "_step_supports_amp_scaling", False):
        return ProbeResult(NoGraphReason.OPTIMIZER)
    with _passes_without_effect(step, batch) as micro:
        _pass(step, micro)  # tables may be made, layers compiled, and attributes set once
        before = _host_draws()
        generator = torch.cuda.default_generators[step.device.index or 0]
        generator.manual_seed(0)
        with restore_after(step) as changed:
            try:
                with patch_for_recording():
                    _pass(step, micro, waits="error")
            except RuntimeError as error:
                if "synchronizing CUDA operation" not in str(error):
                    raise
                return ProbeResult(NoGraphReason.ASKS_DEVICE, locate_user_line(error))
            if _host_draws() != before:
                return ProbeResult(NoGraphReason.DRAWS_ON_HOST)
            if differing := changed():
                return ProbeResult(NoGraphReason.COUNTS_STEPS, ".".join(filter(None, differing[0])))
        return ProbeResult(draws=generator.get_offset() > 0)


def count_work(step: Step, batch: Any, times: float) -> StepWork:
    """Count the work of a step, which is `times` that of the forward pass over a batch."""
    precise = autocast(step.train.precision, step.device)
    with ExitStack() as held:
        micro = held.enter_context(_passes_without_effect(step, batch))
        given = held.enter_context(step.running_pass(micro))
        with torch.no_grad(), precise, OperationCounter() as counter:
            step.workload.loss(step.state.model.unwrapped, given)
    return StepWork(counter.operations, counter.moved_elements * times)


def measure_channels_last(step: Step, batch: Any, recorded: bool) -> bool:
    """Return whether the device takes less time for the passes over a batch with channels last.

    Formats alternate, so that other load affects both. Passes of a step that is to be recorded are recorded too: the
    host may launch the many kernels of a deep network more slowly than the device runs them.
    """
    times = list[float](), list[float]()
    with _passes_without_effect(step, batch) as micro:
        passes: list[Callable[[], None]] = [partial(_pass_in_format, step, micro, last) for last in (False, True)]
        for run in passes:  # kernels are chosen
            run()
        if recorded:
            passes = [_record_pass(run).replay for run in passes]
        for _ in range(TIMED_PASSES):
            for run, found in zip(passes, times, strict=True):
                found.append(_time_pass(run))
    first_s, last_s = map(statistics.median, times)
    return last_s < LEAST_GAIN * first_s


def _pass_in_format(step: Step, micro: MicroBatch, last: bool) -> None:
    handles = use_channels_last(step.state.model.unwrapped) if last else ()
    try:
        _pass(step, micro)
    finally:
        for handle in handles:
            handle.remove()


@cache
def recording_stream() -> torch.cuda.Stream:
    """Return the stream of all recorders of this process: what libraries work in is kept once for each stream."""
    return torch.cuda.Stream()


def _record_pass(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph, side = torch.cuda.CUDAGraph(), recording_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        run()
    return graph


def _time_pass(run: Callable[[], None]) -> float:
    """Return the seconds of a pass on the device, which has work before the host launches more."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


@contextmanager
def _passes_without_effect(step: Step, batch: Any) -> Iterator[MicroBatch]:
    step.state.model.unwrapped.train()
    with preserve_generators(), restore_after(step):
        yield step.move_to_device(MicroBatch(batch, 1))


def _pass(step: Step, micro: MicroBatch, waits: str = "default") -> None:
    """Run forward and backward; `waits="error"` raises where the host waits for the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(waits)
    try:
        step.forward_backward(step.state.model.unwrapped, micro, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        step.state.model.local_parameters.clear_gradients()


def _host_draws() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002 - it is what models draw from
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2], torch.get_rng_state().numpy().tobytes()


@contextmanager
def restore_after(step: Step) -> Iterator[Callable[[], list[Attribute]]]:
    """Restore buffers and plain attributes; yield a function that names changed ones."""
    modules: list[tuple[str, nn.Module]] = list(step.state.model.unwrapped.named_modules())
    buffers = [(name, module, key, b, b.clone()) for name, module in modules for key, b in _buffers(module)]
    holders: list[tuple[str, Any]] = [*modules, ("", step.workload)]
    plain = [(name, holder, _plain_attributes(holder)) for name, holder in holders]

    def changed() -> list[Attribute]:
        rebound = [(name, key) for name, module, key, b, _ in buffers if module._buffers.get(key) is not b]
        now = ((name, old, item) for name, holder, old in plain for item in _plain_attributes(holder).items())
        return rebound + [(name, key) for name, old, (key, value) in now if old.get(key) != value]

    try:
        yield changed
    finally:
        for _, module, key, buffer, value in buffers:
            buffer.copy_(value)
            module._buffers[key] = buffer
        for _, holder, old in plain:
            vars(holder).update(old)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(key, buffer) for key, buffer in module._buffers.items() if buffer is not None]


def _plain_attributes(holder: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(holder).items() if type(value) in PLAIN}


def locate_user_line(error: BaseException) -> str:
    """Return the line of the user's code that raised an error; "" if none did, as in a backward pass."""
    ours = (str(Path(paceline.__file__).parent), str(Path(torch.__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
