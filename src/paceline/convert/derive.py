"""From what files say together to the values of a run file: ranks, the batch, the length, the machines.

Other tools count per device and per process; a run file counts over all ranks. Each number that is derived here comes
with its equation, and numbers that cannot all be true are one error.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.config import Train
from paceline.config.registry import BUILT_IN, find_entry
from paceline.convert.draft import Draft
from paceline.convert.rules import Outcome
from paceline.errors import UserError
from paceline.hardware.catalogue import parse_cluster

DEFAULT_BATCH: int = Train.model_fields["global_batch"].default


def derive_run_file(draft: Draft) -> None:
    """Every line of the run file, in `draft.lines`."""
    ranks = _ranks(draft)
    _batch(draft, ranks)
    _schedule(draft)
    _rhythm(draft)
    _workers(draft)
    _arguments(draft)
    _machines(draft, ranks)
    for key, claim in draft.claims.items():
        if "." in key or key in ("name", "workload"):
            draft.put(key, claim.value, draft.shown(key))
    _offload(draft)
    _sharded_only(draft)


def _ranks(draft: Draft) -> int | None:
    """Of all machines together; None where nothing says it."""
    nodes, per_node = draft.value("nodes"), draft.value("per_node")
    ranks, equation = draft.value("ranks"), ""
    if per_node and ranks and nodes is None and ranks % per_node == 0:
        nodes = ranks // per_node
    if per_node is not None:
        made = (nodes or 1) * per_node
        equation = f"{nodes or 1} node{'s' * ((nodes or 1) > 1)} × {per_node} processes"
        if ranks is not None and ranks != made:
            raise UserError(
                f"{draft.shown('ranks')} is not {equation} = {made} ({draft.shown('per_node')}); change one of them"
            )
        ranks = made
    elif ranks is None:
        ranks, equation = _ranks_of_the_scheduler(draft)
    if ranks is None:
        draft.fill_in["parallel.ranks"] = "nothing says on how many devices; the file is for one"
        return None
    if ranks < 1:
        name = "ranks" if "ranks" in draft.claims else "per_node"
        raise UserError(f"{draft.shown(name)}: a run has at least one process")
    _enough_devices(draft, ranks, nodes or 1)
    for name in ("ranks", "nodes", "per_node", "tasks", "tasks_per_node"):
        if name in draft.claims:
            draft.use(name, "parallel.ranks")
    comment = equation or draft.shown("ranks")
    draft.put("parallel.ranks", ranks, comment)
    return ranks


def _ranks_of_the_scheduler(draft: Draft) -> tuple[int | None, str]:
    """One rank per task or, where tasks are not said or start something else, one per device."""
    nodes, tasks, each = draft.value("nodes") or 1, draft.value("tasks"), draft.value("tasks_per_node")
    gpus, all_gpus = draft.value("gpus_per_node"), draft.value("gpus")
    if draft.value("starts_tasks") and (tasks or each):
        return (tasks, draft.shown("tasks")) if tasks else (nodes * each, f"{nodes} × {each} tasks")
    if gpus:
        return nodes * gpus, f"one per device: {nodes} node{'s' * (nodes > 1)} × {gpus}"
    if all_gpus:
        return all_gpus, f"one per device: {draft.shown('gpus')}"
    return (1, draft.shown("started_alone")) if "started_alone" in draft.claims else (None, "")


def _enough_devices(draft: Draft, ranks: int, nodes: int) -> None:
    gpus = draft.value("gpus_per_node") or ((draft.value("gpus") or 0) // nodes)
    if gpus and ranks > gpus * nodes:
        name = "gpus_per_node" if "gpus_per_node" in draft.claims else "gpus"
        asked = next(n for n in ("per_node", "ranks", "tasks", "tasks_per_node") if n in draft.claims)
        raise UserError(
            f"{draft.shown(asked)} starts {ranks} processes, and {draft.shown(name)} gives them {gpus * nodes} "
            "devices; each needs one of its own"
        )


def _batch(draft: Draft, ranks: int | None) -> None:
    """global = micro × accumulated × ranks: three of them give the fourth, and four must agree."""
    batch, micro, passes = (draft.value(name) for name in ("global_batch", "micro", "accumulation"))
    for name in ("global_batch", "micro", "accumulation"):
        if draft.value(name) is not None and draft.value(name) < 1:
            raise UserError(f"{draft.shown(name)}: it must be 1 or more")
    if batch and micro and passes and ranks is None:
        ranks = _divided(draft, batch, micro * passes, "micro", "accumulation")
        draft.fill_in.pop("parallel.ranks", None)
        comment = f"{batch} global / ({micro} per pass × {passes} accumulated)"
        draft.put("parallel.ranks", ranks, comment)
        draft.use("global_batch", "parallel.ranks")
    world = ranks or 1
    if batch and micro and passes and batch != micro * passes * world:
        raise UserError(
            f"{draft.shown('global_batch')} is not {micro} per pass × {passes} accumulated × {world} "
            f"rank{'s' * (world > 1)} = {micro * passes * world}; write that, or change the others"
        )
    if batch:
        if micro is None and passes:
            micro = _divided(draft, batch, passes * world, "accumulation")
        elif micro and passes is None:
            passes = _divided(draft, batch, micro * world, "micro")
        said = draft.shown("global_batch")
    elif micro:
        passes = passes or 1
        batch = micro * passes * world
        said = f"{micro} per pass × {world} rank{'s' * (world > 1)} × {passes} accumulated"
    elif passes:
        micro = max(1, DEFAULT_BATCH // (passes * world))
        batch = micro * passes * world
        said = f"to fill in: batch of your loader × {world} ranks × {passes} accumulated"
        draft.fill_in["train.global_batch"] = f"the batch size is in your script; write it × {world} × {passes} here"
    elif world > DEFAULT_BATCH:
        batch, said = world, "to fill in: one sample per rank, until your batch is here"
        draft.fill_in["train.global_batch"] = f"the batch size is in your script; write it × {world} ranks here"
    else:
        return
    _write_batch(draft, batch, micro if passes and passes > 1 else None, passes, said)


def _write_batch(draft: Draft, batch: int, micro: int | None, passes: int | None, said: str) -> None:
    draft.put("train.global_batch", batch, said)
    keys = ["train.global_batch"]
    if micro is not None:
        draft.put("parallel.micro_batch", micro, f"so that a step takes {passes} passes")
        keys.append("parallel.micro_batch")
    for name in ("global_batch", "micro", "accumulation"):
        if name in draft.claims:
            draft.use(name, *keys)


def _divided(draft: Draft, batch: int, by: int, *names: str) -> int:
    size, left = divmod(batch, by)
    if left or not size:
        others = " and ".join(draft.shown(name) for name in names)
        ranks = draft.lines.get("parallel.ranks")
        on = f" on {ranks.value} ranks" if ranks else ""
        raise UserError(f"{draft.shown('global_batch')} is not a multiple of {by}, which {others} make{on}")
    return size


def _schedule(draft: Draft) -> None:
    """One length, and a warm-up that is a part of it."""
    total = draft.value("total_steps")
    if "train.steps" in draft.claims and "train.epochs" in draft.claims:
        draft.overrule("train.epochs", "train.steps")
    if total is not None:
        if not {"train.steps", "train.epochs"} & draft.claims.keys():
            draft.put("train.steps", total, draft.shown("total_steps"))
            draft.use("total_steps", "train.steps")
        else:
            draft.reject("total_steps", "a schedule ends with the run")
    if not {"train.steps", "train.epochs"} & {*draft.claims, *draft.lines}:
        draft.fill_in["train.steps"] = "nothing says how long to train; without it the run has one epoch"
    if draft.value("train.warmup_steps") is not None and "train.warmup" in draft.claims:
        draft.overrule("train.warmup", "train.warmup_steps")
    steps, warm = draft.value("train.steps") or total, draft.value("train.warmup_steps")
    if steps and warm and warm >= steps:
        draft.fill_in["train.warmup_steps"] = f"{warm} is the whole run of {steps} steps, which never gets to train.lr"


def _rhythm(draft: Draft) -> None:
    """How often a run is evaluated and saved: in steps, or at the end of each epoch."""
    for by, steps, key in (
        ("evaluate_by", "evaluate_steps", "train.evaluate_every"),
        ("save_by", "save_steps", "train.checkpoint_every"),
    ):
        how, every = draft.value(by), draft.value(steps)
        in_steps = every and (how == "steps" or (how is None and by == "save_by"))
        if in_steps:
            draft.put(key, every, draft.shown(steps))
        for name in (name for name in (by, steps) if name in draft.claims):
            if in_steps:
                draft.use(name, key)
            else:
                draft.keep(name, "it is done at the end of each epoch")


def _arguments(draft: Draft) -> None:
    """What a script is given after its name, as long as it is the script that runs."""
    if "data.arguments" not in draft.claims:
        return
    if str(draft.value("workload")).endswith(".py"):
        draft.use("arguments", "data.arguments")
        return
    del draft.claims["data.arguments"]
    why = f"the script that reads it gives way to  workload: {draft.value('workload')}"
    for i, row in enumerate(draft.rows):
        if row.where == ("arguments",):
            draft.rows[i] = replace(row, outcome=Outcome.NOT_SUPPORTED, where=(), why=why)


def _workers(draft: Draft) -> None:
    """Processes that make samples: a key where the work has one."""
    workers = draft.value("workers")
    if workers is None:
        return
    workload = str(draft.value("workload") or "")
    if workload in BUILT_IN:
        if "workers" in find_entry(workload).sections()["data"].model_fields:
            draft.put("data.workers", workers, draft.shown("workers"))
            draft.use("workers", "data.workers")
        else:
            draft.reject("workers", "texts are tokenised once and read from a memory map; workers have nothing to do")
    else:
        draft.reject("workers", f"the script says it: run.batches(…, workers={workers})", noted=True)


def _machines(draft: Draft, ranks: int | None) -> None:
    """The key `cluster`, where the kind of device is said and known."""
    device, nodes = draft.value("device_name"), draft.value("nodes") or 1
    gpus = draft.value("gpus_per_node") or (draft.value("gpus") or 0) // nodes
    each = gpus or (ranks or 0) // nodes
    if device is not None and each:
        text = f"{nodes}x{each}x{device}"
        try:
            parse_cluster(text)
        except UserError:
            draft.reject("device_name", f"no device of the catalogue is called {device}; plan with --cluster FILE.yaml")
        else:
            draft.put("cluster", text, draft.shown("device_name"))
            for name in ("device_name", "nodes", "gpus_per_node", "gpus"):
                if name in draft.claims:
                    draft.use(name, "cluster")
            if "parallel.strategy" not in draft.claims:
                draft.put("parallel.strategy", "ddp" if (ranks or 1) > 1 else "single", "nothing else is said")


def _sharded_only(draft: Draft) -> None:
    """What says how shards are gathered and summed, where there are none."""
    strategy, gathers = draft.value("parallel.strategy"), ("zero2", "zero3", "fsdp", "hsdp")
    if draft.value("parallel.wrap") is not None and strategy not in gathers:
        del draft.lines["parallel.wrap"]
        draft.reject("parallel.wrap", "nothing is sharded, so nothing is gathered")
    if draft.value("parallel.reduce") in ("bf16", "fp16") and strategy == "zero1":
        del draft.lines["parallel.reduce"]
        draft.reject("parallel.reduce", "with ZeRO 1 gradients are summed in fp32")


def _offload(draft: Draft) -> None:
    """Who can keep state in host memory."""
    strategy = draft.value("parallel.strategy")
    if not draft.value("parallel.offload") or strategy in ("zero2", "zero3", "fsdp", "hsdp"):
        return
    if strategy == "zero1" and draft.value("workload") in BUILT_IN:
        draft.put("parallel.engine", "deepspeed", "offload with ZeRO 1 is DeepSpeed's alone")
        return
    del draft.lines["parallel.offload"]
    nothing = "nothing is sharded, so nothing is offloaded; DeepSpeed ignores it too"
    why = (
        "ZeRO 1 keeps its state on the device here; parallel.strategy=zero2 offloads"
        if strategy == "zero1"
        else nothing
    )
    draft.reject("parallel.offload", why)
