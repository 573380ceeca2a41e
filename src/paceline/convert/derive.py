"""Derive the values of a run file from all claims together: ranks, batch, length, machines.

Other tools count per device and per process; a run file counts over all ranks. Each derived number comes with its
equation, and numbers that cannot all be true are one error.
"""

import math
from dataclasses import replace

from paceline.config import Train
from paceline.config.registry import BUILT_IN, find_entry
from paceline.convert.draft import Draft
from paceline.convert.rules import Outcome
from paceline.convert.shell import AT_RUN_TIME
from paceline.errors import UserError
from paceline.hardware.catalogue import parse_cluster
from paceline.io.format import plural

DEFAULT_BATCH: int = Train.model_fields["global_batch"].default
BATCH = ("global_batch", "micro", "accumulation")
RANKS = ("ranks", "nodes", "per_node", "tasks", "tasks_per_node")
GATHERS_SHARDS = ("zero2", "zero3", "fsdp", "hsdp")


def derive_run_file(draft: Draft) -> None:
    """Set every line of the run file in `draft.lines`."""
    ranks = _derive_ranks(draft)
    _derive_batch(draft, ranks)
    _derive_schedule(draft)
    _derive_intervals(draft)
    _derive_workers(draft)
    _derive_arguments(draft)
    _derive_cluster(draft, ranks)
    for key, claim in draft.claims.items():
        if "." in key or key in ("name", "workload"):
            draft.set_line(key, claim.value, draft.describe(key))
    _check_strategy(draft)
    _check_offload(draft)
    _check_sharded_options(draft)


def _conflict(key: str, reason: str) -> UserError:
    return UserError(reason, code="conflict", key=key)


def _derive_ranks(draft: Draft) -> int | None:
    """Return the number of ranks on all machines; None if nothing tells it."""
    nodes, per_node = draft.value("nodes"), draft.value("per_node")
    ranks: int | None = draft.value("ranks")
    equation = ""
    if draft.value("one_process"):  # whatever num_processes is
        if ranks and ranks > 1 and "parallel.strategy" not in draft.claims:
            draft.fill_in["parallel.ranks"] = f"{draft.describe('one_process')} starts one process, and not {ranks}"
            draft.override("ranks", "one_process")
            ranks, equation = 1, draft.describe("one_process")
        draft.drop("one_process", Outcome.KEPT, "one process is started")
    if per_node and ranks and nodes is None and ranks % per_node == 0:
        nodes = ranks // per_node
    if per_node is not None:
        product = (nodes or 1) * per_node
        equation = f"{plural(nodes or 1, 'node')} × {per_node} processes"
        if ranks is not None and ranks != product:
            sides = f"{draft.describe('ranks')} is not {equation} = {product} ({draft.describe('per_node')})"
            raise _conflict("parallel.ranks", f"{sides}; change one of them")
        ranks = product
    elif ranks is None:
        ranks, equation = _count_scheduled_ranks(draft)
    if unknown := [draft.unknown[name] for name in RANKS if name in draft.unknown and name not in draft.claims]:
        draft.fill_in["parallel.ranks"] = f"{unknown[0]} is {AT_RUN_TIME}"
    if ranks and ranks > 1 and "started_alone" in draft.claims and equation.startswith("one per device"):
        draft.fill_in["parallel.ranks"] = f"one process is started, on {ranks} devices; a rank for each is assumed"
    elif ranks == 1 and "started_alone" in draft.claims and (nodes or 1) * (_count_gpus(draft, nodes or 1) or 1) > 1:
        draft.fill_in["parallel.ranks"] = "one process is started, though the job has several nodes or devices"
    if ranks is None:
        draft.fill_in["parallel.ranks"] = "no file gives the number of devices; the run file is for one"
        return None
    if ranks < 1:
        name = "ranks" if "ranks" in draft.claims else "per_node"
        reason = f"{draft.describe(name)}: a run has at least one process"
        raise UserError(reason, code="invalid-value", key="parallel.ranks")
    _check_devices(draft, ranks, nodes or 1)
    draft.set_line("parallel.ranks", ranks, equation or draft.describe("ranks"), RANKS)
    return ranks


def _count_scheduled_ranks(draft: Draft) -> tuple[int | None, str]:
    """Return one rank per task or, where tasks are not given or start something else, one per device."""
    nodes, tasks, each = draft.value("nodes") or 1, draft.value("tasks"), draft.value("tasks_per_node")
    all_gpus = draft.value("gpus")
    gpus = draft.value("gpus_per_node") if all_gpus else _count_gpus(draft, nodes)
    if draft.value("starts_tasks") and (tasks or each):
        return (tasks, draft.describe("tasks")) if tasks else (nodes * each, f"{nodes} × {each} tasks")
    if gpus:
        return nodes * gpus, f"one per device: {plural(nodes, 'node')} × {gpus}"
    if all_gpus:
        return all_gpus, f"one per device: {draft.describe('gpus')}"
    return (1, draft.describe("started_alone")) if "started_alone" in draft.claims else (None, "")


def _count_gpus(draft: Draft, nodes: int) -> int:
    """Return the devices of a node that a scheduler was asked for: by node, in all, or by task."""
    tasks: int = draft.value("tasks_per_node") or (draft.value("tasks") or 0) // nodes or 1
    each: int = draft.value("gpus_per_node") or (draft.value("gpus") or 0) // nodes
    return each or tasks * (draft.value("gpus_per_task") or 0)


def _check_devices(draft: Draft, ranks: int, nodes: int) -> None:
    gpus = _count_gpus(draft, nodes)
    if gpus and ranks > gpus * nodes:
        devices = next(name for name in ("gpus_per_node", "gpus", "gpus_per_task") if name in draft.claims)
        by = next(name for name in ("per_node", "ranks", "tasks", "tasks_per_node") if name in draft.claims)
        sides = f"{draft.describe(by)} starts {ranks} processes, and {draft.describe(devices)} gives them "
        raise _conflict("parallel.ranks", f"{sides}{gpus * nodes} devices; each process needs its own")


def _derive_batch(draft: Draft, ranks: int | None) -> None:
    """global = micro × accumulated × ranks: three of them give the fourth, and four must agree."""
    batch, micro, passes = (draft.value(name) for name in BATCH)
    for name in BATCH:
        if draft.value(name) is not None and draft.value(name) < 1:
            reason = f"{draft.describe(name)}: it must be 1 or more"
            raise UserError(reason, code="invalid-value", key="train.global_batch")
    if unknown := [draft.unknown[name] for name in BATCH if name in draft.unknown and name not in draft.claims]:
        draft.fill_in["train.global_batch"] = f"{unknown[0]} is {AT_RUN_TIME}"
    if batch and micro and passes and ranks is None:
        ranks = _divide_batch(draft, batch, micro * passes, "micro", "accumulation")
        draft.fill_in.pop("parallel.ranks", None)
        equation = f"{batch} global / ({micro} per pass × {passes} accumulated)"
        draft.set_line("parallel.ranks", ranks, equation, ("global_batch",))
    model_ranks = math.prod(draft.value(f"parallel.{axis}") or 1 for axis in ("tensor", "pipeline", "context"))
    world = max(1, (ranks or 1) // model_ranks)  # ranks with samples of their own
    if batch and micro and passes and batch != micro * passes * world:
        product = f"{micro} per pass × {passes} accumulated × {plural(world, 'rank')} = {micro * passes * world}"
        sides = f"{draft.describe('global_batch')} is not {product}"
        raise _conflict("train.global_batch", f"{sides}; write that, or change the others")
    if batch:
        if micro is None and passes:
            micro = _divide_batch(draft, batch, passes * world, "accumulation")
        elif micro and passes is None:
            passes = _divide_batch(draft, batch, micro * world, "micro")
        comment = draft.describe("global_batch")
    elif micro:
        passes = passes or 1
        batch = micro * passes * world
        comment = f"{micro} per pass × {plural(world, 'rank')} × {passes} accumulated"
        if "parallel.ranks" in draft.fill_in:
            draft.fill_in.setdefault("train.global_batch", f"{comment}: it grows with parallel.ranks")
    elif passes or world > DEFAULT_BATCH:
        passes = passes or 1
        micro = max(1, DEFAULT_BATCH // (passes * world))
        batch = micro * passes * world
        comment = f"to fill in: batch of your loader × {world} ranks × {passes} accumulated"
        draft.fill_in["train.global_batch"] = f"the batch size is in your script; write it × {world} × {passes} here"
    else:
        return
    draft.set_line("train.global_batch", batch, comment, BATCH)
    if micro is not None and passes and passes > 1:
        draft.set_line("parallel.micro_batch", micro, f"so that a step takes {passes} passes", BATCH)


def _divide_batch(draft: Draft, batch: int, by: int, *names: str) -> int:
    size, rest = divmod(batch, by)
    if rest or not size:
        others = " and ".join(draft.describe(name) for name in names)
        ranks = draft.lines.get("parallel.ranks")
        on = f" on {ranks.value} ranks" if ranks else ""
        reason = f"{draft.describe('global_batch')} is not a multiple of {by}, which {others} make{on}"
        raise _conflict("train.global_batch", reason)
    return size


def _derive_schedule(draft: Draft) -> None:
    """Set one length of the run, and a warm-up that is a part of it."""
    lengths = {"train.steps", "train.epochs"}
    total = draft.value("total_steps")
    if lengths <= draft.claims.keys():
        draft.override("train.epochs", "train.steps")
    if total is not None and lengths & draft.claims.keys():
        draft.reject("total_steps", "a schedule ends with the run")
    elif total is not None:
        draft.set_line("train.steps", total, draft.describe("total_steps"), ("total_steps",))
    if not lengths & {*draft.claims, *draft.lines}:
        draft.fill_in["train.steps"] = "no file gives the length of the run; without it the run has one epoch"
    if draft.value("train.warmup_steps") is not None and "train.warmup" in draft.claims:
        draft.override("train.warmup", "train.warmup_steps")
    steps, warmup = draft.value("train.steps") or total, draft.value("train.warmup_steps")
    if steps and warmup and warmup >= steps:
        draft.fill_in["train.warmup_steps"] = f"{warmup} is the whole run of {steps} steps: train.lr is never reached"


def _derive_intervals(draft: Draft) -> None:
    """Set how often a run is evaluated and saved: in steps, or at the end of each epoch."""
    for by, steps, key in (
        ("evaluate_by", "evaluate_steps", "train.evaluate_every"),
        ("save_by", "save_steps", "train.checkpoint_every"),
    ):
        how, every = draft.value(by), draft.value(steps)
        if every and (how == "steps" or (how is None and by == "save_by")):
            draft.set_line(key, every, draft.describe(steps), (by, steps))
            continue
        for name in (by, steps):
            if name in draft.claims:
                draft.drop(name, Outcome.KEPT, "it is done at the end of each epoch")


def _derive_arguments(draft: Draft) -> None:
    """Pass the arguments of a script on to it, as long as it is the script that runs."""
    if "data.arguments" not in draft.claims:
        return
    if str(draft.value("workload") or ".py").endswith(".py"):
        draft.used["arguments"] = ("data.arguments",)
        return
    del draft.claims["data.arguments"]
    reason = f"for the script, which is replaced by  workload: {draft.value('workload')}"
    for i, row in enumerate(draft.rows):
        if row.run_keys == ("arguments",):
            draft.rows[i] = replace(row, outcome=Outcome.NOT_SUPPORTED, run_keys=(), reason=reason)


def _derive_workers(draft: Draft) -> None:
    """Set the number of loader processes, where the workload has such a key."""
    workers, workload = draft.value("workers"), str(draft.value("workload") or "")
    if workers is None:
        return
    if workload not in BUILT_IN:
        draft.reject("workers", f"set it in the script: run.batches(…, workers={workers})", noted=True)
    elif "workers" in find_entry(workload).sections()["data"].model_fields:
        draft.set_line("data.workers", workers, draft.describe("workers"), ("workers",))
    else:
        draft.reject("workers", "texts are tokenised once and read from a memory map; workers have nothing to do")


def _derive_cluster(draft: Draft, ranks: int | None) -> None:
    """Set the key `cluster`, if the kind of device is given and known."""
    device, nodes = draft.value("device_name"), draft.value("nodes") or 1
    each = _count_gpus(draft, nodes) or (ranks or 0) // nodes
    if device is None or not each:
        return
    text = f"{nodes}x{each}x{device}"
    try:
        parse_cluster(text)
    except UserError:
        draft.reject("device_name", f"no device of the catalogue is called {device}; plan with --cluster FILE.yaml")
        return
    used = ("device_name", "nodes", "gpus_per_node", "gpus", "gpus_per_task")
    draft.set_line("cluster", text, draft.describe("device_name"), used)
    if "parallel.strategy" not in draft.claims:
        draft.set_line("parallel.strategy", "ddp" if (ranks or 1) > 1 else "single", "nothing else is given")


def _check_strategy(draft: Draft) -> None:
    """Use hsdp for copies of shards; drop a default where the file that would replace it is missing."""
    claim = draft.claims.get("parallel.strategy")
    if draft.value("parallel.replicate") and claim and claim.value == "fsdp":
        draft.set_line("parallel.strategy", "hsdp", draft.describe("parallel.replicate"))
    missing = [row for row in draft.rows if row.review and row.key.endswith("deepspeed_config_file")]
    if missing and claim and draft.rows[claim.row].key.endswith("distributed_type"):
        draft.reject("parallel.strategy", reason := f"{missing[0].assignment} gives it, which does not exist here")
        draft.fill_in["parallel.strategy"] = reason


def _check_offload(draft: Draft) -> None:
    """Drop the offload where state cannot be kept in host memory."""
    strategy = draft.value("parallel.strategy")
    if draft.value("offload_param") and strategy == "zero3":
        draft.set_line("parallel.offload", True, draft.describe("offload_param"), ("offload_param",))
    elif draft.value("offload_param"):
        draft.reject("offload_param", "only ZeRO 3 offloads parameters; DeepSpeed ignores it too")
    if draft.value("parallel.offload") and strategy not in GATHERS_SHARDS:
        draft.reject("parallel.offload", "only zero2, zero3, fsdp and hsdp keep state in host memory")


def _check_sharded_options(draft: Draft) -> None:
    """Drop options about gathering and summing shards where there are no shards."""
    strategy = draft.value("parallel.strategy")
    if draft.value("parallel.wrap") is not None and strategy not in GATHERS_SHARDS:
        draft.reject("parallel.wrap", "nothing is sharded, so nothing is gathered")
    if draft.value("parallel.reduce") in ("bf16", "fp16") and strategy == "zero1":
        draft.reject("parallel.reduce", "with ZeRO 1 gradients are summed in fp32")
