"""The solution of exercise 1: the loop of single.py on several ranks, with the same loss.

paceline launch --ranks 2 -- python ddp.py      or      torchrun --nproc_per_node=2 ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

GLOBAL_BATCH = 64


def train(rank: int, world: int) -> float:
    torch.manual_seed(0)  # the same data and the same first weights on every rank
    x = torch.randn(512, 20)
    dataset = TensorDataset(x, (x @ torch.randn(20) > 0).float())
    order = torch.Generator().manual_seed(0)  # the same order on every rank: each takes its part of a global batch
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for _ in range(5):
        for batch in torch.randperm(len(dataset), generator=order).split(GLOBAL_BATCH):
            inputs, labels = dataset[batch.chunk(world)[rank]]  # equal parts: the mean of means is the mean
            loss = torch.nn.functional.binary_cross_entropy_with_logits(wrapped(inputs)[:, 0], labels)
            optimizer.zero_grad()
            loss.backward()  # adds up the gradients of all ranks
            optimizer.step()
    with torch.no_grad():
        return float(torch.nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], dataset.tensors[1]))


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
final = train(dist.get_rank(), dist.get_world_size())
if dist.get_rank() == 0:  # one of them prints, and would save
    print(f"loss {final:.6f}")
dist.destroy_process_group()
