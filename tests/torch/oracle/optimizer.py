"""Makes the golden data of tests/unit/t_optimizer.c: 100 steps of AdamW, SGD and Lion on the same gradients.

    python tests/torch/oracle/optimizer.py     (writes tests/torch/golden/optimizer.bin; --check only compares)

AdamW and SGD are those of torch.optim, and Lion is the rule of its paper.  Weights and gradients come from the generator
that both sides have.  Every case is run in fp64 and in fp32.  The fp64 run is the exact result.  The distance of the fp32
run from it is the measure of how close amp.h must be.  In the mixed cases, weights begin as bf16 numbers, gradients are
rounded to bf16, and the result is the master weight.
"""
import numpy as np
import torch

import common

SHAPES = [(7, 13), (33,), (19, 17), (1,), (30, 5)]
STEPS = 100
CASES = {
    "adamw": dict(kind="adamw", lr=1e-3, decay=0.1, clip=0.4),
    "adamw_betas": dict(kind="adamw", lr=3e-3, betas=(0.8, 0.95), eps=1e-6),
    "adamw_maximize": dict(kind="adamw", lr=1e-2, decay=0.01, maximize=True, schedule=True),
    "sgd": dict(kind="sgd", lr=0.05, decay=0.02, clip=0.5),
    "sgd_momentum": dict(kind="sgd", lr=0.02, momentum=0.9, dampening=0.1, schedule=True),
    "sgd_nesterov": dict(kind="sgd", lr=0.01, momentum=0.9, nesterov=True, decay=0.05, maximize=True),
    "lion": dict(kind="lion", lr=1e-4, decay=1.0, clip=0.4),
    "lion_betas": dict(kind="lion", lr=3e-3, betas=(0.95, 0.98), maximize=True, schedule=True),
    "lion_mixed": dict(kind="lion", lr=1e-3, decay=0.3, mixed=True),
}


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, program 1; weight decay by (1 - lr decay)."""

    def __init__(self, groups, lr, betas, maximize):
        super().__init__(groups, dict(lr=lr, betas=betas, maximize=maximize))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for w in group["params"]:
                g = -w.grad if group["maximize"] else w.grad
                m = self.state[w].setdefault("m", torch.zeros_like(w))
                w.mul_(1 - group["lr"] * group["weight_decay"])
                w.add_(torch.sign(m * beta1 + g * (1 - beta1)), alpha=-group["lr"])
                m.mul_(beta2).add_(g, alpha=1 - beta2)


def rate(case, step):
    return case["lr"] * (0.25 + 0.75 * (step % 8) / 8) if case.get("schedule") else case["lr"]


def run(case, dtype):
    stored = torch.bfloat16 if case.get("mixed") else torch.float32
    weights = [torch.from_numpy(common.uniform(31, i, s)).to(stored).to(dtype).requires_grad_() for i, s in enumerate(SHAPES)]
    decay = case.get("decay", 0.0)
    groups = [dict(params=[w for w in weights if w.ndim >= 2], weight_decay=decay),
              dict(params=[w for w in weights if w.ndim < 2], weight_decay=0.0)]
    maximize = case.get("maximize", False)
    if case["kind"] == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=case["lr"], betas=case.get("betas", (0.9, 0.999)), eps=case.get("eps", 1e-8),
                                      maximize=maximize, foreach=False, fused=False)
    elif case["kind"] == "lion":
        optimizer = Lion(groups, lr=case["lr"], betas=case.get("betas", (0.9, 0.99)), maximize=maximize)
    else:
        optimizer = torch.optim.SGD(groups, lr=case["lr"], momentum=case.get("momentum", 0.0), dampening=case.get("dampening", 0.0),
                                    nesterov=case.get("nesterov", False), maximize=maximize, foreach=False, fused=False)
    norms = []
    for step in range(STEPS):
        for i, w in enumerate(weights):
            w.grad = torch.from_numpy(common.uniform(32, 16 * step + i, SHAPES[i], 0.01 * (1 + step % 7), 0.002)).to(stored).to(dtype)
        if "clip" in case:
            norms.append(float(torch.nn.utils.clip_grad_norm_(weights, case["clip"])))
        for group in optimizer.param_groups:
            group["lr"] = rate(case, step)
        optimizer.step()
    return [w.detach().double().numpy() for w in weights], norms


if __name__ == "__main__":
    records = {}
    for name, case in CASES.items():
        exact, norms = run(case, torch.float64)
        fp32, _ = run(case, torch.float32)
        for i, (e, f) in enumerate(zip(exact, fp32)):
            records[f"{name}/{i}"] = e
            records[f"{name}/{i}/torch"] = np.array([np.linalg.norm(f - e) / np.linalg.norm(e)])
        if norms:
            records[f"{name}/norms"] = np.array(norms)
        print(f"  {name}: PyTorch's fp32 errors " + " ".join(f"{records[f'{name}/{i}/torch'][0]:.1e}" for i in range(len(SHAPES)))
              + (f", clipped {sum(n > case['clip'] for n in norms)} of {STEPS}" if norms else ""))
    common.write_golden("optimizer.bin", records, lambda name: 0.5 if name.endswith("/torch") else 1e-12)
