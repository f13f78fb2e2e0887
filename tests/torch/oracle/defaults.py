"""Makes the golden data of the manual's table WHAT DIFFERS FROM PYTORCH'S DEFAULTS: PyTorch's results with its default
settings.

Inputs are stored beside the results.  t_zeros.c sets in amp.h the values of the table's last column, and compares.
"""
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

import common

STEPS = 3


def steps(make, n=STEPS):
    """A matrix and a vector after n steps, from gradients that are multiples of the number of the step."""
    w = torch.from_numpy(common.uniform(1, 0, (3, 4)).copy()).requires_grad_()
    b = torch.from_numpy(common.uniform(1, 1, (4,)).copy()).requires_grad_()
    optimizer = make([w, b])
    for step in range(n):
        w.grad = torch.from_numpy(common.uniform(2, 0, (3, 4)) * np.float32(step + 1))
        b.grad = torch.from_numpy(common.uniform(2, 1, (4,)) * np.float32(step + 1))
        optimizer.step()
    return w.detach().numpy(), b.detach().numpy()


def main():
    r = {"w": common.uniform(1, 0, (3, 4)), "b": common.uniform(1, 1, (4,)),
         "dw": common.uniform(2, 0, (3, 4)), "db": common.uniform(2, 1, (4,))}
    r["adamw/w"], r["adamw/b"] = steps(torch.optim.AdamW)
    r["sgd/w"], r["sgd/b"] = steps(lambda p: torch.optim.SGD(p, momentum=0.9))
    logits = torch.from_numpy(common.uniform(3, 0, (4, 3), 3))
    labels = torch.tensor([0, 1, 2, 0])
    r["logits"], r["labels"] = logits.numpy(), labels.numpy().astype(np.int32)
    r["cross_entropy"] = nn.CrossEntropyLoss()(logits, labels).numpy().reshape(1)
    r["ignore_0"] = nn.CrossEntropyLoss(ignore_index=0)(logits, labels).numpy().reshape(1)
    x = common.uniform(4, 0, (2, 4), 0.002)                 # so small that eps counts
    r["small"] = x
    r["layernorm"] = nn.LayerNorm(4)(torch.from_numpy(x)).detach().numpy()
    r["rmsnorm"] = nn.RMSNorm(4)(torch.from_numpy(x)).detach().numpy()
    r["gelu"] = nn.GELU()(logits).numpy()
    q, k, v = (torch.from_numpy(common.uniform(5, i, (1, 1, 2 if i == 0 else 4, 4), 2)) for i in range(3))
    r["q"], r["k"], r["v"] = q.numpy(), k.numpy(), v.numpy()
    r["causal"] = F.scaled_dot_product_attention(q, k, v, is_causal=True).numpy()
    scaler = torch.amp.GradScaler("cpu")
    p = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([p])
    for _ in range(20):                                     # every step overflows
        scaler.scale(p.sum()).backward()
        p.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    r["scale"] = np.array([scaler.get_scale()], dtype=np.float32)
    p.grad = torch.full((1,), float("inf"))
    optimizer.step()
    r["stepped"] = np.array([not torch.isfinite(p).item()], dtype=np.int32)
    r["batches"] = np.array([len(torch.utils.data.DataLoader(range(10), 4))], dtype=np.int32)
    layer = nn.Linear(64, 512)
    r["bound"] = np.array([layer.weight.abs().max().item(), layer.bias.abs().max().item()], dtype=np.float32)
    common.write_golden("defaults.bin", r, lambda name: 0.1 if name == "bound" else 1e-6)


if __name__ == "__main__":
    main()
