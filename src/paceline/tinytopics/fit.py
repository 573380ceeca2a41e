"""Fits in one process and on several ranks: an epoch is a pass of accelerated EM over all documents."""

import atexit
import io
import math
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from paceline.errors import InvalidValue
from paceline.io.files import write_atomic
from paceline.launch.environment import detect_rank
from paceline.launch.process_group import broadcast_from_main, join_ranks
from paceline.tinytopics.data import open_counts
from paceline.tinytopics.models import NeuralPoissonNMF
from paceline.workloads.topics.fitting.engine import AcceleratedEM
from paceline.workloads.topics.fitting.problem import MAX_TOPICS, FitProblem, build_problem
from paceline.workloads.topics.in_process import use_device
from paceline.workloads.topics.sections import FitOptions

SCATTER = 0.2  # of the logarithms of the first topics, so that each seed begins elsewhere
TIMEOUT_S = 1800  # for a rank that reads more slowly than its peers
ADAM = {"base_lr": 0.01, "max_lr": 0.05, "T_0": 20, "T_mult": 1, "weight_decay": 1e-5}  # without effect: defaults
OnEpoch = Callable[[int, float], None]  # called with the number of an epoch, from 1, and its loss


def fit_model(
    X: Tensor | Dataset,
    k: int,
    num_epochs: int = 200,
    batch_size: int = 16,
    base_lr: float = 0.01,
    max_lr: float = 0.05,
    T_0: int = 20,
    T_mult: int = 1,
    weight_decay: float = 1e-5,
    device: torch.device | None = None,
) -> tuple[NeuralPoissonNMF, list[float]]:
    """Return (model, loss of every epoch) of k topics in X: a tensor (documents, terms), or a dataset of its rows.

    An epoch is a pass over all documents. A fit that has converged stops, and its loss is repeated for the rest of
    `num_epochs`. Losses are means of sums over `batch_size` documents; the fit does not depend on it. The numbers of
    an optimiser have no effect. The default `device` is the GPU, if there is one.
    """
    _check((base_lr, max_lr, T_0, T_mult, weight_decay), k=k, num_epochs=num_epochs, batch_size=batch_size)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with tqdm(total=num_epochs, desc="Training Progress") as bar:

        def on_epoch(epoch: int, loss: float) -> None:
            bar.set_postfix({"Loss": f"{loss:.4f}"})
            bar.update(epoch - bar.n)

        model, losses = _fit_epochs(X, k, num_epochs, batch_size, where, True, on_epoch)
        if bar.n < num_epochs:
            bar.set_postfix_str(f"Loss={losses[-1]:.4f}, converged after {bar.n} epochs")
            bar.update(num_epochs - bar.n)
    return model, losses


def fit_model_distributed(
    X: Tensor | Dataset,
    k: int,
    num_epochs: int = 200,
    batch_size: int = 16,
    base_lr: float = 0.01,
    max_lr: float = 0.05,
    T_0: int = 20,
    T_mult: int = 1,
    weight_decay: float = 1e-5,
    save_path: str | None = "model.pt",
) -> tuple[NeuralPoissonNMF, list[float]]:
    """Fit on all ranks together; each gets the whole model and the same losses, as from `fit_model`.

    A process group or `Accelerator` that exists is used as it is; else the ranks of torchrun, accelerate launch, srun
    or mpirun are joined until the program ends. Without a launcher the program fits alone. Every rank is given the
    same X and reads its own part. The main rank prints each epoch's loss, and writes the model's `state_dict` to
    `save_path`, unless it is None.
    """
    _check((base_lr, max_lr, T_0, T_mult, weight_decay), k=k, num_epochs=num_epochs, batch_size=batch_size)
    device = _join_device()
    alone = not dist.is_initialized()
    main = alone or dist.get_rank() == 0
    done = 0

    def on_epoch(epoch: int, loss: float) -> None:
        nonlocal done
        done = epoch
        if main:
            print(f"Epoch {epoch}, Loss = {loss:.4f}")

    model, losses = _fit_epochs(X, k, num_epochs, batch_size, device, alone, on_epoch)
    if main and done < num_epochs:
        print(f"Converged after {done} of {num_epochs} epochs, Loss = {losses[-1]:.4f}")
    if main and save_path is not None:
        content = io.BytesIO()
        torch.save(model.state_dict(), content)
        write_atomic(Path(save_path), content.getvalue())
    return model, losses


def _check(adam: tuple[float, ...], **sizes: int) -> None:
    """Reject impossible arguments, and warn of those of an optimiser that is not used here."""
    given = dict(zip(ADAM, adam, strict=True))
    for name, value in sizes.items():
        least = 0 if name == "num_epochs" else 1
        if not isinstance(value, int | np.integer) or value < least:
            raise InvalidValue(f"{name}={value}: give a whole number, {least} or more", key=name)
    if sizes["k"] > MAX_TOPICS:
        raise InvalidValue(f"k={sizes['k']} topics: give at most {MAX_TOPICS}", key="k")
    for name, number in given.items():
        if not number >= (name in ("T_0", "T_mult")):
            raise InvalidValue(f"{name}={number}: give {ADAM[name]:g}, or leave it out; it has no effect", key=name)
    if changed := [f"{name}={value:g}" for name, value in given.items() if value != ADAM[name]]:
        warnings.warn(f"no effect of {', '.join(changed)}: this fit has no learning rate", stacklevel=3)


def _fit_epochs(
    X: Any, k: int, num_epochs: int, batch_size: int, device: torch.device, alone: bool, on_epoch: OnEpoch
) -> tuple[NeuralPoissonNMF, list[float]]:
    """Return the model, and for every epoch the loss that its pass found, as a mean over batches.

    Unless `alone`, the ranks of the process group fit together.
    """
    on_gpu = device.type == "cuda"
    counts = open_counts(X, on_device=on_gpu, ranks=1 if alone else dist.get_world_size())
    model = NeuralPoissonNMF(counts.documents, counts.terms, k, device)
    losses: list[float] = []
    if not num_epochs:
        return model, losses
    batches = math.ceil(counts.documents / batch_size)
    where = getattr(counts, "device", device if on_gpu else torch.device("cpu"))
    with use_device(where):
        em = _begin_scattered(build_problem(counts, where, alone=alone), k, num_epochs)
        while em.end is None:
            losses.append(em.step().loss / batches)
            on_epoch(len(losses), losses[-1])
        if rest := num_epochs - len(losses):
            losses += [em.final_loss() / batches] * rest
        L, Ft = em.result()
        model.take(L if alone else _gather_rows(L, counts.documents), Ft.T)
    return model, losses


def _begin_scattered(problem: FitProblem, k: int, num_epochs: int) -> AcceleratedEM:
    """Return a fit that starts near the optimum, scattered by the seed of rank 0, so that seeds differ as expected."""
    drawn = int(torch.randint((1 << 31) - 1, ()))
    seed = drawn if problem.alone else broadcast_from_main(lambda: drawn)
    options = FitOptions(seed=seed, passes=num_epochs)
    first = problem.begin(k, options)
    noise = torch.randn(first.Ft.shape, generator=torch.Generator().manual_seed(seed)).to(first.Ft.device)
    Ft = first.Ft * (SCATTER * noise).exp()
    em = problem.resume_at(first.L, Ft / Ft.sum(0), options)
    em.check = 1  # users plot the loss of every epoch
    return em


def _gather_rows(L: Tensor, documents: int) -> Tensor:
    """Return the rows of all ranks, each of which has the next ones."""
    own = torch.ones(-(-documents // dist.get_world_size()), L.shape[1], device=L.device)
    own[: len(L)] = L
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts)[:documents]


def _join_device() -> torch.device:
    """Return this rank's device, and join the ranks of a launcher unless the program has."""
    if "accelerate" in sys.modules:
        from accelerate.state import PartialState, is_initialized

        if is_initialized():
            return PartialState().device
    kind: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    if dist.is_initialized():
        on_gpu = kind == "cuda" and "nccl" in str(dist.get_backend_config())
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    here = detect_rank(os.environ)
    if here is None or here.world == 1:
        return torch.device(kind)
    group = ExitStack()
    device = group.enter_context(join_ranks(here, kind, threads=0, timeout_s=TIMEOUT_S))

    def leave() -> None:
        if dist.is_initialized():  # the program may have left the group already
            group.close()

    atexit.register(leave)
    return device
