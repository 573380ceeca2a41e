"""The devices: are they there and free, are they as fast as their kind, and does heat or power hold them back?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.diagnostics.results import CheckContext, CheckResult, Health
from paceline.hardware.catalogue import match_driver_name
from paceline.io.format import number, size

DEVICES_TOPIC = "devices"
FREE_SHARE = 0.9
MATRIX_SIZE = 8192
CPU_MATRIX_SIZE = 1024
COPY_ELEMENTS = 1 << 28
"""Elements, of 4 bytes on a CUDA device; far more than a cache holds."""
CPU_COPY_ELEMENTS = 1 << 24
MEASURED_S = 0.3
LOADED_S = 0.2
PEER_S = 0.05
USUAL_FRACTION = 0.7
"""Of the peak that products reach, where nobody measured this kind of device."""
COPY_FRACTION = 0.75
SLOW, TOO_SLOW = 0.85, 0.6
"""Of what is expected."""
BEHIND_OTHERS = 0.85
"""Of the median of the devices."""
ROOM_BYTES = 4e9
PEER_BYTES = 64 << 20
THROTTLE_REASONS = {
    0x8: "by a hardware slow-down",
    0x20: "by heat",
    0x40: "by heat",
    0x80: "by power",
}
"""Bits of NVML's reasons for low clocks."""


def check_visible(here: CheckContext) -> Iterator[CheckResult]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield CheckResult(DEVICES_TOPIC, "CUDA devices", "none: runs use the cores", "", Health.NOT_HERE)
        return
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    same = len(set(names)) == 1
    limited = here.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"{count} × {names[0]}" if same else ", ".join(names)
    found += f", by CUDA_VISIBLE_DEVICES={limited}" if limited is not None else ""
    wanted = here.spec.parallel.ranks if here.spec is not None else 1
    few = count < min(wanted, here.place.local_world if here.place.world > 1 else wanted)
    yield CheckResult(
        *(DEVICES_TOPIC, "CUDA devices", found, f"{wanted} for the run" if few else "of one kind"),
        Health.WRONG if few else Health.OK if same else Health.LOOK,
        f"parallel.ranks={count}, or share them with  parallel.backend=gloo" if few else "all wait for the slowest",
    )


def check_free_memory(here: CheckContext) -> Iterator[CheckResult]:
    """Whether somebody else is on a device."""
    import torch

    left = {index: torch.cuda.mem_get_info(index) for index in _device_indices()}
    busy = {index: (free, whole) for index, (free, whole) in left.items() if free < FREE_SHARE * whole}
    for index, (free, whole) in busy.items():
        found = f"cuda:{index}: {size(free)} free of {size(whole)}"
        yield CheckResult(
            DEVICES_TOPIC, "free memory", found, "all of it", Health.LOOK, "nvidia-smi  says who has the rest"
        )
    if left and not busy:
        least = min(free for free, _ in left.values())
        yield CheckResult(DEVICES_TOPIC, "free memory", f"{size(least)} or more on each device", "all of it")


def check_speed(here: CheckContext) -> Iterator[CheckResult]:
    """Products and copies of each device, against its data sheet and against the others."""
    import torch

    products, copies = {}, {}
    for index in _device_indices():
        if torch.cuda.mem_get_info(index)[0] < ROOM_BYTES:
            yield CheckResult(
                DEVICES_TOPIC, "speed", f"cuda:{index} has no memory left to measure with", "", Health.LOOK
            )
            continue
        products[index], copies[index] = _measure_flops_s(index), _measure_copy_bytes_s(index)
        torch.cuda.empty_cache()
    for index in products:
        kind = match_driver_name(torch.cuda.get_device_name(index))
        peak = kind.peak_flops_s("bf16") * (kind.matmul_fraction or USUAL_FRACTION) if kind else None
        moved = kind.bandwidth_bytes_s * COPY_FRACTION if kind else None
        yield judge_rate(f"products of cuda:{index}", products[index], peak, list(products.values()), _format_teraflops)
        yield judge_rate(f"memory of cuda:{index}", copies[index], moved, list(copies.values()), _format_bytes_s)
    yield from check_throttling(here, products)


def _format_teraflops(rate: float) -> str:
    return f"{number(rate / 1e12, 3)} TFLOP/s"


def _format_bytes_s(rate: float) -> str:
    return f"{size(rate)}/s"


def judge_rate(
    check: str, found: float, nominal: float | None, all_of_them: Sequence[float], say: Callable[[float], str]
) -> CheckResult:
    """A rate against what its kind should reach, and against the same of all devices here."""
    median = statistics.median(all_of_them)
    share = found / nominal if nominal else 1.0
    behind = found < BEHIND_OTHERS * median
    expected = f"about {say(nominal)}, of its data sheet" if nominal else "its kind is not in the catalogue"
    expected += f"; the median here is {say(median)}" if behind else ""
    verdict = Health.WRONG if share < TOO_SLOW or behind else Health.LOOK if share < SLOW else Health.OK
    remedy = "nvidia-smi -q -d PERFORMANCE,CLOCK  says what holds it back; every step waits for the slowest device"
    return CheckResult(DEVICES_TOPIC, check, say(found), expected, verdict, remedy)


def check_throttling(here: CheckContext, products: Mapping[int, float]) -> Iterator[CheckResult]:
    """What the driver says of clocks, heat and memory errors, while each device multiplies at the rate it was found to.

    The power limit alone lowers clocks of every device at work, and is not counted.
    """
    from paceline.measurement.usage import find_device_handles, load_nvml

    if not products:
        return
    nvml = load_nvml()
    if nvml is None:
        yield CheckResult(DEVICES_TOPIC, "heat and power", "not asked", "", Health.NOT_HERE, "pip install nvidia-ml-py")
        return
    handles, said = find_device_handles(nvml, max(products) + 1, here.environ), list[str]()
    for index, rate in products.items():
        if index >= len(handles):
            continue
        facts = _query_under_load(index, rate, partial(_query_driver, nvml, handles[index]))
        said.append(f"{facts.get('heat', '?')} °C, {facts.get('watts', 0):.0f} of {facts.get('most_watts', 0):.0f} W")
        yield from _check_driver_facts(index, facts)
    yield CheckResult(DEVICES_TOPIC, "heat and power", "; ".join(said), "full clocks")


def _check_driver_facts(index: int, facts: Mapping[str, Any]) -> Iterator[CheckResult]:
    """What is not as it should be of one device."""
    reasons = {words for bit, words in THROTTLE_REASONS.items() if int(facts.get("reasons", 0)) & bit}
    if reasons:
        found = f"cuda:{index} slowed {', '.join(sorted(reasons))}, at {facts.get('heat', '?')} °C"
        yield CheckResult(
            DEVICES_TOPIC, "heat and power", found, "full clocks", Health.WRONG, "look at cooling and power supply"
        )
    if facts.get("most_watts", 0) < 0.95 * facts.get("usual_watts", 0):
        found = f"cuda:{index} is limited to {facts['most_watts']:.0f} W of {facts['usual_watts']:.0f} W"
        line = f"sudo nvidia-smi -i {index} -pl {facts['usual_watts']:.0f}"
        yield CheckResult(DEVICES_TOPIC, "power limit", found, "its usual one", Health.LOOK, line)
    if facts.get("memory_errors"):
        found = f"cuda:{index}: {facts['memory_errors']} errors that could not be corrected"
        yield CheckResult(DEVICES_TOPIC, "memory errors", found, "none", Health.WRONG, f"sudo nvidia-smi -i {index} -r")


def _query_under_load(index: int, flops_s: float, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    import torch

    a = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=f"cuda:{index}", dtype=_half_dtype())
    target = torch.empty_like(a)
    for _ in range(int(LOADED_S * flops_s / (2 * MATRIX_SIZE**3)) + 1):
        torch.mm(a, a, out=target)
    time.sleep(LOADED_S / 2)
    found = ask()
    torch.cuda.synchronize(index)
    return found


def _query_driver(nvml: Any, device: Any) -> dict[str, Any]:
    """Some drivers tell one of them and not the other."""
    asked: dict[str, Callable[[], Any]] = {
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
    for name, ask in asked.items():
        with suppress(nvml.NVMLError, AttributeError):
            found[name] = ask()
    return found


def check_peers(here: CheckContext) -> Iterator[CheckResult]:
    """Copies between devices of this machine: are they right, and do they go straight?"""
    import torch

    indices = _device_indices()
    if len(indices) < 2:
        return
    kind, rates = match_driver_name(torch.cuda.get_device_name(0)), []
    for a in indices:
        for b in indices:
            if a == b:
                continue
            straight = torch.cuda.can_device_access_peer(a, b)
            right, rate = _measure_peer_copy(a, b)
            rates.append(rate)
            if not right or not straight:
                found = f"cuda:{a} to cuda:{b}: " + (f"{size(rate)}/s, through the host" if right else "wrong numbers")
                yield CheckResult(
                    *(DEVICES_TOPIC, "between devices", found, "straight, and what was sent"),
                    *(
                        Health.LOOK if right else Health.WRONG,
                        "nvidia-smi topo -p2p r;  IOMMU off or iommu=pt, ACS off",
                    ),
                )
    link = f"{kind.link}, {size(kind.link_bytes_s)}/s" if kind else ""
    slowest = min(rates)
    verdict = Health.LOOK if kind and slowest < 0.3 * kind.link_bytes_s else Health.OK
    found = f"{size(slowest)}/s to {size(max(rates))}/s"
    yield CheckResult(
        DEVICES_TOPIC, "between devices", found, link, verdict, "nvidia-smi topo -m  shows how they are joined"
    )


def check_cores_speed(here: CheckContext) -> Iterator[CheckResult]:
    """For comparison between nodes; there is no data sheet of all the cores there are."""
    flops_s, bytes_s = measure_core_rates()
    yield CheckResult(
        DEVICES_TOPIC, "speed of cores", f"products {number(flops_s / 1e9, 3)} GFLOP/s, memory {size(bytes_s)}/s"
    )


def measure_core_rates() -> tuple[float, float]:
    """(FLOP/s of products, bytes/s of a copy) of this process, best of several."""
    import torch

    a, big = torch.randn(CPU_MATRIX_SIZE, CPU_MATRIX_SIZE), torch.ones(CPU_COPY_ELEMENTS)
    target = torch.empty_like(big)
    product_s, copy_s = _time_best(lambda: a @ a), _time_best(lambda: target.copy_(big))
    return 2 * CPU_MATRIX_SIZE**3 / product_s, 2 * big.nbytes / copy_s


def _time_best(work: Callable[[], object]) -> float:
    work()
    times: list[float] = []
    ends = time.perf_counter() + MEASURED_S
    while len(times) < 3 or time.perf_counter() < ends:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _device_indices() -> list[int]:
    import torch

    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []


def _half_dtype() -> Any:
    import torch

    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def _measure_flops_s(index: int) -> float:
    import torch

    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=f"cuda:{index}", dtype=_half_dtype()) for _ in range(2))
    return 2 * MATRIX_SIZE**3 / _time_on_device(lambda: torch.mm(a, b), index)


def _measure_copy_bytes_s(index: int) -> float:
    import torch

    source = torch.ones(COPY_ELEMENTS, device=f"cuda:{index}")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _time_on_device(lambda: target.copy_(source), index)


def _measure_peer_copy(a: int, b: int) -> tuple[bool, float]:
    """(what was sent arrived, bytes/s)."""
    import torch

    source = torch.arange(PEER_BYTES // 4, device=f"cuda:{a}", dtype=torch.int32)
    target = torch.empty_like(source, device=f"cuda:{b}")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(a)

    rate = source.nbytes / _time_on_device(copy, b, PEER_S)
    return torch.equal(target.cpu(), source.cpu()), rate


def _time_on_device(work: Callable[[], object], index: int, measured_s: float = MEASURED_S) -> float:
    """Seconds of a call in the median of several, the device being waited for after each."""
    import torch

    def once() -> float:
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(index)
        return time.perf_counter() - began

    once(), once()
    times, ends = [once()], time.perf_counter() + measured_s
    while time.perf_counter() < ends:
        times.append(once())
    return statistics.median(times)
