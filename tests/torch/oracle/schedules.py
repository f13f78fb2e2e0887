"""Makes the golden data of amp_schedule_lr: learning rates of the first 60 steps, in fp64.

The schedules of transformers begin their warmup at 0 (.from_zero).  PyTorch's LinearLR from 1 / warmup, followed by
CosineAnnealingLR or LinearLR, is the other warmup.  PyTorch computes each of these rates from the one before.
"""
import numpy as np
import torch
from torch.optim import lr_scheduler as schedulers
from transformers import optimization

import common

LR, MIN, WARMUP, STEPS, DECAY, SHOWN = 3e-4, 2e-5, 7, 50, 15, 60


def rates(make):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    schedule, out = make(optimizer), []
    for _ in range(SHOWN):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return np.array(out, dtype=np.float64)


def then(optimizer, after):
    first = schedulers.LinearLR(optimizer, 1 / WARMUP, 1, WARMUP - 1)
    return schedulers.SequentialLR(optimizer, [first, after], [WARMUP])


def main():
    o = optimization
    cases = {
        "constant": lambda s: o.get_constant_schedule_with_warmup(s, WARMUP),
        "linear": lambda s: o.get_linear_schedule_with_warmup(s, WARMUP, STEPS),
        "linear_min": lambda s: o.get_polynomial_decay_schedule_with_warmup(s, WARMUP, STEPS, MIN, 1.0),
        "cosine": lambda s: o.get_cosine_schedule_with_warmup(s, WARMUP, STEPS),
        "cosine_min": lambda s: o.get_cosine_with_min_lr_schedule_with_warmup(s, WARMUP, STEPS, min_lr=MIN),
        "inverse_sqrt": lambda s: o.get_inverse_sqrt_schedule(s, WARMUP),
        "inverse_sqrt_cold": lambda s: o.get_inverse_sqrt_schedule(s, 0),
        "inverse_sqrt_time": lambda s: o.get_inverse_sqrt_schedule(s, WARMUP, 20),
        "torch_cosine": lambda s: then(s, schedulers.CosineAnnealingLR(s, STEPS - WARMUP, MIN)),
        "torch_linear": lambda s: then(s, schedulers.LinearLR(s, 1, MIN / LR, STEPS - WARMUP)),
    }
    for shape in ("linear", "cosine", "1-sqrt"):
        cases[f"wsd_{shape}"] = lambda s, shape=shape: o.get_wsd_schedule(s, WARMUP, DECAY, STEPS, decay_type=shape)
        cases[f"wsd_{shape}_min"] = lambda s, shape=shape: o.get_wsd_schedule(
            s, WARMUP, DECAY, STEPS, decay_type=shape, min_lr_ratio=MIN / LR)
        cases[f"wsd_{shape}_min_cold"] = lambda s, shape=shape: o.get_wsd_schedule(
            s, 0, DECAY, STEPS, decay_type=shape, min_lr_ratio=MIN / LR)
    common.write_golden("schedules.bin", {name: rates(make) for name, make in cases.items()}, lambda name: 1e-14)


if __name__ == "__main__":
    main()
