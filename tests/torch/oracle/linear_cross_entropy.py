"""Makes the golden data of amp_linear_cross_entropy: F.cross_entropy(F.linear(x, weight, bias)) and its autograd gradients.

Inputs come from counter-based random numbers that t_linear_cross_entropy.c makes again, so only results are stored.  These
are loss and gradients of an fp64 run on fp32 inputs for seed 0, rounded to fp32, and per output the RMS over the seeds of
PyTorch's own error when all is stored in bf16 or fp16 and the loss is computed from logits in fp32, as in a region of
torch.autocast.
"""
import numpy as np
import torch
import torch.nn.functional as F

import common

ROWS, IN, OUT, CLASSES, IGNORE = 13, 24, 37, 33, -100


def inputs(seed):
    """Every fourth label is ignored; the others are among the classes."""
    labels = common.integers(seed, 3, ROWS, CLASSES)
    labels[::4] = IGNORE
    return {"x": common.uniform(seed, 0, (ROWS, IN), 2.0), "weight": common.uniform(seed, 1, (OUT, IN)),
            "bias": common.uniform(seed, 2, (OUT,), 0.5), "labels": labels}


CASES = {"mean": dict(), "smooth": dict(label_smoothing=0.1), "sum": dict(label_smoothing=0.1, reduction="sum"),
         "classes": dict()}


def results(v, dtype, loss_dtype):
    out = {}
    for case, how in CASES.items():
        leaves = [v[name].to(dtype).clone().requires_grad_() for name in ("x", "weight", "bias")]
        logits = F.linear(*leaves).to(loss_dtype)
        loss = F.cross_entropy(logits[:, :CLASSES] if case == "classes" else logits, v["labels"].long(),
                               ignore_index=IGNORE, **how)
        grads = torch.autograd.grad(loss, leaves)
        for name, t in zip(("loss", "dx", "dweight", "dbias"), (loss.detach(), *grads)):
            out[f"{case}/{name}"] = t.double().numpy()
    return out


def stored(raw, dtype):
    return {k: torch.from_numpy(np.asarray(a)).to(dtype) if a.dtype == np.float32 else torch.from_numpy(a)
            for k, a in raw.items()}


def main():
    torch.set_num_threads(1)
    exact = results(stored(inputs(0), torch.float32), torch.float64, torch.float64)
    records = {name: value.astype(np.float32) for name, value in exact.items()}
    for kind, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items():
        errors = []
        for seed in range(common.SEEDS):
            v = stored(inputs(seed), dtype)
            errors.append(common.relative_errors(results(v, dtype, torch.float32),
                                                 results(v, torch.float64, torch.float64), lambda name: name))
        summary = common.rms(errors)
        records.update({f"{kind}/torch/{name}": np.array([e]) for name, e in summary.items()})
        worst = max(summary, key=summary.get)
        print(f"  {kind}: PyTorch's RMS error, largest {summary[worst]:.2e} ({worst})")
    common.write_golden("linear_cross_entropy.bin", records, common.model_bound)


if __name__ == "__main__":
    main()
