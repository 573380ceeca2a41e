"""Options of the commands that start ranks: torchrun, deepspeed, mpirun, horovodrun, srun and sbatch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from paceline.convert.rules import (
    Outcome,
    Rule,
    Ruling,
    UnreadableValue,
    all_of,
    always,
    no,
    noted,
    number,
    quantity,
    to,
    whole,
    word,
)
from paceline.convert.sources import KeyTable

MEETING = "ranks find each other by what the launcher tells them"
SCHEDULER = "for the scheduler"
EVENTS = "every rank's events are in the run folder"


@dataclass(frozen=True)
class Launcher:
    """A command that starts other commands. Names of options are without dashes, with `_` for `-`."""

    table: KeyTable
    flags: frozenset[str] = frozenset()
    """Options without a value."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Short forms."""
    pairs: frozenset[str] = frozenset()
    """Options with two values."""


def _nodes(value: Any) -> Ruling:
    if isinstance(value, str) and (ends := re.fullmatch(r"(\d+)[:-](\d+)", value)):
        if ends[1] != ends[2]:
            why = f"between {ends[1]} and {ends[2]} nodes: a run has one number of ranks, and resumes on any other"
            return Ruling(Outcome.NOT_SUPPORTED, why=why)
        value = ends[1]
    return quantity("nodes")(value)


def _per_node(value: Any) -> Ruling:
    if value in ("gpu", "cpu", "auto"):
        return Ruling(Outcome.NOT_SUPPORTED, why="write how many as parallel.ranks")
    return quantity("per_node")(value)


TORCHRUN = Launcher(
    KeyTable(
        "torchrun",
        {
            "nproc_per_node": _per_node,
            "nnodes": _nodes,
            **all_of(
                (
                    *(
                        "node_rank",
                        "master_addr",
                        "master_port",
                        "rdzv_backend",
                        "rdzv_endpoint",
                        "rdzv_id",
                        "rdzv_conf",
                    ),
                    *("standalone", "local_addr", "use_env", "role"),
                ),
                always(MEETING),
            ),
            "max_restarts": always("paceline train --resume goes on where a run stood", 0),
            **all_of(
                ("monitor_interval", "start_method", "event_log_handler", "signals_to_handle", "shutdown_timeout"),
                always("the launcher's own"),
            ),
            **all_of(
                (
                    *("log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs", "duplicate_stdout_filters"),
                    "duplicate_stderr_filters",
                ),
                no(EVENTS),
            ),
            **all_of(("numa_binding", "virtual_local_rank", "no_python", "run_path"), no("it is not offered")),
        },
    ),
    frozenset(("standalone", "m", "module", "no_python", "run_path", "use_env", "virtual_local_rank")),
    {"r": "redirects", "t": "tee", "m": "module"},
)
DEEPSPEED = Launcher(
    KeyTable(
        "deepspeed",
        {
            "num_gpus": quantity("per_node"),
            "num_accelerators": quantity("per_node"),
            "num_nodes": quantity("nodes"),
            **all_of(("hostfile", "include", "exclude"), noted("which machines; the scheduler or torchrun says it")),
            **all_of(
                (
                    *("master_port", "master_addr", "node_rank", "launcher", "launcher_args", "no_ssh", "no_ssh_check"),
                    *("no_local_rank", "force_multi", "save_pid", "ssh_port", "venv_script"),
                ),
                always(MEETING),
            ),
            **all_of(("bind_cores_to_rank", "bind_core_list"), no("processes are not bound to cores; numactl does it")),
            "autotuning": no("paceline plan chooses the layout"),
            **all_of(("enable_each_rank_log", "log_level"), no(EVENTS)),
            "no_python": no("it is not offered"),
        },
    ),
    frozenset(
        (
            *("module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid", "quiet"),
            "bind_cores_to_rank",
        )
    ),
    {"H": "hostfile", "i": "include", "e": "exclude", "q": "quiet"},
)


def _hosts(value: Any) -> Ruling:
    """`one:4,two:4`: nodes and slots; the ranks are said by -np."""
    hosts = [host.partition(":") for host in word(value).split(",")]
    slots = {slot for _, _, slot in hosts if slot}
    claims: dict[str, Any] = {"nodes": len(hosts)}
    if len(slots) == 1 and all(slot for _, _, slot in hosts):
        claims["slots_per_node"] = whole(slots.pop())
    return Ruling(Outcome.DERIVED, claims)


BINDING = (
    *("bind_to", "map_by", "rank_by", "mca", "omca", "prtemca", "tag_output", "allow_run_as_root", "oversubscribe"),
    *("report_bindings", "depth", "cpu_bind", "line_buffer", "display_map", "mem_bind", "gpu_bind"),
)
MPIRUN = Launcher(
    KeyTable(
        "mpirun",
        {
            **all_of(("n",), quantity("ranks")),
            **all_of(("N", "ppn", "npernode"), quantity("per_node")),
            "host": _hosts,
            "hostfile": noted("which machines; the scheduler says it"),
            **all_of(("x", "env"), noted("an environment variable for every rank")),
            **all_of((*BINDING, "v", "q"), always("mpirun's own; it starts  paceline train  as it is")),
        },
    ),
    frozenset(("allow_run_as_root", "oversubscribe", "tag_output", "report_bindings", "v", "q")),
    {"np": "n", "c": "n", "H": "host", "machinefile": "hostfile", "f": "hostfile", "genv": "x", "gmca": "mca"},
    frozenset(("mca", "omca", "prtemca")),
)
HOROVODRUN = Launcher(
    KeyTable(
        "horovodrun",
        {
            "np": quantity("ranks"),
            "hosts": _hosts,
            "hostfile": noted("which machines; the scheduler says it"),
            "fusion_threshold_mb": to("parallel.bucket_mb", number),
            **all_of(
                (
                    "gloo",
                    "mpi",
                    "network_interface",
                    "network_interfaces",
                    "start_timeout",
                    "ssh_port",
                    "verbose",
                    "mpi_args",
                ),
                always(MEETING),
            ),
            **all_of(("min_np", "max_np", "host_discovery_script"), no("a run resumes on any number of ranks")),
            **all_of(("timeline_filename", "timeline_mark_cycles"), no("paceline measure says where the time goes")),
            **all_of(("autotune", "autotune_log_file", "cycle_time_ms", "cache_capacity"), no("Horovod's own tuning")),
            "output_filename": no(EVENTS),
            "log_level": no(EVENTS),
        },
    ),
    frozenset(("gloo", "mpi", "verbose", "autotune", "timeline_mark_cycles")),
    {"n": "np", "num_proc": "np", "H": "hosts", "p": "ssh_port"},
)


def _devices(claim: str) -> Rule:
    """`gpu:a100:2`, `a100:2`, `gpu:2` or `2`."""

    def rule(value: Any) -> Ruling:
        parts = [part for part in word(value).split("(")[0].split(":") if part]
        if parts[:1] == ["gpu"]:
            parts = parts[1:] or ["1"]
        if "," in word(value) or len(parts) > 2 or not parts:
            return Ruling(Outcome.NOTED, why=SCHEDULER)
        if len(parts) == 1 and not parts[0].isdecimal():
            parts.append("1")
        claims: dict[str, Any] = {claim: whole(parts[-1])}
        if len(parts) == 2:
            claims["device_name"] = parts[0]
        return Ruling(Outcome.DERIVED, claims)

    return rule


def _gres(value: Any) -> Ruling:
    if not word(value).startswith("gpu"):
        return Ruling(Outcome.NOTED, why=SCHEDULER)
    return _devices("gpus_per_node")(value)


def _job_name(value: Any) -> Ruling:
    return Ruling(Outcome.TRANSLATED, {"name": word(value)}, weight=-1)


def _count(name: str) -> Rule:
    def rule(value: Any) -> Ruling:
        try:
            return quantity(name)(value)
        except UnreadableValue:
            return Ruling(Outcome.NOTED, why=SCHEDULER)

    return rule


SLURM_RULES: dict[str, Rule] = {
    "nodes": _nodes,
    "ntasks": _count("tasks"),
    "ntasks_per_node": _count("tasks_per_node"),
    "gres": _gres,
    "gpus_per_node": _devices("gpus_per_node"),
    "gpus": _devices("gpus"),
    "gpus_per_task": always("each rank has a device of its own", "1"),
    "job_name": _job_name,
    "signal": noted(f"{SCHEDULER}: SIGTERM makes a run save and stop; it can be resumed"),
    **all_of(
        (
            *(
                "time",
                "partition",
                "account",
                "qos",
                "mem",
                "mem_per_cpu",
                "mem_per_gpu",
                "cpus_per_task",
                "constraint",
            ),
            *("cpus_per_gpu", "exclusive", "exclude", "nodelist", "reservation", "requeue", "array", "dependency"),
            *("mail_type", "mail_user", "output", "error", "chdir", "hint", "distribution", "switches", "licenses"),
            *("gpu_bind", "cpu_bind", "export", "begin", "comment", "open_mode", "ntasks_per_core", "threads_per_core"),
            *("ntasks_per_gpu", "nice", "wckey", "cluster", "clusters", "container_image", "container_mounts"),
            *("no_requeue", "parsable", "wait", "mpi", "kill_on_bad_exit", "label", "unbuffered", "jobid", "overlap"),
            *("export_env", "environment", "overcommit", "wait_all_nodes", "ntasks_per_socket", "sockets_per_node"),
        ),
        noted(SCHEDULER),
    ),
}
SLURM_FLAGS = frozenset(
    (
        *("exclusive", "requeue", "no_requeue", "parsable", "wait", "label", "unbuffered", "overlap", "overcommit"),
        *("l", "u", "O", "W"),
    )
)
SLURM_SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus_per_task",
    "G": "gpus",
    "t": "time",
    "p": "partition",
    "A": "account",
    "J": "job_name",
    "o": "output",
    "e": "error",
    "q": "qos",
    "C": "constraint",
    "w": "nodelist",
    "x": "exclude",
    "D": "chdir",
    "d": "dependency",
    "a": "array",
    "L": "licenses",
    "l": "label",
    "u": "unbuffered",
    "tasks-per-node": "ntasks_per_node",
}
SRUN = Launcher(KeyTable("srun", SLURM_RULES, dashed=True), SLURM_FLAGS, SLURM_SHORT)
SBATCH = Launcher(KeyTable("sbatch", SLURM_RULES, dashed=True), SLURM_FLAGS, SLURM_SHORT)


def _threads(value: Any) -> Ruling:
    try:
        return Ruling(Outcome.TRANSLATED, {"parallel.threads": whole(value)})
    except UnreadableValue:
        return Ruling(Outcome.NOTED, why="for the shell")


def _timeout(value: Any) -> Ruling:
    if value is None:
        return Ruling(Outcome.NOTED, why="for the shell")
    return Ruling(Outcome.TRANSLATED, {"parallel.timeout_s": number(value)}, "NCCL itself has no such variable")


ENVIRONMENT = KeyTable(
    "the environment",
    {
        "OMP_NUM_THREADS": _threads,
        "NCCL_TIMEOUT": _timeout,
        **all_of(("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"), always(MEETING)),
        "TOKENIZERS_PARALLELISM": always("texts are tokenised before ranks are started"),
    },
)
"""Variables that a job script exports; any other is for the shell."""
