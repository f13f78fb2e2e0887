"""Runs random tensors through PyTorch and writes the corpus that tests/torch/t_differential_tensors.c replays.

    python tests/torch/oracle/fuzz_tensors.py                          the committed corpus, tests/torch/golden/fuzz_tensors.bin
    python tests/torch/oracle/fuzz_tensors.py --seed 7 --cases 1000 --out FILE      a large one, for `make differential`

A case is a list of numbers: the function that is called, and its sizes, strides, dtypes, flags and kind of values.  Inputs
come from counter-based random numbers that both sides have, so only PyTorch's results are stored.  For each output, these
are:
  - the root mean square over 16 seeds of PyTorch's own error (everything stored in the case's dtype, against an fp64 run on
    the same stored inputs);
  - a random projection and the norm of the fp64 results, which check the C program's own fp64 reference;
  - if an element is not finite, which elements PyTorch made infinite or NaN.

PyTorch does not define some results.  They are treated as follows:
  - Rows whose keys are all masked, or whose scores are all -inf, are NaN or 0, depending on kernel and version.  Both sides
    are given zeros, as amp.h documents.
  - Masked keys of a row whose softmax is NaN are left out.
  - Masked keys and values of attention that hold inf or NaN give 0 times inf inside PyTorch.  Such cases come without masks
    only.
  - Elements that overflow on the way depend on the algorithm.  An element is left out, and counted by the C program, if its
    class (finite, inf, -inf, NaN) in PyTorch's run differs from that of the fp64 result rounded to the dtype, or from that
    of the plain formula in fp32.
  - Values whose squares or products overflow fp32 inside a norm, a product or an activation give inf, NaN or 0 by the order
    of operations.  The largest values are kept below that.
  - Infinite gradients of probabilities that are 0 (0 times inf in PyTorch, nothing in amp.h), and sums that are infinite
    times normalised values that underflow, are not drawn.
  - Subnormal operands and products in bf16, which AVX512-BF16 and AMX instructions take as 0, are kept out.
  - Attention of values beyond 2^6 has gradients that cancel beyond every digit, in fp64 too.  In fp16, PyTorch's CPU kernel
    keeps gradients of scores below the normal numbers of fp16 in fp32, and amp.h rounds them to the compute dtype, as CUDA
    kernels do.  Therefore attention's values are at most 2^6, or infinite or NaN.
  - Clipping while unscaling is one multiplication by fp32(1 / scale * coefficient) in amp.h.  The factor is kept normal.
  - Sign and payload of NaN are not compared.
  - For fp8 on a CPU, PyTorch's side is its casts with the scales of tests/torch/oracle/fp8.py, and products of these in
    fp64.
  - For TF32 on a CPU, PyTorch's side is fp32 products of operands rounded to TF32 by hand, ties away from zero.
  - For weights stored in 16 bits with fp32 master weights, PyTorch's side keeps fp32 weights and rounds them at the end.
  - When clipping by a norm that is NaN, PyTorch makes every gradient NaN.  amp.h does not change the other gradients, and the
    step is skipped.
  - A non-finite gradient without a scaler makes PyTorch's weights NaN.  amp.h skips the step by default, so such steps come
    with a scaler only.

Some features are not compared because PyTorch does not have them: documents, windows and prefixes other than as boolean
masks, unequal moment dtypes, and stochastic rounding.  Others are not compared because amp.h does not have them: additive
masks with other values than 0 and -inf (PyTorch is given half of the masks in that form), amsgrad, Adam with L2 decay, and
grouped queries.
"""
import argparse
import functools
import multiprocessing
import os
import warnings

import numpy as np
import torch
import torch.nn.functional as F

import common
import fp8

SEEDS = 16
KIND = {1: torch.float32, 2: torch.float64, 3: torch.float16, 4: torch.bfloat16}
F32, F64, F16, BF16, TF32 = 1, 2, 3, 4, 5
UNIFORM, WIDE, SPECIAL, WIDE_SPECIAL = 0, 1, 2, 3
LIMITS = {F32: (127, -126, -149), F64: (127, -126, -149), F16: (15, -14, -24), BF16: (127, -126, -133)}
FP8_SCALING = {1: "current", 2: "block", 3: "mx"}
FP8_BACKWARD = {1: "e5m2", 2: "e4m3"}
MANTISSA = {F32: 23, F64: 23, F16: 10, BF16: 7}


# ---- Values

@functools.lru_cache(maxsize=256)
def words_of_all(first, stream, n):
    """common.words of SEEDS seeds in one go."""
    blocks = (n + 3) // 4
    counter = np.zeros((SEEDS, blocks, 4), dtype=np.uint32)
    counter[:, :, 0] = np.arange(blocks, dtype=np.uint32)
    counter[:, :, 2] = stream
    keys = np.repeat(first + np.arange(SEEDS, dtype=np.uint64), blocks)
    return common.philox4x32(counter.reshape(-1, 4), (keys, np.zeros_like(keys))).reshape(SEEDS, -1)[:, :n]


def words(seed, stream, n):
    return words_of_all(seed // SEEDS * SEEDS, stream, n)[seed % SEEDS]


def uniform(seed, stream, shape, scale=1.0, shift=0.0):
    return common.uniform(seed, stream, shape, scale, shift, source=words)


def integers(seed, stream, shape, below):
    return common.integers(seed, stream, shape, below, source=words)


def special_values(dtype, low, high, least):
    """In the order of the table in t_differential_tensors.c."""
    largest = 2.0 ** high * (2 - 2.0 ** -MANTISSA[dtype])
    return np.array([0.0, -0.0, np.inf, -np.inf, np.nan, largest, -largest, 2.0 ** low, -2.0 ** low, 2.0 ** least,
                     2.0 ** low - 2.0 ** least], dtype=np.float32)


def values(case, seed, stream, shape, scale=1.0, shift=0.0):
    """fp32 numbers of a stream: uniform, or by the case's recipe if `which` has the stream's bit."""
    how = tuple(int(case[n]) for n in ("recipe", "low", "high", "least", "rare", "dtype"))
    return draw_values(how if int(case["which"]) >> stream & 1 else None, seed, stream, shape, float(scale), float(shift))


@functools.lru_cache(maxsize=128)
def draw_values(how, seed, stream, shape, scale, shift):
    n, out = int(np.prod(shape)), uniform(seed, stream, shape, scale, shift)
    if how is None:
        return out
    recipe, low, high, least, rare, dtype = how
    out = out.ravel()
    if recipe in (WIDE, WIDE_SPECIAL):
        w = words(seed, stream, n)
        e = integers(seed, stream + 64, (n,), high - low) + low
        magnitude = np.ldexp(1.0 + (w & 0x7FFFFF).astype(np.float64) * 2.0 ** -23, e)
        out = np.where(w >> np.uint32(31), -magnitude, magnitude).astype(np.float32)
    if recipe in (SPECIAL, WIDE_SPECIAL):
        w = words(seed, stream + 128, n)
        out = np.where(w >> np.uint32(32 - rare) == 0, special_values(dtype, low, high, least)[(w & 0xFFFF) % 11], out).astype(np.float32)
    return out.reshape(shape)


class Draw:
    """The tensors of one run of a case: stored in their dtype, then, for the exact run, widened to fp64."""

    def __init__(self, case, seed, exact, moved=False):
        self.case, self.seed, self.exact, self.moved = case, seed, exact, moved

    def tensor(self, stream, shape, dtype, scale=1.0, shift=0.0):
        t = torch.from_numpy(values(self.case, self.seed, stream, shape, scale, shift).copy()).to(KIND[int(dtype)])
        if self.moved:      # in the last bits of fp64
            t = t.double() * torch.from_numpy(1.0 + uniform(self.seed, stream + 300, shape).astype(np.float64) * 2.0 ** -50)
        return t.double() if self.exact else t

    def leaf(self, *args, **more):
        return self.tensor(*args, **more).requires_grad_()

    def integers(self, stream, shape, below):
        return integers(self.seed, stream, shape, below)

    def lower(self, t, dtype):
        """As autocast would: rounded to the region's dtype; TF32 rounds within fp32; the exact run does not round."""
        if self.exact or dtype in (0, F32):
            return t
        return Tf32Operand.apply(t) if dtype == TF32 else t.to(KIND[dtype])


def product(c, draw, t):
    return Tf32Product.apply(t) if c["region"] == TF32 and not draw.exact else t


def tf32(t):
    """Ten mantissa bits, ties away from zero, as cvt.rna.tf32.f32."""
    bits = t.detach().contiguous().numpy().view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x1000) & 0xFFFFE000).astype(np.uint32)
    return torch.from_numpy(np.where((bits & 0x7F800000) == 0x7F800000, bits, rounded).view(np.float32))


class Tf32Operand(torch.autograd.Function):
    """An operand of a product: rounded, its gradient not."""
    @staticmethod
    def forward(ctx, t):
        return tf32(t)

    @staticmethod
    def backward(ctx, dy):
        return dy


class Tf32Product(torch.autograd.Function):
    """A product, whose gradient is an operand of two more products."""
    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, dy):
        return tf32(dy)


# ---- Masks

MASK = {"kind": 0, "bidirectional": 0, "window": 1, "global": 0, "lengths": 0, "documents": 0, "per_batch": 0,
        "per_head": 0, "density": 1}


def random_mask(rng, case, keys):
    case.update(MASK)
    if rng.random() < 0.25:
        return
    case["kind"] = int(rng.integers(0, 6))
    case["bidirectional"] = int(case["kind"] in (2, 3) and rng.random() < 0.5)
    case["window"] = int(rng.integers(1, keys + 3))
    case["global"] = int(rng.integers(0, keys // 2 + 2))
    case["lengths"], case["documents"] = int(rng.random() < 0.3), int(rng.integers(0, 3) if rng.random() < 0.3 else 0)
    case["per_batch"], case["per_head"] = int(rng.random() < 0.5), int(rng.random() < 0.5)
    case["density"] = int(rng.integers(1, 4))


def visible(c, draw):
    """Boolean [batch, heads, queries, keys]; the last queries and keys align."""
    b, h, q, k = (int(c[n]) for n in ("batch", "heads", "queries", "keys"))
    kind, window = int(c["kind"]), int(c["window"])
    at, key = np.arange(q)[:, None] + k - q, np.arange(k)[None, :]
    causal = key <= at
    seen = np.ones((b, h, q, k), dtype=bool)
    if kind == 1:
        seen &= causal
    if kind in (2, 3):
        near = np.abs(at - key) < window
        if kind == 3:
            near = near | (key < c["global"]) | ((at >= 0) & (at < c["global"]))
        seen &= near if c["bidirectional"] else near & causal
    if kind == 4:
        prefix = draw.integers(40, (b,), k + 2)
        seen &= causal[None, None] | (key[None] < prefix[:, None, None])[:, None]
    if kind == 5:
        shape = (b if c["per_batch"] else 1, h if c["per_head"] else 1, q, k)
        seen &= draw.integers(41, shape, 4) < c["density"]
    if c["lengths"]:
        seen &= (key[0] < draw.integers(42, (b,), k + 2)[:, None])[:, None, None, :]
    if c["documents"]:
        doc = draw.integers(43, (b, k), 3)
        if c["documents"] == 2:
            doc = np.sort(doc, axis=1)
        row = np.broadcast_to(at[:, 0], (b, q))
        own = np.where(row >= 0, np.take_along_axis(doc, np.maximum(row, 0), axis=1), -1)
        seen &= (own[:, :, None] == doc[:, None, :])[:, None]
    return torch.from_numpy(seen)


# ---- Sizes and settings

def size(rng, largest, zero=0.0):
    if rng.random() < zero:
        return 0
    if rng.random() < 0.12:
        return 1
    return int(np.exp(rng.uniform(0, np.log(largest + 1))))


def choice(rng, *options):
    return options[int(rng.integers(len(options)))]


def flag(rng, p=0.5):
    return int(rng.random() < p)


def recipe(rng, case, streams, tiny=True, special=True, factors=1):
    """Half of the cases uniform; the rest wide, tiny or with special values, in some of the streams.  A product of
    `factors` of the numbers stays below fp32's largest, and in bf16 products nothing is subnormal."""
    dtype = case["region"] if case.get("region") in (F16, BF16) else case["dtype"]
    top, low, least = LIMITS[dtype]
    top = min(top, 127 if factors == 1 else 120 // factors)
    if dtype == BF16 and "region" in case:
        low, least = -50, -60
    case.update(recipe=UNIFORM, which=0, low=low, high=top, least=least, rare=4)
    u = rng.random()
    if u < 0.5:
        return
    if u < 0.65 or not special:
        case.update(recipe=WIDE, low=-6, high=6)
    elif u < 0.75 and tiny:
        case.update(recipe=WIDE, low=least, high=low + 3)
    else:
        case.update(recipe=WIDE_SPECIAL if u < 0.85 else SPECIAL, rare=choice(rng, 4, 8))
    case["which"] = choice(rng, 1, 2, 3, 1 << int(rng.integers(streams)), (1 << streams) - 1)


def special(case):
    return case["recipe"] in (SPECIAL, WIDE_SPECIAL)


# ---- Families: name_case(rng) chooses, name_run(case, draw) computes.  Outputs named d... are gradients of one layer.

def grads(outputs, leaves, seeds, names):
    found = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
    return {n: (torch.zeros_like(x) if g is None else g) for n, g, x in zip(names, found, leaves)}


def linear_case(rng):
    c = {"dtype": choice(rng, F32, F16, BF16), "region": 0, "rows": size(rng, 40, 0.02), "inputs": size(rng, 90),
         "outputs": size(rng, 70), "bias": flag(rng, 0.7), "act": choice(rng, 0, 0, 1, 2, 5), "gap": choice(rng, 0, 0, 3),
         "scale": choice(rng, 1.0, 3.0, 0.1)}
    if c["dtype"] == F32:
        c["region"] = choice(rng, 0, 0, F16, BF16, TF32)
    recipe(rng, c, 4, factors=2)
    if special(c):
        c.update(rows=min(c["rows"], 6), inputs=min(c["inputs"], 12), outputs=min(c["outputs"], 10))
    return c


def activation(kind, x):
    return {0: lambda: x, 1: lambda: F.gelu(x, approximate="tanh"), 2: lambda: F.gelu(x), 5: lambda: F.relu(x)}[kind]()


def linear_run(c, draw):
    n, i, o, d = c["rows"], c["inputs"], c["outputs"], c["dtype"]
    x, w = draw.leaf(0, (n, i), d, c["scale"]), draw.leaf(1, (o, i), d)
    b = draw.leaf(2, (o,), d)
    dy = draw.tensor(3, (n, o), d)
    cast = [draw.lower(t, c["region"]) for t in (x, w)]
    bias = draw.lower(b, 0 if c["region"] == TF32 else c["region"]) if c["bias"] else None
    y = activation(c["act"], product(c, draw, F.linear(cast[0], cast[1], bias))).to(x.dtype)
    leaves = [x, w] + ([b] if c["bias"] else [])
    return {"y": y, **grads(y, leaves, dy, ["dx", "dw", "db"])}


def fp8_case(rng):
    c = {"dtype": choice(rng, F32, F32, F16, BF16), "scaling": choice(rng, *FP8_SCALING), "backward": choice(rng, *FP8_BACKWARD),
         "rows": size(rng, 150), "inputs": size(rng, 150), "outputs": size(rng, 150), "bias": flag(rng), "act": choice(rng, 0, 0, 5)}
    recipe(rng, c, 4, tiny=False, special=False, factors=2)
    return c


class Fp8Linear(torch.autograd.Function):
    """Operands in 8 bits with their scales, as fp8.quantise has them; products of these in fp64."""
    @staticmethod
    def quantised(t, fmt, mode, along, square=False):
        return torch.from_numpy(fp8.quantise(t.detach().float().contiguous().numpy(), fmt, mode, along, square)[2])

    @staticmethod
    def forward(ctx, x, w, mode, backward):
        ctx.save_for_backward(x, w)
        ctx.recipe = mode, backward
        q = Fp8Linear.quantised
        return (q(x, "e4m3", mode, 1) @ q(w, "e4m3", mode, 1, mode == "block").T).float()

    @staticmethod
    def backward(ctx, dy):
        (x, w), (mode, fmt), q = ctx.saved_tensors, ctx.recipe, Fp8Linear.quantised
        dx = q(dy, fmt, mode, 1) @ q(w, "e4m3", mode, 0, mode == "block")
        dw = q(dy, fmt, mode, 0).T @ q(x, "e4m3", mode, 0)
        return dx.to(x.dtype), dw.to(w.dtype), None, None


def fp8_run(c, draw):
    n, i, o, d = c["rows"], c["inputs"], c["outputs"], c["dtype"]
    x, w, b, dy = draw.leaf(0, (n, i), d), draw.leaf(1, (o, i), d), draw.leaf(2, (o,), d), draw.tensor(3, (n, o), d)
    product = F.linear(x, w) if draw.exact else Fp8Linear.apply(x, w, FP8_SCALING[c["scaling"]], FP8_BACKWARD[c["backward"]])
    y = activation(c["act"], product + b if c["bias"] else product).to(x.dtype)
    leaves = [x, w] + ([b] if c["bias"] else [])
    return {"y": y, **grads(y, leaves, dy, ["dx", "dw", "db"])}


def matmul_case(rng):
    c = {"dtype": choice(rng, F32, F16, BF16), "region": 0, "batch": size(rng, 4), "m": size(rng, 40, 0.02),
         "n": size(rng, 40, 0.02), "k": size(rng, 90, 0.02), "trans_a": flag(rng), "trans_b": flag(rng),
         "alpha": choice(rng, 1.0, 0.5, -1.75, 3.0)}
    if c["dtype"] == F32:
        c["region"] = choice(rng, 0, 0, F16, BF16, TF32)
    recipe(rng, c, 3, factors=2)
    if special(c):
        c.update(m=min(c["m"], 6), n=min(c["n"], 8), k=min(c["k"], 12), batch=min(c["batch"], 2))
    return c


def matmul_run(c, draw):
    g, m, n, k, d = c["batch"], c["m"], c["n"], c["k"], c["dtype"]
    a = draw.leaf(0, (g, k, m) if c["trans_a"] else (g, m, k), d)
    b = draw.leaf(1, (g, n, k) if c["trans_b"] else (g, k, n), d)
    left, right = draw.lower(a, c["region"]), draw.lower(b, c["region"])
    y = left.mT if c["trans_a"] else left
    y = torch.matmul(y, right.mT if c["trans_b"] else right)
    y = product(c, draw, c["alpha"] * y).to(a.dtype)
    return {"y": y, **grads(y, [a, b], draw.tensor(2, (g, m, n), d), ["da", "db"])}


def gemm_case(rng):
    c = {"dtype": F32, "region": choice(rng, F32, F32, TF32, F16, BF16), "columns": flag(rng), "trans_a": flag(rng),
         "trans_b": flag(rng), "m": size(rng, 70, 0.03), "n": size(rng, 70, 0.03), "k": size(rng, 300, 0.03),
         "alpha": choice(rng, 1.0, 0.0, -0.5, 2.25), "beta": choice(rng, 0.0, 1.0, -1.0, 0.3), "gap": choice(rng, 0, 1, 5)}
    recipe(rng, c, 3, factors=2)
    if special(c):
        c.update(m=min(c["m"], 6), n=min(c["n"], 8), k=min(c["k"], 12))
        c["alpha"] = c["alpha"] or 1.0
    return c


def gemm_run(c, draw):
    m, n, k = c["m"], c["n"], c["k"]
    a = draw.tensor(0, (k, m) if c["trans_a"] else (m, k), F32)
    b = draw.tensor(1, (n, k) if c["trans_b"] else (k, n), F32)
    y = draw.tensor(2, (m, n), F32)
    a, b = draw.lower(a, c["region"]), draw.lower(b, c["region"])
    product = torch.matmul(a.mT if c["trans_a"] else a, b.mT if c["trans_b"] else b).to(y.dtype)
    out = np.float32(c["alpha"]).item() * product
    return {"c": out + np.float32(c["beta"]).item() * y if c["beta"] else out}


def norm_case(rng):
    c = {"dtype": choice(rng, F32, F16, BF16), "wide_weights": flag(rng, 0.4), "rms": flag(rng), "rows": size(rng, 24, 0.02), "cols": size(rng, 300),
         "residual": flag(rng, 0.3), "weight": flag(rng, 0.8), "bias": flag(rng, 0.7), "eps": choice(rng, 1e-5, 1e-6, 1e-2),
         "dsum": flag(rng, 0.3), "gap": choice(rng, 0, 0, 3), "scale": choice(rng, 1.0, 6.0, 0.01), "shift": choice(rng, 0.0, 0.0, 2.0)}
    c["bias"] = int((c["bias"] or c["cols"] == 1) and not c["rms"])     # of one column, all other gradients are 0
    recipe(rng, c, 6, factors=3)
    if special(c):
        c.update(rows=min(c["rows"], 6), cols=min(c["cols"], 24), low=-20, least=-30)
    return c


def norm_run(c, draw):
    n, k, d = c["rows"], c["cols"], c["dtype"]
    x, r = draw.leaf(0, (n, k), d, c["scale"], c["shift"]), draw.leaf(1, (n, k), d, c["scale"])
    w, b = (draw.leaf(i, (k,), F32 if c["wide_weights"] else d, *how) for i, how in ((2, (0.5, 1.0)), (3, ())))
    s = x + r if c["residual"] else x
    weight, bias = w if c["weight"] else None, b if c["bias"] else None
    eps = float(np.float32(c["eps"]))
    wide = s.float() if c["wide_weights"] and not draw.exact else s        # as under autocast, rounded at the end
    y = (F.rms_norm(wide, (k,), weight, eps) if c["rms"] else F.layer_norm(wide, (k,), weight, bias, eps)).to(s.dtype)
    leaves, names = [x], ["dx"]
    if c["weight"]:
        leaves, names = leaves + [w], names + ["dweight"]
    if c["bias"]:
        leaves, names = leaves + [b], names + ["dbias"]
    dy = draw.tensor(4, (n, k), d)
    if c["dsum"]:
        g = grads([y, s if c["residual"] else x * 1], leaves, [dy, draw.tensor(5, (n, k), d)], names) if c["residual"] else \
            grads(y, leaves, dy, names)
        if not c["residual"]:
            g["dx"] = g["dx"] + draw.tensor(5, (n, k), d)
    else:
        g = grads(y, leaves, dy, names)
    return {"y": y, **({"sum": s} if c["residual"] else {}), **g}


def softmax_case(rng):
    c = {"dtype": choice(rng, F32, F16, BF16), "batch": size(rng, 3), "heads": size(rng, 3), "queries": size(rng, 20, 0.02),
         "keys": size(rng, 70), "scale": choice(rng, 1.0, 0.125, 4.0), "in_place": flag(rng, 0.3)}
    random_mask(rng, c, c["keys"])
    if c["documents"]:
        c["queries"] = min(c["queries"], c["keys"])
    recipe(rng, c, 2)
    if special(c):
        c.update(queries=min(c["queries"], 5), batch=min(c["batch"], 2), heads=1, which=1)
    return c


def seen_scores(c, draw, score):
    """Scores with -inf where masked, and the rows where something else is left; 0 in the others."""
    seen = visible(c, draw)
    score = score.masked_fill(~seen, float("-inf"))
    alive = (score.detach() != float("-inf")).any(-1, keepdim=True)
    return torch.where(alive, score, torch.zeros((), dtype=score.dtype)), alive, seen


def softmax_run(c, draw):
    shape = tuple(c[n] for n in ("batch", "heads", "queries", "keys"))
    x = draw.leaf(0, shape, c["dtype"], 4.0)
    score, alive, seen = seen_scores(c, draw, x * c["scale"])
    p = torch.softmax(score, -1)
    y = torch.where(seen & alive if draw.exact else alive, p, torch.zeros((), dtype=p.dtype))
    out = {"y": y, **grads(y, [x], draw.tensor(1, shape, c["dtype"]), ["dx"])}
    if draw.exact:      # another class than PyTorch's own: left out
        out["dx"] = out["dx"].masked_fill(torch.isnan(p).any(-1, keepdim=True) & ~seen, float("nan"))
    return out


def attention_case(rng):
    c = {"dtype": choice(rng, F32, F16, BF16), "region": 0, "batch": size(rng, 3), "heads": size(rng, 3),
         "queries": size(rng, 40), "keys": size(rng, 70), "dim": size(rng, 40), "scale": choice(rng, 0.0, 0.5, 0.1),
         "packed": flag(rng, 0.4), "gap": choice(rng, 0, 0, 2)}
    if c["packed"]:
        c["keys"] = c["queries"]
    if c["dtype"] == F32:
        c["region"] = choice(rng, 0, 0, F16, BF16)
    random_mask(rng, c, c["keys"])
    if c["documents"]:
        c["queries"] = min(c["queries"], c["keys"])
        c["packed"] = int(c["packed"] and c["queries"] == c["keys"])
    recipe(rng, c, 4, tiny=False, factors=3)
    if special(c):
        c.update(MASK)
        c.update(recipe=SPECIAL, high=6)
        c.update(queries=min(c["queries"], 4), keys=min(c["keys"], 5), dim=min(c["dim"], 6), batch=1, packed=0)
    return c


def attention_run(c, draw):
    b, h, q, k, d, t = (c[n] for n in ("batch", "heads", "queries", "keys", "dim", "dtype"))
    leaves = [draw.leaf(0, (b, q, h, d), t), draw.leaf(1, (b, k, h, d), t), draw.leaf(2, (b, k, h, d), t)]
    qq, kk, vv = (draw.lower(x.transpose(1, 2), c["region"]) for x in leaves)
    scale = float(np.float32(c["scale"])) or d ** -0.5
    score, alive, seen = seen_scores(c, draw, scale * qq @ kk.mT)
    if draw.exact:
        o = torch.softmax(score, -1) @ vv
    else:
        seen = seen | ~alive
        mask = seen if c["dim"] % 2 else torch.zeros(seen.shape, dtype=qq.dtype).masked_fill(~seen, float("-inf"))
        if c["kind"] == 0 and not c["lengths"] and not c["documents"]:
            mask = None
        o = F.scaled_dot_product_attention(qq, kk, vv, attn_mask=mask, scale=scale)
    o = torch.where(alive, o, torch.zeros((), dtype=o.dtype)).transpose(1, 2).to(leaves[0].dtype)
    return {"o": o, **grads(o, leaves, draw.tensor(3, (b, q, h, d), t), ["dq", "dk", "dv"])}


def entropy_case(rng):
    c = {"dtype": choice(rng, F32, F16, BF16), "rows": size(rng, 30), "classes": size(rng, 90), "padding": choice(rng, 0, 0, 5),
         "ignore_index": choice(rng, -100, -1, 3), "ignored": choice(rng, 0, 2, 4), "sum": flag(rng, 0.4),
         "smoothing": choice(rng, 0.0, 0.0, 0.1, 1.0), "factor": choice(rng, 1.0, 0.25, 3.0), "loss_scale": choice(rng, 1.0, 1024.0, 0.3),
         "in_place": flag(rng, 0.3), "gap": choice(rng, 0, 0, 3), "scale": choice(rng, 1.0, 8.0)}
    recipe(rng, c, 1, tiny=c["smoothing"] < 1)
    if special(c):
        c.update(rows=min(c["rows"], 6), classes=min(c["classes"], 24))
    return c


def entropy_run(c, draw):
    n, k, all_, d = c["rows"], c["classes"], c["classes"] + c["padding"], c["dtype"]
    x = draw.leaf(0, (n, all_), d, c["scale"])
    labels = draw.integers(10, (n,), k)
    labels = np.where(draw.integers(11, (n,), 4) < c["ignored"], c["ignore_index"], labels)
    if 0 <= c["ignore_index"] and c["ignore_index"] >= k:
        labels = np.where(labels == c["ignore_index"], 0, labels)
    labels = torch.from_numpy(labels).long()
    how = dict(ignore_index=c["ignore_index"], label_smoothing=c["smoothing"])
    losses = F.cross_entropy(x[:, :k], labels, reduction="none", **how)
    loss = F.cross_entropy(x[:, :k], labels, reduction="sum" if c["sum"] else "mean", **how)
    start = torch.tensor(float(np.float32(c["factor"]) * np.float32(c["loss_scale"])), dtype=loss.dtype)
    return {"losses": losses, "loss": loss.reshape(1), **grads(loss, [x], start, ["dx"])}


# ---- Gradients: unscale, norm, clip

def unscale_case(rng):
    c = {"dtype": choice(rng, F32, F32, F16, BF16, F64), "tensors": int(rng.integers(1, 6)), "scale": choice(rng, 65536.0, 1.0, 1000.0, 2.0 ** -10, 3e30),
         "read": flag(rng, 0.4), "clip": choice(rng, 0.0, 0.5, 10.0, 1e-3)}
    for i in range(5):
        c[f"n{i}"] = size(rng, 400, 0.1) if i < c["tensors"] else 0
    c["gradient"] = choice(rng, 1.0, 1e-3, 100.0)
    recipe(rng, c, 5, factors=2 if c["clip"] and c["read"] else 1)
    if special(c):
        c.update({f"n{i}": min(c[f"n{i}"], 40) for i in range(5)})
    return c


def unscale_run(c, draw):
    """The gradients after unscale_ and clip_grad_norm_, and their norm.  A 16-bit norm is taken of fp32 copies: PyTorch's
    own would be rounded to 16 bits."""
    g = [draw.tensor(i, (c[f"n{i}"],), c["dtype"], c["gradient"]) for i in range(c["tensors"])]
    inv = torch.tensor(float(np.float32(1.0 / float(np.float32(c["scale"])))), dtype=torch.float32)
    found = torch.zeros(1)
    if draw.exact:
        g = [t * inv.double() for t in g]
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(g, found, inv)
    wide = torch.cat([t.double() if draw.exact else t.float() if c["dtype"] != F64 else t for t in g])
    norm = torch.linalg.vector_norm(wide)
    coef = torch.clamp(c["clip"] / (norm + 1e-6), max=1.0) if c["clip"] else torch.ones_like(norm)
    coef = torch.nan_to_num(coef, nan=1.0)
    if not draw.exact:
        coef = coef.float()     # amp.h's factor is fp32 for fp64 gradients too
    out = {f"g{i}": t * coef.to(t.dtype) for i, t in enumerate(g)}
    return {**out, "norm": norm.reshape(1)}


# ---- Optimizers

ADAMW, SGD = 1, 2
MASTER_F32, MASTER_REMAINDER, MASTER_NONE = 1, 2, 3


def optimizer_case(rng):
    c = {"dtype": choice(rng, F32, F32, F32, F16, BF16), "gradient_dtype": F32, "optimizer": choice(rng, ADAMW, SGD), "master": MASTER_F32,
         "tensors": int(rng.integers(1, 5)), "steps": choice(rng, 1, 2, 5, 12), "lr": choice(rng, 1e-3, 1e-2, 0.1), "schedule": flag(rng, 0.4)}
    adamw = c["optimizer"] == ADAMW
    c.update(beta1=choice(rng, 0.9, 0.8, 0.0) if adamw else 0.9, beta2=choice(rng, 0.999, 0.95, 0.9) if adamw else 0.999,
             eps=choice(rng, 1e-8, 1e-6, 1e-3) if adamw else 1e-8, decay=choice(rng, 0.0, 0.01, 0.3), decay_vectors=flag(rng),
             momentum=0.0, dampening=0.0, nesterov=0, maximize=flag(rng, 0.3), clip=choice(rng, 0.0, 0.0, 0.3, 5.0))
    if not adamw:
        c.update(momentum=choice(rng, 0.0, 0.9, 0.5), nesterov=flag(rng, 0.3))
        c["nesterov"] = int(c["nesterov"] and c["momentum"] > 0)
        c["dampening"] = 0.0 if c["nesterov"] or not c["momentum"] else choice(rng, 0.0, 0.1, 0.9)
    c["accumulation"] = choice(rng, 1, 1, 1, 4)
    c["loss_scale"] = choice(rng, 0.0, 1.0, 1024.0, 65536.0)
    c["bad_step"] = int(rng.integers(c["steps"])) if c["loss_scale"] and flag(rng, 0.4) else -1
    c["group"], c["group_rate"], c["group_decay"] = flag(rng, 0.4), choice(rng, 0.1, 2.0, 0.0), choice(rng, -1.0, 0.0, 0.2)
    c["frozen"] = flag(rng, 0.2)
    for i in range(4):
        c[f"rows{i}"], c[f"cols{i}"] = size(rng, 20), size(rng, 20) if flag(rng, 0.6) else 0
    c["gradient"] = choice(rng, 1.0, 1e-2, 1e-5)
    if c["dtype"] != F32:
        c["gradient_dtype"] = choice(rng, F32, c["dtype"])
        c["master"] = choice(rng, MASTER_F32, MASTER_F32, MASTER_NONE, MASTER_REMAINDER if c["dtype"] == BF16 else MASTER_NONE)
    recipe(rng, c, 4, special=False)
    c["which"] = 0          # of weights; gradients are uniform or wide by the next number
    c["wide"] = int(c["recipe"] == WIDE)
    if c["gradient_dtype"] == F16:      # no overflow but the one that is meant
        c["loss_scale"] = min(c["loss_scale"], 1.0 if c["wide"] else 1024.0)
    return c


def optimizer_gradient(c, draw, step, i, shape):
    """fp32 gradient of one accumulation cycle before scaling, exactly what the parts add up to: the parts are equal."""
    case = dict(c, which=1 << (i + 8) if c["wide"] else 0, dtype=F32)
    seed = (draw.seed + 0x10000 * (step + 1)) & 0xFFFFFFFF
    g = torch.from_numpy(values(case, seed, i + 8, shape, np.float32(c["gradient"])).copy())
    return g.to(KIND[c["gradient_dtype"]])


def optimizer_run(c, draw):
    work = torch.float64 if draw.exact else torch.float32 if c["master"] != MASTER_NONE else KIND[c["dtype"]]
    shapes = [(c[f"rows{i}"], c[f"cols{i}"]) if c[f"cols{i}"] else (c[f"rows{i}"],) for i in range(c["tensors"])]
    w = [draw.tensor(i, s, c["dtype"]).to(work) for i, s in enumerate(shapes)]
    groups = []
    for i, t in enumerate(w):
        decay, rate = c["decay"] if t.ndim > 1 or c["decay_vectors"] else 0.0, 1.0
        if c["group"] and i % 2 == 1:
            rate = c["group_rate"] or 1.0
            decay = 0.0 if c["group_decay"] < 0 else c["group_decay"] if c["group_decay"] else decay
        groups.append(dict(params=[t], weight_decay=decay, rate=rate))
    how = dict(lr=c["lr"], maximize=bool(c["maximize"]), foreach=False, fused=False)
    if c["optimizer"] == ADAMW:
        optimizer = torch.optim.AdamW(groups, betas=(c["beta1"], c["beta2"]), eps=c["eps"], **how)
    else:
        optimizer = torch.optim.SGD(groups, momentum=c["momentum"], dampening=c["dampening"], nesterov=bool(c["nesterov"]), **how)
    live = [i for i in range(len(w)) if not (c["frozen"] and i == len(w) - 1 and i > 0)]
    for step in range(c["steps"]):
        if step == c["bad_step"]:
            continue
        for i in live:
            w[i].grad = optimizer_gradient(c, draw, step, i, shapes[i]).to(work)
        if c["clip"]:
            torch.nn.utils.clip_grad_norm_([w[i] for i in live], c["clip"])
        for group in optimizer.param_groups:
            group["lr"] = c["lr"] * group["rate"] * ((0.25 + 0.75 * (step % 8) / 8) if c["schedule"] else 1.0)
        optimizer.step()
    out = {}
    for i, t in enumerate(w):
        out[f"w{i}"] = t if draw.exact else t.to(KIND[c["dtype"]])
        if c["master"] == MASTER_F32 and c["dtype"] != F32:
            out[f"master{i}"] = t
    return out


FAMILIES = ["linear", "matmul", "gemm", "norm", "softmax", "attention", "entropy", "unscale", "optimizer", "fp8"]


# ---- Cases

def layer_of(name):
    return "gradients" if name.startswith("d") else name


def classes(x):
    return np.where(np.isnan(x), 3, np.where(np.isposinf(x), 1, np.where(np.isneginf(x), 2, 0))).astype(np.uint64)


def pack(pattern):
    """26 classes of two bits in each number."""
    padded = np.concatenate([pattern, np.zeros(-len(pattern) % 26, dtype=np.uint64)]).reshape(-1, 26)
    return (padded << (2 * np.arange(26, dtype=np.uint64))).sum(axis=1, dtype=np.uint64).astype(np.float64)


def storage(name, case):
    if name in ("loss", "losses", "norm") or name.startswith("master"):
        return torch.float32
    if name in ("dweight", "dbias") and case["wide_weights"]:
        return torch.float32
    return KIND[int(case["dtype"])]


class Output:
    def __init__(self):
        self.square = self.projection = self.norm = 0.0
        self.patterns = []


def one_seed(case, run, seed, number, outputs):
    with torch.set_grad_enabled(True):
        exact = {n: t.detach() for n, t in run(case, Draw(case, seed, True)).items()}
        theirs = {n: t.detach() for n, t in run(case, Draw(case, seed, False)).items()}
    rounded = {n: t.to(storage(n, case)).double().numpy().ravel() for n, t in exact.items()}
    exact = {n: t.numpy().ravel() for n, t in exact.items()}
    theirs = {n: t.double().numpy().ravel() for n, t in theirs.items()}
    e, g = {}, {}
    for at, name in enumerate(exact):
        out = outputs.setdefault(name, Output())
        pattern, mine = classes(theirs[name]), classes(rounded[name])
        fine = (pattern == 0) & (mine == 0)
        e[name], g[name] = np.where(fine, exact[name], 0.0), np.where(fine, theirs[name], 0.0)
        finite = np.where(np.isfinite(exact[name]), exact[name], 0.0)
        out.projection += float(np.dot(uniform(number, 200 + at, (finite.size,)).astype(np.float64), finite))
        out.norm += float(np.dot(finite, finite))
        out.patterns.append(pack(pattern) if pattern.any() else np.zeros(0))
    for name, error in errors(g, e).items():
        outputs[name].square += error ** 2


def errors(got, exact):
    """common.relative_errors, where nothing is finite or everything is empty: 0."""
    full = {n: e for n, e in exact.items() if e.size}
    with np.errstate(invalid="ignore", divide="ignore"):
        found = common.relative_errors({n: got[n] for n in full}, full, layer_of)
    off = {n: float(np.linalg.norm(got[n] - full[n])) for n in full}
    return {n: (found[n] if np.isfinite(found[n]) else off[n]) if n in full else 0.0 for n in exact}


def determined(case, run, base):
    """Whether the fp64 results stand when the inputs move by 2^-50 of themselves: a result that then moves by more than
    2^-34 of its norm says nothing about fp32."""
    if case["recipe"] == UNIFORM:
        return True
    for s in range(SEEDS):
        one, two = ({n: t.detach().numpy().ravel() for n, t in run(case, Draw(case, base + s, True, moved)).items()} for moved in (False, True))
        fine = {n: np.isfinite(one[n]) & np.isfinite(two[n]) for n in one}
        size = {n: np.linalg.norm(one[n][fine[n]]) for n in one}
        layer = max([size[n] for n in one if layer_of(n) == "gradients"], default=0.0)
        for n in one:
            floor = max(size[n], layer) if layer_of(n) == "gradients" else size[n]
            if np.linalg.norm((one[n] - two[n])[fine[n]]) > 2.0 ** -34 * floor or not np.array_equal(classes(one[n]), classes(two[n])):
                return False
    return True


def case_record(family, case, base):
    """[seed, numbers of the case, outputs, then per output: error, projection, norm, and the patterns of the seeds]"""
    run, outputs = globals()[family + "_run"], {}
    for s in range(SEEDS):
        one_seed(case, run, base + s, base + s, outputs)
    record = [base, len(case), *case.values(), len(outputs)]
    for out in outputs.values():
        record += [np.sqrt(out.square / SEEDS), out.projection, np.sqrt(out.norm)]
        for p in out.patterns:
            record += [len(p), *p]
    return np.array(record, dtype=np.float64)


def one_case(job):
    """The record of a case, and how many were drawn in vain before."""
    seed, family, i = job
    f = FAMILIES.index(family)
    rng, base = np.random.default_rng([seed, f, i]), ((seed * 9 + f) * 100003 + i) * SEEDS & 0x7FFFFFFF
    for vain in range(50):
        case = globals()[family + "_case"](rng)
        if determined(case, globals()[family + "_run"], base):
            return case_record(family, case, base), vain
    raise RuntimeError(f"{family}/{i}: no case with a determined result")


def prepare():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def corpus(seed, cases):
    records = {}
    with multiprocessing.Pool(os.cpu_count(), prepare) as pool:
        for family in FAMILIES:
            made = pool.map(one_case, [(seed, family, i) for i in range(cases)], chunksize=4)
            records.update({f"{family}/{i}": record for i, (record, _) in enumerate(made)})
            print(f"counted {family}.undetermined {sum(vain for _, vain in made)}", flush=True)
    return records


def undefined():
    """The items of the list in this file's head."""
    items = __doc__.split("  - ")[1:]
    return [" ".join(item.split("\nNot compared")[0].split()) for item in items]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, help="per family; default: 40, with --out 200")
    parser.add_argument("--out", help="a corpus to replay once; default: the committed one")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    records = corpus(options.seed, options.cases or (200 if options.out else 40))
    if options.out is None:
        common.write_golden("fuzz_tensors.bin", records, lambda name: 0.0)
        return
    with open(options.out, "wb") as f:
        f.write(common.encode(records))
    print("\n".join("listed " + item for item in undefined()))


if __name__ == "__main__":
    main()
