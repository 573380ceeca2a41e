"""A training loop for one device: the start of exercise 1."""

import torch
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 20)
dataset = TensorDataset(x, (x @ torch.randn(20) > 0).float())
order = torch.Generator().manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(5):
    for batch in torch.randperm(len(dataset), generator=order).split(64):
        inputs, labels = dataset[batch]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(inputs)[:, 0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

with torch.no_grad():
    final = torch.nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], dataset.tensors[1])
print(f"loss {final:.6f}")
