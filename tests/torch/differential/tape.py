"""tape.py - compares random graphs on the tape with torch.autograd, as a part of `make differential`.

    python tests/torch/differential/tape.py SEED PROGRAM [GRAPHS]      (from the project root)

PROGRAM (tests/torch/t_differential_tape.c) writes GRAPHS graphs (default 2,300, of which 2,000 are compared) of up to 60
nodes, in fp32, fp16 and bf16.  Each has 16 sets of numbers, the loss and all gradients.  Here each graph is built again in
PyTorch, twice: in fp64, and with everything stored in the graph's dtype.  The numbers fit the dtype, so both begin with the
same numbers.

The measure is the relative norm per gradient.  Its denominator is at least the root mean square norm of all gradients of
the graph, because some exact gradients are zero.  The measure of a graph is the root mean square over its gradients and its
16 sets.  The bars are:
  - A graph's error may be 1.2 times the larger of PyTorch's error and the roundings below.  The chance of 16 samples adds
    four standard deviations of both root mean squares, by the fourth moments.  The roundings are one in 16 bits.  In fp32
    they are the root of the number of nodes, and the largest score of attention, because exp(score - logsumexp) is off by
    that many.
  - Over all graphs in 16 bits, the geometric mean of the ratio to the larger of the two may be 1.2, without any allowance.
These are left out, and counted:
  - graphs where PyTorch's own error is above 1/2, because no digit is right
  - sets where a number overflows on either side; fp16's gradients start from 1024
  - sets with scores of attention beyond 2^6, whose gradients cancel (as in fuzz_tensors.py)
  - sets with a value all of whose elements are below 2^-30, because products of such values are subnormal in bf16, are 0 to
    AMX and AVX512-BF16, and do not exist in fp16
A graph with fewer than half of its sets is left out too.  SEED 1 has graphs 0 to GRAPHS - 1, and SEED 2 those that follow.
"""
import json
import math
import subprocess
import sys
import time
import warnings

import numpy as np
import torch
import torch.nn.functional as F

import run as runner

ROWS, SEEDS, CLASSES, VECTORS, CHUNK = 6, 16, 5, 4, 10
WIDTHS = (8, 12)
DTYPES = ((torch.float32, 1.0, 2.0 ** -24), (torch.float16, 1024.0, 2.0 ** -11), (torch.bfloat16, 1.0, 2.0 ** -8))
SHAPES = ([(o, i) for o in WIDTHS for i in WIDTHS] + [(w,) for w in WIDTHS for _ in range(VECTORS)] +
          [(CLASSES, w) for w in WIDTHS] * 2)
FLOATS = sum(math.prod(s) for s in SHAPES)
(LINEAR, LAYERNORM, RMSNORM, ADD, SCALE, ACTIVATION, SOFTMAX, SWIGLU, TURN, HALVES, SCORES, ATTENTION, EMBEDDING, GATE) = range(14)
ACTS = {0: lambda x: x, 1: lambda x: F.gelu(x, approximate="tanh"), 2: F.gelu, 3: torch.tanh, 4: F.silu, 5: F.relu}


def operate(o, values, p, ids):
    """One operator, as record_op of the C program."""
    kind, a, b, w, v, n = o
    x, y, bias = values[a], values[b], None if v < 0 else p[v]
    cols = x.shape[1]
    if kind == LINEAR:
        return ACTS[n](F.linear(x, p[w], bias))
    if kind == LAYERNORM:
        return F.layer_norm(x, (cols,), p[w], bias, 1e-5)
    if kind == RMSNORM:
        return F.rms_norm(x, (cols,), p[w], 1e-5)
    if kind == ADD:
        return x + y
    if kind == SCALE:
        return x * (n / 16)
    if kind == ACTIVATION:
        return ACTS[n](x if bias is None else x + bias)
    if kind == SOFTMAX:
        return F.softmax(x, -1)
    if kind == SWIGLU:
        return F.silu(x) * y
    if kind == TURN:
        return x.t().reshape(ROWS, cols)
    if kind == HALVES:
        left, right = x[:, :cols // 2], x[:, cols // 2:]
        return torch.cat((right, F.silu(left) * right), 1)
    if kind == SCORES:
        return F.softmax((x @ y.t()) * 0.25, -1) @ x
    if kind == ATTENTION:
        q, k = (z.reshape(1, ROWS, 2, cols // 2).transpose(1, 2) for z in (x, y))
        return F.scaled_dot_product_attention(q, k, q, is_causal=True).transpose(1, 2).reshape(ROWS, cols)
    if kind == EMBEDDING:
        return F.embedding(ids, p[w])
    mean = y.mean(0, keepdim=True)
    return (x @ mean.t()) @ mean


def scores(o, values):
    """The largest score of an attention."""
    q, k = (values[i].reshape(ROWS, 2, -1).transpose(0, 1) for i in o[1:3])
    return float((q @ k.transpose(1, 2)).abs().max()) / math.sqrt(q.shape[2])


def gradients(graph, numbers, dtype, scale):
    """Of numbers that are fp32: gradients in fp64; in an fp64 run, the largest score and the smallest value's largest element."""
    loss_kind, ops, ids, labels = graph
    x = torch.from_numpy(numbers["x"]).to(dtype).requires_grad_()
    p = [torch.from_numpy(w).to(dtype).requires_grad_() for w in numbers["p"]]
    values = [x]
    for o in ops:
        values.append(operate(o, values, p, ids))
    last, full = values[-1], torch.float64 if dtype == torch.float64 else torch.float32
    width = WIDTHS.index(last.shape[1])
    target = torch.from_numpy(numbers["target"].reshape(-1)[:last.numel()].reshape(last.shape)).to(dtype)
    loss = 0
    if loss_kind in (0, 3):
        loss = F.mse_loss(last.to(full), target.to(full)) * (0.5 if loss_kind == 3 else 1)
    if loss_kind != 0:
        loss = loss + F.cross_entropy(F.linear(last, p[len(SHAPES) - len(WIDTHS) + width]).to(full), labels)
    grads = torch.autograd.grad(loss * scale, [x] + p, allow_unused=True)
    flat = [np.zeros(t.numel()) if g is None else g.detach().double().numpy().reshape(-1) for g, t in zip(grads, [x] + p)]
    if dtype != torch.float64:
        return flat, 0, 0
    with torch.no_grad():
        return (flat, max([scores(o, values) for o in ops if o[0] == ATTENTION], default=0),
                min(float(v.abs().max()) for v in values))


def read_graphs(stream, count):
    """[dtype][graph] of (graph, [numbers with the loss and gradients of amp.h])."""
    at = 0

    def take(n, kind):
        nonlocal at
        out = np.frombuffer(stream, kind, n, at)
        at += 4 * n
        return out

    result = []
    for _ in DTYPES:
        row = []
        for _ in range(count):
            n, loss = take(2, np.int32)
            ops = take(6 * n, np.int32).reshape(n, 6).tolist()
            ids, labels = (torch.from_numpy(take(ROWS, np.int32).astype(np.int64)) for _ in range(2))
            sets = []
            for _ in range(SEEDS):
                x, target = take(ROWS * 8, np.float32).reshape(ROWS, 8).copy(), take(ROWS * 12, np.float32).copy()
                p = [take(math.prod(s), np.float32).reshape(s).copy() for s in SHAPES]
                value = float(take(1, np.float32)[0])
                ours = [take(ROWS * 8, np.float32).astype(np.float64)]
                ours += [take(math.prod(s), np.float32).astype(np.float64) for s in SHAPES]
                sets.append({"x": x, "target": target, "p": p, "loss": value, "ours": ours})
            row.append(((int(loss), ops, ids, labels), sets))
        result.append(row)
    assert at == len(stream)
    return result


def square_error(got, exact):
    """The mean over gradients of squared relative errors."""
    norms = [float(e @ e) for e in exact]
    floor = sum(norms) / max(sum(n > 0 for n in norms), 1)
    return sum(float((g - e) @ (g - e)) / max(n, floor, 1e-300) for g, e, n in zip(got, exact, norms)) / len(exact)


def chance(squares):
    """The relative variance of the root of a mean of squares."""
    mean = sum(squares) / len(squares)
    return (sum(s * s for s in squares) / len(squares) / (mean * mean) - 1) / (4 * len(squares)) if mean > 0 else 0


def compare(graph, sets, dtype, scale, roundoff):
    """(ours, theirs or the roundings, bar) of a graph, or what it is left out for."""
    ours, theirs, largest = [], [], 0.0
    for numbers in sets:
        exact, score, smallest = gradients(graph, numbers, torch.float64, scale)
        own, _, _ = gradients(graph, numbers, dtype, scale)
        finite = all(np.isfinite(g).all() for of in (exact, own, numbers["ours"]) for g in of)
        if not finite or score > 64 or smallest < 2.0 ** -30:
            continue
        largest = max(largest, score)
        ours.append(square_error(numbers["ours"], exact))
        theirs.append(square_error(own, exact))
    if len(ours) < SEEDS // 2:
        return "range"
    mine, other = (math.sqrt(sum(s) / len(s)) for s in (ours, theirs))
    if other > 0.5:
        return "chaotic"
    roundings = math.sqrt(len(graph[1])) + largest if dtype == torch.float32 else 1
    other = max(other, roundoff * roundings)
    return mine, other, 1.2 * other * (1 + 4 * math.sqrt(chance(ours) + chance(theirs)))


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    seed, program, total = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 2300
    first, start, counts, listed = (seed - 1) * total, time.time(), {}, []
    logs = {dtype: [] for dtype, _, _ in DTYPES}
    worst = {dtype: 0.0 for dtype, _, _ in DTYPES}
    left = {"range": 0, "chaotic": 0}
    nodes = 0
    for at in range(first, first + total, CHUNK):
        n = min(CHUNK, first + total - at)
        stream = subprocess.run([program, "--dump", str(at), str(n)], stdout=subprocess.PIPE, check=True).stdout
        for (dtype, scale, roundoff), row in zip(DTYPES, read_graphs(stream, n)):
            for i, (graph, sets) in enumerate(row):
                nodes += len(graph[1])
                got = compare(graph, sets, dtype, scale, roundoff)
                if isinstance(got, str):
                    left[got] += 1
                    continue
                mine, other, bar = got
                worst[dtype] = max(worst[dtype], mine / bar)
                logs[dtype].append(math.log(max(mine, 1e-300) / other))
                if mine > bar:
                    listed.append(f"graph {at + i} in {dtype}: {mine:.3g}, PyTorch {other:.3g}, bar {bar:.3g}")
                    print("listed", listed[-1], flush=True)
    counts.update({"graphs": total, "nodes": nodes // len(DTYPES), "sets_per_graph": SEEDS, **{f"left_out_{k}": v for k, v in left.items()}})
    passed = not listed
    for dtype, _, _ in DTYPES:
        name, ratio = str(dtype).removeprefix("torch."), math.exp(sum(logs[dtype]) / max(len(logs[dtype]), 1))
        counts[f"{name}.compared"] = len(logs[dtype])
        counts[f"{name}.largest_error_over_bar"] = round(worst[dtype], 3)
        counts[f"{name}.geometric_mean_ratio"] = round(ratio, 3)
        passed = passed and len(logs[dtype]) > 0.8 * total and (dtype == torch.float32 or ratio <= 1.2)
    compared = time.time() - start
    failing = {}
    status, under, last = runner.run([program, "--graphs", str(total)], failing, listed)
    counts.update(failing)
    last = f"{total} graphs compared, {len(listed)} over their bar; under a failing allocator: {last}"
    runner.write_record("tape", seed, counts, listed, {"compared": round(compared, 1), "failing_allocator": under}, last,
                        passed and status == 0)
    sys.exit(0 if passed and status == 0 else 1)


if __name__ == "__main__":
    main()
