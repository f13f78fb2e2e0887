"""The loop of examples/quickstart.c with PyTorch.  It has 16 bits, a scaler for fp16, clipping, a schedule, evaluation and
checkpoints.  train and test are lists of (x, y)."""
import math

import torch
from torch import nn


def run(model, train, test, epochs, device, dtype, path):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    steps = epochs * len(train)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / 99, 0.5 + 0.5 * math.cos(math.pi * max(i - 99, 0) / (steps - 99))))
    for epoch in range(epochs):
        for x, y in train:
            with torch.autocast(device, dtype):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
        with torch.no_grad(), torch.autocast(device, dtype):
            right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in test)
        print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {right / sum(len(y) for _, y in test):.4f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
                    "schedule": schedule.state_dict(), "epoch": epoch}, path)
