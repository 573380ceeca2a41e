"""Check the devices: visible and free, as fast as their data sheet, and not throttled by heat or power."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from paceline.diagnostics.results import CheckContext, CheckResult, Health
from paceline.hardware.catalogue import match_driver_name
from paceline.io.format import number, size
from paceline.planner.calibration.calibrate import time_stretches
from paceline.runlog.machine import find_device_handles, load_nvml

FREE_SHARE = 0.9
MATRIX_SIZE, CPU_MATRIX_SIZE = 8192, 1024
COPY_ELEMENTS = 1 << 28
PEER_BYTES = 64 << 20
MIN_FREE_BYTES = 4e9
MEASURED_S, LOADED_S, PEER_S = 0.3, 0.2, 0.05
USUAL_FRACTION, COPY_FRACTION = 0.7, 0.75
"""Of the peak that matrix products and copies reach, unless the catalogue has a measured one."""
SLOW, TOO_SLOW = 0.85, 0.6
BEHIND_OTHERS = 0.85
SLOW_LINK = 0.3
THROTTLE_REASONS = {0x8: "by a hardware slow-down", 0x20: "by heat", 0x40: "by heat", 0x80: "by power"}
"""Bits of NVML. The power limit alone lowers the clocks of every busy device, and is not counted."""
_result = partial(CheckResult, "devices")


def check_visible(context: CheckContext) -> Iterator[CheckResult]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield _result("CUDA devices", "none: runs use the cores", verdict=Health.NOT_HERE)
        return
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    same = len(set(names)) == 1
    limited = context.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"{count} × {names[0]}" if same else ", ".join(names)
    found += f", by CUDA_VISIBLE_DEVICES={limited}" if limited is not None else ""
    wanted = context.spec.parallel.ranks if context.spec is not None else 1
    if count < min(wanted, context.rank_info.local_world if context.rank_info.world > 1 else wanted):
        remedy = f"parallel.ranks={count}, or share them with  parallel.backend=gloo"
        yield _result("CUDA devices", found, f"{wanted} for the run", Health.WRONG, remedy)
    else:
        verdict = Health.OK if same else Health.LOOK
        yield _result("CUDA devices", found, "of one kind", verdict, "all wait for the slowest")


def check_free_memory(context: CheckContext) -> Iterator[CheckResult]:
    memory = {index: torch.cuda.mem_get_info(index) for index in _device_indices()}
    busy = {index: (free, total) for index, (free, total) in memory.items() if free < FREE_SHARE * total}
    for index, (free, total) in busy.items():
        found = f"cuda:{index}: {size(free)} free of {size(total)}"
        yield _result("free memory", found, "all of it", Health.LOOK, "nvidia-smi  shows who has the rest")
    if memory and not busy:
        least = min(free for free, _ in memory.values())
        yield _result("free memory", f"{size(least)} or more on each device", "all of it")


def check_speed(context: CheckContext) -> Iterator[CheckResult]:
    """Compare matmul and copy rates of each device with its data sheet and the others; look for throttling."""
    products, copies = {}, {}
    for index in _device_indices():
        if torch.cuda.mem_get_info(index)[0] < MIN_FREE_BYTES:
            yield _result("speed", f"cuda:{index} has too little free memory to measure", verdict=Health.LOOK)
            continue
        products[index], copies[index] = _measure_flops_s(index), _measure_copy_bytes_s(index)
        torch.cuda.empty_cache()
    for index in products:
        kind = match_driver_name(torch.cuda.get_device_name(index))
        flops_s = kind.peak_flops_s("bf16") * (kind.matmul_fraction or USUAL_FRACTION) if kind else None
        bytes_s = kind.bandwidth_bytes_s * COPY_FRACTION if kind else None
        yield judge_rate(f"products of cuda:{index}", products[index], flops_s, products, "TFLOP/s", 1e12)
        yield judge_rate(f"memory of cuda:{index}", copies[index], bytes_s, copies, "GB/s", 1e9)
    yield from check_throttling(context, products)


def judge_rate(
    check: str, rate: float, nominal: float | None, rates: Mapping[int, float], unit: str, scale: float
) -> CheckResult:
    def format_rate(value: float) -> str:
        return f"{number(value / scale, 3)} {unit}"

    median = statistics.median(rates.values())
    share = rate / nominal if nominal else 1.0
    behind = rate < BEHIND_OTHERS * median
    expected = f"about {format_rate(nominal)}, of its data sheet" if nominal else "its kind is not in the catalogue"
    expected += f"; the median here is {format_rate(median)}" if behind else ""
    verdict = Health.WRONG if share < TOO_SLOW or behind else Health.LOOK if share < SLOW else Health.OK
    remedy = "nvidia-smi -q -d PERFORMANCE,CLOCK  shows the reason; every step waits for the slowest device"
    return _result(check, format_rate(rate), expected, verdict, remedy)


def check_throttling(context: CheckContext, flops_s: Mapping[int, float]) -> Iterator[CheckResult]:
    """Ask the driver for clocks, heat and memory errors while each device multiplies at its measured rate."""
    if not flops_s:
        return
    nvml = load_nvml()
    if nvml is None:
        remedy = "pip install nvidia-ml-py"
        yield _result("heat and power", "not asked", verdict=Health.NOT_HERE, remedy=remedy)
        return
    found: list[str] = []
    for index, handle in enumerate(find_device_handles(nvml, max(flops_s) + 1, context.environ)):
        if index in flops_s:
            facts = _query_under_load(index, flops_s[index], partial(_query_driver, nvml, handle))
            watts = f"{facts.get('watts', 0):.0f} of {facts.get('most_watts', 0):.0f} W"
            found.append(f"{facts.get('heat', '?')} °C, {watts}")
            yield from _check_driver_facts(index, facts)
    yield _result("heat and power", "; ".join(found), "full clocks")


def _check_driver_facts(index: int, facts: Mapping[str, Any]) -> Iterator[CheckResult]:
    if reasons := {text for bit, text in THROTTLE_REASONS.items() if int(facts.get("reasons", 0)) & bit}:
        found = f"cuda:{index} slowed {', '.join(sorted(reasons))}, at {facts.get('heat', '?')} °C"
        yield _result("heat and power", found, "full clocks", Health.WRONG, "look at cooling and power supply")
    if facts.get("most_watts", 0) < 0.95 * facts.get("usual_watts", 0):
        found = f"cuda:{index} is limited to {facts['most_watts']:.0f} W of {facts['usual_watts']:.0f} W"
        remedy = f"sudo nvidia-smi -i {index} -pl {facts['usual_watts']:.0f}"
        yield _result("power limit", found, "its usual one", Health.LOOK, remedy)
    if facts.get("memory_errors"):
        found = f"cuda:{index}: {facts['memory_errors']} errors that could not be corrected"
        yield _result("memory errors", found, "none", Health.WRONG, f"sudo nvidia-smi -i {index} -r")


def _query_under_load(index: int, flops_s: float, query: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    a = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=f"cuda:{index}", dtype=_half_dtype())
    target = torch.empty_like(a)
    for _ in range(int(LOADED_S * flops_s / (2 * MATRIX_SIZE**3)) + 1):
        torch.mm(a, a, out=target)
    time.sleep(LOADED_S / 2)
    found = query()
    torch.cuda.synchronize(index)
    return found


def _query_driver(nvml: Any, device: Any) -> dict[str, Any]:
    queries: dict[str, Callable[[], Any]] = {
        "heat": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        "watts": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
        "most_watts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1e3,
        "usual_watts": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(device) / 1e3,
        "reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device),
        "memory_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
    }
    found = {}
    for name, query in queries.items():
        with suppress(nvml.NVMLError, AttributeError):
            found[name] = query()
    return found


def check_peers(context: CheckContext) -> Iterator[CheckResult]:
    indices = _device_indices()
    if len(indices) < 2:
        return
    kind, rates = match_driver_name(torch.cuda.get_device_name(0)), []
    expected, remedy = "direct, and what was sent", "nvidia-smi topo -p2p r;  IOMMU off or iommu=pt, ACS off"
    for a, b in ((a, b) for a in indices for b in indices if a != b):
        correct, rate = _measure_peer_copy(a, b)
        rates.append(rate)
        if not correct:
            yield _result("between devices", f"cuda:{a} to cuda:{b}: wrong numbers", expected, Health.WRONG, remedy)
        elif not torch.cuda.can_device_access_peer(a, b):
            found = f"cuda:{a} to cuda:{b}: {size(rate)}/s, through the host"
            yield _result("between devices", found, expected, Health.LOOK, remedy)
    link = f"{kind.link}, {size(kind.link_bytes_s)}/s" if kind else ""
    verdict = Health.LOOK if kind and min(rates) < SLOW_LINK * kind.link_bytes_s else Health.OK
    found = f"{size(min(rates))}/s to {size(max(rates))}/s"
    yield _result("between devices", found, link, verdict, "nvidia-smi topo -m  shows how they are connected")


def measure_core_rate() -> float:
    """Return the FLOP/s of products on this process's cores, the best of several tries."""
    a = torch.randn(CPU_MATRIX_SIZE, CPU_MATRIX_SIZE)
    return 2 * CPU_MATRIX_SIZE**3 / min(time_stretches(lambda: a @ a, MEASURED_S, 0.0, least=3))


def _device_indices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []


def _half_dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def _measure_flops_s(index: int) -> float:
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=f"cuda:{index}", dtype=_half_dtype()) for _ in range(2))
    return 2 * MATRIX_SIZE**3 / _time_on_device(lambda: torch.mm(a, b), index)


def _measure_copy_bytes_s(index: int) -> float:
    source = torch.ones(COPY_ELEMENTS, device=f"cuda:{index}")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _time_on_device(lambda: target.copy_(source), index)


def _measure_peer_copy(a: int, b: int) -> tuple[bool, float]:
    """Return (whether the numbers arrived, bytes/s)."""
    source = torch.arange(PEER_BYTES // 4, device=f"cuda:{a}", dtype=torch.int32)
    target = torch.empty_like(source, device=f"cuda:{b}")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(a)

    rate = source.nbytes / _time_on_device(copy, b, PEER_S)
    return torch.equal(target.cpu(), source.cpu()), rate


def _time_on_device(work: Callable[[], object], index: int, measured_s: float = MEASURED_S) -> float:
    return statistics.median(time_stretches(work, measured_s, 0.0, 3, lambda: torch.cuda.synchronize(index)))
