"""Makes the golden data of t_autocast.c.

autocast.txt has decisions: one line "device operator inputs region result" per case, with the dtype that PyTorch returns.
  cpu   PyTorch's CPU autocast, run for real.
  cuda  PyTorch's CUDA autocast.  This needs no GPU: fake tensors carry a device and a dtype through the dispatcher,
        autocast included, and no memory.  The same rules written down as explicit casts are run for real on the CPU
        and must agree (`explicit`), so that the table can be read in this file too.
  Region "none" is outside of any region.  "error" means that PyTorch returns an error.  A line of the CPU that ends in
  "differs" has another result than the CUDA line of the same case, because amp.h follows CUDA.
autocast.bin has values: results of matrix products whose operands were rounded to the region's dtype by hand, in fp64, and
of operators whose operands a region must not change.
"""
import itertools
import logging
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import common

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
REGIONS = [None, torch.bfloat16, torch.float16]


# ---- Operators, in amp.h's names.  Each takes its inputs, and a function `ask` through which it calls PyTorch, so that
#      explicit casts can be put in between: ask(policy of the CUDA list, function, *inputs).

def attention(ask, q, k):
    split = [t.reshape(1, 2, 4, 4) for t in (q, k)]
    return ask("lower", F.scaled_dot_product_attention, *split, split[1])


def swiglu(ask, gate, up):
    return ask("fallthrough", torch.mul, ask("fallthrough", F.silu, gate), up)


def cross_entropy(ask, logits):
    labels = torch.zeros(4, dtype=torch.int64, device=logits.device)
    if ask is run_cpu:                                      # the CPU list has cross_entropy_loss itself
        return F.cross_entropy(logits, labels)
    return ask("fp32", lambda x: F.nll_loss(x, labels), ask("set_opt", F.log_softmax, logits))


def bce(ask, x):
    return ask("banned", lambda t: F.binary_cross_entropy(t, t), x)


# name: (inputs, function).  user_*: what a host's own operator of that policy must do, by an operator of the list.
OPERATORS = {
    "linear": (2, lambda ask, x, w: ask("lower", F.linear, x, w)),
    "matmul": (2, lambda ask, a, b: ask("lower", torch.bmm, a.unsqueeze(0), b.T.unsqueeze(0))),
    "gemm": (2, lambda ask, a, b: ask("lower", torch.mm, a, b.T)),
    "attention": (2, attention),
    "layernorm": (1, lambda ask, x: ask("fp32", lambda t: F.layer_norm(t, (8,)), x)),
    "rmsnorm": (1, lambda ask, x: ask("fp32", lambda t: F.rms_norm(t, (8,)), x)),
    "softmax": (1, lambda ask, x: ask("set_opt", F.softmax, x)),
    "activation": (1, lambda ask, x: ask("fallthrough", F.gelu, x)),
    "swiglu": (2, swiglu),
    "cross_entropy": (1, cross_entropy),
    "mse": (2, lambda ask, x, y: ask("fp32", F.mse_loss, x, y)),
    "embedding": (1, lambda ask, table: ask("fallthrough", lambda t: F.embedding(
        torch.zeros(3, dtype=torch.int64, device=t.device), t), table)),
    "dropout": (1, lambda ask, x: ask("fallthrough", lambda t: F.dropout(t, 0.5), x)),
    "add": (2, lambda ask, a, b: ask("fallthrough", torch.add, a, b)),
    "user_lower": (2, lambda ask, a, b: ask("lower", lambda x, y: torch.addmm(x[:, :4].contiguous(), x, y.T), a, b)),
    "user_fp32": (1, lambda ask, x: ask("fp32", torch.exp, x)),
    "user_promote": (2, lambda ask, a, b: ask("promote", torch.atan2, a, b)),
    "user_fallthrough": (2, lambda ask, a, b: ask("fallthrough", torch.mul, a, b)),
    "user_banned": (1, bce),
}


# ---- Three ways of asking

def run_cpu(policy, function, *inputs, **named):
    """Live: whatever autocast is on does its work."""
    return function(*inputs, dim=-1) if policy == "set_opt" else function(*inputs)


def explicit(region):
    """The CUDA lists as casts, with autocast off.  Eligible is what is floating and not fp64."""
    def eligible(t):
        return t.dtype in FLOATS[:3]

    def ask(policy, function, *inputs):
        if region is None:
            return run_cpu(policy, function, *inputs)
        to = None
        if policy == "lower":
            to = region
        elif policy == "fp32":
            to = torch.float32
        elif policy == "promote":
            kinds = {t.dtype for t in inputs if eligible(t)}
            if kinds - {region, torch.float32}:
                raise RuntimeError("another 16-bit dtype than the region's")
            to = torch.float32 if torch.float32 in kinds else region
        elif policy == "banned":
            raise RuntimeError("banned")
        elif policy == "set_opt":
            return function(*inputs, dim=-1, dtype=torch.float32) if eligible(inputs[0]) else function(*inputs, dim=-1)
        return function(*[t.to(to) if to is not None and eligible(t) else t for t in inputs])
    return ask


def result_of(function, ask, inputs):
    try:
        return NAMES[function(ask, *inputs).dtype]
    except RuntimeError:
        return "error"


def tensors(dtypes, device):
    """4 x 8 inputs of probabilities, so that every operator accepts them; a new one each, on the device."""
    return [torch.full((4, 8), 0.5, dtype=d, device=device) for d in dtypes]


def decide(function, dtypes, region):
    """The results on cpu and cuda."""
    if region is None:
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_enabled("cuda", False)
    else:
        for device in ("cpu", "cuda"):
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, region)
    cpu = result_of(function, run_cpu, tensors(dtypes, "cpu"))
    with FakeTensorMode():
        cuda = result_of(function, lambda p, f, *i: run_cpu(p, f, *i), tensors(dtypes, "cuda"))
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_enabled("cuda", False)
    by_hand = result_of(function, explicit(region), tensors(dtypes, "cpu"))
    if by_hand == "error":                  # fake kernels are more lenient about mixed dtypes than real ones
        cuda = "error"
    if cuda != by_hand:
        raise AssertionError(f"{dtypes} in {region}: CUDA gives {cuda}, explicit casts {by_hand}")
    return cpu, cuda


def decisions():
    lines = []
    for name, (count, function) in OPERATORS.items():
        for dtypes, region in itertools.product(itertools.product(FLOATS, repeat=count), REGIONS):
            cpu, cuda = decide(function, dtypes, region)
            inputs = ",".join(NAMES[d] for d in dtypes) + (",i64" if name == "embedding" else "")
            case = f"{name} {inputs} {NAMES.get(region, 'none')}"
            lines.append(f"cuda {case} {cuda}")
            lines.append(f"cpu {case} {cpu}" + (" differs" if cpu != cuda else ""))
    return "\n".join(sorted(lines)) + "\n"


# ---- Values

def tf32(x):
    """fp32 rounded to 10 bits of mantissa, ties away from zero."""
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


ROUND = {
    "fp32": lambda x: x,
    "tf32": tf32,
    "fp16": lambda x: torch.from_numpy(x).half().float().numpy(),
    "bf16": lambda x: torch.from_numpy(x).bfloat16().float().numpy(),
}


def values():
    """x [5, 19], w [7, 19] and dy [5, 7] are streams 0, 1, 2 of seed 77."""
    x, w, dy = (common.uniform(77, i, shape) for i, shape in enumerate([(5, 19), (7, 19), (5, 7)]))
    records = {}
    for kind, rounded in ROUND.items():
        rx, rw, rdy = (rounded(t).astype(np.float64) for t in (x, w, dy))
        records[f"{kind}/y"] = rx @ rw.T
        records[f"{kind}/dx"] = rdy @ rw
        records[f"{kind}/dw"] = rdy.T @ rx
    x64 = torch.from_numpy(x).double()
    records["softmax"] = torch.softmax(x64, -1).numpy()
    records["layernorm"] = F.layer_norm(x64, (19,), eps=1e-5).numpy()
    records["gelu"] = F.gelu(x64, approximate="tanh").numpy()
    return records


def main():
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)   # it logs what `result_of` catches
    common.write_text("autocast.txt", decisions())
    common.write_golden("autocast.bin", values(), lambda name: 1e-12)


if __name__ == "__main__":
    main()
