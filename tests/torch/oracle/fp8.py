"""Makes the golden data of products in fp8: operands as PyTorch casts them to 8 bits, their scales, and their products in
fp64.

There is one linear layer, x [M, K], weight [N, K], dy [M, N], for each recipe.  Quantised operands and scales must agree
bit for bit.  They are stored as 8-bit patterns, four to an int32, and as the fp32 numbers by which blocks are multiplied.
Products are stored as their rows' sums with random weights, beside the sums of the terms' magnitudes, which bound the
error.  If this PyTorch has torch._scaled_mm on the CPU, its product must agree too.
"""
import numpy as np
import torch

import common

M, K, N = 136, 140, 132
FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0, 8), "e5m2": (torch.float8_e5m2, 57344.0, 15)}
FLT_MAX = np.float32(3.4028235e38)


def to_fp8(x, fmt):
    """As torch casts, finite numbers saturating; infinity is NaN in E4M3."""
    dtype, largest, _ = FORMATS[fmt]
    t = torch.from_numpy(x)
    clamped = torch.where(torch.isfinite(t), t.clamp(-largest, largest), t)
    if fmt == "e4m3":
        clamped = torch.where(torch.isinf(t), torch.full_like(t, float("nan")), clamped)
    q = clamped.to(dtype)
    return q.view(torch.uint8).numpy(), q.to(torch.float32).numpy()


def scale_of(block, fmt, mode):
    """By which a block is multiplied."""
    _, largest, exponent = FORMATS[fmt]
    amax = np.float32(np.max(np.abs(block))) if not np.isnan(block).any() else np.float32(np.nan)
    if mode == "mx":
        bits = int(amax.view(np.uint32))
        e8m0 = 255 if np.isnan(amax) else 254 if np.isinf(amax) else max((bits >> 23) - exponent, 0)
        return np.float32(np.nan) if e8m0 == 255 else np.ldexp(np.float32(1), 127 - e8m0)
    if amax == 0 or not np.isfinite(amax):
        scale = np.float32(1)
    else:
        with np.errstate(over="ignore"):
            scale = np.float32(largest) / amax
        scale = FLT_MAX if np.isinf(scale) else scale
    if mode == "block":
        scale = np.uint32(int(scale.view(np.uint32)) & 0xFF800000).view(np.float32)
    return scale


def quantise(x, fmt, mode, along, square=False):
    """8-bit patterns, scales in the order of their blocks, and the values they stand for in fp64.  along: 1 k lies along
    the rows, 0 down the columns."""
    size = {"current": 0, "block": 128, "mx": 32}[mode]
    rows, cols = x.shape
    down, across = (rows, cols) if size == 0 else (size, size) if square else (1, size) if along else (size, 1)
    q, scales, values = np.zeros(x.shape, np.uint8), [], np.zeros(x.shape)
    for i in range(0, rows, down):
        for j in range(0, cols, across):
            block = x[i:i + down, j:j + across]
            scale = scale_of(block, fmt, mode)
            with np.errstate(over="ignore", invalid="ignore"):
                patterns, numbers = to_fp8((block * scale).astype(np.float32), fmt)
                # a finite number that overflowed saturates
                lost = np.isfinite(block) & np.isinf(block * scale)
            if lost.any():
                largest = np.float32(FORMATS[fmt][1])
                fixed, numbers2 = to_fp8(np.where(lost, np.sign(block) * largest, 0).astype(np.float32), fmt)
                patterns, numbers = np.where(lost, fixed, patterns), np.where(lost, numbers2, numbers)
            q[i:i + down, j:j + across] = patterns
            values[i:i + down, j:j + across] = numbers.astype(np.float64) / np.float64(scale)
            scales.append(scale)
    return q, np.array(scales, np.float32), values


AMAXES = [3.0, 1.0, 0.25, 0.0, 0.5, 7e4, 1e-3, 0.125, 1e-40, 0.1, 0.2, 1e-44, 2e-45, 1e-45, 3e-45, 5.0]


def delayed(recent, margin, length=4):
    """Scales after each step of E4M3, as TransformerEngine's delayed_scaling.cu computes them: row 0 of the history receives
    the new magnitude, rows roll down, a magnitude of 0 leaves all as it is."""
    history, scale, out = np.zeros(length, np.float32), np.float32(0), []
    for amax in np.array(AMAXES, np.float32):
        if amax > 0:
            history[0] = amax
            used = history[0] if recent else history.max()
            history = np.append(history[1:], history[0])
            history[0] = 0
            with np.errstate(over="ignore"):
                scale = np.float32(448.0 * 2.0 ** -margin) / used
            scale = FLT_MAX if np.isinf(scale) else scale
        out.append(scale)
    return np.array(out, np.float32)


def packed(q):
    flat = np.zeros((q.size + 3) // 4 * 4, np.uint8)
    flat[:q.size] = q.ravel()
    return flat.view("<i4")


def wide(stream, shape):
    """Numbers of very different sizes, as fp32 can be made in C too: rows and columns scaled by powers of two."""
    x = common.uniform(8, stream, shape)
    i, j = np.meshgrid(np.arange(shape[0]), np.arange(shape[1]), indexing="ij")
    return np.ldexp(x, -((i * 7 + j * 3) % 13)).astype(np.float32)


def specials():
    """Rows of 96 numbers: a tensor each."""
    base = common.uniform(9, 0, (96,))
    out = {"zeros": base * 0, "tiny": np.ldexp(base, -140), "small": np.ldexp(base, -122), "huge": np.ldexp(base, 127)}
    for name, value in (("infinite", np.inf), ("nan", np.nan), ("largest", FLT_MAX)):
        out[name] = base.copy()
        out[name][70] = value
    out["powers"] = np.ldexp(np.float32(1.75), (np.arange(96) % 40) - 20)       # ties, and 448 itself
    return {name: x.astype(np.float32).reshape(1, 96) for name, x in out.items()}


def scaled_mm(a, b, sa, sb):
    """torch._scaled_mm of fp8 operands [m, k], [n, k], or None."""
    try:
        one = lambda s: torch.tensor(float(s))
        return torch._scaled_mm(a, b.t(), scale_a=one(1 / sa), scale_b=one(1 / sb), out_dtype=torch.float32).numpy()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        print("  no torch._scaled_mm here:", str(error).splitlines()[0][:100])
        return None


def main():
    torch.set_num_threads(1)
    records = {}
    x, w, dy = wide(0, (M, K)), wide(1, (N, K)), wide(2, (M, N))
    weights = {n: common.uniform(10, n, (n,)).astype(np.float64) for n in (K, N)}

    def operand(name, data, fmt, mode, along, square=False):
        key = f"{name}/{mode}/{fmt}/{along}"
        q, scales, values = quantise(data, fmt, mode, along, square)
        if along == 1 or mode != "current":
            records[key], records[key + "/scales"] = packed(q), scales
        return q, scales, values

    def product(name, a, b):
        cols = weights[b.shape[0]]
        records[name] = (a @ b.T) @ cols
        records[name + "/terms"] = (np.abs(a) @ np.abs(b).T) @ np.abs(cols)

    for mode in ("current", "block", "mx"):
        xq = operand("x", x, "e4m3", mode, 1)
        wq = operand("w", w, "e4m3", mode, 1, mode == "block")
        product(f"y/{mode}", xq[2], wq[2])
        x_down = operand("x", x, "e4m3", mode, 0)[2]
        w_down = operand("w", w, "e4m3", mode, 0, mode == "block")[2]
        for fmt in FORMATS:
            dyq = operand("dy", dy, fmt, mode, 1)[2]
            product(f"dx/{mode}/{fmt}", dyq, w_down.T)
            product(f"dw/{mode}/{fmt}", operand("dy", dy, fmt, mode, 0)[2].T, x_down.T)
        if mode == "current":
            full = [torch.from_numpy(q).view(torch.float8_e4m3fn)[:, :128].contiguous() for q in (xq[0], wq[0])]
            got = scaled_mm(full[0][:, :], full[1][:128], xq[1][0], wq[1][0])
            if got is not None:
                want = xq[2][:, :128] @ wq[2][:128, :128].T
                terms = np.abs(xq[2][:, :128]) @ np.abs(wq[2][:128, :128]).T
                assert (np.abs(got - want) <= terms * 130 * 2.0 ** -24).all(), "torch._scaled_mm disagrees"
                print("  torch._scaled_mm agrees")
    for name, data in specials().items():
        for mode in ("current", "block", "mx"):
            for fmt in FORMATS:
                operand("special/" + name, data, fmt, mode, 1)
    for recent in (0, 1):
        for margin in (0, 3):
            records[f"delayed/{recent}/{margin}"] = delayed(recent, margin)
    common.write_golden("fp8.bin", records, lambda name: 1e-12 if name[0] in "yd" and "scales" not in name else 0.0)


if __name__ == "__main__":
    print(f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    main()
