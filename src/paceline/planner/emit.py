"""Build launch files for the chosen layout: torchrun, Slurm, Kubernetes, SkyPilot, Accelerate, DeepSpeed."""

import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline import __version__
from paceline.config import RunSpec
from paceline.config.registry import is_script
from paceline.errors import UserError
from paceline.io.arguments import format_slurm_time, option_error
from paceline.io.escape import to_one_line
from paceline.io.files import read_text
from paceline.io.format import duration
from paceline.io.html_page import compile_template
from paceline.layout import ZERO_STAGES, layout_of
from paceline.planner.candidates import PROCESS_BYTES, format_words
from paceline.planner.plan import Plan
from paceline.planner.rows import PlanRow
from paceline.runlog.jobs import ATTEMPTS

TIME_MARGIN = 1.3  # times the planned hours are asked of a scheduler
RUNS = "runs"  # where run folders go, as under `train`
POD_RUN_FILE = "/paceline/run.yaml"
PORT = 29500
SKYPILOT_MEMORY_NAMES = ("A100-80GB", "V100-32GB")
"""SkyPilot names the memory of these devices, and not of smaller ones of the same model."""
TEMPLATES = Path(__file__).parent / "templates"
REQUEUE_CODE = 75
HERE_CODE = 76
"""The exit code of `paceline.slurm.requeue` that asks for a requeue: EX_TEMPFAIL, a temporary failure."""
WARN_S = 120
MIN_JOB_H = 5 / 60  # asked for at least, however short a run is planned: starting takes time


def build_launch_files(plan: Plan, run_file: Path, kind: str, words: Sequence[str] = ()) -> dict[str, str]:
    """Return file names with their content.

    `kind` is a method of `LaunchWriter`; `words` are the overrides that the plan was made with.
    """
    if plan.chosen is None:
        raise option_error("--emit", f"nothing to launch: {' '.join(plan.advice)}", "does-not-fit")
    overrides = plan.overrides()
    own = [word for word in words if word.partition("=")[0] not in overrides]
    chosen = format_words(overrides).split()
    files: dict[str, str] = getattr(LaunchWriter(plan, plan.chosen, run_file, (*own, *chosen)), kind)()
    return files


@dataclass
class LaunchWriter:
    """A plan that is to be started; `words` are the user's overrides and those of the plan."""

    plan: Plan
    row: PlanRow
    run_file: Path
    words: tuple[str, ...]

    def __post_init__(self) -> None:
        self.command = ("train", str(self.run_file), *self.words)
        self.name = self.plan.spec.name
        self.layout, self.cluster = self.row.price.layout, self.row.price.where.cluster
        self.on_gpu = not self.plan.target.whole.device.synchronous

    def torchrun(self) -> dict[str, str]:
        return {f"{self.name}.sh": self._build_script(f"{self._torchrun()} -m paceline", self.command)}

    def slurm(self) -> dict[str, str]:
        """Return the script that `paceline submit` sends, without what a site adds."""
        job = BatchJob(
            name=self.name,
            note=self.note,
            command=(*self.command, "--out", RUNS),
            run=f"{RUNS}/{self.name}",
            nodes=str(self.cluster.nodes),
            per_node=self.cluster.per_node,
            gpus=str(self.cluster.per_node) if self.on_gpu else "",
            hours=None if self.row.hours is None else max(MIN_JOB_H, self.row.hours * TIME_MARGIN),
        )
        return {f"{self.name}.sbatch": build_batch_script(job)}

    def kubernetes(self) -> dict[str, str]:
        price, nodes, per_node, name = self.row.price, self.cluster.nodes, self.cluster.per_node, to_dns_name(self.name)
        requests: dict[str, Any] = {"nvidia.com/gpu": per_node} if self.on_gpu else {"cpu": str(per_node)}
        if memory := price.host_node_bytes if self.on_gpu else per_node * price.memory.total_bytes * TIME_MARGIN:
            requests["memory"] = f"{(memory + per_node * PROCESS_BYTES) / 2**20:.0f}Mi"
        where = f"--standalone --nproc-per-node {per_node}"
        if nodes > 1:
            where = (
                f"--nnodes {nodes} --nproc-per-node {per_node} --node-rank $JOB_COMPLETION_INDEX "
                f"--master-addr {name}-node-0-0.{name} --master-port {PORT}"
            )
        words = shlex.join(["train", POD_RUN_FILE, *self.words, "--out", "/runs", "--resume-or-start"])
        text = render_launch_template(
            "kubernetes.yaml.j2",
            name=name,
            job=self,
            run_file=self._read_run_file().rstrip("\n"),
            command=f"exec torchrun {where} -m paceline {words}",
            requests=requests,
            limits={key: value for key, value in requests.items() if key != "cpu"},
        )
        return {f"{self.name}.yaml": text}

    def skypilot(self) -> dict[str, str]:
        model = to_skypilot_name(self.plan.target.whole.device.name)
        text = render_launch_template(
            "skypilot.yaml.j2",
            name=to_dns_name(self.name),
            job=self,
            device="accelerators" if self.on_gpu else "cpus",
            count=f"{model}:{self.cluster.per_node}" if self.on_gpu else "8+",
            command=shlex.join([*self.words, "--out", "/paceline-runs", "--resume-or-start"]),
            port=PORT,
        )
        return {f"{self.name}_sky.yaml": text}

    def accelerate(self) -> dict[str, str]:
        """Return files for `accelerate launch`, by which Accelerate drives data parallelism, sharded or not."""
        import yaml

        from paceline.trainer.engines.accelerate_config import build_accelerate_config, check_accelerate

        spec = self._spec_for_engine("accelerate")
        layout = layout_of(spec)
        check_accelerate(spec, layout, {})
        values = build_accelerate_config(spec, layout, spec.parallel.device) | {"num_machines": self.cluster.nodes}
        name = f"{self.name}_accelerate.yaml"
        launcher, head = f"accelerate launch --config_file {name}", ""
        if self.cluster.nodes > 1:
            values.pop("machine_rank", None)  # each node gives its own
            head = 'NODE="${NODE:?the number of this node, from 0}"\n'
            launcher += f' \\\n  --machine_rank "$NODE" --main_process_ip "$HEAD" --main_process_port {PORT}'
        if not self.on_gpu:  # on CPUs, accelerate launch always starts one process
            launcher = self._torchrun()
        script = self._build_script(f"{launcher} \\\n  -m paceline", self._command_for_engine("accelerate", name), head)
        return {name: yaml.safe_dump(values, sort_keys=False), f"{self.name}.sh": script}

    def deepspeed(self) -> dict[str, str]:
        from paceline.trainer.engines.deepspeed_config import check_deepspeed

        spec = self._spec_for_engine("deepspeed")
        check_deepspeed(spec, layout_of(spec))
        stage = ZERO_STAGES[self.layout.strategy]
        zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
        if self.layout.offload:
            parts = ("offload_optimizer", "offload_param") if stage == 3 else ("offload_optimizer",)
            zero |= {part: {"device": "cpu", "pin_memory": True} for part in parts}
        values = {
            "train_batch_size": self.layout.global_batch,
            "train_micro_batch_size_per_gpu": self.layout.micro_batch,
            "gradient_accumulation_steps": self.row.price.passes,
            "gradient_clipping": float(self.plan.spec.train.clip),
            "zero_optimization": zero,
        }
        name = f"{self.name}_deepspeed.json"
        script = self._build_script(f"{self._torchrun()} -m paceline", self._command_for_engine("deepspeed", name))
        return {name: json.dumps(values, indent=2) + "\n", f"{self.name}.sh": script}

    @property
    def note(self) -> str:
        hours = "" if self.row.hours is None else f", {duration(self.row.hours * 3600)} planned"
        devices = f"{self.row.devices} × {self.plan.target.whole.device.name}"
        return f"{self.name}: {self.layout.family} on {devices}{hours}"

    def _read_run_file(self) -> str:
        """Read the run file, for machines that do not have it. What it names must be there in the same places."""
        if is_script(str(self.run_file)):
            problem = f"{self.run_file} is a script, which must be in the image; write a run file that names it"
            raise option_error("--emit", problem, "not-supported")
        return read_text(self.run_file)

    def _build_script(self, launcher: str, command: Sequence[str], head: str = "") -> str:
        if self.cluster.nodes > 1:
            head = 'HEAD="${HEAD:?run this on every node, with HEAD=NAME_OF_THE_FIRST_NODE}"\n' + head
        top = f"#!/usr/bin/env bash\n# {self.note}\nset -euo pipefail\n"
        return f"{top}{head}exec {launcher} {shlex.join(command)}\n"

    def _torchrun(self) -> str:
        if self.cluster.nodes == 1:
            return f"torchrun --standalone --nproc-per-node {self.cluster.per_node}"
        return (
            f"torchrun --nnodes {self.cluster.nodes} --nproc-per-node {self.cluster.per_node} --rdzv-backend c10d "
            f'--rdzv-id {self.name} \\\n  --rdzv-endpoint "$HEAD:{PORT}"'
        )

    def _command_for_engine(self, engine: str, config: str) -> tuple[str, ...]:
        return (*self.command, f"parallel.engine={engine}", f"parallel.engine_config={config}")

    def _spec_for_engine(self, engine: str) -> RunSpec:
        """Return the run in the chosen layout under an engine, on devices that need not exist here."""
        obstacle = self.plan.cost_model.engine_obstacle(engine)
        if not obstacle and self.layout.split_axes:
            obstacle = f"the chosen layout is {self.layout.family}, which {engine} does not support"
        if obstacle:
            raise option_error("--emit", f"{obstacle}; use  --emit torchrun  or  slurm", "not-supported")
        device = "cuda" if self.on_gpu else "cpu"
        return self.plan.spec.replace({**self.plan.overrides(), "parallel.engine": engine, "parallel.device": device})


def to_dns_name(name: str) -> str:
    """Convert a name for Kubernetes: lower-case letters, digits and dashes, with room for its suffixes."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")


def to_skypilot_name(device: str) -> str:
    """Convert the name of a device of the catalogue: A100-SXM4-80GB to A100-80GB, RTX-3090 to RTX3090."""
    words = [word for word in device.split("-") if not re.fullmatch(r"(SXM\d?|PCIe|NVL)", word, re.IGNORECASE)]
    if words[0] == "RTX":
        return "".join(words[:2])
    whole = "-".join(words[:2])
    return whole if whole in SKYPILOT_MEMORY_NAMES else words[0]


@dataclass(frozen=True)
class BatchJob:
    """What a batch script contains; every text in it is the user's or the site's, and is quoted."""

    name: str
    note: str
    command: tuple[str, ...]  # of each rank: `train …`
    run: str
    nodes: str  # `2`, or `1-2` if fewer are enough
    per_node: int
    gpus: str = ""  # of a node: `4` or, with their kind, `a100:4`
    hours: float | None = None
    log: str = "slurm-%j.out"
    options: Mapping[str, str] = field(default_factory=dict)  # other options of sbatch, without their dashes
    setup: tuple[str, ...] = ()  # lines of the shell, copied as they are
    python: tuple[str, ...] = ("python",)  # what starts Python; in a container, with the words in front of it
    warn_s: int = WARN_S
    attempts: int = ATTEMPTS

    @property
    def elastic(self) -> bool:
        return "-" in self.nodes


def build_batch_script(job: BatchJob, kind: Literal["batch", "array", "command"] = "batch", **values: Any) -> str:
    """Build a job that trains.

    In an array each task measures one number of `ranks` against one rank, in turns, on one node. A command of the
    user's runs once for each rank, and again while it saves `checkpoints`.
    """
    python, command = shlex.join([*job.python, "-m"]), shlex.join(job.command)
    values |= {"note": to_one_line(job.note), "version": __version__, "directives": _list_directives(job)}
    values |= {"python": python, "command": command, "requeue": REQUEUE_CODE, "here": HERE_CODE}
    return render_launch_template(f"slurm_{kind}.sh.j2", job=job, **values)


def render_launch_template(file: str, **values: Any) -> str:
    """Render a file of `templates/`; nothing is escaped, the filters `shell` and `yaml` quote a value."""
    text = (TEMPLATES / file).read_text(encoding="utf-8")
    dump = functools.partial(json.dumps, ensure_ascii=False)  # which YAML is a superset of
    template = compile_template(text, html=False, value=lambda value: value, shell=shlex.quote, yaml=dump)
    return f"{template.render(**values)}\n"


def _list_directives(job: BatchJob) -> Iterator[str]:
    asked, options = {"job-name": job.name, "nodes": job.nodes}, dict(job.options)
    if job.elastic:
        cores = options.pop("cpus-per-task", "1")
        if not re.fullmatch(r"[1-9]\d{0,5}", cores, re.ASCII):
            problem = f"{cores!r} is not a number of cores; write it as  cpus-per-task: '4'"
            raise option_error("cpus-per-task", problem)
        # cores only: Slurm keeps the number of tasks of the first start, and would wait for as many nodes again
        asked["mincpus"] = str(job.per_node * int(cores))
    else:
        asked["ntasks-per-node"] = str(job.per_node)
    if job.gpus:
        asked["gpus-per-node"] = job.gpus
    if job.hours is not None:
        asked["time"] = format_slurm_time(job.hours)
    asked |= {"signal": f"B:USR1@{job.warn_s}", "open-mode": "append", "output": job.log, **options}
    for name, value in asked.items():
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise option_error(name, "not an option of sbatch; write it without its dashes, as in  constraint")
        yield f"--{name}={quote_directive(value)}" if value else f"--{name}"
    yield "--requeue"


def quote_directive(value: str) -> str:
    """Quote a value of a `#SBATCH` line, which sbatch reads with quotes and backslashes."""
    if not value.isprintable():
        message = f"{value!r} has control characters, which a batch script cannot have; leave them out"
        raise UserError(message, code="invalid-value")
    if re.fullmatch(r"[\w.,:;%@+=/~^*\[\]&|()-]+", value, re.ASCII):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
