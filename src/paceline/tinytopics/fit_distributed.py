"""A fit whose documents are spread over ranks: those of an `Accelerator`, of a process group, or of a launcher."""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from paceline.io.files import write_atomic
from paceline.launch.environment import detect_rank
from paceline.launch.process_group import join_ranks
from paceline.tinytopics.epochs import Epochs, FitRequest
from paceline.tinytopics.models import NeuralPoissonNMF
from paceline.workloads.topics.fitting.passes import RangePass, ReadPasses

TIMEOUT_S = 1800  # for a rank that reads more slowly than its peers


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
    """`fit_model` on all ranks together; each gets the whole model and the same losses.

    Ranks that an `Accelerator` or a process group joins already are used as they are, with their device; else
    those
    of torchrun, accelerate launch, srun or mpirun are joined until the program ends. A program that is alone fits
    alone. Every rank is given the same X and reads its own part. The main rank writes the model's `state_dict` to
    `save_path`, unless it is None.
    """
    request = FitRequest(X, k, num_epochs, batch_size)
    request.check(base_lr=base_lr, max_lr=max_lr, T_0=T_0, T_mult=T_mult, weight_decay=weight_decay)
    device = _device()
    together = dist.is_initialized()
    main = not together or dist.get_rank() == 0
    bars = EpochBars(num_epochs, shown=main)
    model, losses = Epochs(request, device, alone=not together).run(bars.seen, bars.watch)
    if main and bars.done < num_epochs:
        print(f"Converged after {bars.done} of {num_epochs} epochs, Loss = {losses[-1]:.4f}")
    if main and save_path is not None:
        content = io.BytesIO()
        torch.save(model.state_dict(), content)
        write_atomic(Path(save_path), content.getvalue())
    return model, losses


class EpochBars:
    """A bar for every epoch, which runs through this rank's documents, and a line with its loss."""

    def __init__(self, epochs: int, shown: bool) -> None:
        self.epochs, self.shown, self.done = epochs, shown, 0

    def watch(self, passes: ReadPasses, documents: int) -> ReadPasses:
        def read() -> Iterator[RangePass]:
            name = f"Epoch {self.done + 1}/{self.epochs}"
            with tqdm(total=documents, desc=name, unit=" documents", disable=not self.shown) as bar:
                for first, last, work in passes():
                    yield first, last, work
                    bar.update(last - first)

        return read

    def seen(self, epoch: int, loss: float) -> None:
        self.done = epoch
        if self.shown:
            print(f"Epoch {epoch}, Loss = {loss:.4f}")


def _device() -> torch.device:
    """This rank's device, with the ranks of a launcher joined if nobody has joined them."""
    if "accelerate" in sys.modules:
        from accelerate.state import PartialState, is_initialized

        if is_initialized():
            return PartialState().device
    if not dist.is_initialized():
        return _join()
    on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _join() -> torch.device:
    place = detect_rank(os.environ)
    kind: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    if place is None or place.world == 1:
        return torch.device(kind)
    group = ExitStack()
    device = group.enter_context(join_ranks(place, kind, threads=0, timeout_s=TIMEOUT_S))

    def leave() -> None:
        if dist.is_initialized():  # the program may have left it by itself
            group.close()

    atexit.register(leave)
    return device
