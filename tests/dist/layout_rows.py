"""What the ranks of test_layouts.py and others do: many layouts one after the other, in one launch."""

import os
from contextlib import closing
from pathlib import Path

import torch

from paceline.launch.environment import SINGLE_RANK, detect_rank
from paceline.launch.process_group import create_device_mesh, join_ranks
from paceline.launch.signals import StopRequest
from paceline.layout import layout_of
from paceline.runlog.events import EventWriter
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint.reader import find_newest
from paceline.trainer.checkpoint.writer import CheckpointWriter
from paceline.trainer.context import RunContext
from paceline.trainer.evaluation import evaluate
from paceline.trainer.optim.optimizers import set_lr
from paceline.trainer.setup import build_gradient_job
from paceline.workload import build_workload


def job_of(spec, place, device, events=None, checkpoints=None, folder=Path()):
    context = RunContext(spec, layout_of(spec), place, device, folder, events, checkpoints, StopRequest())
    return build_gradient_job(context, build_workload(spec))


def train_rows(rows, scratch, kind="cpu", backend="auto"):
    """Train each (name, spec) into scratch/name, as `paceline train` does."""
    place = detect_rank(os.environ) or SINGLE_RANK
    with join_ranks(place, kind, 1, 120, backend) as device:
        for name, spec in rows:
            folder = Path(scratch) / name
            with (
                EventWriter(folder / f"rank{place.rank}.jsonl") as events,
                closing(CheckpointWriter(folder / "checkpoints", 1)) as checkpoints,
            ):
                job_of(spec, place, device, events, checkpoints, folder).run()
                checkpoints.wait()


def evaluate_again(folder, spec, scratch):
    """The metrics of a run's newest checkpoint, as this rank computes them together with the others."""
    place = detect_rank(os.environ) or SINGLE_RANK
    scratch = Path(scratch) / str(place.world)
    with (
        join_ranks(place, "cpu", spec.parallel.threads, 120) as device,
        EventWriter(scratch / f"rank{place.rank}.jsonl") as events,
        closing(CheckpointWriter(scratch, 1)) as checkpoints,
    ):
        job = job_of(spec, place, device, events, checkpoints, scratch)
        job.restore(find_newest(RunDir(Path(folder)).checkpoints, print))
        assert job.state.step > 0
        return evaluate(job, job.held_out)


def held_bytes(rows):
    """For each (name, spec): bytes of storage this rank holds for parameters, gradients and optimiser state.

    Parameters are counted when the loss has been computed, gradients when the backward pass is over, each storage
    once: what a strategy keeps whole in between counts whole.
    """
    place = detect_rank(os.environ) or SINGLE_RANK
    found = {}
    with join_ranks(place, "cpu", 1, 120) as device:
        for name, spec in rows:
            job = job_of(spec, place, device)
            state, workload = job.state, job.workload
            batch = job.loader.samples.batch(*2 * [torch.arange(2).numpy()])
            total, _ = workload.loss(state.model.net, batch)
            parameters = _bytes(_parameters_at_work(state.model.parts))
            total.backward()
            state.model.local_parameters.attach_gradients()
            found[name] = {
                "parameters": parameters,
                "gradients": _bytes(_local(p.grad) for part in state.model.parts for p in part.parameters()),
                "optimizer": _bytes(
                    value for values in state.optimizer.state.values() for value in values.values() if value.ndim
                ),
            }
    return found


def _parameters_at_work(parts):
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        yield from (_local(p) for p in part.parameters())
        for module in part.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for p in group.fsdp_params:
                        yield from (p._sharded_param_data, *getattr(p, "all_gather_outputs", []))


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bytes(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(size for place, size in storages.items() if place)


def parts_after(spec):
    place = detect_rank(os.environ) or SINGLE_RANK
    with join_ranks(place, "cpu", 1, 120) as device:
        job = job_of(spec, place, device)
        for batch in job.loader.prefetch(0, job.facts.steps):
            set_lr(job.state.optimizer, 0.01)
            job.train_step(batch, False)
        return [p.data.tolist() for p in job.state.model.local_parameters], [b.tolist() for b in job.state.buffers()]


def train_rows_through_host(rows, scratch):
    """The same where messages and gathers go the way that they take from a device which ranks share."""
    from paceline.launch.shared_device import HostRoutedGroup, patch_functional_gathers
    from paceline.parallel import pipeline

    patch_functional_gathers("CPU")
    pipeline.route_through_host = lambda group, device: HostRoutedGroup(group)
    train_rows(rows, scratch)


def gather_in_every_way():
    """What functional collectives and DTensor gather, by gloo's own way and by that for ranks that share a device."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from paceline.launch.shared_device import patch_functional_gathers

    def gather(mesh, rank):
        x = (torch.arange(12.0).view(2, 6) + 100 * rank).requires_grad_()
        whole = DTensor.from_local(x, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
        whole.to_local().square().sum().backward()
        ops, group = torch.ops._c10d_functional, mesh.get_group().group_name
        numbers = torch.tensor([rank, 7], dtype=torch.bfloat16)
        sent = [ops.all_gather_into_tensor(numbers, 2, group)]
        sent += ops.all_gather_into_tensor_coalesced([torch.arange(3.0) + rank, torch.ones(1, 2)], 2, group)
        return [whole.to_local().detach(), x.grad, *map(ops.wait_tensor, sent)]

    place = detect_rank(os.environ)
    with join_ranks(place, "cpu", 1, 120):
        mesh = create_device_mesh("cpu", (place.world,))
        plain = gather(mesh, place.rank)
        patch_functional_gathers("CPU")
        name = "_c10d_functional::all_gather_into_tensor"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        return {"plain": plain, "mended": gather(mesh, place.rank)}
