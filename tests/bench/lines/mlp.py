"""The task of examples/mlp.c with PyTorch."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, TRAIN, IN, HIDDEN, CLASSES, STEPS = 6000, 5000, 8, 64, 4, 1500
torch.manual_seed(1)
x = torch.rand(ROWS, IN) - 0.5
y = (x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 2] > x[:, 3]).long()
batches = DataLoader(TensorDataset(x[:TRAIN], y[:TRAIN]), batch_size=100, shuffle=True)
model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
step = 0
while step < STEPS:
    for rows, labels in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 500 == 0:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x[TRAIN:]), y[TRAIN:])
            print(f"step {step}: validation loss {loss:.4f}")
