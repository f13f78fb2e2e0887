"""Makes the golden data of t_optimizer.c's 8-bit moments, with bitsandbytes on the CPU.

    python tests/torch/oracle/moments.py     (writes tests/torch/golden/moments.bin; --check only compares)

It has the maps, codes and scales of bitsandbytes, and 100 steps of its 8-bit AdamW, Lion and SGD.  bitsandbytes rounds to
the nearest number of the map, with one exception.  For fp32, fp16 and bf16, its CPU library looks the code up in a table of
65,536 equal steps of [-1, 1], which has no step at 0.  With that table, zero becomes 2e-5 of the block's largest number,
and a weight that gets no gradient moves.  For fp64, the same call computes the rounding.  Therefore fp64 is compared here.
The script also checks that the table is this rounding, apart from its steps.
"""
import bitsandbytes.backends.cpu.ops as cpu
import bitsandbytes.functional as bnb
import numpy as np
import torch

import common

BLOCK, STEPS = 256, 100
SHAPE = (33, 131)                     # the last block is not full
MAPS = {"m": bnb.create_dynamic_map(True), "v": bnb.create_dynamic_map(False)}
CASES = {
    "adamw": dict(lr=1e-3, decay=0.1, betas=(0.9, 0.999), names=("adam", "m", "v")),
    "lion": dict(lr=1e-4, decay=1.0, betas=(0.9, 0.99), names=("lion", "m", None)),
    "sgd": dict(lr=0.02, decay=0.0, betas=(0.9, 0.0), names=("momentum", "m", None)),
}
quantize, dequantize = torch.ops.bitsandbytes.quantize_blockwise, torch.ops.bitsandbytes.dequantize_blockwise


def rounded(x, code, absmax_out=None, out=None, blocksize=BLOCK):
    codes, scales = quantize(x.double(), code, blocksize)
    if out is not None:
        out.copy_(codes)
        absmax_out.copy_(scales)
    return codes, scales


def numbers(kind):
    """Blocks of every magnitude, each with halfway points and their neighbours, zeros, and scales down to subnormal ones."""
    code = MAPS[kind].numpy()
    middle = ((code[1:] + code[:-1]) / np.float32(2)).astype(np.float32)
    blocks = [np.append(x, np.float32(1)) for x in (middle, np.nextafter(middle, np.float32(-9)), np.nextafter(middle, np.float32(9)))]
    blocks.append(code)
    for i in range(10):
        x = common.uniform(81, i, BLOCK) * np.exp2(-(common.words(82, i, BLOCK) % 24).astype(np.float32))
        blocks.append((x * np.float32(2.0 ** (12 * i - 90))).astype(np.float32))
    blocks.append(common.uniform(81, 40, BLOCK, 0.3))
    blocks[-1][::3] = 0
    blocks.append(common.uniform(81, 41, BLOCK, 3.0)[:77])
    x = np.concatenate(blocks)
    return np.abs(x) if kind == "v" else x


def table_step(x, scales):
    """What bitsandbytes' table rounds: x / scale to one of 65,536 steps."""
    y = x * np.repeat(np.float32(1) / scales, BLOCK)[: x.size]
    step = ((y + np.float32(1)) * np.float32(0.5) * np.float32(65535) + np.float32(0.5)).astype(np.int64)
    return (step.astype(np.float32) / np.float32(65535) * np.float32(2) - np.float32(1)).astype(np.float32)


def compare_shortcut(kind):
    x = torch.from_numpy(common.uniform(83, 0, BLOCK * 64))
    x = x * x if kind == "v" else x
    x[5] = 0
    code = MAPS[kind]
    table, scales = quantize(x, code, BLOCK)
    computed, _ = rounded(x, code)
    stepped = torch.bucketize(torch.from_numpy(table_step(x.numpy(), scales.numpy())), (code[:-1] + code[1:]) / 2).to(torch.uint8)
    assert torch.equal(stepped, table), "the table is another rounding than its steps"
    print(f"  {kind}: the table has another code for {(table != computed).sum()} of {x.numel()} numbers, and {code[int(table[5])]:.1e} for 0")


def gradient(step):
    rows = np.exp2(-(np.arange(SHAPE[0]) % 9)).astype(np.float32)[:, None]
    return common.uniform(84, step, SHAPE, 0.05, 0.002) * rows


def run_bitsandbytes(case):
    name, first, second = case["names"]
    w = torch.from_numpy(common.uniform(85, 0, SHAPE))
    blocks = -(-w.numel() // BLOCK)
    state = [torch.zeros(SHAPE, dtype=torch.uint8) if k else None for k in (first, second)]
    scale = [torch.zeros(blocks) if k else None for k in (first, second)]
    for step in range(1, STEPS + 1):
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            name, torch.from_numpy(gradient(step)), w, state[0], state[1], *case["betas"], 0.0, 0.0, 1e-8, step, case["lr"],
            MAPS[first], MAPS[second] if second else None, scale[0], scale[1], case["decay"], 1.0, False)
    return w.double().numpy()


def run_exactly(case):
    """The same rule in fp64, without rounding."""
    w = common.uniform(85, 0, SHAPE).astype(np.float64)
    m, v = np.zeros(SHAPE), np.zeros(SHAPE)
    lr, (beta1, beta2) = case["lr"], case["betas"]
    for step in range(1, STEPS + 1):
        g = gradient(step).astype(np.float64)
        w *= 1 - lr * case["decay"]
        if case["names"][0] == "adam":
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w -= lr / (1 - beta1 ** step) * m / (np.sqrt(v / (1 - beta2 ** step)) + 1e-8)
        elif case["names"][0] == "lion":
            w -= lr * np.sign(beta1 * m + (1 - beta1) * g)
            m = beta2 * m + (1 - beta2) * g
        else:
            m = beta1 * m + g if step > 1 else g
            w -= lr * m
    return w


if __name__ == "__main__":
    cpu._quant_blockwise_fp32_direct = rounded
    records = {}
    for kind, code in MAPS.items():
        compare_shortcut(kind)
        x = numbers(kind)
        codes, scales = rounded(torch.from_numpy(x), code)
        back = dequantize(codes, scales, code, BLOCK, torch.float32)
        records[f"{kind}/map"] = code.numpy()
        records[f"{kind}/numbers"] = x
        records[f"{kind}/codes"] = codes.numpy().astype(np.int32)
        records[f"{kind}/scales"] = scales.numpy()
        records[f"{kind}/back"] = back.numpy()
    for name, case in CASES.items():
        exact, theirs = run_exactly(case), run_bitsandbytes(case)
        records[name] = exact
        records[f"{name}/bitsandbytes"] = np.array([np.linalg.norm(theirs - exact) / np.linalg.norm(exact)])
        print(f"  {name}: 8 bits are off by {records[f'{name}/bitsandbytes'][0]:.2e}")
    common.write_golden("moments.bin", records, lambda name: 0.5 if name.endswith("/bitsandbytes") else 1e-12 if name in CASES else 0)
