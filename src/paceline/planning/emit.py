"""Launch files for the chosen layout: torchrun, Slurm, Accelerate, DeepSpeed. Every word of the user's is quoted."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.layout import layout_of
from paceline.planning.candidates import family_name
from paceline.planning.plan import Plan
from paceline.planning.training import ZERO
from paceline.spec import RunSpec

SPARE = 1.3
"""Times the planned hours are asked of a scheduler."""
PORT = 29500


def launch_files(plan: Plan, run_file: Path, kind: str, words: Sequence[str] = ()) -> dict[str, str]:
    """File name to content; `words` are the overrides that the plan was made with."""
    if plan.chosen is None:
        raise UserError(f"there is nothing to launch: {' '.join(plan.advice)}")
    if kind in ("accelerate", "deepspeed"):
        _suits(plan, kind)
    make = {"torchrun": _torchrun, "slurm": _slurm, "accelerate": _accelerate, "deepspeed": _deepspeed}[kind]
    return make(plan, _command(plan, run_file, words))


def _command(plan: Plan, run_file: Path, words: Sequence[str]) -> list[str]:
    """`train RUN …` with the user's overrides, and then those of the plan."""
    chosen = plan.overrides()
    own = [word for word in words if word.partition("=")[0] not in chosen]
    return ["train", str(run_file), *own, *(f"{key}={str(value).lower()}" for key, value in chosen.items())]


def _joined(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _shape(plan: Plan) -> tuple[int, int]:
    """(nodes, devices per node)."""
    assert plan.chosen is not None
    cluster = plan.chosen.price.where.cluster
    return cluster.nodes, cluster.per_node


def _on_gpu(plan: Plan) -> bool:
    return not plan.site.whole.device.synchronous


def _note(plan: Plan) -> str:
    row = plan.chosen
    assert row is not None
    hours = "" if row.hours is None else f", {row.hours:.2g} h planned"
    devices = f"{row.devices} × {plan.site.whole.device.name}"
    return f"# {plan.spec.name}: {family_name(row.price.layout)} on {devices}{hours}"


def _launcher(plan: Plan) -> str:
    """torchrun on one node, or on each of several."""
    nodes, each = _shape(plan)
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {each} -m paceline"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-id {plan.spec.name} \\\n"
        f'  --rdzv-endpoint "$HEAD:{PORT}" -m paceline'
    )


def _head_line(plan: Plan) -> str:
    if _shape(plan)[0] == 1:
        return ""
    return 'HEAD="${HEAD:?run this on every node, with HEAD=NAME_OF_THE_FIRST_NODE}"\n'


def _top(plan: Plan) -> str:
    return f"#!/usr/bin/env bash\n{_note(plan)}\nset -euo pipefail\n"


def _torchrun(plan: Plan, command: list[str]) -> dict[str, str]:
    text = f"{_top(plan)}{_head_line(plan)}exec {_launcher(plan)} {_joined(command)}\n"
    return {f"{plan.spec.name}.sh": text}


def _slurm(plan: Plan, command: list[str]) -> dict[str, str]:
    """One task per device: the ranks find each other by what srun tells them."""
    nodes, each = _shape(plan)
    row = plan.chosen
    assert row is not None
    lines = ["#!/usr/bin/env bash", f"#SBATCH --job-name={plan.spec.name}"]
    lines += [f"#SBATCH --nodes={nodes}", f"#SBATCH --ntasks-per-node={each}"]
    if _on_gpu(plan):
        lines.append(f"#SBATCH --gpus-per-node={each}")
    if row.hours is not None:
        lines.append(f"#SBATCH --time={_clock(row.hours * SPARE)}")
    lines += ["#SBATCH --signal=TERM@120", _note(plan), "set -euo pipefail"]
    lines.append(f"exec srun python -m paceline {_joined(command)}")
    return {f"{plan.spec.name}.sbatch": "\n".join(lines) + "\n"}


def _clock(hours: float) -> str:
    minutes = max(5, math.ceil(hours * 60))
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02}:{rest % 60:02}:00"


def _accelerate(plan: Plan, command: list[str]) -> dict[str, str]:
    """What `accelerate launch` starts and Paceline drives through Accelerate: data parallelism, sharded or not."""
    import yaml

    from paceline.training.engines.accelerate_config import config

    nodes, _ = _shape(plan)
    spec = _under(plan, "accelerate")
    values = {**config(spec, layout_of(spec), spec.parallel.device), "num_machines": nodes}
    if nodes > 1:
        values.pop("machine_rank", None)  # each node is told its own
    name = f"{plan.spec.name}_accelerate.yaml"
    words = [*command, "parallel.engine=accelerate", f"parallel.engine_config={name}"]
    head, launcher = _head_line(plan), f"accelerate launch --config_file {name}"
    if nodes > 1:
        head += 'NODE="${NODE:?the number of this node, from 0}"\n'
        launcher += f' \\\n  --machine_rank "$NODE" --main_process_ip "$HEAD" --main_process_port {PORT}'
    if not _on_gpu(plan):  # accelerate launch starts one process on CPUs, whatever it is asked for
        launcher = _launcher(plan).removesuffix(" -m paceline")
    script = f"{_top(plan)}{head}exec {launcher} \\\n  -m paceline {_joined(words)}\n"
    return {name: yaml.safe_dump(values, sort_keys=False), f"{plan.spec.name}.sh": script}


def _deepspeed(plan: Plan, command: list[str]) -> dict[str, str]:
    assert plan.chosen is not None
    price = plan.chosen.price
    layout = price.layout
    stage = ZERO.get(layout.strategy, 0)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if layout.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    values = {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": price.passes,
        "gradient_clipping": float(plan.spec.train.clip),
        "zero_optimization": zero,
    }
    name = f"{plan.spec.name}_deepspeed.json"
    words = [*command, "parallel.engine=deepspeed", f"parallel.engine_config={name}"]
    script = f"{_top(plan)}{_head_line(plan)}exec {_launcher(plan)} {_joined(words)}\n"
    return {name: json.dumps(values, indent=2) + "\n", f"{plan.spec.name}.sh": script}


def _under(plan: Plan, engine: str) -> RunSpec:
    """The run in the chosen layout on the planned devices, which need not be here."""
    device = "cuda" if _on_gpu(plan) else "cpu"
    return plan.spec.replace({**plan.overrides(), "parallel.engine": engine, "parallel.device": device})


def _suits(plan: Plan, kind: str) -> None:
    """What an engine cannot do is said now, in the words in which the run would say it."""
    assert plan.chosen is not None
    layout = plan.chosen.price.layout
    why = plan.subject.why_not_under(kind)
    if not why and layout.tensor * layout.pipeline > 1:
        why = f"the chosen layout is {family_name(layout)}, which {kind} does not spread"
    if why:
        raise UserError(f"{why}; use  --emit torchrun  or  slurm")
    spec = _under(plan, kind)
    if kind == "deepspeed":
        from paceline.training.engines.deepspeed_config import check

        check(spec, layout_of(spec))
    else:
        from paceline.training.engines.accelerate_config import check as check_accelerate

        check_accelerate(spec, layout_of(spec), {})
