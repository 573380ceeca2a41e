"""Points inside and outside of a circle, with DistributedDataParallel:  torchrun --nproc-per-node 2 ddp_before.py"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def points(count, seed):
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(x, (x.square().sum(1) < 0.6).long())


def main():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = points(1000, seed=1), points(203, seed=2)
    model = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 2))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=50 // ranks, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = torch.zeros(2, device=device)
        with torch.no_grad():
            for x, y in DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, shuffle=False)):
                right[0] += (model(x.to(device)).argmax(1) == y.to(device)).sum()
                right[1] += len(y)
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {right[0] / right[1]:.4f} of {right[1]:.0f}")
            torch.save(model.module.state_dict(), "ddp.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
