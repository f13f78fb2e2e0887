"""Makes the golden data of the long sums: PyTorch's own errors in fp32, as the number of terms grows.

Inputs come from counter-based random numbers that t_kernels.c makes again.  The error is |result - fp64 result| over the
root of the larger of sum(results^2) and sum(terms^2), in units of 2^-24, so that sums that cancel count no more than
others.  The terms are uniform in [-1, 1), or in [0, 1) if the name ends in "+".  PyTorch runs on one thread, because its
order depends on the number of threads.
"""
import numpy as np
import torch
import torch.nn.functional as F

import common

ROWS, COLS, CHAINS, LONG = (1000, 10000, 400000), 16, (256, 512, 1024, 4096), (1024, 16384)
UNIT = 2.0 ** 24


def error(got, exact, squares):
    off = np.linalg.norm((got.double() - exact).numpy().ravel())
    return UNIT * off / np.sqrt(max(float((exact ** 2).sum()), float(squares)))


def gradient(function, shape, dy, dtype):
    """Of function(p) by p, zeros of a shape."""
    p = torch.zeros(shape, dtype=dtype, requires_grad=True)
    return torch.autograd.grad(function(p), p, dy.to(dtype))[0]


def rows_cases(x):
    """name -> the same sum over the rows of x in a dtype"""
    rows = x.shape[0]
    ids, half = torch.arange(rows) % 2, x.reshape(rows // 2, 2, COLS)
    h = (x - x.mean(1, keepdim=True))

    def norm(dtype):                # weight and bias of a LayerNorm whose input is h
        weight = torch.ones(COLS, dtype=dtype, requires_grad=True)
        bias = torch.zeros(COLS, dtype=dtype, requires_grad=True)
        y = F.layer_norm(h.to(dtype), (COLS,), weight, bias, 1e-5)
        return torch.autograd.grad(y, (weight, bias), x.to(dtype))[1]

    return {
        "columns": lambda dtype: x.to(dtype).sum(0),
        "positions": lambda dtype: gradient(lambda p: p + torch.zeros((rows // 2, 2, COLS), dtype=dtype), (2, COLS), half, dtype),
        "table": lambda dtype: gradient(lambda p: F.embedding(ids, p), (2, COLS), x, dtype),
        "norm": norm,
    }


def main():
    torch.set_num_threads(1)
    records = {}

    def record(name, run, squares):
        records[name] = np.array([error(run(torch.float32), run(torch.float64), squares)])
        print(f"  {name}: {records[name][0]:.2f} units of 2^-24")

    for rows in ROWS:
        for kind, scale, shift in (("", 1.0, 0.0), ("+", 0.5, 0.5)):
            x = torch.from_numpy(common.uniform(rows, 0, (rows, COLS), scale, shift))
            for name, run in rows_cases(x).items():
                record(f"{name}/{rows}{kind}", run, (x.double() ** 2).sum())
        x = torch.from_numpy(common.uniform(rows, 0, (COLS, rows)))
        w = torch.from_numpy(common.uniform(rows, 1, (rows, 1)))
        products = ((x.double() * w.double().T) ** 2).sum()
        record(f"matrix_times_column/{rows}", lambda dtype: x.to(dtype) @ w.to(dtype), products)
        record(f"row_times_matrix/{rows}", lambda dtype: w.T.to(dtype) @ x.T.contiguous().to(dtype), products)
        record(f"softmax/{rows}", lambda dtype: torch.softmax(x.to(dtype), 1), 0)
    for k in CHAINS:
        a, b = (torch.from_numpy(common.uniform(k, stream, shape)) for stream, shape in enumerate(((64, k), (k, 64))))
        record(f"product/{k}", lambda dtype: a.to(dtype) @ b.to(dtype), (a.double() ** 2 @ b.double() ** 2).sum())
    for n in LONG:
        q, k, v = (torch.from_numpy(common.uniform(n, stream, (1, 1, rows, 64))) for stream, rows in enumerate((64, n, n)))
        record(f"attention_keys/{n}", lambda dtype: F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype)), 0)
        queries, dy, keys, values = (torch.from_numpy(common.uniform(n, stream, (1, 1, rows, 64)))
                                     for stream, rows in enumerate((n, n, 64, 64)))

        def values_gradient(dtype):
            p = values.to(dtype).requires_grad_()
            y = F.scaled_dot_product_attention(queries.to(dtype), keys.to(dtype), p)
            return torch.autograd.grad(y, p, dy.to(dtype))[0]
        record(f"attention_queries/{n}", values_gradient, 0)
    common.write_golden("sums.bin", records, lambda name: 0.5)


if __name__ == "__main__":
    print(f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    main()
