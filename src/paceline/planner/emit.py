"""Launch files for the chosen layout: torchrun, Slurm, Kubernetes, SkyPilot, Accelerate, DeepSpeed.

Every word of the user's is quoted.
"""

from __future__ import annotations

import json
import os
import posixpath
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import COMMAND_LINE, DEFAULT, RunSpec
from paceline.config.registry import is_script
from paceline.errors import UserError
from paceline.hardware.catalogue import Cluster
from paceline.io.format import duration
from paceline.io.safe_open import read_text
from paceline.layout import Layout, layout_of
from paceline.planner.candidates import PROCESS_BYTES, family_name
from paceline.planner.emit_cloud import POD_RUN_FILE as POD_FILE
from paceline.planner.emit_cloud import PORT, PodSpec, SkyTask, build_manifest, build_sky_file
from paceline.planner.emit_slurm import MIN_JOB_H, BatchJob, build_batch_script
from paceline.planner.plan import Plan, PlanRow
from paceline.planner.training_cost import ZERO_STAGES

TIME_MARGIN = 1.3
"""Times the planned hours are asked of a scheduler."""
RUNS = "runs"
"""Where run folders go, as under `train`."""


def build_launch_files(plan: Plan, run_file: Path, kind: str, words: Sequence[str] = ()) -> dict[str, str]:
    """File name to content; `kind` is a method of `LaunchWriter`, `words` are the overrides that the plan was made
    with."""
    if plan.chosen is None:
        raise UserError(f"there is nothing to launch: {' '.join(plan.advice)}")
    overrides = plan.overrides()
    own = [word for word in words if word.partition("=")[0] not in overrides]
    chosen = [f"{key}={str(value).lower()}" for key, value in overrides.items()]
    launch = LaunchWriter(plan, plan.chosen, run_file, (*own, *chosen))
    files: dict[str, str] = getattr(launch, kind)()
    return files


@dataclass(frozen=True)
class LaunchWriter:
    """A plan that is to be started; `words` are the user's overrides and those of the plan."""

    plan: Plan
    row: PlanRow
    run_file: Path
    words: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        return ("train", str(self.run_file), *self.words)

    @property
    def name(self) -> str:
        return self.plan.spec.name

    @property
    def layout(self) -> Layout:
        return self.row.price.layout

    @property
    def cluster(self) -> Cluster:
        return self.row.price.where.cluster

    @property
    def on_gpu(self) -> bool:
        return not self.plan.site.whole.device.synchronous

    def torchrun(self) -> dict[str, str]:
        return {f"{self.name}.sh": self._script(f"{self._torchrun()} -m paceline", self.command)}

    def slurm(self) -> dict[str, str]:
        """The script that `paceline submit` sends, without what a site adds."""
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
        price = self.row.price
        host = price.host_node_bytes if self.on_gpu else self.cluster.per_node * price.memory.total_bytes * TIME_MARGIN
        pods = PodSpec(
            name=self.name,
            note=self.note,
            run_file=self._text(),
            command=self.words,
            nodes=self.cluster.nodes,
            per_node=self.cluster.per_node,
            gpus=self.cluster.per_node if self.on_gpu else 0,
            memory_bytes=host and host + self.cluster.per_node * PROCESS_BYTES,
            reads=self._reads(posixpath.dirname(POD_FILE)),
        )
        return {f"{self.name}.yaml": build_manifest(pods)}

    def skypilot(self) -> dict[str, str]:
        self._text()
        task = SkyTask(
            name=self.name,
            note=self.note,
            run_file=str(self.run_file),
            command=self.words,
            nodes=self.cluster.nodes,
            per_node=self.cluster.per_node,
            device=self.plan.site.whole.device.name if self.on_gpu else "",
            reads=self._reads("~"),
        )
        return {f"{self.name}_sky.yaml": build_sky_file(task)}

    def accelerate(self) -> dict[str, str]:
        """What `accelerate launch` starts and Paceline drives through Accelerate: data parallelism, sharded or not."""
        import yaml

        from paceline.trainer.engines.accelerate_config import build_accelerate_config, check_accelerate

        spec = self._under("accelerate")
        check_accelerate(spec, layout_of(spec), {})
        values = {
            **build_accelerate_config(spec, layout_of(spec), spec.parallel.device),
            "num_machines": self.cluster.nodes,
        }
        name = f"{self.name}_accelerate.yaml"
        launcher, head = f"accelerate launch --config_file {name}", ""
        if self.cluster.nodes > 1:
            values.pop("machine_rank", None)  # each node is told its own
            head = 'NODE="${NODE:?the number of this node, from 0}"\n'
            launcher += f' \\\n  --machine_rank "$NODE" --main_process_ip "$HEAD" --main_process_port {PORT}'
        if not self.on_gpu:  # accelerate launch starts one process on CPUs, whatever it is asked for
            launcher = self._torchrun()
        script = self._script(f"{launcher} \\\n  -m paceline", self._with_engine("accelerate", name), head)
        return {name: yaml.safe_dump(values, sort_keys=False), f"{self.name}.sh": script}

    def deepspeed(self) -> dict[str, str]:
        from paceline.trainer.engines.deepspeed_config import check_deepspeed

        spec = self._under("deepspeed")
        check_deepspeed(spec, layout_of(spec))
        stage = ZERO_STAGES.get(self.layout.strategy, 0)
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
        script = self._script(f"{self._torchrun()} -m paceline", self._with_engine("deepspeed", name))
        return {name: json.dumps(values, indent=2) + "\n", f"{self.name}.sh": script}

    @property
    def note(self) -> str:
        hours = "" if self.row.hours is None else f", {duration(self.row.hours * 3600)} planned"
        devices = f"{self.row.devices} × {self.plan.site.whole.device.name}"
        return f"{self.name}: {family_name(self.layout)} on {devices}{hours}"

    def _text(self) -> str:
        """The run file, for machines that do not have it. What it names must be there in the same places."""
        if is_script(str(self.run_file)):
            raise UserError(f"{self.run_file} is a script, which must be in the image; write a run file that names it")
        return read_text(self.run_file)

    def _reads(self, folder: str) -> tuple[str, ...]:
        """Code and data of the user's that the run file names, as a machine sees them that has the file in `folder`."""
        spec, here, text = self.plan.spec, self.run_file.resolve().parent, self._text()
        parts = {"model": spec.model, "data": spec.data}
        keys = [(f"{name}.{key}", getattr(part, key)) for name, part in parts.items() for key in part.paths()]
        own = spec.workload.rpartition(":")[0]
        named = [
            str(path) for key, path in keys if path is not None and spec.origin(key) not in (DEFAULT, COMMAND_LINE)
        ]
        found = [*([own] if own.endswith(".py") else []), *named]
        seen = (path if path in text else posixpath.join(folder, os.path.relpath(path, here)) for path in found)
        return tuple(posixpath.normpath(path) if path.startswith("/") else path for path in seen)

    def _script(self, launcher: str, command: Sequence[str], head: str = "") -> str:
        if self.cluster.nodes > 1:
            head = 'HEAD="${HEAD:?run this on every node, with HEAD=NAME_OF_THE_FIRST_NODE}"\n' + head
        top = f"#!/usr/bin/env bash\n# {self.note}\nset -euo pipefail\n"
        return f"{top}{head}exec {launcher} {shlex.join(command)}\n"

    def _torchrun(self) -> str:
        """On one node, or on each of several."""
        if self.cluster.nodes == 1:
            return f"torchrun --standalone --nproc-per-node {self.cluster.per_node}"
        return (
            f"torchrun --nnodes {self.cluster.nodes} --nproc-per-node {self.cluster.per_node} --rdzv-backend c10d "
            f'--rdzv-id {self.name} \\\n  --rdzv-endpoint "$HEAD:{PORT}"'
        )

    def _with_engine(self, engine: str, config: str) -> tuple[str, ...]:
        return (*self.command, f"parallel.engine={engine}", f"parallel.engine_config={config}")

    def _under(self, engine: str) -> RunSpec:
        """The run in the chosen layout under an engine, on the planned devices, which need not be here.

        What the engine cannot do is said now.
        """
        why = self.plan.subject.engine_obstacle(engine)
        if not why and self.layout.tensor * self.layout.pipeline > 1:
            why = f"the chosen layout is {family_name(self.layout)}, which {engine} does not spread"
        if why:
            raise UserError(f"{why}; use  --emit torchrun  or  slurm")
        device = "cuda" if self.on_gpu else "cpu"
        return self.plan.spec.replace({**self.plan.overrides(), "parallel.engine": engine, "parallel.device": device})
