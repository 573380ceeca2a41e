"""Ten clouds of points told apart by a small network: 64 samples a step, however many ranks share them."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, GLOBAL_BATCH, LR = 3, 64, 0.1

hvd.init()
torch.manual_seed(0)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
device = "cuda" if torch.cuda.is_available() else "cpu"

draw = torch.Generator().manual_seed(0)
labels = torch.randint(0, 10, (1792,), generator=draw)
points = torch.randn(10, 64, generator=draw)[labels] + 2 * torch.randn(1792, 64, generator=draw)
samples = TensorDataset(points, labels)
sampler = DistributedSampler(samples, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(samples, batch_size=GLOBAL_BATCH // hvd.size(), sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    mean = hvd.allreduce(total / len(loader), name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch} loss {mean.item():.6f}", flush=True)
